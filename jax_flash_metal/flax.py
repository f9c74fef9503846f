"""One attention function for `flax.linen` and `flax.nnx`: pass it as `attention_fn=`.

Translates Flax's arguments to `flash_attention`; calls that ask for what only Flax's
own function can give (attention weights, other einsums) go there; `explain` says so.
Needs Flax; nothing else of the package imports it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype as linen_promote_dtype

from jax_flash_metal import api, support
from jax_flash_metal.config import (
    AttentionConfig,
    AttentionOperands,
    Implementation,
)
from jax_flash_metal.support import Explanation

Array = jax.Array

_DTYPES = ("float32", "float16", "bfloat16")
_ARRAY_ARGUMENTS = ("query", "key", "value", "bias", "mask", "dropout_rng")


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
    *,
    implementation: Implementation = None,
) -> Array:
    """Attention for `linen.MultiHeadDotProductAttention` and `nnx.MultiHeadAttention`.

    Formula and rules of `flash_attention` with scale 1 / sqrt(head_dim).

    Args:
      query: [*batch, q_len, num_heads, head_dim].
      key: [*batch, kv_len, num_kv_heads, head_dim].
      value: [*batch, kv_len, num_kv_heads, value_head_dim].
      bias: Broadcastable to [*batch, num_heads, q_len, kv_len].
      mask: Same; bool or 0/1 numbers.
      broadcast_dropout: One set of dropout bits for all batch indices and heads.
      dropout_rng: Key for dropout.
      dropout_rate: In [0, 1).
      deterministic: No dropout.
      dtype: Of the computation; None: the promoted dtype of query, key and value.
      precision: Ignored: products are accumulated in float32 anyway.
      module: A module that wants the attention weights sown; takes Flax's function.
      force_fp32_for_softmax: Ignored: the softmax is float32 always.
      einsum_dot_general: Takes Flax's function.
      qk_attn_weights_einsum: Takes Flax's function.
      attn_weights_value_einsum: Takes Flax's function.
      promote_dtype: As in nnx; None: linen's, which is the same.
      is_causal: Query i sees key j only if j <= i. With linen, cheaper than a dense
        mask, which has to be read:
        `functools.partial(dot_product_attention, is_causal=True)`.
      implementation: As in `flash_attention`; bind it with `functools.partial`.

    Returns:
      [*batch, q_len, num_heads, value_head_dim].

    Raises:
      ValueError, TypeError, NotImplementedError: As `flash_attention`.
    """
    arguments = dict(locals())
    _check(arguments)
    reason = _flax_reason(arguments)
    if reason is not None:
        if implementation is not None:
            raise NotImplementedError(
                f"implementation={implementation!r} cannot run this call: {reason}; "
                "implementation=None takes Flax's own function."
            )
        api.log_fallback(f"flax.dot_product_attention takes Flax's own: {reason}.")
        return _call_flax(**arguments)
    return _attend(arguments, lambda *prepared: api.run(*prepared)[0])


def explain(*args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Which implementation `dot_product_attention` takes for these arguments, and why.

    Arrays may be `jax.ShapeDtypeStruct`s; platform None: `jax.default_backend()`.
    """
    bound = inspect.signature(dot_product_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    _check(arguments)
    reason = _flax_reason(arguments)
    if reason is not None:
        forced = arguments["implementation"] is not None
        return Explanation("unsupported" if forced else "flax", f"{reason}.")

    found: list[Explanation] = []

    def explain_prepared(operands: AttentionOperands, config: AttentionConfig) -> Array:
        where = platform or jax.default_backend()
        found.append(support.explain(operands, config, where))
        return operands.query

    arrays = {name: arguments[name] for name in _ARRAY_ARGUMENTS}
    jax.eval_shape(lambda a: _attend({**arguments, **a}, explain_prepared), arrays)
    return found[0]


def _check(arguments: Mapping[str, Any]) -> None:
    """What would fail without a clear sentence before `flash_attention` can check."""
    for name in ("query", "key", "value", "bias", "mask"):
        x = arguments[name]
        is_optional = name in ("bias", "mask")
        if not hasattr(x, "dtype") and not (is_optional and x is None):
            raise TypeError(f"{name} must be an array, but got {type(x).__name__}.")
    mask = arguments["mask"]
    if mask is not None and jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise ValueError(
            f"mask must be bool or 0/1 numbers, but got mask.dtype={mask.dtype}."
        )


def _flax_reason(arguments: Mapping[str, Any]) -> str | None:
    """Why the call belongs to Flax's own function, as a clause, or None."""
    for name in (
        "einsum_dot_general",
        "qk_attn_weights_einsum",
        "attn_weights_value_einsum",
    ):
        if arguments[name] is not None:
            return f"{name} replaces the matrix products"
    if arguments["module"] is not None:
        return "sow_weights asks for the attention weights, which are never formed"
    dtype = arguments["dtype"]
    if dtype is None:
        dtype = jnp.result_type(
            *(arguments[name].dtype for name in ("query", "key", "value"))
        )
    if jnp.dtype(dtype).name not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name} is none of {', '.join(_DTYPES)}"
    return None


def _call_flax(*, module: Any, mask: Any, is_causal: bool, **arguments: Any) -> Array:
    """Calls linen's or nnx's function with those arguments that it knows."""
    function = (
        nnx.dot_product_attention
        if isinstance(module, nnx.Module)
        else linen.dot_product_attention
    )
    if is_causal:  # not an argument of every version
        q_len, kv_len = arguments["query"].shape[-3], arguments["key"].shape[-3]
        causal = jnp.tril(jnp.ones((q_len, kv_len), bool))
        mask = causal if mask is None else mask.astype(bool) & causal
    if arguments["promote_dtype"] is None:
        del arguments["promote_dtype"]
    known = inspect.signature(function).parameters
    arguments = {name: a for name, a in arguments.items() if name in known}
    out: Array = function(mask=mask, module=module, **arguments)
    return out


def _attend(arguments: Mapping[str, Any], finish: Callable[..., Array]) -> Array:
    """Translates the arguments and calls `finish(operands, config)`."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    dtype = arguments["dtype"]
    if arguments["promote_dtype"] is None:
        query, key, value = linen_promote_dtype(query, key, value, dtype=dtype)
    else:
        query, key, value = arguments["promote_dtype"]((query, key, value), dtype=dtype)
    mask = arguments["mask"]
    if mask is not None:
        mask = mask.astype(jnp.bool_)
    rate = 0.0 if arguments["deterministic"] else arguments["dropout_rate"]
    if rate and arguments["dropout_rng"] is None:
        raise ValueError(
            f"dropout_rate={rate} needs a dropout_rng unless deterministic=True, but "
            "got dropout_rng=None."
        )

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        mask: Array | None,
        outer_batch_index: Any,
    ) -> Array:
        operands, config = api.prepare(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=arguments["is_causal"],
            dropout_rate=rate,
            dropout_key=arguments["dropout_rng"] if rate else None,
            broadcast_dropout=arguments["broadcast_dropout"],
            outer_batch_index=outer_batch_index,
            implementation=arguments["implementation"],
        )
        out = finish(operands, config)
        return out.reshape(query.shape[:-3] + out.shape[-3:])

    return _over_batch(attend, query, key, value, arguments["bias"], mask, 0)


def _over_batch(
    attend: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    index: Any,
) -> Array:
    """Maps `attend`, which takes one batch dimension, over the further ones.

    A dimension of size 1 of bias or mask is dropped, not repeated. `index` counts the
    elements of the dimensions mapped so far.
    """
    rank = query.ndim
    if rank <= 4:
        return attend(query, key, value, bias, mask, index)

    def mapped(a: Array | None) -> bool:
        return a is not None and a.ndim == rank and a.shape[0] != 1

    def drop(a: Array | None) -> Array | None:
        return a[0] if a is not None and a.ndim == rank and a.shape[0] == 1 else a

    size = query.shape[0]
    return jax.vmap(
        functools.partial(_over_batch, attend),
        in_axes=(0, 0, 0, 0 if mapped(bias) else None, 0 if mapped(mask) else None, 0),
    )(query, key, value, drop(bias), drop(mask), index * size + jnp.arange(size))
