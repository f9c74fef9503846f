"""Checks of arguments: a failure is one sentence with the argument's name and shapes.

ValueError: wrong shape, dtype or value. TypeError: wrong kind of argument. Whether a
kernel exists for a valid call is another question (`support`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal._jax_compat import is_prng_key, is_tracer
from jax_flash_metal.config import IMPLEMENTATIONS, Implementation, SegmentIds

Array = jax.Array

_DTYPES = ("float32", "float16", "bfloat16", "float64")
# i + q_offset must not overflow int32.
_MAX_Q_OFFSET = 2**30
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def array(name: str, x: Any) -> Array:
    """`x` as a jax.Array; arrays only, so that a forgotten argument is noticed."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{name} must be an array, but got {type(x).__name__}.")
    return jnp.asarray(x)


def parts(name: str, x: Any) -> list[Array]:
    """Floating arrays of `merge_partials`; also one array, of them stacked."""
    if not isinstance(x, (tuple, list, jax.Array, np.ndarray)):
        raise TypeError(
            f"{name} must be a sequence of arrays, but got {type(x).__name__}."
        )
    arrays = [array(name, part) for part in x]
    for a in arrays:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(
                f"{name} must have a floating dtype, but got {name} of dtype {a.dtype}."
            )
    return arrays


def check_qkv(query: Array, key: Array, value: Array) -> None:
    if query.ndim not in (3, 4):
        raise ValueError(
            "query must have shape (batch, q_len, num_heads, head_dim) or "
            f"(q_len, num_heads, head_dim), but got query.shape={query.shape}."
        )
    for name, a in (("key", key), ("value", value)):
        both = f"query.shape={query.shape} and {name}.shape={a.shape}"
        if a.ndim != query.ndim:
            raise ValueError(
                f"query and {name} must have the same rank, but got {both}."
            )
        if a.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"query and {name} must have the same batch size, but got {both}."
            )

    both = f"key.shape={key.shape} and value.shape={value.shape}"
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"key and value must have the same kv_len, but got {both}.")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have the same num_kv_heads, but got {both}."
        )

    both = f"query.shape={query.shape} and key.shape={key.shape}"
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head_dim, but got {both}.")
    sizes = (
        ("num_heads", "query", query, -2),
        ("num_kv_heads", "key", key, -2),
        ("head_dim", "query", query, -1),
        ("value_head_dim", "value", value, -1),
    )
    for size, name, a, axis in sizes:
        if a.shape[axis] == 0:
            raise ValueError(
                f"{size} must be at least 1, but got {name}.shape={a.shape}."
            )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, but got {both}."
        )

    if query.dtype.name not in _DTYPES:
        raise ValueError(
            f"query must have one of the dtypes {', '.join(_DTYPES)}, but got "
            f"query.dtype={query.dtype}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must have the same dtype, but got "
            f"query.dtype={query.dtype}, key.dtype={key.dtype} and "
            f"value.dtype={value.dtype}."
        )


def scores_operand(name: str, x: Any, scores_shape: tuple[int, ...]) -> Array:
    """A bias or mask, with leading dimensions of 1 up to the rank of the scores."""
    x = array(name, x)
    aligned = (1,) * (len(scores_shape) - x.ndim) + x.shape
    if len(aligned) != len(scores_shape) or any(
        size not in (1, full) for size, full in zip(aligned, scores_shape)
    ):
        raise ValueError(
            f"{name} must be broadcastable to (batch, num_heads, q_len, kv_len)="
            f"{scores_shape}, but got {name}.shape={x.shape}."
        )
    return jnp.reshape(x, aligned)


_BIAS_DTYPES = ("float32", "float16", "bfloat16")


def bias(x: Any, scores_shape: tuple[int, ...], accumulation_dtype: Any) -> Array:
    """In a dtype that the kernels read, or else in that of the scores."""
    if isinstance(x, np.ndarray | np.generic):
        # Here already: jnp.asarray makes float32 of float64 unless it is enabled.
        x = _narrow(x, jax.dtypes.canonicalize_dtype(x.dtype))
    a = scores_operand("bias", x, scores_shape)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise ValueError(
            f"bias must have a floating dtype, but got bias.dtype={a.dtype}."
        )
    if a.dtype.name in _BIAS_DTYPES:
        return a
    narrowed: Array = _narrow(a, accumulation_dtype).astype(accumulation_dtype)
    return narrowed


def _narrow(x: Any, dtype: Any) -> Any:
    """Clips float64 to the range of float32, so that a finite bias remains finite.

    Minus infinity would hide the key.
    """
    if x.dtype != np.float64 or dtype != np.float32:
        return x
    numpy = np if isinstance(x, np.ndarray | np.generic) else jnp
    clipped = numpy.clip(x, -_FLOAT32_MAX, _FLOAT32_MAX)
    return numpy.where(numpy.isfinite(x), clipped, x)


def mask(x: Any, scores_shape: tuple[int, ...]) -> Array:
    a = scores_operand("mask", x, scores_shape)
    if a.dtype != jnp.bool_:
        raise ValueError(
            "mask must have dtype bool (True = attend), but got "
            f"mask.dtype={a.dtype}; pass an additive mask as bias."
        )
    return a


def number(name: str, x: Any) -> float:
    """A static float."""
    if isinstance(x, (bool, np.bool_, str, bytes)) or x is None or is_tracer(x):
        raise TypeError(
            f"{name} must be a Python number (it is compiled into the program), "
            f"but got {type(x).__name__}."
        )
    try:
        result = float(x)
    except OverflowError:
        result = math.inf
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a Python number, but got {type(x).__name__}."
        ) from None
    # Beyond float32 it would be inf in the program, where scores are float32.
    if math.isfinite(result) and abs(result) > _FLOAT32_MAX:
        raise ValueError(
            f"{name} must be within the range of float32, but got {name}={result}."
        )
    return result


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(
            f"{name} must be a bool (it is compiled into the program), but got "
            f"{type(x).__name__}."
        )
    return bool(x)


def scale(x: Any, head_dim: int) -> float:
    if x is None:
        return 1.0 / math.sqrt(head_dim)
    result = number("scale", x)
    if not math.isfinite(result):
        raise ValueError(f"scale must be finite, but got scale={result}.")
    return result


def logits_soft_cap(x: Any) -> float | None:
    if x is None:
        return None
    result = number("logits_soft_cap", x)
    # Far inside float32: a quotient by it, and a product with it, must not be 0 or inf.
    if not 1e-30 <= result <= 1e30:
        raise ValueError(
            "logits_soft_cap must lie in [1e-30, 1e30], but got "
            f"logits_soft_cap={result}."
        )
    return result


def q_offset(x: Any, *, has_effect: bool) -> int | Array:
    """A static int, or an int32 scalar array that may be traced."""
    if x is None:
        return 0
    if not has_effect:
        raise ValueError(
            "q_offset needs is_causal=True, sliding_window or alibi_slopes (without "
            f"them it has no effect), but got q_offset={x}."
        )
    if isinstance(x, jax.Array):
        if x.ndim or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                "q_offset must be an int or an integer scalar array, but got "
                f"q_offset.shape={x.shape} and q_offset.dtype={x.dtype}."
            )
        # Beyond, every key is visible or none, and sums would not fit into int32. The
        # limits in turn may not fit into the array's dtype.
        info = np.iinfo(x.dtype)
        low, high = max(-_MAX_Q_OFFSET, info.min), min(_MAX_Q_OFFSET, info.max)
        return jnp.clip(x, low, high).astype(jnp.int32)
    offset = _static_int(x)
    if offset is None:
        raise TypeError(
            "q_offset must be an int or an integer scalar array, but got "
            f"{type(x).__name__}."
        )
    if abs(offset) > _MAX_Q_OFFSET:
        raise ValueError(
            f"q_offset must lie in [-2**30, 2**30], but got q_offset={offset}."
        )
    return offset


def sliding_window(
    x: Any, name: str = "sliding_window"
) -> tuple[int | None, int | None] | None:
    if x is None:
        return None
    pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    sides = tuple(None if side is None else _static_int(side) for side in pair)
    if len(pair) != 2 or any(
        side is None and given is not None for side, given in zip(sides, pair)
    ):
        raise TypeError(
            f"{name} must be an int or a pair (left, right) of ints or None, but got "
            f"{x!r}."
        )
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(f"{name} must not be negative, but got {x!r}.")
    left, right = (None if s is None or s > _INT32_MAX else s for s in sides)
    return None if left is None and right is None else (left, right)


def _static_int(x: Any) -> int | None:
    if isinstance(x, (bool, np.bool_)) or is_tracer(x):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def segment_ids(
    x: Any, batch_size: int, q_len: int, kv_len: int, *, batched: bool
) -> SegmentIds:
    got = None
    if not isinstance(x, (tuple, list)):
        got = type(x).__name__
    elif len(x) != 2:
        got = f"{len(x)} of them"
    elif x[0] is None or x[1] is None:
        got = "no q ids" if x[0] is None else "no kv ids"
    if got is not None:
        raise TypeError(
            f"segment_ids must be a pair (q ids, kv ids) of arrays, but got {got}."
        )
    return SegmentIds(
        *(
            _int32(
                f"segment_ids.{side}",
                ids,
                f"(batch, {side}_len)",
                (batch_size, length),
                batched=batched,
            )
            for side, ids, length in (("q", x[0], q_len), ("kv", x[1], kv_len))
        )
    )


def seq_lengths(name: str, x: Any, batch_size: int, *, batched: bool) -> Array:
    return _int32(name, x, "(batch,)", (batch_size,), batched=batched)


def _int32(
    name: str, x: Any, dims: str, shape: tuple[int, ...], *, batched: bool
) -> Array:
    """Without a batch dimension in the call, it may be left out here too."""
    x = array(name, x)
    accepted = (shape,) if batched else (shape, shape[1:])
    if x.shape not in accepted or x.dtype != jnp.int32:
        raise ValueError(
            f"{name} must be int32 of shape {dims}={shape}, but got "
            f"{name}.shape={x.shape} and {name}.dtype={x.dtype}."
        )
    return jnp.reshape(x, shape)


def per_head(name: str, x: Any, num_heads: int) -> Array:
    a = array(name, x)
    if a.shape != (num_heads,) or not jnp.issubdtype(a.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be floating of shape (num_heads,)={(num_heads,)}, but got "
            f"{name}.shape={a.shape} and {name}.dtype={a.dtype}."
        )
    return a


def dropout_rate(x: Any, key: Any) -> float:
    rate = number("dropout_rate", x)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must lie in [0, 1), but got {rate}.")
    if rate and key is None:
        raise ValueError(
            f"dropout_rate={rate} needs a dropout_key, but got dropout_key=None."
        )
    return rate


def dropout_key(x: Any) -> Array:
    """The key's data: uint32 [2], or [4] for generators other than threefry."""
    data = jax.random.key_data(x) if is_prng_key(x) else array("dropout_key", x)
    if data.shape not in ((2,), (4,)) or data.dtype != jnp.uint32:
        raise ValueError(
            "dropout_key must be one key (jax.random.key) or its uint32 data, but got "
            f"dropout_key.shape={x.shape} and dropout_key.dtype={x.dtype}."
        )
    return data


def implementation(x: Any) -> Implementation:
    if x is None or isinstance(x, str):  # what == gives for an array is an array
        for known in IMPLEMENTATIONS:
            if known == x:
                return known
    raise ValueError(
        f"implementation must be None, 'metal', 'cpu' or 'xla', but got {x!r}."
    )
