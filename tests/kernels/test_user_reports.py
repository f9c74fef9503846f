"""Inputs from public bug reports that need no feature beyond the fused kernels'.

Others are where their property is tested: strides in test_layouts, vmap in
test_batching, empty sequences in test_edge_shapes, repetition in test_determinism.
"""

import numpy as np
import pytest

from tests.support import cases, native
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import FORWARD, check, run


@pytest.mark.parametrize("offset", [0, 1024 - 32])
def test_mlx_2835(offset):
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
    check(native, case)


def test_mlx_2626():
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
    check(native, case)
    inputs = make_inputs(case)
    whole = native.run_forward(*inputs.operands, **case.options)
    first = native.run_forward(*(x[:, :5] for x in inputs.operands), **case.options)
    assert_identical(first[0], whole[0][:, :5], name="out", context=case.id)
    assert_identical(first[1], whole[1][..., :5], name="logsumexp", context=case.id)


def test_dao_ailab_1778():
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
    check(native, case)
    results = run(native, make_inputs(case), **case.options)
    assert (results.out[:, :1024] == 0).all()
    assert (results.dquery[:, :1024] == 0).all()
    assert np.isneginf(results.logsumexp[..., :1024]).all()


def test_jax_23819():
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
    check(native, case)
    operands = make_inputs(case).operands
    first = native.run_forward(*operands, **case.options)
    second = native.run_forward(*operands, **case.options)
    for name, a, b in zip(FORWARD, first, second):
        assert_identical(a, b, name=name, context=case.id)


@pytest.mark.parametrize("lengths", [(15, 17), (16, 17), (17, 16)], ids=str)
def test_lucidrains_7(lengths):
    """Lq 16, Lkv 17: gradient shapes and values."""
    q_len, kv_len = lengths
    check(native, cases.Case(f"lucidrains-7-{q_len}", q_len=q_len, kv_len=kv_len))
