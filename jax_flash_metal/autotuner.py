"""The autotuner: which rows of the variant table are fastest on this machine's GPU.

Measures, only when it is asked to, the kernels that a class of calls may take, and the
unfused form beside them. What it finds is kept and used by tunings.py. For users:
docs/autotune.md. (Not named like its function, which the package has under that name.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jax_flash_metal import (
    api,
    autodiff,
    kernel_cases,
    kernel_choices,
    kernel_proof,
    support,
    tunings,
)
from jax_flash_metal.attention_library import (
    BACKWARD_RESULTS,
    FORWARD_OPERANDS,
    FORWARD_RESULTS,
    Array,
    AttentionError,
    AttentionLibrary,
    CallShape,
    attach_results,
    make_problem,
)
from jax_flash_metal.config import AttentionConfig, AttentionOperands
from jax_flash_metal.kernel_choices import Choice
from jax_flash_metal.lowering import has_features, takes_kernels
from jax_flash_metal.tunings import WHOLE_CALLS, Chosen, Timing, Tuning, Unfused

DEFAULT_BUDGET_SECONDS = 30.0
# A row must be this many times as fast as the default to take its place: below it may
# be noise, and the default was chosen for a reason.
LEAST_GAIN = 1.02


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something to be timed.

    Attributes:
      which: "forward", "backward", or "forward+backward" of a whole call.
      form: Of kernel_choices.FORMS; of a whole call "fused" or "unfused".
      kernels: Names of those that are chosen; of the unfused form none.
      run: Does it once, and waits for the end; to be called within `prepared`.
      prepared: A context in which calls take these kernels. What it costs is no cost of
        a call, so it is entered before the clock starts.
    """

    which: str
    form: str
    kernels: tuple[str, ...]
    run: Callable[[], object] = dataclasses.field(repr=False, compare=False)
    prepared: Callable[[], contextlib.AbstractContextManager[object]] = (
        dataclasses.field(default=contextlib.nullcontext, repr=False, compare=False)
    )


# Seconds of a call of each candidate, within a budget in seconds; infinite for one that
# was not measured. The first one is what the others must beat, and always measured.
Measure: TypeAlias = Callable[[Sequence[Candidate], float], Sequence[float]]


def autotune(
    *args: Any,
    platform: str | None = None,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    again: bool = False,
    measure: Measure | None = None,
    **kwargs: Any,
) -> Tuning:
    """Measures which kernels are fastest for calls like this one, and uses them.

    For the shape class of the call (dtype, head_dims, lengths and number of heads
    rounded up to powers of two, groups, which options it has) it times every row of the
    variant table that may serve the forward pass, both forms of the backward pass, and
    the reference. Calls of the class take the fastest from then on, in this process, in
    compiled programs too, and in later ones: the result is kept in the user's cache
    folder. Only that a call without `implementation` takes the reference is decided
    when it is compiled.

    Args:
      *args: As for `flash_attention`; only shapes and dtypes matter, so arrays may be
        `jax.ShapeDtypeStruct`s. It is measured on random numbers, with everything
        visible that a mask, segment ids or lengths could hide.
      platform: A JAX platform on which such calls run Metal kernels: "flash_metal", or
        "cpu" with implementation="metal". None: `jax.default_backend()`.
      budget_seconds: For all measurements; what does not fit is left out. Compiling a
        kernel may go beyond it.
      again: Measure also where a result is stored.
      measure: Times the candidates, see `Measure`: positive seconds of each. None:
        `measure_in_turn`.
      **kwargs: As for `flash_attention`.

    Returns:
      A `Tuning`; its text is a summary.

    Raises:
      ValueError, TypeError: As `flash_attention` does; `measure` gave no times.
      NotImplementedError: Such calls run no Metal kernels.
      RuntimeError: JAX_FLASH_METAL_AUTOTUNE=off forbids it, or the native library or
        its device is missing.

    Notes:
      Kernels whose results differ from those of the default by more than the proof of
      the kernels allows, or that fail that proof, are left out.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_flash_metal
      >>> x = jax.ShapeDtypeStruct((2, 37, 6, 64), jnp.float32)
      >>> result = jax_flash_metal.autotune(
      ...     x, x, x, is_causal=True, implementation="metal", platform="cpu"
      ... )
      >>> result.shape_class
      'float32 d64 v64 q64 k64 n16 g1 causal'
    """
    if not 0 < budget_seconds < math.inf:
        raise ValueError(f"budget_seconds must be positive, but got {budget_seconds}.")
    operands, config = api.prepare_abstract(*args, **kwargs)
    platform = platform or jax.default_backend()
    _demand_metal(operands, config, platform)
    if tunings.is_off():
        raise RuntimeError(f"autotune cannot measure: {tunings.OFF}")
    arrays = {n: x for n, x in operands._asdict().items() if x is not None}
    try:
        shape_class = tunings.shape_class_of(config, arrays)
        with _turns:
            known = tunings.load().get(shape_class)
            if known is not None and not again and _is_of(known, platform):
                return known
            deadline = time.monotonic() + budget_seconds
            how = measure or measure_in_turn
            tuner = _Tuner(shape_class, config, operands, platform, how, deadline)
            result = tuner.tune()
            tunings.keep(result)
            return result
    except AttentionError as error:
        raise RuntimeError(f"autotune cannot measure: {error}") from error


# Two at once would measure each other.
_turns = threading.Lock()


def _is_of(known: Tuning, platform: str) -> bool:
    return known.unfused is None or known.unfused.platform == platform


def _demand_metal(
    operands: AttentionOperands, config: AttentionConfig, platform: str
) -> None:
    reason = support.unfused_reason(operands)
    if reason is not None:
        raise support.demand_kernels(reason, "metal")
    backend = takes_kernels(config, platform)
    if backend != "metal":
        takes = "the reference" if backend is None else f"the {backend} kernels"
        raise NotImplementedError(
            "autotune measures Metal kernels, but with "
            f"implementation={config.implementation!r} on platform {platform!r} this "
            f"call takes {takes}. Use platform 'flash_metal', or "
            "implementation='metal' on platform 'cpu'."
        )


# -- What is measured ------------------------------------------------------------------


class _Tuner:
    """One class of calls: its operands, and the stages of its measurement."""

    def __init__(
        self,
        shape_class: str,
        config: AttentionConfig,
        operands: AttentionOperands,
        platform: str,
        measure: Measure,
        deadline: float,
    ) -> None:
        self._class, self._config, self._platform = shape_class, config, platform
        self._measure, self._deadline = measure, deadline
        self._library: AttentionLibrary = tunings.library()
        self._shape = CallShape.of(*operands[:3])
        self._arrays = random_operands(operands)
        names = [n for n in self._arrays if n not in FORWARD_OPERANDS]
        self._features = has_features(config, names)
        self._timings: list[Timing] = []
        self._admitted: dict[tuple[str, Choice], str | None] = {}

    def tune(self) -> Tuning:
        passes = {"forward": _Pass(self, "forward")}
        objection = self._objection(passes["forward"])
        if objection is not None:
            raise NotImplementedError(f"autotune cannot measure: {objection}.")
        passes["forward"].run_default()
        backward = _Pass(self, "backward", passes["forward"].results)
        objection = self._objection(backward)
        if objection is not None:
            nothing = Timing("backward", kernel_choices.NO_FORM, (), None, objection)
            self._timings.append(nothing)
        else:
            passes["backward"] = backward
            backward.run_default()
        # Every stage gets its share of the time that is left: the forward pass; of the
        # backward pass the two kernels of both forms, and the forms; two whole calls.
        chosen: dict[str, Chosen | None] = {"forward": None, "backward": None}
        chosen["forward"] = self._tune_forward(passes["forward"])
        if "backward" in passes:
            chosen["backward"] = self._tune_backward(passes["backward"])
        return Tuning(
            shape_class=self._class,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(
                "T", "seconds"
            ),
            device=self._library.device_facts().get("name", ""),
            **chosen,
            unfused=self._compare_unfused(chosen),
            timings=tuple(self._timings),
            origin="measured",
        )

    def _objection(self, pass_: _Pass) -> str | None:
        """Of the table's rows, whatever the class takes by an earlier measurement.

        By their plan, not by forcing them: a proof takes seconds, in which programs on
        other threads would run them.
        """
        return kernel_proof.objection(
            "metal", pass_.problem, pass_.which, self._features, pass_.plan
        )

    def _tune_forward(self, pass_: _Pass) -> Chosen | None:
        default = pass_.default
        if default is None:
            return None
        rows = self._rows(default)[0]
        others = [Choice(default.form, (row,)) for row in rows]
        return self._chosen(self._stage(pass_, [default, *others], 8))

    def _tune_backward(self, pass_: _Pass) -> Chosen | None:
        """Each form's rows, one kernel after the other; then the best of each form.

        The kernels of a pass run one after the other, so what one gains does not depend
        on the row of the other, and their product need not be measured.
        """
        default = pass_.default
        if default is None:
            return None
        forms = ["A", "B"] if default.form in ("A", "B") else [default.form]
        best: list[Choice] = []
        stages_left = 2 * len(forms) + 3
        for form in sorted(forms, key=lambda form: form != default.form):
            kernels = dict(kernel_choices.FORMS["backward"])[form]
            left_after_it = stages_left - len(kernels)
            choice = default if form == default.form else self._start(pass_, form)
            if choice is None:
                stages_left = left_after_it
                continue
            for position, rows in enumerate(self._rows(choice)):
                others = [_with_row(choice, position, row) for row in rows]
                measured = self._stage(pass_, [choice, *others], stages_left)
                stages_left -= 1
                if not measured:
                    break
                choice = _fastest(measured)[0]
            else:
                best.append(choice)
            stages_left = left_after_it
        return self._chosen(self._stage(pass_, [default, *best], stages_left))

    def _start(self, pass_: _Pass, form: str) -> Choice | None:
        """A choice of a form that is not the default's: its first rows that are right.

        None: there are none, or no time to look for them.
        """
        kernels = dict(kernel_choices.FORMS["backward"])[form]
        for rows in itertools.product(*map(self._rows_of, kernels)):
            choice = Choice(form, rows)
            if self._failure(pass_, choice) is None:
                return choice
            if self._is_late():
                break
        return None

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _rows(self, choice: Choice) -> list[list[str]]:
        """The rows that could stand in each place of the choice."""
        templates = kernel_choices.template_of()
        return [self._rows_of(templates[name]) for name in choice.kernels]

    def _rows_of(self, kernel: str) -> list[str]:
        head_dim = max(self._shape.head_dim, self._shape.value_head_dim)
        return kernel_choices.rows_of(kernel, self._shape.dtype, head_dim)

    def _stage(
        self, pass_: _Pass, choices: Sequence[Choice], stages_left: int
    ) -> list[tuple[Choice, float]]:
        """Measures the choices that are right; the first is what others must beat.

        Empty if the first one is not.
        """
        candidates = []
        for choice in dict.fromkeys(choices):
            failure = self._failure(pass_, choice)
            if failure is None:
                candidates.append(pass_.candidate(choice))
            elif choice == choices[0]:
                return []
        seconds = self._time(candidates, stages_left)
        return [
            (Choice(candidate.form, candidate.kernels), time)
            for candidate, time in zip(candidates, seconds)
        ]

    def _time(
        self, candidates: Sequence[Candidate], stages_left: int
    ) -> Sequence[float]:
        left = max(0.0, self._deadline - time.monotonic())
        given = self._measure(candidates, left / stages_left)
        seconds = _checked(candidates, given)
        for candidate, second in zip(candidates, seconds):
            is_measured = second < math.inf
            self._timings.append(
                Timing(
                    candidate.which,
                    candidate.form,
                    candidate.kernels,
                    second if is_measured else None,
                    None if is_measured else "the time was used up",
                )
            )
        return seconds

    def _failure(self, pass_: _Pass, choice: Choice) -> str | None:
        """Why a choice must not be used, as a clause; noted among the timings, once."""
        key = (pass_.which, choice)
        if key not in self._admitted:
            failure = None
            if choice != pass_.default:  # which was proven, and is the measure
                failure = self._judge(pass_, choice)
            self._admitted[key] = failure
            if failure is not None:
                self._timings.append(
                    Timing(pass_.which, choice.form, choice.kernels, None, failure)
                )
        return self._admitted[key]

    def _judge(self, pass_: _Pass, choice: Choice) -> str | None:
        known = kernel_proof.known_failure(choice, self._features)
        if known is not None:
            return known
        if self._is_late():
            return "the time was used up"
        try:
            return self._prove(pass_, choice) or pass_.compare(choice)
        except AttentionError as error:
            return str(error).rstrip(".")

    def _prove(self, pass_: _Pass, choice: Choice) -> str | None:
        return tunings.disproof(
            self._shape,
            pass_.which,
            choice,
            has_features=self._features,
            in_parts=kernel_choices.sums_in_parts(pass_.planned(choice)["kernels"]),
        )

    def _chosen(self, measured: Sequence[tuple[Choice, float]]) -> Chosen | None:
        if not measured or measured[0][1] == math.inf:
            return None
        choice, seconds = _fastest(measured)
        return Chosen(choice.form, choice.kernels, seconds, measured[0][1])

    # -- Whole calls -------------------------------------------------------------------

    def _compare_unfused(self, chosen: dict[str, Chosen | None]) -> Unfused | None:
        """Jitted calls, for JAX's own cost of a call is a part of both."""
        if chosen["forward"] is None or chosen["backward"] is None:
            return None
        if tunings.scores_bytes(self._arrays) > tunings.MAX_SCORES_BYTES:
            return None  # never chosen, and it might not even fit
        names = {"forward": chosen["forward"].kernels}
        names["forward+backward"] = names["forward"] + chosen["backward"].kernels
        seconds: dict[str, dict[str, float]] = {form: {} for form in WHOLE_CALLS}
        with contextlib.ExitStack() as stack:
            for which, own in chosen.items():
                key = (self._class, which)
                choice = None if own is None else own.choice
                stack.enter_context(kernel_choices.forced(self._library, key, choice))
            for stages_left, which in ((2, "forward"), (1, "forward+backward")):
                candidates = [
                    Candidate(which, form, kernels, self._call(which, form))
                    for form, kernels in zip(WHOLE_CALLS, (names[which], ()))
                ]
                for candidate, second in zip(
                    candidates, self._time(candidates, stages_left)
                ):
                    seconds[candidate.form][which] = second
        if any(x == math.inf for form in seconds.values() for x in form.values()):
            return None
        return Unfused(self._platform, seconds["unfused"], seconds["fused"])

    def _call(self, which: str, form: str) -> Callable[[], object]:
        """A compiled call as a program has it; compiled when it is first run."""
        forced = dataclasses.replace(self._config, implementation="metal")
        config = forced if form == "fused" else self._config
        device = jax.devices(self._platform)[0]
        put: Any = jax.device_put  # untyped in JAX
        wait: Any = jax.block_until_ready  # likewise
        arrays: dict[str, Any] = self._arrays
        on_device: list[AttentionOperands] = []

        @jax.jit
        def step(operands: AttentionOperands) -> Any:
            def attend(query: Any, key: Any, value: Any) -> Any:
                whole = operands._replace(query=query, key=key, value=value)
                # As lowering makes it of a call that takes the reference.
                return autodiff.attention(whole, config, form == "fused")[0]

            if which == "forward":
                return attend(*operands[:3])
            out, pullback = jax.vjp(attend, *operands[:3])
            return out, pullback(out)

        def run() -> None:
            if not on_device:
                on_device.append(put(AttentionOperands(**arrays), device))
            wait(step(*on_device))

        return run


class _Pass:
    """A pass over the operands, by the C ABI.

    Attributes:
      which: "forward" or "backward".
      problem: For the library.
      plan: What it launches by the table, as AttentionLibrary.outline gives it.
      default: What is chosen so; None: nothing in it can be chosen.
      results: By the default, by name; there after run_default.
    """

    def __init__(
        self, tuner: _Tuner, which: str, residuals: dict[str, Array] | None = None
    ) -> None:
        self.which = which
        self._library, self._key = tuner._library, (tuner._class, which)
        # An array of offsets takes the place of the number.
        options = kernel_choices.options_of(tuner._config) | tuner._arrays
        self._operands: dict[str, Array] = {
            name: options.pop(name) for name in FORWARD_OPERANDS
        }
        self._names: tuple[str, ...] = FORWARD_RESULTS
        if residuals is not None:
            out, logsumexp = residuals["out"], residuals["logsumexp"]
            self._operands |= residuals | {
                "dout": _normal(out.shape, out.dtype, seed=1),
                "dlogsumexp": np.zeros_like(logsumexp),
            }
            self._names = BACKWARD_RESULTS
        self._options = options  # whose memory must live as long as the problem
        self.problem = make_problem(self._operands, **options)
        self._results = attach_results(self.problem, self._operands, self._names)
        self.results: dict[str, Array] = {}
        self.plan = self.planned(None)
        self.default = kernel_choices.choice_of(self.plan, which)

    def planned(self, choice: Choice | None) -> dict[str, Any]:
        """What it launches by a choice; None: by the table."""
        with self._forced(choice):
            return self._library.outline(self.problem, self.which)

    def run_default(self) -> None:
        with self._forced(None):
            self._library.run(self.problem, self.which)
        self.results = {name: x.copy() for name, x in self._results.items()}

    def candidate(self, choice: Choice) -> Candidate:
        return Candidate(
            self.which,
            choice.form,
            choice.kernels,
            run=lambda: self._library.run(self.problem, self.which),
            prepared=lambda: self._forced(choice),
        )

    def compare(self, choice: Choice) -> str | None:
        """How the results by a choice differ too much from the default's, or None."""
        for result in self._results.values():
            result.fill(np.nan)
        with self._forced(choice):
            self._library.run(self.problem, self.which)
        dtype = self._results[self._names[0]].dtype.name
        return kernel_cases.difference(dtype, self._results, self.results)

    @contextlib.contextmanager
    def _forced(self, choice: Choice | None) -> Iterator[None]:
        with kernel_choices.forced(self._library, self._key, choice):
            yield


def _with_row(choice: Choice, position: int, row: str) -> Choice:
    kernels = (*choice.kernels[:position], row, *choice.kernels[position + 1 :])
    return Choice(choice.form, kernels)


def _checked(candidates: Sequence[Candidate], given: Sequence[Any]) -> list[float]:
    """What a measure gave, as numbers.

    Raises:
      ValueError: It is not what `Measure` says.
    """
    values = list(given)
    if len(values) != len(candidates):
        raise ValueError(
            f"measure must return the seconds of each of the {len(candidates)} "
            f"candidates, but returned {len(values)} of them."
        )
    seconds = []
    for number, (candidate, value) in enumerate(zip(candidates, values)):
        try:
            second = float(value)
        except (TypeError, ValueError, OverflowError):
            second = math.nan
        if not 0 < second <= (math.inf if number else sys.float_info.max):
            rule = "infinite: not measured" if number else "the first one finite"
            raise ValueError(
                f"measure must return positive seconds ({rule}), but returned "
                f"{value!r} for {candidate}."
            )
        seconds.append(second)
    return seconds


def _fastest(measured: Sequence[tuple[Choice, float]]) -> tuple[Choice, float]:
    """The first one, unless another is faster by LEAST_GAIN; of equals the earlier."""
    best = min(measured, key=lambda pair: pair[1])
    return best if best[1] * LEAST_GAIN < measured[0][1] else measured[0]


# -- Operands --------------------------------------------------------------------------


def random_operands(operands: AttentionOperands) -> dict[str, Array]:
    """Arrays of these shapes and dtypes, by name; everything is visible.

    Args:
      operands: Checked; anything with a shape and a dtype.
    """
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    q_len, kv_len = given["query"].shape[-3], given["key"].shape[-3]
    fixed = {
        "mask": True,
        "q_offset": max(0, kv_len - q_len),
        "query_seq_lengths": q_len,
        "key_value_seq_lengths": kv_len,
        **dict.fromkeys(("q_segment_ids", "kv_segment_ids"), 0),
        "dropout_key": 1,
    }
    arrays = {}
    for number, (name, x) in enumerate(given.items()):
        dtype = np.dtype(x.dtype)
        if name in fixed:
            arrays[name] = np.full(x.shape, fixed[name], dtype)
        elif name.endswith("_indices"):
            arrays[name] = np.arange(math.prod(x.shape), dtype=dtype).reshape(x.shape)
        else:
            arrays[name] = _normal(x.shape, dtype, seed=number + 2)
    return arrays


def _normal(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape, np.float32).astype(dtype)


# -- Time ------------------------------------------------------------------------------

_MAX_ROUNDS = 15
_MIN_SAMPLES = 3
# Of a turn of calls that are shorter: a clock and a queue have their own noise.
_TURN_SECONDS = 2e-3
# A candidate this many times as slow as the fastest one gets no more turns.
_HOPELESS = 2.0


def measure_in_turn(
    candidates: Sequence[Candidate], budget_seconds: float
) -> list[float]:
    """Median seconds of a call: all candidates in turn, again and again.

    Whatever slows the machine down, such as its heat, then slows all of them down. Each
    runs once to warm up, and for a turn to see how long it takes; hopeless ones stay at
    that.
    """
    started = time.perf_counter()
    warming_up = 0.0  # compiling, most of it: not counted

    def is_over() -> bool:
        return time.perf_counter() - started - warming_up > budget_seconds

    samples: list[list[float]] = [[] for _ in candidates]
    calls = [1] * len(candidates)
    for i, candidate in enumerate(candidates):
        if i and is_over():
            break
        warming_up += _turn(candidate, 1)
        once = _turn(candidate, 1)
        calls[i] = max(1, min(1000, math.ceil(_TURN_SECONDS / max(once, 1e-9))))
        samples[i].append(once if calls[i] == 1 else _turn(candidate, calls[i]))
    fastest = min(s[0] for s in samples if s)
    hopeful = [i for i, s in enumerate(samples) if s and s[0] <= _HOPELESS * fastest]
    if len(hopeful) > 1:
        for round_ in range(_MAX_ROUNDS):
            if is_over():
                break
            # To and fro: none is always behind the same one.
            for i in hopeful[:: 1 if round_ % 2 else -1]:
                samples[i].append(_turn(candidates[i], calls[i]))
        for i in hopeful:
            # Too few to say that it is faster than the first.
            if i and len(samples[i]) < _MIN_SAMPLES:
                samples[i] = []
    return [statistics.median(s) if s else math.inf for s in samples]


def _turn(candidate: Candidate, calls: int) -> float:
    with candidate.prepared():
        started = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            candidate.run()
        return (time.perf_counter() - started) / calls
