"""The strict front end: what it must reject, what it must accept, and our kernels.

rejected/*.metal each break one rule; their second line is the expected message.
"""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from plugin import build
from plugin.device.software.frontend import lint

FOLDER = Path(__file__).resolve().parent
REJECTED = sorted((FOLDER / "rejected").glob("*.metal"))
ACCEPTED = sorted((FOLDER / "accepted").glob("*.metal"))
KERNELS = sorted(build.KERNEL_DIR.glob("*.metal"))

# A sample with a fixed seed: each takes about a second.
MUTATIONS_PER_FILE = 4


def _names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def test_corpora_are_there():
    assert len(REJECTED) >= 50
    assert len(ACCEPTED) >= 9
    assert KERNELS


@pytest.mark.parametrize("path", REJECTED, ids=_names(REJECTED))
def test_wrong_snippet_is_rejected(path: Path):
    expected = re.search(r"^// expect: (.*)$", path.read_text(), re.MULTILINE)
    assert expected, f"{path}: no line '// expect: ...'"
    messages = [finding.message for finding in lint.lint([path])]
    assert any(re.search(expected[1], message) for message in messages), messages


@pytest.mark.parametrize("path", ACCEPTED, ids=_names(ACCEPTED))
def test_good_snippet_is_accepted(path: Path):
    assert lint.lint([path]) == []


@pytest.mark.parametrize("path", KERNELS, ids=_names(KERNELS))
def test_kernel_is_accepted_and_small_enough(path: Path):
    """Every row of the table: no finding, no more threadgroup memory than allowed."""
    report = lint.lint_file(path)
    assert report.findings == []
    rows = [row for row in build.load_variants() if row.source == path.stem]
    assert set(report.threadgroup_bytes) == {row.host_name for row in rows}
    limits = {row.host_name: _most_bytes(row.head_dim) for row in rows}
    used = report.threadgroup_bytes
    too_large = {name: n for name, n in used.items() if n > limits[name]}
    assert not too_large


def _most_bytes(head_dim: int) -> int:
    """Up to head_dim 128, two threadgroups must fit in the 32 KB of a core."""
    return (16 if head_dim <= 128 else 32) * 1024


def test_findings_name_the_place(tmp_path: Path):
    header = tmp_path / "helper.h"
    header.write_text("\n\ninline float first(const float* row) { return row[0]; }\n")
    kernel = tmp_path / "kernel.metal"
    kernel.write_text(
        '#include <metal_stdlib>\n#include "helper.h"\n'
        "[[kernel]] void k(device float* rows [[buffer(0)]]) { rows[0] = 1.0L; }\n"
    )
    places = {(Path(f.file).name, f.line) for f in lint.lint([kernel])}
    assert places == {("helper.h", 3), ("kernel.metal", 3)}


# -- Mutations of our own kernels ----------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*")
_SPACE = re.compile(r"\b(?:device|threadgroup|constant|thread)\b(?!_)[ \t]+")
# Without its space, a threadgroup variable is a thread variable: legal Metal. What uses
# it sees a difference, which is the checker's business.
_THREADGROUP_VARIABLE = re.compile(r"^threadgroup[ \t]+[^;*&(]*;")


def address_space_words(text: str) -> list[tuple[int, int]]:
    """Where the text has an address-space word that no correct program can lack."""
    code = _COMMENT.sub(lambda match: " " * len(match[0]), text)
    return [
        match.span()
        for match in _SPACE.finditer(code)
        if not _THREADGROUP_VARIABLE.match(code[match.start() :])
    ]


def _mutations() -> list[tuple[str, int]]:
    chosen = []
    for path in sorted(build.KERNEL_DIR.glob("attention_*")):
        words = range(len(address_space_words(path.read_text())))
        if path.suffix in (".metal", ".h"):
            generator = random.Random(path.name)
            count = min(MUTATIONS_PER_FILE, len(words))
            chosen += [(path.name, n) for n in sorted(generator.sample(words, count))]
    return chosen


def _user_of(header: str) -> str:
    """A kernel file that includes the header, however indirectly."""
    for path in KERNELS:
        included = build.included_files(path, [build.KERNEL_DIR])
        if header in {file.name for file in included}:
            return path.name
    raise AssertionError(f"no kernel includes {header}")


@pytest.mark.parametrize(("name", "number"), _mutations())
def test_deleted_address_space_is_found(name: str, number: int, tmp_path: Path):
    copy = tmp_path / "metal_kernels"
    shutil.copytree(build.KERNEL_DIR, copy)
    text = (copy / name).read_text()
    start, end = address_space_words(text)[number]
    (copy / name).write_text(text[:start] + text[end:])
    findings = lint.lint_file(copy / _user_of(name), all_rows=False).findings
    line = text.count("\n", 0, start) + 1
    assert findings, f"{name}:{line}: nothing found without '{text[start:end].strip()}'"
