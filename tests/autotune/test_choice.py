"""What autotune measures and chooses, with a table and times that are made up."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash_metal
from jax_flash_metal import autotuner, kernel_proof, lowering, tunings
from jax_flash_metal.kernel_cases import Verdict
from tests.autotune.fake_library import TABLE, disable, library, name

__all__ = ["library"]  # a fixture

HEADS, LENGTHS = (6, 3), (37, 53)


def shapes(q_len=LENGTHS[0], dtype=jnp.float16, head_dim=64):
    return [
        jax.ShapeDtypeStruct((2, length, heads, head_dim), dtype)
        for length, heads in (
            *((q_len, HEADS[0]), (LENGTHS[1], HEADS[1]), (LENGTHS[1], HEADS[1])),
        )
    ]


class Times:
    """A measure with times of kernels that add up, and of whole calls."""

    def __init__(self, unfused=10.0, fused=1.0, **more):
        """`more`: seconds beyond 1, by part and block_q, such as forward16=0.5."""
        self.more, self.whole = more, {"fused": fused, "unfused": unfused}
        self.groups, self.budgets = [], []

    def __call__(self, candidates, budget_seconds):
        self.groups.append(candidates)
        self.budgets.append(budget_seconds)
        return [self.time(candidate) for candidate in candidates]

    def time(self, candidate):
        if candidate.form in self.whole:
            return self.whole[candidate.form]
        base = {"B": self.more.get("B", 0.0)}.get(candidate.form, 0.0)
        return 1 + base + sum(map(self.of, candidate.kernels))

    def of(self, kernel):
        (v,) = (v for v in TABLE if v.host_name == kernel)
        part = v.kernel.removeprefix("attention_").removeprefix("backward_")
        return self.more.get(f"{part}{v.block_q}", 0.0)

    def measured(self, which):
        """The kernels of each group of a pass."""
        return [
            [candidate.kernels for candidate in group]
            for group in self.groups
            if group[0].which == which
        ]


def tune(measure, *operands, **options):
    options = {
        "implementation": "metal",
        "platform": "cpu",
        "measure": measure,
    } | options
    return jax_flash_metal.autotune(*(operands or shapes()), **options)


def test_every_row_of_the_class_is_measured_and_no_other(library):
    times = Times()
    result = tune(times)
    assert times.measured("forward")[0] == [
        (name("forward", q),) for q in (16, 32, 64)
    ]  # not that of float32 nor of head_dim 128
    assert result.shape_class == "float16 d64 v64 q64 k64 n16 g2"
    assert result.origin == "measured"
    assert result.device == "Fake GPU"


def test_the_fastest_row_is_chosen(library):
    result = tune(Times(forward16=0.5, forward32=0.25, forward64=0.3))
    assert result.forward.kernels == (name("forward", 32),)
    assert (result.forward.seconds, result.forward.default_seconds) == (1.25, 1.5)
    assert result.forward.gain == pytest.approx(1.2)
    key = result.shape_class, "forward"
    assert library.choices[key] == ("-", [name("forward", 32)])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({}, 16),  # a tie: the default
        ({"forward16": 0.02}, 16),  # a gain of 2 %: noise
        ({"forward16": 0.03}, 32),
        # Of equals that are not the default, the first.
        ({"forward16": 0.5, "forward32": 0.1, "forward64": 0.1}, 32),
        ({"forward32": math.inf, "forward64": math.inf}, 16),  # not measured
    ],
    ids=str,
)
def test_ties_and_small_gains(library, seconds, chosen):
    assert tune(Times(**seconds)).forward.kernels == (name("forward", chosen),)


def test_rows_of_the_backward_pass_are_measured_apart(library):
    times = Times(dq16=0.5, dq64=0.2, dkv16=0.4, dkv32=0.9, B=5.0)
    result = tune(times)
    of_dq, of_dkv = times.measured("backward")[:2]
    dkv = name("backward_dkv", 16)
    assert of_dq == [(name("backward_dq", q), dkv) for q in (16, 32, 64)]
    # With the best row of the first kernel.
    dq = name("backward_dq", 32)
    assert of_dkv == [(dq, name("backward_dkv", q)) for q in (16, 32, 64)]
    assert (result.backward.form, result.backward.kernels) == (
        "A",
        (dq, name("backward_dkv", 64)),
    )


@pytest.mark.parametrize("default", ["A", "B"])
@pytest.mark.parametrize("faster", ["A", "B"])
def test_forms(library, default, faster):
    library.default_form = default
    times = Times(B=-0.2 if faster == "B" else 0.2, dkv16=0.3, dq_product32=-0.1)
    result = tune(times)
    dkv = name("backward_dkv", 32)
    product = name("backward_dq_product", 32)
    expected = {"A": (name("backward_dq", 16), dkv), "B": (dkv, product)}
    assert result.backward.form == faster
    assert result.backward.kernels == expected[faster]
    # All that is left is compared at once, with the default.
    last = times.measured("backward")[-1]
    first = name("backward_dq" if default == "A" else "backward_dkv", 16)
    assert last[0][0] == first
    assert set(last[1:]) == set(expected.values())
    assert library.choices[result.shape_class, "backward"][0] == faster


def test_forms_that_tie(library):
    assert tune(Times()).backward.form == "A"
    library.default_form = "B"
    assert tune(Times(), again=True).backward.form == "B"


def test_few_queries(library):
    """Their kernels have one row each, but for dK, dV; and no forms."""
    times = Times(dkv16=0.5, dkv64=-0.1)
    result = tune(times, *shapes(q_len=5))
    assert result.forward.kernels == (name("short_forward", 8),)
    assert (result.backward.form, result.backward.kernels) == (
        "-",
        (name("short_dq", 8), name("backward_dkv", 64)),
    )


# -- Wrong kernels ---------------------------------------------------------------------


def failures_of(result):
    return {t.kernels: t.failure for t in result.timings if t.failure is not None}


def test_a_row_with_other_results_is_never_chosen(library):
    """However fast it is; planted."""
    wrong = name("forward", 32)
    library.wrong = {wrong, name("backward_dkv", 64)}
    times = Times(forward32=-0.9, dkv64=-0.9, dkv32=-0.1)
    result = tune(times)
    assert result.forward.kernels == (name("forward", 16),)
    assert result.backward.kernels[1] == name("backward_dkv", 32)
    measured = {c.kernels for group in times.groups for c in group}
    assert not any(library.wrong & set(kernels) for kernels in measured)
    why = failures_of(result)[(wrong,)]
    assert why.startswith("its out is wrong: 0.75 where 0.5 is right, ")
    assert f"left out: {wrong}: its out is wrong" in str(result)


def test_a_row_that_writes_nothing_is_never_chosen(library):
    """What it leaves is not what the default has written before it."""
    idle = name("backward_dkv", 32)
    library.idle = {idle}
    result = tune(Times(dkv32=-0.5))
    assert idle not in result.backward.kernels
    assert any("are not finite" in why for why in failures_of(result).values())


def test_a_row_that_fails_its_proof_is_never_chosen(library, monkeypatch):
    bad = name("backward_dq_product", 32)
    cases = []

    def prove(case):
        cases.append(case)
        failure = "planted" if bad in case.choice else None
        return {bad: Verdict(None, failure)} if failure else {}

    monkeypatch.setattr(kernel_proof, "prove", prove)
    result = tune(Times(B=-0.5, dq_product32=-0.4))
    assert (result.backward.form, result.backward.kernels[1]) == (
        "B",
        name("backward_dq_product", 16),
    )
    (why,) = {w for kernels, w in failures_of(result).items() if bad in kernels}
    assert why == f"the kernel {bad} is disabled: planted"
    assert not any(bad in kernels for _, kernels in library.runs)
    # The default was proven before; others by the cases without options.
    forward = [case for case in cases if case.which == "forward"]
    assert [case.choice for case in forward] == [
        f"-\t{name('forward', q)}" for q in (32, 64)
    ]
    assert not any(case.has_options or case.is_short for case in cases)


def test_a_call_with_options_needs_the_proof_with_options(library, monkeypatch):
    cases = []
    monkeypatch.setattr(kernel_proof, "prove", lambda case: cases.append(case) or {})
    bias = jax.ShapeDtypeStruct((6, 37, 53), jnp.float16)
    result = tune(Times(), *shapes(), bias)
    assert result.shape_class.endswith(" bias")
    forward = [case.has_options for case in cases if case.which == "forward"]
    assert forward == [False, True, False, True]


def test_a_row_that_is_disabled_does_not_run(library, monkeypatch):
    disable(monkeypatch, name("forward", 64))
    result = tune(Times(forward64=-0.5))
    assert result.forward.kernels == (name("forward", 16),)
    assert not any(name("forward", 64) in kernels for _, kernels in library.runs)


def test_a_row_that_does_not_run_is_left_out(library):
    library.errors = {name("forward", 32): "it needs 40 KB of threadgroup memory."}
    result = tune(Times(forward32=-0.5))
    assert result.forward.kernels == (name("forward", 16),)
    assert failures_of(result) == {
        (name("forward", 32),): "it needs 40 KB of threadgroup memory"
    }


def test_the_backward_pass_needs_its_proof(library, monkeypatch):
    monkeypatch.setattr(
        kernel_proof,
        "objection",
        lambda backend, problem, which, *more: "no" if which == "backward" else None,
    )
    result = tune(Times(forward16=0.5))
    assert result.forward.gain == 1.5
    assert result.backward is None and result.unfused is None
    assert "left out: backward: no" in str(result)


def test_a_default_that_fails_its_proof_ends_it(library, monkeypatch):
    monkeypatch.setattr(kernel_proof, "objection", lambda *call: "the kernel is bad")
    with pytest.raises(NotImplementedError, match="measure: the kernel is bad"):
        tune(Times())


def test_a_form_begins_with_the_first_row_that_is_right(library, monkeypatch):
    disable(monkeypatch, name("backward_dq_product", 16))
    result = tune(Times(B=-0.5))
    assert (result.backward.form, result.backward.kernels) == (
        "B",
        (name("backward_dkv", 16), name("backward_dq_product", 32)),
    )


def test_the_time_of_a_form_without_right_rows_is_shared(library):
    library.errors = {name("backward_dq_product", q): "no" for q in (16, 32)}
    times = Times(B=-0.5)
    assert tune(times, budget_seconds=80.0).backward.form == "A"
    # The rows of two kernels of form A, then the default and the best one.
    expected = [80 / 7, 80 / 6, 80 / 3]
    assert times.budgets[1:4] == pytest.approx(expected, rel=0.1)


# -- Whole calls -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unfused", "is_taken"), [(1.0, True), (1.04, True), (1.05, False), (2.0, False)]
)
def test_the_unfused_form_must_win_by_5_percent(
    library, monkeypatch, unfused, is_taken
):
    result = tune(Times(fused=1.1, unfused=unfused))
    assert result.unfused.platform == "cpu"
    which = "forward+backward"
    assert result.unfused.seconds[which] == unfused
    assert result.unfused.fused_seconds[which] == 1.1
    # Calls on platform cpu take the native CPU kernels anyway.
    assert not result.unfused.is_taken
    row = {"metal": "the device of this test"}
    monkeypatch.setitem(lowering.KERNEL_PLATFORMS, "cpu", row)
    assert result.unfused.is_taken is is_taken
    assert str(result).endswith(" unfused: unfused is taken") is is_taken


def test_the_unfused_form_is_not_measured_where_it_would_not_be_taken(
    library, monkeypatch
):
    times = Times(unfused=0.1)
    monkeypatch.setattr(tunings, "MAX_SCORES_BYTES", 4 * 2 * 6 * 37 * 53)
    assert tune(times).unfused is not None
    monkeypatch.setattr(tunings, "MAX_SCORES_BYTES", 4 * 2 * 6 * 37 * 53 - 1)
    assert tune(times, again=True).unfused is None


# -- Arguments and the budget ----------------------------------------------------------


def test_a_stored_result_is_not_measured_again(library):
    first, second = Times(forward16=0.5), Times(forward16=0.5)
    result = tune(first)
    stored = tune(second)
    assert stored == result and stored.origin == "measured"  # in this process
    assert not second.groups
    assert tune(second, again=True).forward == result.forward
    assert second.groups


def test_the_budget_is_shared(library):
    times = Times()
    tune(times, budget_seconds=80.0)
    # The first of eight stages, and the last of all: what is left, which is all of it.
    assert times.budgets[0] == pytest.approx(10, abs=0.5)
    assert times.budgets[-1] == pytest.approx(80, abs=5)
    assert times.budgets == sorted(times.budgets)


def test_without_time_only_the_default_is_measured(library):
    result = tune(Times(forward32=-0.5), budget_seconds=1e-9)
    assert result.forward.kernels == (name("forward", 16),)
    assert set(failures_of(result).values()) == {"the time was used up"}


@pytest.mark.parametrize("budget", [0, -1.0, math.inf, math.nan])
def test_wrong_budgets(library, budget):
    with pytest.raises(ValueError, match="budget_seconds must be positive, but got"):
        tune(Times(), budget_seconds=budget)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"implementation": None}, "this call takes the cpu kernels. Use platform"),
        ({"implementation": "xla"}, "this call takes the reference. Use platform"),
        ({"platform": "tpu", "implementation": None}, "this call takes the reference"),
        ({"platform": "tpu"}, "needs platform 'cpu' or 'flash_metal', but"),
    ],
    ids=str,
)
def test_calls_without_metal_kernels(library, options, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        tune(Times(), **options)


def test_a_call_that_no_kernels_cover(library):
    with pytest.raises(NotImplementedError, match="head_dim 320 is above 256"):
        tune(Times(), *shapes(head_dim=320))


def test_a_wrong_call(library):
    query, key, _ = shapes()
    with pytest.raises(ValueError, match="kv_len"):
        tune(Times(), query, key, query)


def test_the_setting_forbids_it(library, monkeypatch):
    monkeypatch.setenv(tunings.SETTING, "off")
    with pytest.raises(
        RuntimeError, match="JAX_FLASH_METAL_AUTOTUNE says that nothing"
    ):
        tune(Times())


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        *((x, "must return positive seconds") for x in (math.nan, 0.0, -1.0, None)),
        ("fast", "returned 'fast' for Candidate"),
        (10**400, "must return positive seconds"),
    ],
    ids=lambda x: str(x)[:8],
)
@pytest.mark.parametrize("position", [0, 1])
def test_a_measure_must_return_seconds(library, second, sentence, position):
    def measure(candidates, budget_seconds):
        seconds = [1.0] * len(candidates)
        seconds[position] = second
        return seconds

    with pytest.raises(ValueError, match=sentence):
        tune(measure)
    assert tunings.store().read() == {}


def test_a_measure_must_measure_the_first_and_all(library):
    with pytest.raises(ValueError, match="the first one finite"):
        tune(lambda candidates, budget: [math.inf] * len(candidates))
    for seconds in ([], [1.0], [1.0] * 4):
        with pytest.raises(
            ValueError, match=f"of the 3 candidates, but .* {len(seconds)}"
        ):
            tune(lambda candidates, budget, seconds=seconds: seconds)
    assert tunings.load() == {}


def test_a_measure_may_return_other_numbers(library):
    result = tune(lambda candidates, budget: np.ones(len(candidates), np.float32))
    assert type(result.forward.seconds) is float
    assert tunings.store().read() == {result.shape_class: result}


# -- The clock -------------------------------------------------------------------------


class Clock:
    """Runs take the time that is set, on a clock of their own."""

    def __init__(self, monkeypatch):
        self.now, self.order = 0.0, []
        monkeypatch.setattr(autotuner.time, "perf_counter", lambda: self.now)

    def candidate(self, label, *seconds):
        """The last of the times is that of all later runs."""
        left = list(seconds)

        def run():
            self.order.append(label)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return autotuner.Candidate("forward", "-", (label,), run)


def test_candidates_take_turns(monkeypatch):
    clock = Clock(monkeypatch)
    candidates = [
        # The first run, which compiles, is not counted.
        clock.candidate("a", 9.0, 0.25),
        clock.candidate("b", 5.0, 0.25, 0.5, 0.5, 0.125),
    ]
    assert autotuner.measure_in_turn(candidates, 1e9) == [0.25, 0.125]
    assert clock.order[:4] == ["a", "a", "b", "b"]
    assert clock.order[4:12] == ["b", "a", "a", "b", "b", "a", "a", "b"]


def test_kernels_are_chosen_before_the_clock_starts(monkeypatch):
    """Once for a turn."""
    clock = Clock(monkeypatch)
    inside = []

    @contextlib.contextmanager
    def prepared():
        clock.now += 7.0
        inside.append(True)
        yield
        clock.now += 7.0

    candidate = clock.candidate("a", 2**-12)
    candidate = dataclasses.replace(candidate, prepared=prepared)
    assert autotuner.measure_in_turn([candidate], 1e9) == [2**-12]
    assert (len(inside), len(clock.order)) == (3, 2 + 9)


def test_a_candidate_runs_its_kernels(library):
    """Where it is prepared, and only there."""
    seen = []

    def measure(candidates, budget_seconds):
        for candidate in candidates:
            with candidate.prepared():
                if candidate.form not in tunings.WHOLE_CALLS:
                    candidate.run()
                    kernels = library.runs[-1][1]
                    assert tuple(kernels) == candidate.kernels
                    seen.append(candidate)
            assert candidate.form in tunings.WHOLE_CALLS or not library.choices
        return [1.0] * len(candidates)

    tune(measure)
    assert {candidate.which for candidate in seen} == {"forward", "backward"}


def test_a_hopeless_candidate_gets_no_more_turns(monkeypatch):
    clock = Clock(monkeypatch)
    slow = clock.candidate("slow", 1.0)
    candidates = [clock.candidate("a", 0.25), slow, clock.candidate("b", 0.5)]
    assert autotuner.measure_in_turn(candidates, 1e9) == [0.25, 1.0, 0.5]
    assert clock.order.count("slow") == 2
    assert clock.order.count("a") == clock.order.count("b") > 10


def test_short_calls_are_timed_together(monkeypatch):
    clock = Clock(monkeypatch)
    (seconds,) = autotuner.measure_in_turn([clock.candidate("a", 2**-12)], 1e9)
    assert seconds == 2**-12
    assert len(clock.order) == 2 + 9  # 2 ms of calls


def test_the_budget_ends_the_measurement(monkeypatch):
    clock = Clock(monkeypatch)
    candidates = [clock.candidate(label, 1.0) for label in "abc"]
    # Warming up is not counted. The round begins in time; two samples of the others
    # tell nothing.
    assert autotuner.measure_in_turn(candidates, 5.5) == [1.0, math.inf, math.inf]
    assert clock.now == 3 + 3 + 3
    # One more round, and they do.
    assert autotuner.measure_in_turn(candidates, 6.5) == [1.0, 1.0, 1.0]
    # No time for the third one at all.
    clock.order.clear()
    assert autotuner.measure_in_turn(candidates, 1.5)[1:] == [math.inf, math.inf]
    assert "c" not in clock.order
