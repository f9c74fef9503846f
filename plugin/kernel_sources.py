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

    source: str = ""

    def table_line(self) -> str:
        """The row as C++, for the planner's table."""
        loads = "Loads::kDevice" if self.loads == "device" else "Loads::kThreadgroup"
        return (
            f'{{"{self.kernel}", {DTYPES[self.dtype][1]}, {self._sizes()}, {loads}, '
            f"{self.roles}, {self.min_family}, {str(self.is_default).lower()}, "
            f'"{self.host_name}"}},\n'
        )

    def instantiation(self) -> str:
        """The row as MSL: an explicit instantiation under its host name."""
        msl_type = DTYPES[self.dtype][0]
        loads = variant_table.LOADS.index(self.loads)
        instance = f"{self.kernel}<{msl_type}, {self._sizes()}, {loads}, {self.roles}>"
        return (
            f'template [[host_name("{self.host_name}")]] [[kernel]] '
            f"decltype({instance}) {instance};\n"
        )

    def _sizes(self) -> str:
        return (
            f"{self.head_dim}, {self.block_q}, {self.block_kv}, {self.block_d}, "
            f"{self.num_simdgroups}"
        )


def load_variants(kernel_dir: Path = KERNEL_DIR) -> list[Variant]:
    """Reads variants.toml; rows in table order, dtypes in the order of each row."""
    variants: list[Variant] = []
    seen: dict[str, int] = {}
    for row, line in _rows("variant", kernel_dir):
        for variant in _parse_row(row, f"{kernel_dir / 'variants.toml'}:{line}"):
            first = seen.setdefault(variant.host_name, line)
            if first != line:
                raise BuildError(
                    f"{kernel_dir / 'variants.toml'}:{line}: {variant.host_name} is "
                    f"already in the table, at line {first}."
                )
            variants.append(variant)
    if not variants:
        raise BuildError(
            f"{kernel_dir / 'variants.toml'}: expected at least one [[variant]] row, "
            "got none."
        )
    return variants


def _rows(table: str, kernel_dir: Path) -> list[tuple[dict[str, Any], int]]:
    """The rows of one table of variants.toml, each with its line."""
    path = kernel_dir / "variants.toml"
    text = path.read_text()
    try:
        rows = variant_table.read_table(text).get(table, [])
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path}: {error}") from None
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith(f"[[{table}]]")
    ]
    return list(zip(rows, lines))


_OPTIONAL = {"source", "loads", "roles", "min_family", "is_default"}


def _parse_row(row: dict[str, Any], where: str) -> list[Variant]:
    sizes = (*variant_table.SIZES, "block_d")
    _check_fields(row, {"kernel", "dtypes", *sizes}, _OPTIONAL, where)
    for name in sizes:
        if not isinstance(row[name], int) or row[name] < 1:
            raise BuildError(
                f"{where}: {name} must be a positive integer, got {row[name]!r}."
            )
    for name, values in (
        ("loads", variant_table.LOADS),
        ("roles", (1, 2)),
        ("is_default", (False, True)),
    ):
        if name in row and row[name] not in values:
            raise BuildError(
                f"{where}: {name} must be among {list(values)}, got {row[name]!r}."
            )
    _check_family(row, where)
    columns = {name: value for name, value in row.items() if name != "dtypes"}
    columns.setdefault("source", row["kernel"])
    return [Variant(dtype=dtype, **columns) for dtype in row["dtypes"]]


def load_backward_forms(
    kernel_dir: Path = KERNEL_DIR,
) -> list[variant_table.BackwardForm]:
    """Reads the forms of the backward pass from variants.toml, in table order."""
    forms: list[variant_table.BackwardForm] = []
    for row, line in _rows("backward_form", kernel_dir):
        where = f"{kernel_dir / 'variants.toml'}:{line}"
        fields = {"form", "dtypes", "head_dim", "min_family", "min_scores"}
        _check_fields(row, fields, set(), where)
        if row["form"] not in ("A", "B"):
            raise BuildError(f"{where}: form must be A or B, got {row['form']!r}.")
        _check_family(row, where)
        columns = {name: value for name, value in row.items() if name != "dtypes"}
        forms += [
            variant_table.BackwardForm(dtype=dtype, **columns)
            for dtype in row["dtypes"]
        ]
    return forms


def _check_fields(
    row: dict[str, Any], required: set[str], optional: set[str], where: str
) -> None:
    unknown = set(row) - required - optional
    missing = required - set(row)
    if unknown or missing:
        raise BuildError(
            f"{where}: missing fields {sorted(missing)}, unknown fields "
            f"{sorted(unknown)}."
        )
    for dtype in row["dtypes"]:
        if dtype not in DTYPES:
            raise BuildError(
                f"{where}: dtypes must be among {list(DTYPES)}, got {dtype!r}."
            )


def _check_family(row: dict[str, Any], where: str) -> None:
    family = row.get("min_family", 0)
    if not isinstance(family, int) or family < 0:
        raise BuildError(
            f"{where}: min_family must be an integer of at least 0, got {family!r}."
        )


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

    variants.inc and backward_forms.inc: the planner's tables. kernel_sources.inc: what
    a device needs that compiles MSL at run time (plugin/device/apple).
    kernel_digest.inc: a string literal, the hash of what kernel_sources.inc has, as
    everything that names these kernels.
    """
    variants = load_variants(kernel_dir)
    embedded = embed(variants, kernel_dir)
    literal = f'"{hashlib.sha256(embedded.encode()).hexdigest()}"'
    return {
        "variants.inc": "".join(row.table_line() for row in variants),
        "backward_forms.inc": "".join(
            f"{{{DTYPES[form.dtype][1]}, {form.head_dim}, {form.min_family}, "
            f"{form.min_scores}, '{form.form}'}},\n"
            for form in load_backward_forms(kernel_dir)
        ),
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
