"""The table of kernel variants (metal_kernels/variants.toml) as Python reads it.

The kernels' instantiation and the native planner are made from the same file by
plugin/kernel_sources.py, which checks it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Its columns of numbers.
SIZES = ("head_dim", "block_q", "block_kv", "num_simdgroups")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table with one of its dtypes: one kernel of the library."""

    kernel: str
    dtype: str
    head_dim: int
    block_q: int
    block_kv: int
    num_simdgroups: int

    @property
    def host_name(self) -> str:
        """The kernel's name in the library."""
        return (
            f"{self.kernel}_{self.dtype}_d{self.head_dim}"
            f"_q{self.block_q}_k{self.block_kv}_s{self.num_simdgroups}"
        )


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Every variant, in the order of the table.

    Raises:
      RuntimeError: The table is not there.
    """
    # In a wheel the kernels are inside the package, in a source tree beside it.
    package = Path(__file__).parent
    candidates = [p / "metal_kernels/variants.toml" for p in (package, package.parent)]
    for path in candidates:
        if path.is_file():
            rows = tomllib.loads(path.read_text())["variant"]
            return tuple(
                Variant(row["kernel"], dtype, *(row[size] for size in SIZES))
                for row in rows
                for dtype in row["dtypes"]
            )
    raise RuntimeError(
        "The table of kernel variants is missing: expected it at "
        f"{' or '.join(str(p) for p in candidates)}; reinstall jax-flash-metal."
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
