"""The only place that knows differences between JAX versions (0.4.34 … newest).

Everything else of the package uses JAX through its stable public names and these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.ad_checkpoint
import jax.extend.core
from jax._src import dispatch
from jax.core import ShapedArray
from jax.interpreters import batching, mlir

# Untyped in JAX, hence Any. jax.ffi is a module since jax 0.5.
try:
    import jax.ffi

    ffi: Any = jax.ffi
except ImportError:
    import jax.extend.ffi

    ffi = jax.extend.ffi

# Runs one primitive outside jit. Not public, and not to be built from public parts: a
# plain jax.jit of the primitive calls itself without end under jax.disable_jit() and
# when jax_debug_nans looks for the operation that made a NaN.
apply_primitive: Any = dispatch.apply_primitive
checkpoint_name: Any = jax.ad_checkpoint.checkpoint_name
primitive: Any = jax.extend.core.Primitive

__all__ = [
    "ShapedArray",
    "apply_primitive",
    "batching",
    "checkpoint_name",
    "ffi",
    "is_prng_key",
    "is_tracer",
    "mlir",
    "primitive",
]


def is_tracer(x: Any) -> bool:
    """Whether `x` is a value that is known only when the program runs."""
    return isinstance(x, jax.core.Tracer)


def is_prng_key(x: Any) -> bool:
    """Whether `x` is an array of new-style keys (`jax.random.key`)."""
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
