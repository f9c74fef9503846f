"""The two primitives, forward and backward: abstract evaluation and batching.

Only plain attention (query, key, value, scale, is_causal, static q_offset) gets here;
`autodiff` binds them, `lowering` gives them their code.

Every operand has the same number of leading batch dimensions, each of the full size or
1 (shared). vmap adds one in front: an operand that is not mapped gets a dimension of
size 1, never a copy per batch element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import lowering
from jax_flash_metal._jax_compat import (
    ShapedArray,
    apply_primitive,
    batching,
    primitive,
)
from jax_flash_metal.config import AttentionConfig

Array = jax.Array

flash_attention_forward_p = primitive("flash_attention_forward")
flash_attention_backward_p = primitive("flash_attention_backward")


def attention_forward(
    query: Array, key: Array, value: Array, *, config: AttentionConfig
) -> tuple[Array, Array]:
    """Returns out [*B, q_len, num_heads, value_head_dim], logsumexp [*B, N, q_len]."""
    out, logsumexp = flash_attention_forward_p.bind(query, key, value, config=config)
    return out, logsumexp


def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    *,
    config: AttentionConfig,
) -> tuple[Array, Array, Array]:
    """Returns dquery, dkey, dvalue, each with the full batch sizes."""
    dquery, dkey, dvalue = flash_attention_backward_p.bind(
        query, key, value, out, logsumexp, dout, dlogsumexp, config=config
    )
    return dquery, dkey, dvalue


def full_batch(*batches: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes of a call from those of its operands."""
    return tuple(np.broadcast_shapes(*(tuple(batch) for batch in batches)))


def _forward_abstract_eval(
    query: Any, key: Any, value: Any, *, config: AttentionConfig
) -> list[ShapedArray]:
    batch = full_batch(*(a.shape[:-3] for a in (query, key, value)))
    q_len, num_heads, _ = query.shape[-3:]
    return [
        ShapedArray((*batch, q_len, num_heads, value.shape[-1]), query.dtype),
        ShapedArray((*batch, num_heads, q_len), np.dtype(np.float32)),
    ]


def _backward_abstract_eval(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dout: Any,
    dlogsumexp: Any,
    *,
    config: AttentionConfig,
) -> list[ShapedArray]:
    batch = full_batch(
        *(a.shape[:-3] for a in (query, key, value, out, dout)),
        *(a.shape[:-2] for a in (logsumexp, dlogsumexp)),
    )
    return [ShapedArray(batch + a.shape[-3:], a.dtype) for a in (query, key, value)]


def _batching_rule(
    prim: Any,
    operands: Sequence[Array],
    axes: Sequence[int | None],
    *,
    config: AttentionConfig,
) -> tuple[list[Array], list[int]]:
    operands = [
        jnp.expand_dims(operand, 0) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes)
    ]
    results = prim.bind(*operands, config=config)
    return results, [0] * len(results)


def _register(prim: Any, abstract_eval: Callable[..., list[ShapedArray]]) -> None:
    prim.multiple_results = True
    prim.def_abstract_eval(abstract_eval)
    prim.def_impl(functools.partial(apply_primitive, prim))
    batching.primitive_batchers[prim] = functools.partial(_batching_rule, prim)


_register(flash_attention_forward_p, _forward_abstract_eval)
_register(flash_attention_backward_p, _backward_abstract_eval)
lowering.register(flash_attention_forward_p, flash_attention_backward_p)
