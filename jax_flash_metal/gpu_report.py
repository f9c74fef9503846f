"""`bench --model`: the predictions of gpu_model.py as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jax_flash_metal import gpu_counts, gpu_model
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.gpu_chips import CHIPS, Chip

DEFAULT_CHIPS = ("M1", "M2", "M3", "M4")
NOTE = (
    "A model, not a measurement: no Apple GPU was there. Its constants and how far it "
    "is off where others have measured: docs/model.md."
)
WHY_NOT_MODELLED = (
    f"up to {gpu_counts.SHORT_QUERY} queries have kernels of their own, which the "
    "model does not describe"
)

_HEADER = (
    "chip",
    "problem",
    "dtype",
    "mask",
    "pass",
    "ours (predicted)",
    "unfused (predicted)",
    "unfused/ours",
    "of peak",
    "limits",
)


def is_modelled(shape: AttentionShape) -> bool:
    """Whether there are predictions of a shape."""
    return shape.num_queries > gpu_counts.SHORT_QUERY


def row(
    chip: Chip, shape: AttentionShape, dtype: str, is_causal: bool, pass_: str
) -> list[str]:
    """The cells of a case."""
    mask = "causal" if is_causal else "full"
    cells = [chip.name, str(shape), dtype, mask, pass_]
    if not is_modelled(shape):
        return [*cells, "not modelled", "", "", "", WHY_NOT_MODELLED]
    launches = gpu_model.attention_launches(chip, shape, dtype, pass_, is_causal)
    ours = gpu_model.seconds_of(chip, launches)
    unfused = gpu_model.unfused_seconds(chip, shape, dtype, pass_, is_causal)
    share = gpu_model.share_of_peak(chip, shape, pass_, is_causal, ours)
    return [
        *cells,
        _milliseconds(ours),
        _milliseconds(unfused),
        f"{unfused / ours:.2f}x",
        f"{100 * share:.0f} %",
        ", ".join(
            dict.fromkeys(gpu_model.predict(chip, launch).limit for launch in launches)
        ),
    ]


def lines(
    chips: Sequence[str], cases: Iterable[tuple[AttentionShape, str, bool, str]]
) -> Iterator[str]:
    """A table of (shape, dtype, is_causal, pass) on chips; "of peak" is by products."""
    table = [list(_HEADER)]
    table += [row(CHIPS[name], *case) for case in cases for name in chips]
    yield NOTE
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        yield "  ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip()


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
