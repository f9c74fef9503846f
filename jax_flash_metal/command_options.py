"""What the commands' options have in common: numbers, sizes that fit, files to write.

Plain Python: imports neither JAX nor NumPy.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from jax_flash_metal import variant_table
from jax_flash_metal.benchmark_shapes import AttentionShape

# A smaller size costs as much, or nearly: tiles are computed whole.
_ROUNDED_TO = 64


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, but is {_short(text)}"
        )
    return value


def seconds(text: str) -> float:
    """Seconds, above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, but is {_short(text)}"
        )
    return value


def seconds_or_none(text: str) -> float:
    """Seconds; 0: none."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds, at least 0, but is {_short(text)}"
        )
    return value


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def check_head_dim(shape: AttentionShape, dtype: str) -> None:
    """Raises ValueError: no kernel takes the shape's head_dim."""
    largest = variant_table.max_head_dims()[dtype]
    if shape.head_dim > largest:
        raise ValueError(
            f"the kernels take a head_dim of up to {largest} in {dtype}, but it is "
            f"{shape.head_dim}."
        )


def check_size(shape: AttentionShape, limit: int, why: str) -> None:
    """Raises ValueError: B·N·T·L·D is above the limit, with `why` there is one."""

    def rounded(size: int) -> int:
        return -(-size // _ROUNDED_TO) * _ROUNDED_TO

    work = shape.batch_size * shape.num_heads * rounded(shape.num_queries)
    work *= rounded(shape.length) * rounded(shape.head_dim)
    if work > limit:
        raise ValueError(
            f"{shape} is too large: {why}, so batch · heads · queries · keys · "
            f"head_dim, the last three rounded up to multiples of {_ROUNDED_TO}, may "
            f"be {limit:.1e} at most, but is {_power(work)}."
        )


def _power(value: int) -> str:
    """As 1.2e+34, also where no float is so large."""
    return f"{float(value):.1e}" if value < 10**300 else "above 1e+300"


def check_writable(option: str, path: Path) -> None:
    """Raises ValueError: the option's file could not be written."""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "there is no permission to write there"
    else:
        return
    raise ValueError(f"{option} {path} cannot be written: {reason}.")
