"""The forms of the backward pass, with the rows of every GPU family.

Whatever the planner would take for the size, the form and the family are forced here,
and the scratch for the score gradient is cut until it holds some heads or some keys.
What is planned then is in tests/plugin/test_planner.py.
"""

import numpy as np
import pytest

from tests.support import cases, native, reference_f64
from tests.support.compare import assert_identical
from tests.support.forced import Forced
from tests.support.inputs import make_inputs
from tests.support.kernel_check import BACKWARD, check, check_backward, run, run_case
from tests.support.poison import (
    KEY_SIDE,
    QUERY_SIDE,
    RULES,
    Poison,
    check_hidden,
    check_poison,
    rule_case,
)

FAMILIES = (0, 9)  # tiles in threadgroup memory, tiles from device memory


def _limit(case, chunks):
    """Bytes of the score gradient: of all, of some heads, of 128 keys of a head."""
    num_groups = case.num_heads // case.num_kv_heads
    rows, keys = (-(-size // 8) * 8 for size in (case.q_len, case.kv_len))
    itemsize = 2 if case.dtype == "bfloat16" else 4  # float16 has float32 there
    head = num_groups * rows * keys * itemsize
    return {"whole": 0, "heads": head * min(2, case.num_kv_heads), "keys": 1}[chunks]


CASES = [
    cases.Case("form-f32", kv_len=131),
    cases.Case("form-causal-bf16", dtype="bfloat16", q_len=150, kv_len=260,
               head_dim=128, is_causal=True, q_offset=100),
    cases.Case("form-wide-f16", dtype="float16", q_len=45, kv_len=135, head_dim=256,
               value_head_dim=200, num_heads=2, num_kv_heads=1),
    cases.Case("form-narrow-value-f32", q_len=40, kv_len=300, head_dim=77,
               value_head_dim=9, num_heads=4, num_kv_heads=4, is_causal=True,
               q_offset=270),
    cases.Case("form-window-f16", dtype="float16", batch=(2, 3), q_len=130, kv_len=140,
               head_dim=40, num_heads=2, num_kv_heads=1, sliding_window=(20, 3)),
    cases.Case("form-outer-batches-f16", dtype="float16", batch=(2, 2, 2, 2, 2),
               q_len=9, kv_len=130, head_dim=8, query_batch=(2, 1, 2, 1, 2),
               key_batch=(1, 2, 1, 2, 1), value_batch=(2, 1, 1, 2, 2),
               num_heads=2, num_kv_heads=1),
    cases.Case("form-mask-bf16", dtype="bfloat16", q_len=70, kv_len=270,
               head_dim=24, mask="random"),
    cases.Case("form-everything-f32", q_len=70, kv_len=290, head_dim=16,
               **cases.EVERYTHING),
    cases.Case("form-everything-f16", dtype="float16", q_len=41, kv_len=150,
               head_dim=72, **cases.EVERYTHING | {"bias": "float16"}),
]  # fmt: skip


def _num_chunks(plan):
    return sum("_dq_product_" in launch["kernel"] for launch in plan["launches"])


@pytest.mark.parametrize(
    ("chunks", "family"), [("whole", 9), ("heads", 0), ("keys", 0), ("keys", 9)]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_form_b(case, chunks, family):
    implementation = Forced("B", family, _limit(case, chunks))
    plan = implementation.plan(case)
    whole = _num_chunks(Forced("B", family).plan(case))
    assert plan["form"] == "B"
    assert (_num_chunks(plan) > whole) == (chunks != "whole")
    assert (plan["scratch_bytes"]["dquery_sum"] > 0) == (chunks == "keys")
    check(implementation, case)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_form_a(case, family):
    implementation = Forced("A", family)
    assert implementation.plan(case)["form"] == "A"
    check_backward(implementation, case)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.id)
def test_chunks_give_the_same_bits(case, family):
    """Wherever dS is cut; of dK and dV, those of form A too."""
    expected = run_case(Forced("B", family), case)
    limits = [_limit(case, chunks) for chunks in ("heads", "keys")]
    for other in (*(Forced("B", family, x) for x in limits), Forced("A", family)):
        results = run_case(other, case)
        for name in BACKWARD if other.form == "B" else ("dkey", "dvalue"):
            assert_identical(
                getattr(results, name),
                getattr(expected, name),
                name=name,
                context=f"{case.context}, {other}",
            )


PARTS = [
    cases.Case("parts-f32", q_len=150, kv_len=40, num_heads=20, num_kv_heads=1,
               head_dim=24, value_head_dim=70, is_causal=True, q_offset=-60),
    cases.Case("parts-bf16", dtype="bfloat16", q_len=200, kv_len=70, num_heads=24,
               num_kv_heads=2, head_dim=40),
    cases.Case("parts-wide-f16", dtype="float16", q_len=260, kv_len=33, num_heads=10,
               num_kv_heads=1, head_dim=150, batch=()),
    cases.Case("parts-short-f16", dtype="float16", q_len=5, kv_len=70, num_heads=130,
               num_kv_heads=1, head_dim=32),
    cases.Case("parts-everything-f32", q_len=200, kv_len=90, num_heads=24,
               num_kv_heads=2, head_dim=16, **cases.EVERYTHING),
    cases.Case("parts-outer-batches-f32", batch=(2, 2, 2, 2, 2), q_len=150, kv_len=11,
               head_dim=8, query_batch=(2, 1, 2, 1, 2), key_batch=(1, 2, 1, 2, 1),
               value_batch=(2, 1, 1, 2, 2), num_heads=16, num_kv_heads=1),
]  # fmt: skip


@pytest.mark.parametrize(("form", "family"), [("A", 0), ("B", 9)])
@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.id)
def test_parts(case, form, family):
    """The sums of dK and dV over queries and heads, cut: key-value heads are few."""
    if case.q_len <= 8:
        form = "A"  # with the kernels for few queries in place of its dQ
    implementation = Forced(form, family, _limit(case, "heads"))
    launches = implementation.plan(case)["launches"]
    assert "_dkv_combine_" in launches[-1]["kernel"]
    check_backward(implementation, case)


def test_parts_are_added_in_order():
    """The same bits on any number of threads."""
    case = PARTS[0]
    implementation = Forced("B", limit=_limit(case, "heads"))
    expected = run_case(implementation, case)
    try:
        native.set_threads(1)
        results = run_case(implementation, case)
    finally:
        native.set_threads(0)
    for name, array in results.present():
        assert_identical(
            array, getattr(expected, name), name=name, context=case.context
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dout", "dlogsumexp"), [(1e-4, 0), (3000, 0), (1e-4, 1e3), (0, 1e5)]
)
def test_a_score_gradient_of_16_bits_has_the_range(dout, dlogsumexp, family):
    """Small and large cotangents leave float16's exponents, but not those of dS."""
    case = cases.Case("range-f16", dtype="float16", q_len=40, kv_len=150, head_dim=32)
    inputs = make_inputs(case)
    inputs = inputs._replace(
        dout=(inputs.dout * dout).astype(np.float16),
        dlogsumexp=inputs.dlogsumexp * np.float32(dlogsumexp),
    )
    exact = reference_f64.attention_gradients(*inputs, **case.options)[0]
    errors = [
        np.abs(run(Forced(form, family), inputs, **case.options).dquery - exact).max()
        for form in ("A", "B")
    ]
    assert errors[1] <= 3 * errors[0]


# -- NaN and inf, as in test_poison.py -------------------------------------------------

IMPLEMENTATIONS = [Forced("A", 9), Forced("B", 0, 1), Forced("B", 9, 1)]
implementations = pytest.mark.parametrize(
    "implementation", IMPLEMENTATIONS, ids=lambda x: f"{x.form}-{x.family}-{x.limit}"
)


@pytest.mark.parametrize(
    "case",
    [
        cases.Case("poison-f32", q_len=37, kv_len=150, q_offset=113, is_causal=True,
                   num_heads=4, num_kv_heads=2, head_dim=40),
        cases.Case("poison-bf16", dtype="bfloat16", q_len=33, kv_len=135,
                   num_heads=2, num_kv_heads=1, head_dim=200, is_causal=True,
                   q_offset=40),
        rule_case("mask-blocks", 40, "float16"),
        *(pytest.param(rule_case(rule, 40), marks=pytest.mark.slow) for rule in RULES),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
@implementations
def test_nan_spoils_what_sees_it(case, implementation):
    for operands, length in ((KEY_SIDE, case.kv_len), (QUERY_SIDE, case.q_len)):
        for operand in operands:
            positions = (0, length // 2, length - 1)
            check_poison(
                implementation,
                case,
                *map(Poison, [operand] * 3, positions, (np.nan, np.inf, np.nan)),
            )


@pytest.mark.parametrize("value", [np.nan, 3e4])
@pytest.mark.parametrize(
    "rule",
    [
        "everything",
        "segments",
        *(
            pytest.param(rule, marks=pytest.mark.slow)
            for rule in RULES
            if rule not in ("everything", "segments")
        ),
    ],
)
@implementations
def test_what_is_hidden_is_not_seen(rule, value, implementation):
    check_hidden(implementation, rule_case(rule, 40, "float32"), value)
    check_hidden(implementation, rule_case(rule, 37, "float16"), value)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", ["whole", "heads", "keys"])
@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "case",
    [*cases.CURATED, *cases.VALUES, *cases.pairwise(), *cases.FEATURES],
    ids=lambda case: case.id,
)
def test_all_cases(case, family, form, chunks):
    if case.q_len <= 8:
        form = "A"
    check(Forced(form, family, _limit(case, chunks)), case)
