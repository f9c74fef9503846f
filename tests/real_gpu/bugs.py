"""Bugs planted in copies of the kernels, and the tool that must find each on the GPU.

Every barrier of the kernels deleted, by search; the others by their text, which must be
in the kernels as often as told: whoever changes the kernel changes the table.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from plugin import build, kernel_sources
from plugin.kernel_sources import KERNEL_DIR, Variant

# What finds it: a tool of compute-sanitizer, the comparison with float64, or the clock.
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck", "numbers", "hang")
_BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\s*\([^;]*\)\s*;")
_COMMON = "attention_common.h"
# The kernels that a bug in a file is built into: those that have it soonest.
_KERNELS = {
    _COMMON: ("attention_forward", "attention_backward_dkv"),
    "attention_backward_dkv.metal": ("attention_backward_dkv",),
    "attention_forward.metal": ("attention_forward",),
    "attention_delta.metal": ("attention_delta",),
    "attention_bias_gradient.metal": ("attention_bias_gradient",),
    "attention_sinks_gradient.metal": ("attention_sinks_gradient",),
}
# Of dkv.metal's own barriers: between the simdgroups of a pair.
_PAIRED = ("attention_backward_dkv.metal",)


class AnchorMissing(Exception):
    """The text that a bug replaces is not in the kernels (or not as often as told)."""


@dataclasses.dataclass(frozen=True)
class Bug:
    """One wrong edit: of the `occurrences` of `old`, the `index`-th is replaced."""

    id: str
    tool: str
    file: str
    old: str
    new: str
    occurrences: int = 1
    index: int = 0

    def copy_of_kernels(self, folder: Path) -> Path:
        """A copy of the kernels with the bug."""
        copy = folder / KERNEL_DIR.name
        shutil.copytree(KERNEL_DIR, copy)
        path = copy / self.file
        text = path.read_text()
        places = [m.start() for m in re.finditer(re.escape(self.old), text)]
        if len(places) != self.occurrences:
            raise AnchorMissing(
                f"{self.id}: expected {self.occurrences} x {self.old!r} in {self.file}"
                f", found {len(places)}: adapt the bug to the kernel as it is now."
            )
        at = places[self.index]
        path.write_text(text[:at] + self.new + text[at + len(self.old) :])
        return copy

    def rows(self) -> list[str]:
        """Host names of the rows to build it into: float32, the smallest head_dim."""
        kernels = _KERNELS.get(self.file)
        if kernels is None:
            raise AnchorMissing(f"{self.id}: say in _KERNELS what has {self.file}.")
        return [_smallest(kernel, self.file in _PAIRED).host_name for kernel in kernels]


def _smallest(kernel: str, prefers_paired: bool) -> Variant:
    rows = [
        row
        for row in kernel_sources.load_variants()
        if row.kernel == kernel
        and row.dtype == "float32"
        and row.loads == "threadgroup"
    ]
    if not rows:
        raise AnchorMissing(f"no row of {kernel} for float32 with shared tiles")
    roles = max(row.roles for row in rows) if prefers_paired else 1
    return min(rows, key=lambda row: (row.roles != roles, row.head_dim))


def bugs() -> list[Bug]:
    """All of them."""
    return [*_deleted_barriers(), *_OTHERS]


def _deleted_barriers() -> Iterator[Bug]:
    for path in sorted(KERNEL_DIR.glob("*")):
        if path.suffix not in (".metal", ".h"):
            continue
        text = path.read_text()
        code = re.sub(r"//[^\n]*", lambda match: " " * len(match[0]), text)
        for number, match in enumerate(_BARRIER.finditer(code)):
            same = [m.start() for m in re.finditer(re.escape(match[0]), text)]
            yield Bug(
                f"{path.stem}-barrier-{number}-deleted",
                "racecheck",
                path.name,
                match[0],
                "",
                len(same),
                same.index(match.start()),
            )


_OTHERS = [
    Bug(
        "row-past-the-end-read", "memcheck", _COMMON,
        "min(row, matrix.num_rows - 1)", "row",
    ),
    Bug(
        "row-past-the-end-written", "memcheck", _COMMON,
        "if (row < num_rows) {", "{",
    ),
    Bug(
        "tile-rows-not-written", "initcheck", _COMMON,
        "for (int row = int(thread_index) / kThreadsPerRow;",
        "for (int row = int(thread_index) / kThreadsPerRow + kRowsAtOnce;",
    ),
    Bug(
        "delta-of-last-row-not-written", "initcheck", "attention_delta.metal",
        "if (row >= params.q_len) return;", "if (row + 1 >= params.q_len) return;",
    ),
    Bug(
        "result-of-last-row-not-written", "initcheck", _COMMON,
        "if (row < num_rows) {", "if (row + 1 < num_rows) {",
    ),
    Bug(
        "barrier-in-two-places", "synccheck", _COMMON,
        "return false;\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
        # Of different instructions, whole simdgroups wait for one another all the same.
        "return false;\n"
        "  if (thread_index % 64 < 32) {\n"
        "    simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "  } else {\n"
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "  }",
    ),
    Bug(  # on an H200
        "barrier-skipped-by-one-lane", "hang", _COMMON,
        "return false;\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
        "return false;\n"
        "  if (thread_index != 37) threadgroup_barrier(mem_flags::mem_threadgroup);",
    ),
    Bug(
        "shuffle-of-a-wrong-lane", "numbers", _COMMON,
        "return max(x, simd_shuffle_xor(x, ushort(8)));",
        "return max(x, simd_shuffle_xor(x, ushort(4)));",
    ),
]  # fmt: skip


def included_files(kernel: str) -> set[str]:
    """The source of a kernel and what it includes."""
    source = next(
        row.source for row in kernel_sources.load_variants() if row.kernel == kernel
    )
    path = KERNEL_DIR / f"{source}.metal"
    return {file.name for file in build.included_files(path, [KERNEL_DIR])}
