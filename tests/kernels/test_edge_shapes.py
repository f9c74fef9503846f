"""Sizes 0 and 1, rows without keys, extreme offsets."""

import dataclasses

import numpy as np
import pytest

from tests.support import cases, reference_f64, tolerances
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import check, run, run_case

dtypes = pytest.mark.parametrize("dtype", tolerances.DTYPES)
short_and_long = pytest.mark.parametrize("q_len", [37, 5])


@dtypes
@short_and_long
def test_no_keys(dtype, q_len, kernels):
    case = cases.Case("no-keys", dtype=dtype, q_len=q_len, kv_len=0)
    results = run(kernels, make_inputs(case), **case.options)
    assert (results.out == 0).all() and np.isneginf(results.logsumexp).all()
    assert (results.dquery == 0).all()
    assert results.dkey.size == results.dvalue.size == 0


@dtypes
def test_report_34_dao_ailab_2421(dtype, kernels):
    """No queries at all: gradients of unused keys are 0, not what was in memory."""
    case = cases.Case("no-queries", dtype=dtype, q_len=0)
    results = run(kernels, make_inputs(case), **case.options)
    assert results.out.shape == (2, 0, 6, 64)
    assert results.logsumexp.shape == (2, 6, 0)
    assert (results.dkey == 0).all() and (results.dvalue == 0).all()


@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 0, "kv_len": 0},
        {"batch": (0,)},
        {"batch": (2, 0, 3)},
        {"batch": (0,), "q_len": 5},
        {"batch": (0,), "kv_len": 0},
    ],
    ids=str,
)
def test_nothing_at_all(sizes, kernels):
    case = cases.Case("nothing", **sizes)
    results = run(kernels, make_inputs(case), **case.options)
    assert all(x.size == 0 for _, x in results.present())


@pytest.mark.parametrize(
    "case",
    [
        cases.Case("all-ones", batch=(1,), q_len=1, kv_len=1, num_heads=1,
                   num_kv_heads=1, head_dim=1),
        cases.Case("one-query", q_len=1),
        cases.Case("one-key", kv_len=1),
        cases.Case("one-key-causal", kv_len=1, is_causal=True),
        cases.Case("one-value-column", value_head_dim=1),
        cases.Case("one-query-column", head_dim=1, value_head_dim=64),
        cases.Case("batch-of-one", batch=(1, 1, 1)),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
@dtypes
def test_size_one(case, dtype, kernels):
    check(kernels, dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("head_dim", range(1, 257, 17))
def test_odd_head_dims(head_dim, kernels):
    """Both head dims walk through multiples of 8 and everything between them."""
    case = cases.Case(
        f"odd-d{head_dim}",
        dtype="float16",
        batch=(1,),
        head_dim=head_dim,
        value_head_dim=258 - head_dim - (head_dim == 1),
        num_heads=2,
        num_kv_heads=1,
    )
    check(kernels, case)


@dtypes
@short_and_long
@pytest.mark.parametrize("offset", [-1, -3, -31, -33, -36, -37, -100])
def test_rows_without_keys(dtype, q_len, offset, kernels):
    case = cases.Case(
        f"no-key-rows{offset}-q{q_len}",
        dtype=dtype,
        q_len=q_len,
        is_causal=True,
        q_offset=offset,
    )
    check(kernels, case)
    results = run(kernels, make_inputs(case), **case.options)
    hidden = slice(0, min(-offset, q_len))
    assert (results.out[:, hidden] == 0).all()
    assert np.isneginf(results.logsumexp[..., hidden]).all()
    assert (results.dquery[:, hidden] == 0).all()
    if -offset >= q_len:
        assert (results.dkey == 0).all() and (results.dvalue == 0).all()


@short_and_long
@pytest.mark.parametrize("offset", [53, 1000, 2**31 - 1, 2**31, 2**40, 2**63 - 1])
def test_large_offset_is_no_mask(q_len, offset, kernels):
    case = cases.Case("offset", q_len=q_len)
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    actual = run(
        kernels, inputs, **case.options | {"is_causal": True, "q_offset": offset}
    )
    for name, array in actual.present():
        assert_identical(
            array, getattr(expected, name), name=name, context=f"q_offset={offset}"
        )


@short_and_long
@pytest.mark.parametrize("offset", [-(2**31), -(2**31) - 1, -(2**40), -(2**63)])
def test_very_negative_offset_hides_all(q_len, offset, kernels):
    case = cases.Case("offset", q_len=q_len, is_causal=True, q_offset=offset)
    results = run(kernels, make_inputs(case), **case.options)
    assert np.isneginf(results.logsumexp).all()
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert (getattr(results, name) == 0).all(), name


@short_and_long
def test_offset_without_causal_does_nothing(q_len, kernels):
    case = cases.Case("offset-unused", q_len=q_len)
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    actual = run(kernels, inputs, **case.options | {"q_offset": -7})
    for name, array in actual.present():
        assert_identical(array, getattr(expected, name), name=name, context=case.id)


EVERYTHING = cases.EVERYTHING | {"feature_batch": {}}


@dtypes
@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_len": 0},
        {"kv_len": 0, "q_len": 5},
        {"q_len": 0},
        {"q_len": 0, "kv_len": 0},
        {"batch": (0,)},
        {"batch": (2, 0), "q_len": 5},
    ],
    ids=str,
)
def test_nothing_with_every_feature(sizes, dtype, kernels):
    """Whatever has elements has zeros, and gradients that nothing adds to are 0."""
    case = cases.Case("nothing-of-everything", dtype=dtype, **sizes | EVERYTHING)
    results = run_case(kernels, case)
    assert np.isneginf(results.logsumexp).all()
    for name, array in results.present():
        if name != "logsumexp":
            assert (array == 0).all(), name


@pytest.mark.parametrize(
    ("batch", "summed"),
    [((0,), (1,)), ((2, 0), (2, 1)), ((0, 2), (1, 2))],  # of the operands
    ids=str,
)
def test_gradients_summed_over_an_empty_batch_are_zero(batch, summed, kernels):
    """Every element is there, those of a dimension that is not summed too."""
    case = cases.Case(
        "empty-batch", batch=batch, bias="float32", sinks=True, slopes=True,
        feature_batch={"bias": summed, "sinks": summed, "alibi_slopes": summed},
    )  # fmt: skip
    results = run_case(kernels, case)
    for array in (results.dbias, results.dsinks, results.dslopes):
        assert array.size and (array == 0).all()


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": (1,), "q_len": 1, "kv_len": 1, "num_heads": 1, "num_kv_heads": 1,
         "head_dim": 1},
        {"q_len": 1},
        {"kv_len": 1},
        {"batch": ()},
        {"batch": (1, 1, 1)},
        {"head_dim": 200, "value_head_dim": 3},
    ],
    ids=str,
)  # fmt: skip
@dtypes
def test_size_one_with_every_feature(sizes, dtype, kernels):
    features = EVERYTHING | {"q_offset": 0, "bias_values": "normal"}
    check(kernels, cases.Case("one-of-everything", dtype=dtype, **sizes | features))


@short_and_long
@pytest.mark.parametrize("offset", [-(2**31), -(2**31) + 1, 2**31 - 1, 2**30])
@pytest.mark.parametrize("window", [None, (2**40, 3), (5, 2**62), (2**62, 2**62)])
def test_extreme_offsets_as_operand(q_len, offset, window, kernels):
    """Positions do not wrap round: every key is in the past, or none is."""
    for is_causal in (False, True):
        case = cases.Case(
            "extreme-offset", q_len=q_len, is_causal=is_causal, sliding_window=window
        )
        inputs = make_inputs(case)
        offsets = np.array([offset, offset], np.int32)
        options = case.options | {"q_offset": offsets}
        expected = reference_f64.attention(*inputs.operands, **options)
        out, logsumexp = kernels.run_forward(*inputs.operands, **options)
        np.testing.assert_allclose(out, expected.out, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(
            np.isneginf(logsumexp), np.isneginf(expected.logsumexp)
        )
        results = run(kernels, inputs, **options)
        gradients = reference_f64.attention_gradients(
            *inputs.operands, inputs.dout, inputs.dlogsumexp, **options
        )
        np.testing.assert_allclose(results.dkey, gradients.dkey, rtol=1e-4, atol=1e-4)


@short_and_long
@pytest.mark.parametrize("length", [-(2**31), -1, 0, 2**31 - 1])
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_out_of_range(name, length, q_len, kernels):
    """Below 0 is 0; above the length is all."""
    case = cases.Case("length", q_len=q_len)
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    actual = run(kernels, inputs, **case.options | {name: np.array([length], np.int32)})
    for result, array in actual.present():
        if length > 0:
            assert_identical(
                array, getattr(expected, result), name=result, context=f"{length}"
            )
        else:
            assert (array == (-np.inf if result == "logsumexp" else 0)).all(), result
