"""What `bench` measured: as tables, as JSON, as plots.

Imports neither JAX nor NumPy; rich and matplotlib only where they are used.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal.bench_measure import Case, Comparison, Series, case_from_json

# Of the JSON. Fields may be added within a version.
SCHEMA = 1


@dataclasses.dataclass
class Report:
    """One run.

    Attributes:
      machine: Facts about it; `peak` is the measured FMA limit of one thread by dtype,
        in operations a second, and `threads` how many every process could use.
      results: By case, in the order in which they were measured.
      warnings: Sentences.
      baseline: An earlier run to compare with, if any.
    """

    package_version: str
    created: str  # ISO 8601
    command: str
    machine: dict[str, Any]
    results: list[tuple[Case, Comparison]] = dataclasses.field(default_factory=list)
    not_timed: list[Case] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    baseline: Baseline | None = None

    def limit(self, case: Case, name: str) -> float | None:
        """The CPU's FMA limit for the dtype with all threads, operations a second.

        None: it is not known, or the implementation does not run on the CPU.
        """
        in_jax = name in ("jax.nn", "xla")
        if name in ("metal", "mlx") or (
            in_jax and self.machine.get("platform", "cpu") != "cpu"
        ):
            return None
        peak = self.machine.get("peak", {})
        # Where a dtype has no products of its own they are those of float32.
        of_one = peak.get(case.dtype, peak.get("float32"))
        return float(of_one * self.machine["threads"]) if of_one else None

    def as_json(self) -> str:
        content = {
            "schema": SCHEMA,
            "package_version": self.package_version,
            "created": self.created,
            "command": self.command,
            "machine": self.machine,
            "warnings": self.warnings,
            "not_timed": [case.as_json() for case in self.not_timed],
            "rows": [
                self._row(case, comparison, series)
                for case, comparison in self.results
                for series in (*comparison.series, comparison.again)
            ],
        }
        return json.dumps(_plain(content), indent=1, allow_nan=False)

    def _row(
        self, case: Case, comparison: Comparison, series: Series
    ) -> dict[str, Any]:
        row: dict[str, Any] = {
            "case": case.as_json(),
            **dataclasses.asdict(series),
            "is_again": series is comparison.again,
            "operations": case.operations,
            "noise": comparison.noise,
            "ratio": comparison.ratio(series),
            "seconds": None,
        }
        if series.samples:
            limit = self.limit(case, series.name)
            speed = case.operations / series.seconds
            row |= {
                "seconds": series.seconds,
                "spread": series.spread,
                "operations_per_second": speed,
                "share_of_limit": limit and speed / limit,
            }
        return row


def key(case: Case, name: str) -> str:
    """What a figure is of, the same in every run."""
    return f"{case} {name}"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Seconds of an earlier run by `key`, and its machine."""

    seconds: Mapping[str, float]
    machine: Mapping[str, Any]

    def differences(self, machine: Mapping[str, Any]) -> list[str]:
        """A warning if it is of another machine, number of threads or platform."""
        changed = ", ".join(
            f"{name} {self.machine.get(name)} (now {machine.get(name)})"
            for name in ("cpu", "threads", "platform")
            if self.machine.get(name) != machine.get(name)
        )
        return [f"The baseline was measured with {changed}."] if changed else []


def read_baseline(path: Path) -> Baseline:
    """Reads a file that `--json` wrote.

    Raises:
      ValueError: It is none.
      OSError: It cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] == SCHEMA:
            seconds = {
                key(case_from_json(row["case"]), row["name"]): row["seconds"]
                for row in content["rows"]
                if row["seconds"] is not None and not row["is_again"]
            }
            return Baseline(seconds, dict(content["machine"]))
    except (ValueError, LookupError, TypeError):
        pass  # such as the JSON of doctor
    raise ValueError(f"{path} is not a file of bench --json with schema {SCHEMA}")


def _plain(value: Any) -> Any:
    """Without NaN and infinities, which are no JSON."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- The screen ------------------------------------------------------------------------


def as_screen(report: Report, width: int) -> str:
    """Tables, one for each dtype, mask and pass."""
    from rich.console import Console

    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False, markup=False)
    for warning in report.warnings:
        console.print(f"NOTE: {warning}")
    console.print(machine_in_words(report.machine))
    for title, results in _by_kind(report.results).items():
        console.print(_table(report, title, results))
    failures: dict[tuple[str, str], list[Case]] = {}
    for case, comparison in report.results:
        for series in comparison.series:
            if series.failure is not None:
                why = series.failure.rstrip(".")
                failures.setdefault((series.name, why), []).append(case)
    for (name, why), cases in failures.items():
        console.print(f"{name}, {_first_of(cases)}: {why}.")
    if report.not_timed:
        first = _first_of(report.not_timed)
        console.print(f"Not timed within the time budget: {first}.")
    return output.getvalue()


def _first_of(cases: Sequence[Case]) -> str:
    return f"{cases[0]} and {len(cases) - 1} more" if cases[1:] else str(cases[0])


def machine_in_words(machine: Mapping[str, Any]) -> str:
    isas, peak = machine.get("isas", []), machine.get("peak", {})
    words = [str(machine.get("cpu", "")), f"{machine['threads']} thread(s)"]
    words += isas[-1:]
    words += [
        f"{dtype} limit {flops / 1e9:.0f} GFLOP/s a thread"
        for dtype, flops in peak.items()
    ]
    words += [f"{n} {version}" for n, version in machine.get("versions", {}).items()]
    return ", ".join(filter(None, words))


def _by_kind(
    results: Sequence[tuple[Case, Comparison]],
) -> dict[str, list[tuple[Case, Comparison]]]:
    kinds: dict[str, list[tuple[Case, Comparison]]] = {}
    for case, comparison in results:
        mask = "causal" if case.is_causal else "full"
        title = f"{case.dtype}, {mask}, {case.pass_}"
        kinds.setdefault(title, []).append((case, comparison))
    return kinds


def _table(
    report: Report, title: str, results: Sequence[tuple[Case, Comparison]]
) -> Any:
    from rich import box
    from rich.table import Table

    ours = results[0][1].series[0].name
    columns = ["shape", "implementation", "time", "spread", f"× {ours}", "noise"]
    columns += ["GFLOP/s", "of limit", "memory MB"]
    if report.baseline:
        columns.append("× before")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=i < 2)
    for case, comparison in results:
        for i, series in enumerate(comparison.series):
            shape = str(case.shape) if i == 0 else ""
            last = i == len(comparison.series) - 1
            cells = _cells(report, case, comparison, series)
            table.add_row(shape, series.name, *cells, end_section=last)
    return table


_NONE = "–"


def _cells(
    report: Report, case: Case, comparison: Comparison, series: Series
) -> list[str]:
    """Those of a row behind the names."""
    memory = _NONE
    if series.memory_bytes is not None:
        memory = f"{series.memory_bytes / 1e6:.1f}"
    before = None
    if report.baseline is not None:
        before = report.baseline.seconds.get(key(case, series.name))
    if not series.samples:
        cells = ["failed", *[_NONE] * 5, memory]
        return [*cells, _NONE] if report.baseline else cells
    speed = case.operations / series.seconds
    limit, ratio = report.limit(case, series.name), comparison.ratio(series)
    is_ours = series is comparison.series[0]
    noise = comparison.noise if is_ours else None
    cells = [
        duration(series.seconds),
        f"± {series.spread:.0%}",
        _NONE if ratio is None else f"{ratio:.2f}",
        _NONE if noise is None else f"± {noise:.2f}",
        f"{speed / 1e9:.3g}",
        _NONE if limit is None else f"{speed / limit:.0%}",
        memory,
    ]
    if report.baseline:
        cells.append(_NONE if before is None else f"{series.seconds / before:.2f}")
    return cells


def duration(seconds: float) -> str:
    """With three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return (
                f"{seconds / size:.3g} {unit}" if seconds < 100 else f"{seconds:.0f} s"
            )
    return f"{seconds * 1e6:.3g} µs"


# -- Plots -----------------------------------------------------------------------------


def save_plot(report: Report, path: Path) -> None:
    """Time and memory against the length, a line for each implementation.

    A column for each kind of problem: the dtype, the mask, the pass, and the shape but
    for its length.

    Raises:
      ImportError: matplotlib is missing.
    """
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure

    columns = _lines(report)
    figure = Figure(figsize=(4.5 * max(1, len(columns)), 7), layout="constrained")
    axes = figure.subplots(2, max(1, len(columns)), squeeze=False)
    quantities = (("seconds", "seconds"), ("memory", "MB above inputs and results"))
    for column, (title, lines) in enumerate(columns.items()):
        for row, (quantity, label) in enumerate(quantities):
            axis = axes[row][column]
            axis.set(xscale="log", yscale="log", xlabel="length", ylabel=label)
            lengths = sorted(
                {x for points in lines[quantity].values() for x, _ in points}
            )
            axis.set_xticks(lengths, [str(length) for length in lengths])
            axis.set_xticks([], minor=True)
            axis.grid(visible=True, which="both", alpha=0.3)
            for name, points in lines[quantity].items():
                axis.plot(*zip(*sorted(points)), marker="o", label=name)
        axes[0][column].set_title(title, fontsize="small")
        axes[0][column].legend()
    figure.suptitle(machine_in_words(report.machine), fontsize="x-small")
    figure.savefig(path, dpi=120)


def _lines(
    report: Report,
) -> dict[str, dict[str, dict[str, list[tuple[int, float]]]]]:
    """Points (length, value) by column, quantity and implementation."""
    columns: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {}
    for title, results in _by_kind(report.results).items():
        for case, comparison in results:
            shape = str(case.shape).replace(f" L{case.shape.length} ", " ")
            lines = columns.setdefault(
                f"{shape}\n{title}", {"seconds": {}, "memory": {}}
            )
            for series in comparison.series:
                if series.samples:
                    point = (case.shape.length, series.seconds)
                    lines["seconds"].setdefault(series.name, []).append(point)
                if series.memory_bytes:
                    point = (case.shape.length, series.memory_bytes / 1e6)
                    lines["memory"].setdefault(series.name, []).append(point)
    return columns
