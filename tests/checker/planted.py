"""Bugs to plant in copies of our kernels: barriers by search, guards by their text.

A bug whose text is no longer in the kernels is an error, not a pass: whoever changes
the kernel changes the table.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plugin import build

_BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\s*\([^;]*\)\s*;")
_COMMENT = re.compile(r"//[^\n]*")
_FUNCTION = re.compile(r"\bMETAL_FUNC\b[^;{]*?\b(\w+)\(")


class Part(NamedTuple):
    """Kernels that work together in a pass: what a bug needs to be built and run.

    Attributes:
      kernels: Names. A row takes seconds to compile, so that a bug in what all share is
        planted in one part of them.
      family: The GPU family whose rows they are.
      form: Of the backward pass.
    """

    kernels: tuple[str, ...]
    family: int = 0
    form: str = "A"


_MASK = ("attention_mask_blocks",)
_DKV = (
    *(*_MASK, "attention_delta"),
    *("attention_backward_dkv", "attention_backward_dkv_combine"),
)
_SHORT = "attention_short_"
PARTS: dict[str, Part] = {
    "forward": Part((*_MASK, "attention_forward")),
    "backward": Part((*_DKV, "attention_backward_dq")),
    "short forward": Part((*_MASK, f"{_SHORT}forward", f"{_SHORT}forward_combine")),
    "short backward": Part((*_DKV, f"{_SHORT}dq", f"{_SHORT}dq_combine")),
    "gradient": Part(
        (
            *(*_MASK, "attention_delta", "attention_sinks_gradient"),
            *("attention_bias_gradient", "attention_bias_gradient_combine"),
        )
    ),
    # Without tiles in threadgroup memory, and with dS in scratch.
    "device forward": Part((*_MASK, "attention_forward"), family=9),
    "device backward": Part(
        (*_DKV, "attention_backward_dq_product"), family=9, form="B"
    ),
}


class AnchorMissing(Exception):
    """The text that a bug replaces is not in the kernels (or not as often as told)."""


@dataclasses.dataclass(frozen=True)
class Bug:
    """One wrong edit: of the `occurrences` of `old`, the `index`-th is replaced."""

    id: str
    file: str
    old: str
    new: str
    occurrences: int = 1
    index: int = 0
    part: str = ""  # a name in PARTS; "": the first that has the file
    is_slow: bool = False  # for `make test-all` only: another bug is much like it

    def plant(self, kernel_dir: Path) -> None:
        """Edits the file in a copy of the kernels."""
        path = kernel_dir / self.file
        text = path.read_text()
        places = [match.start() for match in re.finditer(re.escape(self.old), text)]
        if len(places) != self.occurrences:
            raise AnchorMissing(
                f"{self.id}: expected {self.occurrences} x {self.old!r} in {self.file}"
                f", found {len(places)}: adapt the bug to the kernel as it is now"
            )
        at = places[self.index]
        path.write_text(text[:at] + self.new + text[at + len(self.old) :])


def part_of(bug: Bug) -> str:
    """The part that a bug is built in."""
    return bug.part or next(
        part
        for part, (kernels, _, _) in PARTS.items()
        if any(bug.file in files for files in map(_files_of, kernels))
    )


def _files_of(kernel: str) -> set[str]:
    """The source of a kernel and what it includes."""
    source = next(row.source for row in build.load_variants() if row.kernel == kernel)
    path = build.KERNEL_DIR / f"{source}.metal"
    return {file.name for file in build.included_files(path, [build.KERNEL_DIR])}


def barrier_bugs() -> list[Bug]:
    """Every barrier of the kernels deleted, and every one without its memory flags."""
    return [
        bug
        for path in sorted(build.KERNEL_DIR.glob("*"))
        if path.suffix in (".metal", ".h")
        for bug in _barrier_bugs_of(path.name, path.read_text())
    ]


def _barrier_bugs_of(file: str, text: str) -> Iterator[Bug]:
    code = _COMMENT.sub(lambda match: " " * len(match[0]), text)
    for match in _BARRIER.finditer(code):
        barrier = match[0]
        same = [m.start() for m in re.finditer(re.escape(barrier), text)]
        place = (len(same), same.index(match.start()))
        name = f"{Path(file).stem}-barrier-{place[1]}"
        functions = _FUNCTION.findall(code[: match.start()])
        part = _part_that_calls(functions[-1]) if functions else ""
        yield Bug(f"{name}-deleted", file, barrier, "", *place, part)
        weak, changed = re.subn(r"mem_flags::\w+", "mem_flags::mem_none", barrier)
        if changed:
            yield Bug(f"{name}-without-flags", file, barrier, weak, *place, part)


def _part_that_calls(function: str) -> str:
    """The first part with a kernel that calls it; "": it is in a kernel."""
    call = re.compile(rf"\b{function}\b")
    for part, (kernels, _, _) in PARTS.items():
        for kernel in kernels:
            texts = [
                (build.KERNEL_DIR / file).read_text() for file in _files_of(kernel)
            ]
            # Once where it is defined.
            if sum(len(call.findall(_COMMENT.sub("", text))) for text in texts) > 1:
                return part
    return ""


def copy_of_kernels(folder: Path, part: str = "forward", form: str = "") -> Path:
    """A copy whose variant table has the fewest rows that the bug cases need.

    Per kernel the float32 row of the smallest head_dim: what a bug needs is one kernel
    that has it, and each row takes seconds to compile.

    Args:
      part: In PARTS: whose family and form are those of any device in the copy.
      form: Of the backward pass, if not the part's.
    """
    copy = folder / "metal_kernels"
    shutil.copytree(build.KERNEL_DIR, copy)
    _, family, form_of_part = PARTS[part]
    smallest: dict[str, build.Variant] = {}
    rows = [
        dataclasses.replace(row, min_family=0)
        for row in sorted(
            build.load_variants(), key=lambda row: (row.head_dim, -row.min_family)
        )
        if row.dtype == "float32" and row.min_family <= family
    ]
    for row in rows:
        smallest.setdefault(row.kernel, row)
    tables = [*map(_table_row, smallest.values())]
    if (form or form_of_part) == "B":
        tables.append(
            '[[backward_form]]\nform = "B"\ndtypes = ["float32"]\nhead_dim = 256\n'
            "min_family = 0\nmin_scores = 0\n"
        )
    (copy / "variants.toml").write_text("\n".join(tables))
    return copy


def _table_row(row: build.Variant) -> str:
    columns = dataclasses.asdict(row) | {"dtypes": [row.dtype]}
    del columns["dtype"]
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in columns.items())
    return "[[variant]]\n" + "".join(lines)
