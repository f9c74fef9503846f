"""What `doctor` found: the checks, as JSON, as one screen, as a file for an issue.

Imports neither JAX nor the library: a report must be possible where both are broken.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
# Of the JSON. Fields may be added within a version.
SCHEMA = 1

HOW_TO_REPORT = (
    "Please attach the report to an issue of jax-flash-metal; it has what is needed to "
    "find the cause."
)


@dataclasses.dataclass
class Check:
    """One thing that was looked at.

    Attributes:
      name: Short.
      status: "warn": works, or was not tried, and the user should know.
      message: A sentence; for a warning or failure it says what to do.
      seconds: What it took.
      facts: Whatever may help to find a cause.
      rows: A table of figures; which columns depends on the check.
    """

    name: str
    status: Status
    message: str
    seconds: float = 0.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def sentence(text: str) -> str:
    """With a capital letter and a full stop, as the errors of others may not have."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


@dataclasses.dataclass
class Report:
    package_version: str
    created: str  # ISO 8601
    command: str
    checks: list[Check] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The worst of the checks."""
        found = {check.status for check in self.checks}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    def check(self, name: str) -> Check | None:
        return next((check for check in self.checks if check.name == name), None)

    def as_json(self) -> str:
        content = {
            "schema": SCHEMA,
            "status": self.status,
            **dataclasses.asdict(self),
        }
        return json.dumps(_plain(content), indent=1, allow_nan=False)

    def as_screen(self, width: int = 100) -> str:
        """One screen of text."""
        output = io.StringIO()
        try:
            _print_tables(self, output, width)
        except ImportError:  # no rich: a report all the same
            for check in self.checks:
                print(f"{check.status:5}{check.name}: {check.message}", file=output)
        return output.getvalue()

    def as_file(self) -> str:
        """The screen, then everything; the user's name is not in it."""
        text = (
            f"{self.as_screen()}\nThe same with all details, for programs:\n\n"
            f"{self.as_json()}\n"
        )
        try:
            return text.replace(str(Path.home()), "~")
        except RuntimeError:  # nobody's home
            return text


def _plain(value: Any) -> Any:
    """Without NaN and infinities, which are no JSON, and other things that are none."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, _JSON_TYPES) else str(value)


_JSON_TYPES = (bool, int, float, str)


# -- The screen ------------------------------------------------------------------------

# Of a message; the rest, a compiler's log for one, is in the report.
_MAX_MESSAGE = 320


def _print_tables(report: Report, output: io.StringIO, width: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=output, width=width, highlight=False, markup=False)

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if i == 0 else "right")
        return made

    checks = Table(
        title=f"jax-flash-metal {report.package_version} doctor",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=False,
    )
    for check in report.checks:
        checks.add_row(check.status, check.name, _shortened(check.message))
    console.print(checks)

    self_test = report.check("self-test")
    if self_test is not None and self_test.rows:
        kernels = table("Kernels", "kernel", "right", "compile ms", "error/allowed")
        for row in _by_kernel(self_test.rows):
            kernels.add_row(*row)
        console.print(kernels)

    cpu = report.check("cpu self-test")
    if cpu is not None and cpu.rows:
        on_cpu = table("CPU kernels", "instruction set", "right", "error/allowed")
        for instruction_set, right, _, error in _by_kernel(cpu.rows):
            on_cpu.add_row(instruction_set, right, error)
        console.print(on_cpu)

    timing = report.check("timing")
    timed = [row for row in timing.rows if "fused_ms" in row] if timing else []
    if timing is not None and timed:
        columns = ("shape", "forward", "unfused/fused", "gradient", "unfused/fused")
        timings = table(
            f"Milliseconds, fused / unfused, on {timing.facts['device']}", *columns
        )
        for shape, passes in _by_shape(timed).items():
            forward, gradient = passes.get("forward"), passes.get("gradient")
            timings.add_row(shape, *_figures(forward), *_figures(gradient))
        console.print(timings)


def _by_shape(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, Mapping[str, Any]]]:
    shapes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        shapes.setdefault(row["shape"], {})[row["pass"]] = row
    return shapes


def _figures(row: Mapping[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "–", "–"
    ratio, noise = row["ratio"], row["ratio"] * row["noise"]
    return (
        f"{row['fused_ms']:.2f} / {row['unfused_ms']:.2f}",
        f"{ratio:.2f} ± {noise:.2f}",
    )


def _shortened(message: str) -> str:
    if len(message) <= _MAX_MESSAGE:
        return message
    return f"{message[:_MAX_MESSAGE]} … (the report has all of it)"


def _by_kernel(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """A line per kernel of the table of variants."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["kernel"], []).append(row)
    lines = []
    for kernel, variants in groups.items():
        right = sum(row["failure"] is None for row in variants)
        times = [
            row["compile_ms"] for row in variants if row.get("compile_ms") is not None
        ]
        errors = [row["error"] for row in variants if row["error"] is not None]
        lines.append(
            (
                kernel,
                f"{right} of {len(variants)}",
                f"{min(times):.1f} … {max(times):.1f}" if times else "–",
                f"{max(errors):.2g}" if errors else "–",
            )
        )
    return lines
