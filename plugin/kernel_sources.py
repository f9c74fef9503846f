"""The Metal kernels as text: the variant table and the headers that C++ has from it.

variants.toml becomes the planner's table and explicit instantiations; the sources
become one text each, without project includes, for a device that compiles at run time.
Reads files, runs nothing; called by build.py and the lint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal import variant_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KERNEL_DIR = Path(__file__).resolve().parent.parent / "metal_kernels"

DTYPES = {  # name in variants.toml: (MSL type, C++ enumerator)
    "float32": ("float", "Dtype::kFloat32"),
    "float16": ("half", "Dtype::kFloat16"),
    "bfloat16": ("bfloat", "Dtype::kBfloat16"),
}


class BuildError(Exception):
    """The sources are wrong; the message names the file and the line."""


# -- The variant table ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant(variant_table.Variant):
    """A row of the table with one of its dtypes, and what its kernel is made of."""

    source: str

    def table_line(self) -> str:
        """The row as C++, for the planner's table."""
        sizes = f"{self.head_dim}, {self.block_q}, {self.block_kv}"
        return (
            f'{{"{self.kernel}", {DTYPES[self.dtype][1]}, {sizes}, '
            f'{self.num_simdgroups}, "{self.host_name}"}},\n'
        )

    def instantiation(self) -> str:
        """The row as MSL: an explicit instantiation under its host name."""
        msl_type = DTYPES[self.dtype][0]
        instance = (
            f"{self.kernel}<{msl_type}, {self.head_dim}, {self.block_q}, "
            f"{self.block_kv}, {self.num_simdgroups}>"
        )
        return (
            f'template [[host_name("{self.host_name}")]] [[kernel]] '
            f"decltype({instance}) {instance};\n"
        )


def load_variants(kernel_dir: Path = KERNEL_DIR) -> list[Variant]:
    """Reads variants.toml; rows in table order, dtypes in the order of each row."""
    path = kernel_dir / "variants.toml"
    text = path.read_text()
    try:
        rows = tomllib.loads(text).get("variant", [])
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path}: {error}") from None
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith("[[variant]]")
    ]
    variants: list[Variant] = []
    seen: dict[str, int] = {}
    for row, line in zip(rows, lines):
        for variant in _parse_row(row, f"{path}:{line}"):
            first = seen.setdefault(variant.host_name, line)
            if first != line:
                raise BuildError(
                    f"{path}:{line}: {variant.host_name} is already in the table, "
                    f"at line {first}."
                )
            variants.append(variant)
    if not variants:
        raise BuildError(f"{path}: expected at least one [[variant]] row, got none.")
    return variants


def _parse_row(row: dict[str, Any], where: str) -> list[Variant]:
    unknown = set(row) - {"kernel", "source", "dtypes", *variant_table.SIZES}
    missing = {"kernel", "dtypes", *variant_table.SIZES} - set(row)
    if unknown or missing:
        raise BuildError(
            f"{where}: missing fields {sorted(missing)}, unknown fields "
            f"{sorted(unknown)}."
        )
    for name in variant_table.SIZES:
        if not isinstance(row[name], int) or row[name] < 1:
            raise BuildError(
                f"{where}: {name} must be a positive integer, got {row[name]!r}."
            )
    for dtype in row["dtypes"]:
        if dtype not in DTYPES:
            raise BuildError(
                f"{where}: dtypes must be among {list(DTYPES)}, got {dtype!r}."
            )
    sizes = {name: row[name] for name in variant_table.SIZES}
    source = row.get("source", row["kernel"])
    return [
        Variant(kernel=row["kernel"], source=source, dtype=dtype, **sizes)
        for dtype in row["dtypes"]
    ]


# -- One text per source -------------------------------------------------------------

_DIRECTIVE = re.compile(r'[ \t]*#[ \t]*(\w+)(?:[ \t]+"([^"]+)"|[ \t]+(once)\b)?')


def flatten(source: Path) -> str:
    """`source` with the text of each project header in place of its first #include.

    `#line` directives name the file and line that a text is from. Headers must have
    `#pragma once`, and includes must not depend on conditions: both are checked.
    System headers, in angle brackets, stay included.
    """
    return "".join(_flat_lines(source, set()))


def _flat_lines(path: Path, seen: set[Path]) -> list[str]:
    is_header = bool(seen)
    seen.add(path)
    lines = [f'#line 1 "{path.name}"\n']
    depth = 0
    has_once = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _DIRECTIVE.match(line)
        word, name, once = match.groups() if match else ("", None, None)
        if word == "pragma" and once:
            has_once = True
            line = ""
        elif word == "include" and name:
            if depth:
                raise BuildError(
                    f"{path}:{number}: a header of the project is included under a "
                    "condition; the text to embed has each header once, for all."
                )
            header = path.parent / name
            if not header.is_file():
                raise BuildError(f"{path}:{number}: {header} is not there.")
            if header not in seen:
                lines += _flat_lines(header, seen)
            line = f'#line {number + 1} "{path.name}"'
        elif word.startswith("if"):
            depth += 1
        elif word == "endif":
            depth -= 1
        lines.append(line + "\n")
    if is_header and not has_once:
        raise BuildError(f"{path}:1: a header without #pragma once.")
    return lines


# -- Headers for C++ -----------------------------------------------------------------


def headers(kernel_dir: Path = KERNEL_DIR) -> dict[str, str]:
    """Headers by name, made of all rows and sources of `kernel_dir`.

    variants.inc: the planner's table. kernel_sources.inc: what a device needs that
    compiles MSL at run time (plugin/device/apple). kernel_digest.inc: a string literal,
    the hash of what kernel_sources.inc has, as everything that names these kernels.
    """
    variants = load_variants(kernel_dir)
    embedded = embed(variants, kernel_dir)
    literal = f'"{hashlib.sha256(embedded.encode()).hexdigest()}"'
    return {
        "variants.inc": "".join(row.table_line() for row in variants),
        "kernel_sources.inc": (
            f"{embedded}static constexpr char kMslDigest[] = {literal};\n"
        ),
        "kernel_digest.inc": f"{literal}\n",
    }


def embed(variants: Sequence[Variant], kernel_dir: Path) -> str:
    """The sources that the rows name and the rows' instantiations, as C++ tables."""
    names = list(dict.fromkeys(row.source for row in variants))
    sources = [_source_line(kernel_dir / f"{name}.metal") for name in names]
    kernels = [
        f'    {{"{row.host_name}", {names.index(row.source)},\n'
        f"     {_raw_literal(row.instantiation())}}},\n"
        for row in variants
    ]
    return "".join(
        [
            "static constexpr MslSource kMslSources[] = {\n",
            *sources,
            "};\n",
            "static constexpr MslKernel kMslKernels[] = {\n",
            *kernels,
            "};\n",
        ]
    )


def _source_line(path: Path) -> str:
    if not path.is_file():
        raise BuildError(f"{path}: not found, but variants.toml names it.")
    text = flatten(path)
    if ')msl"' in text:
        raise BuildError(f'{path}: )msl" would end the literal that the text is in.')
    return f'    {{"{path.stem}",\n     {_raw_literal(text)}}},\n'


def _raw_literal(text: str) -> str:
    return f'R"msl({text})msl"'
