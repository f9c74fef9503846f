"""NaN and inf: what no visible pair links to them keeps its bits; NaN never hides."""

import dataclasses

import numpy as np
import pytest

from tests.support import cases, native
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import Results, run
from tests.support.poison import QUERY_SIDE, Poison, check_poison

KEY_SIDE = ("key", "value")

_HEADS = {"num_heads": 4, "num_kv_heads": 2}
CASES = [
    cases.Case("square", q_len=70, kv_len=70, is_causal=True, head_dim=40, **_HEADS),
    cases.Case(
        "bottom-right", q_len=37, kv_len=83, q_offset=46, is_causal=True, **_HEADS
    ),
    cases.Case(
        "no-key-rows", q_len=71, kv_len=37, q_offset=-34, is_causal=True, **_HEADS
    ),
    cases.Case("no-mask", q_len=37, kv_len=53, **_HEADS),
    cases.Case("wide", q_len=37, kv_len=53, is_causal=True, head_dim=200, **_HEADS),
    cases.Case("short", q_len=7, kv_len=140, q_offset=66, is_causal=True, **_HEADS),
    cases.Case(
        "short-no-key-rows", q_len=8, kv_len=20, q_offset=-3, is_causal=True, **_HEADS
    ),
    cases.Case("short-no-mask", q_len=5, kv_len=140, **_HEADS),
]
all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("operand", [*KEY_SIDE, *QUERY_SIDE])
@all_cases
def test_spoils_only_what_sees_it(case, operand, value):
    length = case.kv_len if operand in KEY_SIDE else case.q_len
    for position in sorted({0, 1, length // 2, length - 2, length - 1}):
        check_poison(native, case, Poison(operand, position, value))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("operand", [*KEY_SIDE, *QUERY_SIDE])
@pytest.mark.parametrize("index", [0, 2, 5])
def test_in_other_dtypes(index, operand, dtype):
    case = dataclasses.replace(CASES[index], dtype=dtype)
    length = case.kv_len if operand in KEY_SIDE else case.q_len
    for value in (np.nan, np.inf):
        check_poison(native, case, Poison(operand, length // 2, value))


@pytest.mark.parametrize("component", [0, 7, 31, 38, 39])
@pytest.mark.parametrize("operand", ["query", "key", "value", "dout"])
def test_one_component_is_enough(operand, component):
    """head_dim 40: also in the tail that fills no fragment."""
    for case in (
        CASES[0],
        cases.Case("one-component", q_len=6, kv_len=70, head_dim=40),
    ):
        check_poison(native, case, Poison(operand, 4, np.nan, component))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e4])
@pytest.mark.parametrize("q_len", [40, 6])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_that_is_hidden(dtype, q_len, value):
    """Every key that no row sees and every row that sees no key, all at once."""
    for offset in (-3, 0, 20):
        case = cases.Case(
            f"hidden{offset}-{dtype}-q{q_len}",
            dtype=dtype,
            q_len=q_len,
            kv_len=100,
            is_causal=True,
            q_offset=offset,
        )
        clean = make_inputs(case)
        dirty = type(clean)(*(x.copy() for x in clean))
        first_hidden_key = q_len + offset
        dirty.key[:, first_hidden_key:] = value
        dirty.value[:, first_hidden_key:] = value
        blind = slice(0, max(0, -offset))
        dirty.query[:, blind] = value
        dirty.dout[:, blind] = value
        dirty.dlogsumexp[..., blind] = value
        expected = run(native, clean, **case.options)
        actual = run(native, dirty, **case.options)
        for name in Results._fields:
            assert_identical(
                getattr(actual, name),
                getattr(expected, name),
                name=name,
                context=f"{case.context}, hidden {value}",
            )


@pytest.mark.parametrize("q_len", [37, 5])
def test_all_nan_gives_all_nan(q_len):
    case = cases.Case(f"all-nan-q{q_len}", q_len=q_len)
    inputs = make_inputs(case)
    inputs = type(inputs)(*(np.full_like(x, np.nan) for x in inputs))
    for name, array in run(native, inputs, **case.options)._asdict().items():
        assert np.isnan(array).all(), name


@pytest.mark.parametrize("q_len", [37, 5])
def test_overflowing_scores_are_not_silent(q_len):
    """Finite inputs whose scores exceed float32: NaN or inf, no plausible number."""
    case = cases.Case(f"overflow-q{q_len}", q_len=q_len)
    inputs = make_inputs(case)
    inputs.query[...] = 1e30
    inputs.key[...] = 1e30
    out, logsumexp = native.run_forward(*inputs.operands, **case.options)
    assert not np.isfinite(logsumexp).any()
    assert np.isnan(out).all()
