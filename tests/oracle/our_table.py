"""The Apple layer's tables of selectors, classes and constants, read by a compiler.

A program that includes the headers prints them, with encodings that follow from the C++
types: what is compared with the oracles is what the layer is compiled from.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from plugin import build
from tests.oracle.encoding import Signature, split

HEADERS = build.ROOT / "plugin" / "device" / "apple"
PROGRAM = Path(__file__).with_name("print_tables.cc")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of JFM_SELECTORS."""

    owner: str
    selector: str
    signature: Signature


@dataclasses.dataclass(frozen=True)
class Tables:
    """All that the headers say."""

    rows: list[Row]
    classes: list[str]
    constants: dict[str, int]


@functools.cache
def read() -> Tables:
    """The tables as they are."""
    return read_changed({})


def read_changed(changed: Mapping[str, str]) -> Tables:
    """With other texts of some headers, by file name: to plant mistakes."""
    target = build.TARGETS[build.host_target()].zig_triple
    with tempfile.TemporaryDirectory() as folder:
        # Copies, because a header finds its neighbours in its own folder first.
        apple = Path(folder, "plugin", "device", "apple")
        apple.mkdir(parents=True)
        for path in HEADERS.glob("*.h"):
            text = changed.get(path.name, path.read_text())
            (apple / path.name).write_text(text)
        program = Path(folder, "print_tables")
        includes = [f"-I{folder}", f"-I{build.ROOT}"]
        build.run_zig(
            [
                *(
                    "c++",
                    "-target",
                    target,
                    "-std=c++17",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                ),
                *(*includes, str(PROGRAM), "-o", str(program)),
            ]
        )
        output = subprocess.check_output([program], text=True)
    tables = Tables([], [], {})
    for line in output.splitlines():
        kind, *fields = line.split("\t")
        if kind == "selector":
            owner, selector, encodings = fields
            result, *arguments = split(encodings)
            tables.rows.append(Row(owner, selector, Signature(result, (*arguments,))))
        elif kind == "class":
            tables.classes.append(fields[0])
        else:
            assert kind == "constant", line
            tables.constants[fields[0]] = int(fields[1])
    return tables
