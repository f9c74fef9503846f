"""The table of kernel variants (metal_kernels/variants.toml) as Python reads it.

The kernels' instantiation and the native planner are made from the same file by
plugin/kernel_sources.py, which checks it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Its columns of positive numbers.
SIZES = ("head_dim", "block_q", "block_kv", "num_simdgroups")
LOADS = ("threadgroup", "device")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table with one of its dtypes: one kernel of the library.

    Attributes:
      kernel: Name of the kernel's template.
      dtype: Of the operands.
      head_dim: The largest one that it takes.
      block_q: Queries of a tile.
      block_kv: Keys of a tile.
      block_d: Columns of a tile, of head_dim.
      num_simdgroups: Of a threadgroup.
      loads: Where products read tiles from, among LOADS.
      roles: 2 if pairs of simdgroups share rows, each for one result.
      min_family: The first Apple GPU family that the row is the default of.
      is_default: False for a row that only a measurement chooses.
    """

    kernel: str
    dtype: str
    head_dim: int
    block_q: int
    block_kv: int
    block_d: int
    num_simdgroups: int
    loads: str = "threadgroup"
    roles: int = 1
    min_family: int = 0
    is_default: bool = True

    @property
    def host_name(self) -> str:
        """The kernel's name in the library."""
        return (
            f"{self.kernel}_{self.dtype}_d{self.head_dim}_q{self.block_q}"
            f"_k{self.block_kv}_b{self.block_d}_s{self.num_simdgroups}"
            + ("_device" if self.loads == "device" else "")
            + ("_paired" if self.roles == 2 else "")
        )


@dataclasses.dataclass(frozen=True)
class BackwardForm:
    """Where the backward pass keeps the score gradient in scratch (form "B").

    Attributes:
      form: "A" or "B". The first row that applies says it; "A" where none does.
      dtype: Of the operands.
      head_dim: The largest one that the row is for.
      min_family: The first Apple GPU family that the row is for.
      min_scores: The least product of q_len and kv_len that it is for.
    """

    form: str
    dtype: str
    head_dim: int
    min_family: int
    min_scores: int


def read_table(text: str) -> dict[str, Any]:
    """The tables of variants.toml, with defaults filled in; checks nothing."""
    tables: dict[str, Any] = tomllib.loads(text)
    for row in tables.get("variant", []):
        row.setdefault("block_d", row.get("head_dim"))
    return tables


@functools.cache
def _table() -> dict[str, Any]:
    # In a wheel the kernels are inside the package, in a source tree beside it.
    package = Path(__file__).parent
    candidates = [p / "metal_kernels/variants.toml" for p in (package, package.parent)]
    for path in candidates:
        if path.is_file():
            return read_table(path.read_text())
    raise RuntimeError(
        "The table of kernel variants is missing: expected it at "
        f"{' or '.join(str(p) for p in candidates)}; reinstall jax-flash-metal."
    )


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Every variant, in the order of the table.

    Raises:
      RuntimeError: The table is not there.
    """
    names = [field.name for field in dataclasses.fields(Variant)]
    return tuple(
        Variant(dtype=dtype, **{name: row[name] for name in names if name in row})
        for row in _table()["variant"]
        for dtype in row["dtypes"]
    )


@functools.cache
def backward_forms() -> tuple[BackwardForm, ...]:
    """The forms of the backward pass, in the order of the table.

    Raises:
      RuntimeError: The table is not there.
    """
    names = [field.name for field in dataclasses.fields(BackwardForm)]
    return tuple(
        BackwardForm(dtype=dtype, **{name: row[name] for name in names if name in row})
        for row in _table().get("backward_form", [])
        for dtype in row["dtypes"]
    )


@functools.cache
def max_head_dims() -> dict[str, int]:
    """Largest head_dim per dtype name that every kernel of the table covers."""
    limits: dict[str, dict[str, int]] = {}
    for v in variants():
        kernels = limits.setdefault(v.dtype, {})
        kernels[v.kernel] = max(v.head_dim, kernels.get(v.kernel, 0))
    return {dtype: min(kernels.values()) for dtype, kernels in limits.items()}


def row_head_dim(dtype: str, head_dim: int) -> int:
    """The smallest head_dim of the dtype's rows that covers `head_dim`.

    Every kernel takes for it the row that it takes for `head_dim`.
    """
    return min(
        v.head_dim for v in variants() if v.dtype == dtype and v.head_dim >= head_dim
    )
