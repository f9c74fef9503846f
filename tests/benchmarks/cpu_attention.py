"""What the CPU kernels must reach, measured as `bench` measures; fails if one does not.

    python -m tests.benchmarks.cpu_attention [CHECK…]

Ratios are of one run, in turn, each implementation in a process of its own
(docs/bench.md). "XLA" is jax.nn.dot_product_attention(implementation="xla"), which is
faster than this package's reference; where that is measured too, the faster of both. A
figure nearer to its limit than the noise beside it shows nothing: run it again on a
machine that does nothing else. Linux, with PyTorch, Flax and optax installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal import bench
from jax_flash_metal.bench_measure import (
    Case,
    Comparison,
    Contender,
    Series,
    Settings,
    WorkerError,
    measure,
    with_expected,
)
from jax_flash_metal.benchmark_shapes import PASSES, SHAPE_SETS, AttentionShape

# Wanted, at least; where it says so at most.
FASTER_THAN_XLA = {2048: 6.0, 4096: 8.5}
FASTER_THAN_TORCH = 1.0
SHARE_OF_LIMIT = 0.65
BFLOAT16_FASTER = 1.5
SHORT_AGAINST_XLA = 0.95
MEMORY_MB = 100.0  # at most
TWO_THREADS = 1.8
TRAINING = {"xla": 1.5, "jax.nn": 1.0}

SETTINGS = Settings(rounds=15, seconds=6.0)
LENGTHS = (1024, 2048, 4096)
HEAD_DIMS = (64, 128)


@dataclasses.dataclass
class Line:
    """A figure and what is wanted of it; None: it could not be measured."""

    what: str
    value: float | None
    wanted: float
    noise: float | None = None
    is_upper_limit: bool = False
    unit: str = ""
    failure: str = ""

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        if self.is_upper_limit:
            return self.value <= self.wanted
        return self.value >= self.wanted

    def __str__(self) -> str:
        sign = "≤" if self.is_upper_limit else "≥"
        value = "–" if self.value is None else f"{self.value:.2f}{self.unit}"
        noise = "" if self.noise is None else f"± {self.noise:.2f}"
        verdict = "pass" if self.holds else "FAIL"
        doubt = ""
        if self.noise is not None and self.value is not None:
            near = abs(self.value - self.wanted) < self.noise * self.value
            doubt = "(within the noise)" if near else ""
        return (
            f"{verdict}  {self.what:72} {value:>9} {noise:>7}  {sign} "
            f"{self.wanted:g}{self.unit} {doubt}{self.failure}"
        )


def self_attention(
    length: int, head_dim: int, dtype: str, is_causal: bool, pass_: str
) -> Case:
    shape = AttentionShape(1, 8, 8, length, head_dim)
    return Case(shape, dtype, is_causal, pass_)


def long_cases(dtype: str, passes: Sequence[str]) -> Iterator[Case]:
    for head_dim in HEAD_DIMS:
        for is_causal in (True, False):
            for length in LENGTHS:
                for pass_ in passes:
                    yield self_attention(length, head_dim, dtype, is_causal, pass_)


class Bench:
    """Measures; a case is measured once for all checks that ask for the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._comparisons: dict[tuple[Case, tuple[str, ...]], Comparison] = {}
        self._machine: dict[str, Any] = {}

    def compare(self, case: Case, *names: str, settings: Settings = SETTINGS) -> Any:
        if (case, names) not in self._comparisons:
            expected = self._folder / "expected.npz"
            self._comparisons[case, names] = bench.measure_case(
                case, names, None, settings, expected, nothing
            )
        return self._comparisons[case, names]

    def request(self, case: Case) -> dict[str, Any]:
        return with_expected(case, self._folder / f"{case.dtype}.npz", SETTINGS)

    @property
    def machine(self) -> dict[str, Any]:
        if not self._machine:
            self._machine = bench.machine_facts(None, "cpu")
        return self._machine

    def limit(self) -> float | None:
        """Of float32 with all threads, operations a second."""
        of_one = self.machine.get("peak", {}).get("float32")
        return of_one * self.machine["threads"] if of_one else None


def nothing(doing: str) -> None:
    """Shows no progress: a line is printed for each figure."""


def ratio_line(
    what: str,
    comparison: Comparison,
    others: Sequence[Series],
    wanted: float,
) -> Line:
    """How many times faster than the fastest of the others ours is.

    Not known if one of them failed: it may be the fastest.
    """
    ours = comparison.series[0]
    ratios = [comparison.ratio(series) for series in others]
    known = [ratio for ratio in ratios if ratio is not None]
    reasons = (s.failure for s in (ours, *others) if s.failure)
    value = min(known) if len(known) == len(ratios) else None
    failure = "" if value is not None else next(reasons, "")
    return Line(what, value, wanted, comparison.noise, failure=failure)


# -- The checks ------------------------------------------------------------------------


def xla(bench_: Bench) -> Iterator[Line]:
    for length, wanted in FASTER_THAN_XLA.items():
        case = self_attention(length, 64, "float32", True, "forward+backward")
        found = bench_.compare(case, "cpu", "jax.nn")
        yield ratio_line(f"XLA / ours, {case}", found, found.series[1:], wanted)


def torch(bench_: Bench) -> Iterator[Line]:
    for dtype in ("float32", "bfloat16"):
        for case in long_cases(dtype, PASSES):
            found = bench_.compare(case, "cpu", "torch")
            what = f"PyTorch / ours, {case}"
            yield ratio_line(what, found, found.series[1:], FASTER_THAN_TORCH)


def limit(bench_: Bench) -> Iterator[Line]:
    for case in long_cases("float32", ("forward",)):
        ours = bench_.compare(case, "cpu", "torch").series[0]
        peak, what = bench_.limit(), f"share of the FMA limit, {case}"
        share = None
        if peak and ours.samples:
            share = case.operations / ours.seconds / peak
        failure = ours.failure or ("" if peak else "the limit is not known")
        yield Line(what, share, SHARE_OF_LIMIT, failure=failure)


def bfloat16(bench_: Bench) -> Iterator[Line]:
    if "avx512_bf16" not in bench_.machine.get("isas", []):
        print("bfloat16: not applicable, this CPU has no products of bfloat16")
        return
    for half in long_cases("bfloat16", PASSES):
        single = dataclasses.replace(half, dtype="float32")
        contenders = [
            Contender(case.dtype, "cpu", bench_.request(case))
            for case in (half, single)
        ]
        found = measure(contenders, SETTINGS, nothing)
        what = f"float32 / bfloat16, {half}"
        yield ratio_line(what, found, found.series[1:], BFLOAT16_FASTER)


def short(bench_: Bench) -> Iterator[Line]:
    for shape in SHAPE_SETS["short"]:
        for is_causal in (True, False):
            for pass_ in PASSES:
                case = Case(shape, "float32", is_causal, pass_)
                found = bench_.compare(case, "cpu", "jax.nn", "xla")
                what = f"XLA / ours, {case}"
                yield ratio_line(what, found, found.series[1:], SHORT_AGAINST_XLA)


def memory(bench_: Bench) -> Iterator[Line]:
    case = self_attention(16384, 64, "float32", True, "forward+backward")
    once = Settings(rounds=1)
    ours = bench_.compare(case, "cpu", settings=once).series[0]
    used = None if ours.memory_bytes is None else ours.memory_bytes / 1e6
    what = f"memory, {case}"
    yield Line(
        what,
        used,
        MEMORY_MB,
        is_upper_limit=True,
        unit=" MB",
        failure=ours.failure or "",
    )


def threads(bench_: Bench) -> Iterator[Line]:
    cpus = sorted(os.sched_getaffinity(0))
    for pass_ in PASSES:
        case = self_attention(2048, 64, "float32", True, pass_)
        what = f"1 thread / 2 threads, {case}"
        if len(cpus) < 2:
            yield Line(what, None, TWO_THREADS, failure="there is only one CPU")
            continue
        request = bench_.request(case)
        contenders = [
            Contender(f"{n} threads", "cpu", request, tuple(cpus[:n])) for n in (2, 1)
        ]
        found = measure(contenders, SETTINGS, nothing)
        yield ratio_line(what, found, found.series[1:], TWO_THREADS)


def training(bench_: Bench) -> Iterator[Line]:
    contenders = [Contender(name, name, {}) for name in ("cpu", *TRAINING)]
    found = measure(contenders, SETTINGS, nothing, "tests.benchmarks.training_step")
    for series in found.series[1:]:
        what = f"{series.name} / ours, a step of the demo's model at length 1024"
        yield ratio_line(what, found, [series], TRAINING[series.name])


CHECKS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "xla": xla,
    "torch": torch,
    "limit": limit,
    "bfloat16": bfloat16,
    "short": short,
    "memory": memory,
    "threads": threads,
    "training": training,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help="of: " + ", ".join(CHECKS)
    )
    arguments = parser.parse_args()
    unknown = set(arguments.checks) - set(CHECKS)
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}")
    lines: list[Line] = []
    load = bench.Load()
    with tempfile.TemporaryDirectory() as folder:
        bench_ = Bench(Path(folder))
        for name in arguments.checks or CHECKS:
            try:
                for line in CHECKS[name](bench_):
                    lines.append(line)
                    print(line, flush=True)
            except WorkerError as error:
                lines.append(Line(name, None, 0, failure=str(error)))
                print(lines[-1], flush=True)
    others = load.of_others()
    if others is not None:
        print(f"other programs used {others:.2f} CPUs meanwhile")
    failed = sum(not line.holds for line in lines)
    print(f"{len(lines) - failed} of {len(lines)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
