"""The tables of docs/model.md, between its comments; the text around them is by hand.

`python -m tests.support.model_tables` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from jax_flash_metal import gpu_model, gpu_planner, gpu_published, gpu_report
from jax_flash_metal.benchmark_shapes import DTYPES, SHAPE_SETS, AttentionShape
from jax_flash_metal.gpu_chips import CHIPS, SOURCES
from jax_flash_metal.variant_table import Variant

FILE = Path(__file__).parents[2] / "docs" / "model.md"
HEAD_DIMS = (64, 128)
BASE_CHIPS = ("M1", "M2", "M3", "M4")
FAMILIES = (7, 9)


def long_shape(head_dim: int) -> AttentionShape:
    """What the shares of the peak are of."""
    return AttentionShape(1, 32, 32, 2048, head_dim)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def sources() -> str:
    return _table(
        ("name", "where"), ((name, address) for name, address in SOURCES.items())
    )


def chips() -> str:
    return _table(
        ("chip", "family", "cores", "MHz", "TFLOP/s", "GB/s", "SLC MB", "source"),
        (
            (
                chip.name,
                f"apple{chip.family}",
                str(chip.cores),
                f"{chip.clock_mhz:.0f}",
                f"{chip.flops / 1e12:.2f}",
                f"{chip.dram_gbs:.0f}",
                f"{chip.slc_mb:.0f}",
                chip.source,
            )
            for chip in CHIPS.values()
        ),
    )


def published() -> str:
    def number(value: float, unit: str) -> str:
        return f"{value:.0f} %" if unit == "%" else f"{value:.2f} {unit}"

    rows = []
    for figure in gpu_published.all_figures():
        low, high = number(figure.low, figure.unit), number(figure.high, figure.unit)
        rows.append(
            (
                figure.source,
                figure.what,
                low if low == high else f"{low.split()[0]} … {high}",
                number(figure.predicted, figure.unit),
                "fitted" if figure.is_fitted else f"{100 * figure.error:+.0f} %",
            )
        )
    return _table(("source", "of", "published", "model", "error"), rows)


def shares() -> str:
    rows = []
    for name in CHIPS:
        for dtype in DTYPES:
            cells = [name, dtype]
            for head_dim in HEAD_DIMS:
                shape = long_shape(head_dim)
                for pass_ in ("forward", "forward+backward"):
                    seconds = gpu_model.attention_seconds(
                        CHIPS[name], shape, dtype, pass_, False
                    )
                    by_products, as_mfa = (
                        100
                        * gpu_model.share_of_peak(
                            CHIPS[name], shape, pass_, False, seconds, softmax
                        )
                        for softmax in (0, 5)
                    )
                    cells.append(f"{as_mfa:.0f} ({by_products:.0f})")
            rows.append(cells)
    passes = [f"D{d} {p}" for d in HEAD_DIMS for p in ("forward", "both")]
    return _table(("chip", "dtype", *passes), rows)


def seed() -> str:
    chip = CHIPS["M4"]
    rows = []
    for shape in SHAPE_SETS["seed"]:
        if not gpu_report.is_modelled(shape):
            continue
        for dtype in ("float16", "float32"):
            cells = [str(shape), dtype]
            for is_causal in (False, True):
                arguments = (chip, shape, dtype, "forward+backward", is_causal)
                ours = gpu_model.attention_seconds(*arguments)
                cells.append(f"{1e3 * ours:.3g} ms")
                for passes in (gpu_model.MLX_PASSES, gpu_model.BEST_PASSES):
                    unfused = gpu_model.unfused_seconds(*arguments, passes)
                    cells.append(f"{unfused / ours:.2f}×")
            rows.append(cells)
    columns = ("ours", "as MLX", "best")
    return _table(
        ("problem", "dtype", *columns, *(f"causal: {name}" for name in columns)), rows
    )


def rows_of_the_table() -> str:
    rows = []
    for kernel in gpu_model.TILED_KERNELS:
        for head_dim in (64, 128, 256):
            for family in FAMILIES:
                for dtype in ("float16", "float32"):
                    default = gpu_planner.default_variant(
                        kernel, dtype, head_dim, family
                    )
                    ranked = gpu_model.rank(kernel, dtype, default.head_dim, family)
                    slower = dict((row, ratio) for ratio, row in ranked)[default]
                    rows.append(
                        (
                            kernel.removeprefix("attention_"),
                            dtype,
                            str(head_dim),
                            f"apple{family}",
                            f"`{_tile(default)}`",
                            f"`{_tile(ranked[0][1])}`",
                            f"{slower:.3f}",
                        )
                    )
    return _table(
        ("kernel", "dtype", "D", "family", "default", "fastest", "default / fastest"),
        rows,
    )


def _tile(row: Variant) -> str:
    return row.host_name.split(f"{row.dtype}_", 1)[1]


TABLES: dict[str, Callable[[], str]] = {
    "sources": sources,
    "chips": chips,
    "published": published,
    "shares": shares,
    "seed": seed,
    "rows": rows_of_the_table,
}


def text(current: str) -> str:
    """The file with its tables made anew.

    Raises:
      KeyError: It has a comment for a table that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return re.sub(
        r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, current, flags=re.S
    )


if __name__ == "__main__":
    FILE.write_text(text(FILE.read_text()))
