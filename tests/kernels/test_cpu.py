"""The CPU kernels with every instruction set that this CPU has.

With the best one they run all that is asked of both implementations.
"""

import numpy as np
import pytest

from tests.support import cases, native
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import check, run, run_case
from tests.support.poison import RULES, check_hidden, rule_case

WITH_EVERYTHING = [c for c in cases.FEATURES if c.id.startswith("everything")]
LONG_AND_SHORT = [
    cases.Case("long-f32", q_len=700, kv_len=530, head_dim=40, is_causal=True),
    cases.Case("long-bf16", dtype="bfloat16", q_len=390, kv_len=800, head_dim=72),
    cases.Case("long-everything-f16", dtype="float16", q_len=450, kv_len=530,
               num_heads=4, num_kv_heads=2, head_dim=16, **cases.EVERYTHING),
    cases.Case("short-f32", q_len=2, kv_len=5000, head_dim=24),
    cases.Case("short-everything-bf16", dtype="bfloat16", q_len=4, kv_len=3000,
               num_heads=4, num_kv_heads=2, head_dim=16, **cases.EVERYTHING),
    cases.Case("many-tiny-f16", dtype="float16", batch=(77,), q_len=5, kv_len=9,
               num_heads=4, num_kv_heads=2, head_dim=16),
    cases.Case("summed-parts", batch=(5,), q_len=270, kv_len=390, head_dim=8,
               bias="float16", bias_ones="nt", slopes=True, sinks=True, feature_batch={
                   "bias": (1,), "alibi_slopes": (1,), "sinks": (1,)}),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [*cases.CURATED, *WITH_EVERYTHING, *cases.CPU_BLOCKS],
    ids=lambda case: case.id,
)
def test_every_instruction_set(case, isa):
    check(native.cpu, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["mask", "segments-mixed", "causal-bias", "softcap"])
def test_what_is_hidden(rule, dtype, isa):
    for value in (np.nan, np.inf):
        check_hidden(native.cpu, rule_case(rule, 40, dtype), value)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_what_each_rule_hides(rule, isa):
    for dtype in ("float32", "float16", "bfloat16"):
        for q_len in (40, 6):
            check_hidden(native.cpu, rule_case(rule, q_len, dtype), np.nan)


@pytest.mark.parametrize("case", LONG_AND_SHORT, ids=lambda case: case.id)
def test_bits_do_not_depend_on_the_threads(case, isa, set_threads):
    set_threads(1)
    expected = run_case(native.cpu, case)
    for threads in (1, 2, 5, 5):
        set_threads(threads)
        for name, array in run_case(native.cpu, case).present():
            context = f"{case.context}, {threads} threads"
            assert_identical(array, getattr(expected, name), name=name, context=context)


@pytest.mark.parametrize("head_dim", [16, 24, 80])  # scales that round, and one not
@pytest.mark.parametrize("q_len", [37, 5])
def test_gradients_of_scores_far_beyond_what_float32_resolves(q_len, head_dim, isa):
    """Around 1e10 and 1e16: as one-hot as they are, no NaN."""
    case = cases.Case(f"far-q{q_len}", q_len=q_len, head_dim=head_dim)
    inputs = make_inputs(case)
    for factor in (1e5, 1e8):
        query, key = (np.float32(factor) * x for x in (inputs.query, inputs.key))
        dirty = inputs._replace(query=query, key=key)
        for name, array in run(native.cpu, dirty, **case.options).present():
            assert np.isfinite(array).all(), f"{name} of {case.context}"


def test_a_kernel_has_the_name_of_what_runs(isa):
    case = cases.Case("name", dtype="bfloat16")
    operands = dict(zip(native.FORWARD_OPERANDS, make_inputs(case).operands))
    problem = native.make_problem(operands, backend="cpu", **case.options)
    native.attach_results(problem, operands, native.FORWARD_RESULTS)
    assert native.kernels(problem, "forward") == [f"cpu_forward_bfloat16_{isa}"]
    assert native.cpu.device_facts()["family"] == isa
