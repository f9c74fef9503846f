"""Our custom calls through jax's ffi_call, without the package's own front.

One small good call, and any change to it. Tests register the targets first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal._jax_compat import ffi
from jax_flash_metal.attention_library import (
    DIFFERENTIABLE_OPTIONS,
    OPTIONAL_OPERANDS,
)

FORWARD = "jax_flash_metal_forward_v3"
BACKWARD = "jax_flash_metal_backward_v3"
GRADIENT = "jax_flash_metal_gradient_v3"
RESULTS = {
    FORWARD: ("out", "logsumexp"),
    BACKWARD: ("dquery", "dkey", "dvalue"),
    GRADIENT: ("gradient",),
}
SHAPES = {
    "query": (2, 5, 6, 8),
    "key": (1, 7, 3, 8),  # shared over the batch
    "value": (2, 7, 3, 4),
    "bias": (2, 1, 5, 7),  # over heads
    "mask": (1, 6, 1, 7),
    "q_offset": (2,),
    "q_segment_ids": (2, 5),
    "kv_segment_ids": (1, 7),
    "query_seq_lengths": (2,),
    "key_value_seq_lengths": (1,),
    "sinks": (1, 6),
    "alibi_slopes": (2, 6),
    "dropout_key": (1, 2),
    "dropout_batch_indices": (2,),
    "dropout_head_indices": (1, 6),
    "out": (2, 5, 6, 4),
    "logsumexp": (2, 6, 5),
    "dout": (2, 5, 6, 4),
    "dlogsumexp": (2, 6, 5),
    "dquery": (2, 5, 6, 8),
    "dkey": (2, 7, 3, 8),
    "dvalue": (2, 7, 3, 4),
    "gradient": (2, 1, 5, 7),  # of the bias
}
DTYPES = {
    "mask": jnp.bool_,
    "dropout_key": jnp.uint32,
    **dict.fromkeys(("q_offset", "q_segment_ids", "kv_segment_ids"), jnp.int32),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), jnp.int32),
    **dict.fromkeys(("dropout_batch_indices", "dropout_head_indices"), jnp.int32),
}
_RESIDUALS = ("out", "logsumexp", "dout", "dlogsumexp")
ATTRIBUTES = {
    "version": np.int64(3),
    "scale": np.float32(0.25),
    "is_causal": True,
    "q_offset": np.int64(2),
    "window_left": np.int64(-1),
    "window_right": np.int64(-1),
    "logits_soft_cap": np.float32(0),
    "dropout_rate": np.float64(0),
    "operands": np.int64(0),
    "backend": np.int64(0),
}


def call(
    target: str,
    shapes: dict[str, Any] | None = None,
    dtypes: dict[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
    optional: tuple[str, ...] = (),
) -> list[np.ndarray]:
    """A good call with these operands and changes; None leaves a thing out.

    The call for a gradient is for that of the first of its operands that can have one.
    """
    shapes = {**SHAPES, **(shapes or {})}
    names = [name for name in OPTIONAL_OPERANDS if name in optional]
    good = dict(ATTRIBUTES)
    good["operands"] = np.int64(sum(1 << OPTIONAL_OPERANDS.index(n) for n in names))
    if "dropout_key" in names:
        good["dropout_rate"] = np.float64(0.5)
    if target == GRADIENT:
        of = next((n for n in names if n in DIFFERENTIABLE_OPTIONS), "bias")
        good["gradient_of"] = np.int64(DIFFERENTIABLE_OPTIONS.index(of))
    attributes = {**good, **(attributes or {})}
    attributes = {k: v for k, v in attributes.items() if v is not None}

    def structs(names: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
        all_dtypes = {**DTYPES, **(dtypes or {})}
        return [
            jax.ShapeDtypeStruct(shapes[name], all_dtypes.get(name, jnp.float32))
            for name in names
            if shapes[name] is not None
        ]

    results = structs(RESULTS[target])
    residuals = () if target == FORWARD else _RESIDUALS
    names = ["query", "key", "value", *names, *residuals]
    operands = [jnp.ones(x.shape, x.dtype) for x in structs(names)]
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
