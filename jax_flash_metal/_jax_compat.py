"""The only place that knows differences between JAX versions (0.4.34 … newest).

Everything else of the package uses JAX through its stable public names and these.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

try:  # a module of its own since jax 0.5
    from jax.ffi import ffi_lowering
except ImportError:
    from jax.extend.ffi import ffi_lowering

__all__ = [
    "Primitive",
    "ShapedArray",
    "batching",
    "ffi_lowering",
    "is_prng_key",
    "is_tracer",
    "mlir",
]


def is_tracer(x: Any) -> bool:
    """Whether `x` is a value that is known only when the program runs."""
    return isinstance(x, jax.core.Tracer)


def is_prng_key(x: Any) -> bool:
    """Whether `x` is an array of new-style keys (`jax.random.key`)."""
    return hasattr(x, "dtype") and bool(
        jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
