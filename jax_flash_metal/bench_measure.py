"""Measures implementations side by side: one process for each, turn by turn.

For `bench` and for benchmarks of the tests. Starts the processes (bench_worker.py),
asks and waits; it imports neither JAX nor NumPy, so that it takes no time of theirs.
docs/bench.md says what the figures mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jax_flash_metal import crashes, hosts
from jax_flash_metal.benchmark_shapes import AttentionShape


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem to be timed. A causal mask lets the last query see the last key."""

    shape: AttentionShape
    dtype: str  # of DTYPES
    is_causal: bool
    pass_: str  # of PASSES

    @property
    def operations(self) -> float:
        return self.shape.count_operations(self.pass_, is_causal=self.is_causal)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"{self.shape} {self.dtype} {mask} {self.pass_}"


def case_from_json(values: Mapping[str, Any]) -> Case:
    """The inverse of Case.as_json; other keys are left alone."""
    fields = {field.name: values[field.name] for field in dataclasses.fields(Case)}
    return Case(**fields | {"shape": AttentionShape(**values["shape"])})


# -- Results ---------------------------------------------------------------------------


@dataclasses.dataclass
class Series:
    """What was measured of one implementation.

    Attributes:
      samples: Seconds of a call, one for each round.
      calls: In a turn, whose mean a sample is.
      memory_bytes: Peak of a call above inputs and results, if it can be measured.
      error: The largest error of a row of the results, see bench_worker.row_error.
      failure: Why there are no samples.
      runs: What it ran, in its own words.
    """

    name: str
    samples: list[float] = dataclasses.field(default_factory=list)
    calls: int = 0
    memory_bytes: int | None = None
    error: float | None = None
    failure: str | None = None
    runs: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, as a part of the median."""
        low, high = quartiles(self.samples)
        return (high - low) / 2 / self.seconds


@dataclasses.dataclass
class Comparison:
    """The series of a case: the first is ours, `again` ours in a second process."""

    series: list[Series]
    again: Series

    def ratio(self, series: Series) -> float | None:
        """Time as a multiple of ours: the median of the rounds' ratios.

        Of rounds, because what slows the machine down for a while slows down all.
        """
        ours = self.series[0]
        if not ours.samples or not series.samples:
            return None
        return statistics.median(ratios(series.samples, ours.samples))

    @property
    def noise(self) -> float | None:
        """Ratios that are nearer to 1 than this say nothing."""
        if not self.series[0].samples or not self.again.samples:
            return None
        return noise_floor(ratios(self.again.samples, self.series[0].samples))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [n / d for n, d in zip(numerators, denominators)]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


# Half of the 95 % interval of a median in interquartile ranges, but for 1/√n: the notch
# of McGill, Tukey and Larsen, Variations of box plots, 1978.
_NOTCH = 1.57


def noise_floor(of_itself: Sequence[float]) -> float:
    """How far from 1 the median of these ratios of A to A may be, by chance alone."""
    low, high = quartiles(of_itself)
    notch = _NOTCH * (high - low) / math.sqrt(len(of_itself))
    return abs(statistics.median(of_itself) - 1) + notch


# -- Processes -------------------------------------------------------------------------


class WorkerError(Exception):
    """A worker could not do what it was asked; the message says why, as a clause."""


# Of what a process printed: the end, where the reason is.
_MAX_OUTPUT = 300


class Worker:
    """A process that measures one thing; see bench_worker.serve."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        # What it prints goes to a file, since nobody reads a pipe in time.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env={**os.environ, **(environment or {})},
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._begun = b""  # of an answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, do: str, limit: float, **what: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
          WorkerError: It failed, crashed, or took more than `limit` seconds.
        """
        self.tell(do, **what)
        return self.answer(limit)

    def tell(self, do: str, **what: Any) -> None:
        """Sends a request; `answer` must follow."""
        assert self._process.stdin is not None
        request = json.dumps({"do": do, **what}).encode() + b"\n"
        with contextlib.suppress(OSError):  # it has ended; `answer` says how
            self._process.stdin.write(request)

    def answer(self, limit: float) -> dict[str, Any]:
        """The answer to the last request; raises as `ask` does."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._begun:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.close()
                raise WorkerError(f"did not answer within {limit:.0f} s")
            assert self._process.stdout is not None
            received = self._process.stdout.read(1 << 16)
            if not received:
                raise WorkerError(self._ending())
            self._begun += received
        line, self._begun = self._begun.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise WorkerError(answer["failure"])
        return answer

    def _ending(self) -> str:
        code = self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace").strip()
        last = output.rsplit("\n", 1)[-1][-_MAX_OUTPUT:]
        return crashes.ending(code) + (f": {last}" if last else "")

    def close(self) -> None:
        """Ends the process, whatever it does. Twice is once."""
        self._selector.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            if pipe is not None:
                pipe.close()


# -- Measuring -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: At most.
      seconds: For the rounds of a case: there are fewer, if they are long, down to
        MIN_ROUNDS.
      platform: The JAX platform of the implementations in JAX.
      limit: Seconds that a process may take for one answer.
    """

    rounds: int = 21
    seconds: float = 10.0
    platform: str = "cpu"
    limit: float = 600.0


MIN_ROUNDS = 5
# Shorter turns would be mostly waking up.
_TURN_SECONDS = 0.02
_MAX_CALLS = 1000
_WARM_UP_BELOW = 0.1

# Of the memory that is free: an implementation that wants more cannot run here.
_MEMORY_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Contender:
    """What takes part in a comparison.

    Attributes:
      name: For the reader.
      subject: Of the worker's module.
      request: What the subject is asked to prepare.
      cpus: That it may use; None: all.
    """

    name: str
    subject: str
    request: Mapping[str, Any]
    cpus: tuple[int, ...] | None = None


_WORKER = "jax_flash_metal.bench_worker"


def start_worker(
    subject: str,
    cpus: tuple[int, ...] | None = None,
    platform: str = "cpu",
    module: str = _WORKER,
) -> Worker:
    """A process for a subject of the module, whose main calls bench_worker.serve."""
    memory_bytes = _free_memory_share()
    options = {"subject": subject, "cpus": cpus, "memory_bytes": memory_bytes}
    return Worker(
        [sys.executable, "-m", module, json.dumps(options)],
        {"JAX_PLATFORMS": hosts.JAX_PLATFORMS[platform]},
    )


def _free_memory_share() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    sizes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(_MEMORY_SHARE * 1024 * int(kib)) for kib in sizes), None)


def with_expected(case: Case, path: Path, settings: Settings) -> dict[str, Any]:
    """The request for a case: has the reference write the right results to `path`.

    On platform cpu and all CPUs, whatever the contenders run on. Raises WorkerError.
    """
    request = {**case.as_json(), "expected": str(path)}
    with start_worker("expected") as worker:
        worker.ask("load", settings.limit)
        worker.ask("prepare", settings.limit, case=request)
    return request


def measure(
    contenders: Sequence[Contender],
    settings: Settings,
    progress: Callable[[str], None],
    module: str = _WORKER,
) -> Comparison:
    """Measures the contenders in turn; the first one is ours.

    Ours is measured by two processes, for the noise floor: two processes of one program
    differ by where their memory lies, and so do those of two implementations.
    """
    comparison = Comparison(
        [Series(contender.name) for contender in contenders], Series(contenders[0].name)
    )
    entries = [*zip(comparison.series, contenders), (comparison.again, contenders[0])]
    workers = {
        i: start_worker(contender.subject, contender.cpus, settings.platform, module)
        for i, (_, contender) in enumerate(entries)
    }
    try:
        progress("starting processes")
        for worker in workers.values():  # importing, all at once
            worker.tell("load")
        pace: dict[int, float] = {}
        for i, (series, contender) in enumerate(entries):
            try:
                series.versions = workers[i].answer(settings.limit)["versions"]
                # Preparing, one after the other: it needs time and memory.
                progress(f"preparing {series.name}")
                facts = workers[i].ask(
                    "prepare", settings.limit, case=contender.request
                )
                _take_facts(series, facts)
                pace[i] = _pace(workers[i], settings.limit)
            except WorkerError as error:
                series.failure = str(error)
                workers.pop(i).close()
        all_series = [series for series, _ in entries]
        _take_turns(all_series, workers, pace, settings, progress)
    finally:
        for worker in workers.values():
            worker.close()
    return comparison


def _take_facts(series: Series, facts: Mapping[str, Any]) -> None:
    series.memory_bytes = facts.get("memory_bytes")
    series.runs = facts.get("runs", "")
    series.error = facts.get("error")
    if series.error is not None and not series.error <= facts["tolerance"]:
        raise WorkerError(
            f"its results are wrong: the error is {series.error:.1e}, allowed is "
            f"{facts['tolerance']:.0e}"
        )


_PACE_CALLS = 5


def _pace(worker: Worker, limit: float) -> float:
    """Seconds of a call, the fastest of some if it is short: the first are slower."""
    fastest = math.inf
    for _ in range(_PACE_CALLS):
        fastest = min(fastest, worker.ask("turn", limit, calls=1)["seconds"])
        if fastest > _WARM_UP_BELOW:
            break
    return fastest


def _take_turns(
    all_series: Sequence[Series],
    workers: dict[int, Worker],
    pace: Mapping[int, float],
    settings: Settings,
    progress: Callable[[str], None],
) -> None:
    """Rounds in which every worker has a turn, each time in another order."""
    order = list(workers)
    for i in order:
        calls = math.ceil(_TURN_SECONDS / max(pace[i], 1e-9))
        all_series[i].calls = min(_MAX_CALLS, calls)
    deadline = time.monotonic() + settings.seconds
    for number in range(settings.rounds):
        if number >= MIN_ROUNDS and time.monotonic() > deadline:
            break
        progress(f"round {number + 1} of {settings.rounds}")
        start = number % max(1, len(order))
        for i in order[start:] + order[:start]:
            series = all_series[i]
            if i not in workers:
                continue
            try:
                answer = workers[i].ask(
                    "turn",
                    settings.limit,
                    calls=series.calls,
                    warm_up=pace[i] < _WARM_UP_BELOW,
                )
                series.samples.append(answer["seconds"])
            except WorkerError as error:
                # Its samples so far are of a process that was about to fail.
                series.samples, series.failure = [], str(error)
                workers.pop(i).close()
