"""Our custom calls through jax's ffi_call, without the package's own front.

One small good call, and any change to it. Tests register the targets first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal._jax_compat import ffi

FORWARD = "jax_flash_metal_forward_v1"
BACKWARD = "jax_flash_metal_backward_v1"
RESULTS = {FORWARD: ("out", "logsumexp"), BACKWARD: ("dquery", "dkey", "dvalue")}
SHAPES = {
    "query": (2, 5, 6, 8),
    "key": (1, 7, 3, 8),  # shared over the batch
    "value": (2, 7, 3, 4),
    "out": (2, 5, 6, 4),
    "logsumexp": (2, 6, 5),
    "dout": (2, 5, 6, 4),
    "dlogsumexp": (2, 6, 5),
    "dquery": (2, 5, 6, 8),
    "dkey": (2, 7, 3, 8),
    "dvalue": (2, 7, 3, 4),
}
OPERANDS = {
    FORWARD: ("query", "key", "value"),
    BACKWARD: ("query", "key", "value", "out", "logsumexp", "dout", "dlogsumexp"),
}
ATTRIBUTES = {
    "version": np.int64(1),
    "scale": np.float32(0.25),
    "is_causal": True,
    "q_offset": np.int64(2),
}


def call(
    target: str,
    shapes: dict[str, Any] | None = None,
    dtypes: dict[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
) -> list[np.ndarray]:
    """A good call with these changes; None leaves a thing out."""
    shapes = {**SHAPES, **(shapes or {})}
    attributes = {**ATTRIBUTES, **(attributes or {})}
    attributes = {k: v for k, v in attributes.items() if v is not None}

    def structs(names: tuple[str, ...]) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(shapes[name], (dtypes or {}).get(name, jnp.float32))
            for name in names
            if shapes[name] is not None
        ]

    results = structs(RESULTS[target])
    operands = [jnp.ones(x.shape, x.dtype) for x in structs(OPERANDS[target])]
    # A new function each time: JAX's cache takes np.int64(1) and True for the same.
    run = jax.jit(lambda *args: bind(target, results, *args, **attributes))
    return [np.asarray(x) for x in run(*operands)]


def bind(
    target: str,
    results: list[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    **attributes: Any,
) -> list[jax.Array]:
    """ffi_call of any JAX version."""
    if ffi.__name__ == "jax.ffi":
        return ffi.ffi_call(target, results)(*operands, **attributes)
    return ffi.ffi_call(target, results, *operands, **attributes)  # before jax 0.5


def assert_good_call_works() -> None:
    out, logsumexp = call(FORWARD)
    # Values are all 1: their mean is. Scores are all 8 * scale = 2; row t sees t + 3.
    np.testing.assert_allclose(out, np.ones(SHAPES["out"]), rtol=1e-5)
    visible = np.minimum(np.arange(5) + 3, 7)
    expected = np.broadcast_to(2 + np.log(visible), SHAPES["logsumexp"])
    np.testing.assert_allclose(logsumexp, expected, rtol=1e-5)
