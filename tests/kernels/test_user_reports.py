"""Inputs from public bug reports, at the kernels: `test_report_NN_…`.

Others are where their property is tested (strides in test_layouts, vmap in
test_batching, empty sequences in test_edge_shapes, repetition in test_determinism,
index ranges in test_index_range), the rest in tests/semantics/test_user_reports.py,
which counts them.
"""

import numpy as np
import pytest

from tests.support import cases, tolerances
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import BACKWARD, check, run, run_case


@pytest.mark.parametrize("offset", [0, 1024 - 32])
def test_report_22_mlx_2835(offset, kernels):
    """Few queries, many keys: top-left by default, bottom-right with q_offset."""
    case = cases.Case(
        f"mlx-2835-{offset}",
        dtype="float16",
        batch=(1,),
        q_len=32,
        kv_len=1024,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        is_causal=True,
        q_offset=offset,
    )
    check(kernels, case)


def test_report_23_mlx_2626(kernels):
    """bfloat16 (1, 2, 8, 8): what is visible equals the truncated sequence."""
    case = cases.Case(
        "mlx-2626",
        dtype="bfloat16",
        batch=(1,),
        q_len=8,
        kv_len=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        is_causal=True,
    )
    check(kernels, case)
    inputs = make_inputs(case)
    whole = kernels.run_forward(*inputs.operands, **case.options)
    first = kernels.run_forward(*(x[:, :5] for x in inputs.operands), **case.options)
    assert_identical(first[0], whole[0][:, :5], name="out", context=case.id)
    assert_identical(first[1], whole[1][..., :5], name="logsumexp", context=case.id)


def test_report_32_dao_ailab_1778(kernels):
    """More queries than keys, bottom-right: the rows without keys are 0."""
    case = cases.Case(
        "dao-1778",
        dtype="float16",
        batch=(1,),
        q_len=2048,
        kv_len=1024,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        is_causal=True,
        q_offset=-1024,
    )
    check(kernels, case)
    results = run(kernels, make_inputs(case), **case.options)
    assert (results.out[:, :1024] == 0).all()
    assert (results.dquery[:, :1024] == 0).all()
    assert np.isneginf(results.logsumexp[..., :1024]).all()


def test_report_10_jax_23819(kernels):
    """A length of 4092, no multiple of a block: repeatable and right (one head)."""
    case = cases.Case(
        "jax-23819",
        batch=(1,),
        q_len=4092,
        kv_len=4092,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        is_causal=True,
    )
    first = check(kernels, case)
    for name, array in run_case(kernels, case).present():
        assert_identical(array, getattr(first, name), name=name, context=case.id)


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize("kv_len", [31, 32, 33, 64, 65, 96])
@pytest.mark.parametrize("q_len", [31, 32, 33, 64, 65])
def test_report_11_jax_25647(q_len, kv_len, causal, kernels):
    """Every relation of lengths and blocks, with and without causality, both passes."""
    offset = kv_len - q_len if causal == "bottom-right" else 0
    for head_dim in (8, 80):
        case = cases.Case(
            f"jax-25647-q{q_len}-k{kv_len}-{causal}-d{head_dim}",
            batch=(1,),
            q_len=q_len,
            kv_len=kv_len,
            num_heads=2,
            num_kv_heads=1,
            head_dim=head_dim,
            is_causal=causal != "none",
            q_offset=offset,
            mask="blocks" if q_len == 65 else None,
        )
        check(kernels, case)


@pytest.mark.parametrize("lengths", [(15, 17), (16, 17), (17, 16)], ids=str)
def test_report_17_lucidrains_7(lengths, kernels):
    """Lq 16, Lkv 17: gradient shapes and values."""
    q_len, kv_len = lengths
    check(kernels, cases.Case(f"lucidrains-7-{q_len}", q_len=q_len, kv_len=kv_len))


@pytest.mark.parametrize("dtype", tolerances.DTYPES)
@pytest.mark.parametrize("q_len", [256, 8])
def test_report_31_dao_ailab_443(q_len, dtype, kernels):
    """Packed, causal, sequences of one key each."""
    starts = np.array([0, 76, 110]) * q_len // 256
    case = cases.Case(
        f"dao-443-q{q_len}-{dtype}",
        dtype=dtype,
        batch=(1,),
        q_len=q_len,
        kv_len=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        is_causal=True,
    )
    ids = np.searchsorted(starts, np.arange(q_len), side="right") - 1
    arguments = case.options | {
        "q_segment_ids": ids.astype(np.int32)[None],
        "kv_segment_ids": np.arange(3, dtype=np.int32)[None],
    }
    results = run(kernels, make_inputs(case), **arguments)
    assert all(np.isfinite(getattr(results, name)).all() for name in BACKWARD)
    # The probability of an only key is 1: no score matters.
    cotangents = make_inputs(case)._replace(
        dlogsumexp=np.zeros((1, 2, q_len), np.float32)
    )
    results = run(kernels, cotangents, **arguments)
    largest = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}[dtype]
    assert np.abs(results.dquery.astype(np.float32)).max() < largest
