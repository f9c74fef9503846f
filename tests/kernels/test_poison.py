"""NaN and inf: what no visible pair links to them keeps its bits; NaN never hides."""

import dataclasses

import numpy as np
import pytest

from tests.support import cases, reference_f64
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import (
    all_results,
    assert_result,
    run,
)
from tests.support.poison import (
    KEY_SIDE,
    QUERY_SIDE,
    RULES,
    Poison,
    check_hidden,
    check_poison,
    rule_case,
)

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
# What makes a score besides q·k, and has a gradient.
SCORE_FEATURES = {"bias": "float32", "sinks": True, "slopes": True}
INFINITE_RULES = ("mask-bias-rows", "sinks-slopes", "softcap", "dropout", "everything")
all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("operand", [*KEY_SIDE, *QUERY_SIDE])
@all_cases
def test_spoils_only_what_sees_it(case, operand, value, kernels):
    length = case.kv_len if operand in KEY_SIDE else case.q_len
    positions = sorted({0, 1, length // 2, length - 2, length - 1})
    check_poison(kernels, case, *(Poison(operand, i, value) for i in positions))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("operand", [*KEY_SIDE, *QUERY_SIDE])
@pytest.mark.parametrize("index", [0, 2, 5])
def test_in_other_dtypes(index, operand, dtype, kernels):
    case = dataclasses.replace(CASES[index], dtype=dtype)
    length = case.kv_len if operand in KEY_SIDE else case.q_len
    check_poison(
        kernels, case, *(Poison(operand, length // 2, x) for x in (np.nan, np.inf))
    )


@pytest.mark.parametrize("component", [0, 7, 31, 38, 39])
@pytest.mark.parametrize("operand", ["query", "key", "value", "dout"])
def test_one_component_is_enough(operand, component, kernels):
    """head_dim 40: also in the tail that fills no fragment."""
    for case in (
        CASES[0],
        cases.Case("one-component", q_len=6, kv_len=70, head_dim=40),
    ):
        check_poison(kernels, case, Poison(operand, 4, np.nan, component))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e4])
@pytest.mark.parametrize("q_len", [40, 6])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_that_is_hidden(dtype, q_len, value, kernels):
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
        expected = run(kernels, clean, **case.options)
        actual = run(kernels, dirty, **case.options)
        for name, array in actual.present():
            context = f"{case.context}, hidden {value}"
            assert_identical(array, getattr(expected, name), name=name, context=context)


@pytest.mark.parametrize("q_len", [37, 5])
def test_all_nan_gives_all_nan(q_len, kernels):
    case = cases.Case(f"all-nan-q{q_len}", q_len=q_len)
    inputs = make_inputs(case)
    inputs = type(inputs)(*(np.full_like(x, np.nan) for x in inputs))
    for name, array in run(kernels, inputs, **case.options).present():
        assert np.isnan(array).all(), name


# Scores beyond float32, and of infinite queries: of either sign.
HUGE = [(1e30, 1e30), (1e30, -1e30), (np.inf, 1.0), (np.inf, -1.0)]


def check_not_silent(implementation, case, query, key):
    """Every score of every row is infinite: NaN everywhere, no plausible number.

    Scores of -inf must not make rows that see a key like those that see none.
    """
    inputs = make_inputs(case)
    inputs.query[...] = query
    inputs.key[...] = key
    results = run(implementation, inputs, **make_arguments(case))
    for name, array in results.present():
        assert np.isnan(array).all(), f"{name} of {case.context}: {query} and {key}"


@pytest.mark.parametrize("features", [{}, SCORE_FEATURES], ids=["plain", "features"])
@pytest.mark.parametrize("q_len", [37, 5])
@pytest.mark.parametrize(("query", "key"), HUGE)
def test_overflowing_scores_are_not_silent(query, key, q_len, features, kernels):
    case = cases.Case(f"overflow-q{q_len}", q_len=q_len, head_dim=16, **features)
    check_not_silent(kernels, case, query, key)


def check_minus_infinity(implementation, case, position, component):
    """-inf in one component of a key: scores of -inf where the query is positive there.

    A row is NaN in all its results, or as if it did not see the key. An element of
    another gradient is NaN or as float64 says, too.
    """
    poison = Poison("key", position, -np.inf, component)
    check_poison(implementation, case, poison)  # NaN only where the key is seen

    clean, arguments = make_inputs(case), make_arguments(case)
    kv_head = case.num_kv_heads // 2  # as poison.py has it
    dirty = clean._replace(key=clean.key.copy())
    dirty.key[..., position, kv_head, component] = -np.inf
    results = run(implementation, dirty, **arguments)

    num_groups = case.num_heads // case.num_kv_heads
    mask = np.ones((*case.batch, case.num_heads, case.q_len, case.kv_len), bool)
    mask[..., kv_head * num_groups : (kv_head + 1) * num_groups, :, position] = False
    arguments["mask"] = mask & arguments.get("mask", True)
    expected = all_results(reference_f64, case, arguments)

    # [*batch, head, row, column]
    rows = [np.swapaxes(getattr(results, name), -3, -2) for name in ("out", "dquery")]
    spoilt = [np.isnan(results.logsumexp), *(np.isnan(x).any(-1) for x in rows)]
    for name, x, some in zip(("out", "dquery"), rows, spoilt[1:]):
        assert (np.isnan(x).all(-1) == some).all(), f"{name} of {case.context}"
    assert all((some == spoilt[0]).all() for some in spoilt), case.context
    for name, actual in results.present():
        wanted = getattr(expected, name)
        finite = np.where(np.isnan(actual), wanted.astype(actual.dtype), actual)
        context = f"{case.context} with {poison}"
        assert_result(case, name, finite, wanted, context=context)


@pytest.mark.parametrize(
    "case",
    [
        *(CASES[i] for i in (0, 2, 3, 5, 7)),
        *(rule_case(rule, q_len) for rule in INFINITE_RULES for q_len in (40, 6)),
        rule_case("mask", 40, "bfloat16"),
        rule_case("mask", 6, "float16"),
    ],
    ids=lambda case: case.id,
)
def test_minus_infinity_of_a_visible_key(case, kernels):
    for position, component in [(0, 0), (case.kv_len // 3, 7), (case.kv_len - 3, 15)]:
        check_minus_infinity(kernels, case, position, component)


@pytest.mark.parametrize("q_len", [40, 6])
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_hides(rule, q_len, kernels):
    """One element in turn: who does not see it keeps every bit, in every gradient."""
    case = rule_case(rule, q_len)
    poisons = [
        Poison(operand, position, value)
        for operand, positions in [
            *((name, (1, 33, 69)) for name in KEY_SIDE),
            *((name, (0, q_len // 2, q_len - 1)) for name in QUERY_SIDE),
        ]
        for position, value in zip(positions, (np.nan, np.inf, np.nan))
    ]
    if "bias" in case.features:
        positions = [(0, 0), (1, 40), (q_len - 1, 3), (q_len // 2, 69)]
        poisons += [Poison("bias", position, np.nan) for position in positions]
        poisons.append(Poison("bias", (2, 5), np.inf))
    for name in ("sinks", "alibi_slopes"):
        if name in case.features:
            poisons += [Poison(name, None, value) for value in (np.nan, np.inf)]
    check_poison(kernels, case, *poisons)


@pytest.mark.parametrize(
    "value",
    [
        np.nan,
        3e4,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (np.inf, -np.inf)),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_all_that_each_rule_hides(rule, value, kernels):
    """Everything that nobody sees at once, hidden elements of the bias too."""
    for q_len, dtype in [
        (40, "float32"),
        (6, "float16"),
        (37, "bfloat16"),
        (5, "float32"),
    ]:
        check_hidden(kernels, rule_case(rule, q_len, dtype), value)


@pytest.mark.parametrize("q_len", [40, 6])
def test_dropped_elements_are_seen(q_len, kernels):
    """Dropout hides nothing: a NaN key spoils every row that sees it."""
    case = cases.Case(
        f"dropped-q{q_len}", q_len=q_len, dropout_rate=0.9, **_HEADS | {"head_dim": 16}
    )
    inputs, arguments = make_inputs(case), make_arguments(case)
    inputs.key[0, 7] = np.nan
    _, logsumexp = kernels.run_forward(*inputs.operands, **arguments)
    assert np.isnan(logsumexp[0]).all() and np.isfinite(logsumexp[1]).all()
