"""The three primitives, forward, backward and gradient: abstract evaluation, batching.

`autodiff` binds them, `lowering` gives them their code.

Every operand has the same number of leading batch dimensions, each of the full size or
1 (shared). vmap adds one in front: an operand that is not mapped gets a dimension of
size 1, never a copy per batch element. Parameters: `config`; `names`, of the optional
operands that are there; and for the gradient primitive `of`, the operand whose gradient
it is, and `num_mapped`: in so many first batch dimensions, those that vmap added, the
gradient is full, in the others it has the operand's own size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import config as config_
from jax_flash_metal import lowering, sharding
from jax_flash_metal._jax_compat import (
    ShapedArray,
    allow_in_shard_map,
    apply_primitive,
    batching,
    primitive,
)
from jax_flash_metal.config import (
    DIFFERENTIABLE_OPTIONS,
    OPTIONAL_OPERANDS,
    AttentionConfig,
    AttentionOperands,
    operand_names,
)

Array = jax.Array

flash_attention_forward_p = primitive("flash_attention_forward")
flash_attention_backward_p = primitive("flash_attention_backward")
flash_attention_gradient_p = primitive("flash_attention_gradient")


def attention_forward(
    operands: AttentionOperands, *, config: AttentionConfig
) -> tuple[Array, Array]:
    """Returns out [*B, q_len, num_heads, value_head_dim], logsumexp [*B, N, q_len]."""
    arrays, names = _present(operands)
    out, logsumexp = flash_attention_forward_p.bind(*arrays, names=names, config=config)
    return out, logsumexp


def attention_backward(
    operands: AttentionOperands,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    *,
    config: AttentionConfig,
) -> tuple[Array, Array, Array]:
    """Returns dquery, dkey, dvalue, each with the full batch sizes."""
    arrays, names = _present(operands)
    dquery, dkey, dvalue = flash_attention_backward_p.bind(
        *(*arrays, out, logsumexp, dout, dlogsumexp), names=names, config=config
    )
    return dquery, dkey, dvalue


def operand_gradient(
    of: str,
    operands: AttentionOperands,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    *,
    config: AttentionConfig,
) -> Array:
    """The gradient of bias, sinks or alibi_slopes, shaped like it."""
    arrays, names = _present(operands)
    gradient: Array
    (gradient,) = flash_attention_gradient_p.bind(
        *(*arrays, out, logsumexp, dout, dlogsumexp),
        names=names,
        of=of,
        num_mapped=0,
        config=config,
    )
    return gradient


def _present(operands: AttentionOperands) -> tuple[list[Array], tuple[str, ...]]:
    names = tuple(n for n in OPTIONAL_OPERANDS if getattr(operands, n) is not None)
    return [a for a in operands if a is not None], names


def _full_batch(
    names: tuple[str, ...], arrays: Sequence[Any], has_residuals: bool
) -> tuple[int, ...]:
    """The call's batch sizes; checks that all arrays belong to one call."""
    named = dict(zip(operand_names(names, has_residuals), arrays, strict=True))
    if len({len(config_.batch_of(name, a)) for name, a in named.items()}) != 1:
        shapes = {name: a.shape for name, a in named.items()}
        raise ValueError(
            "the operands of one call must have the same number of batch dimensions, "
            f"but got {shapes}."
        )
    return config_.full_batch(named)


def _forward_abstract_eval(
    *arrays: Any, names: tuple[str, ...], config: AttentionConfig
) -> list[ShapedArray]:
    query, _, value = arrays[:3]
    batch = _full_batch(names, arrays, has_residuals=False)
    q_len, num_heads, _ = query.shape[-3:]
    return [
        ShapedArray((*batch, q_len, num_heads, value.shape[-1]), query.dtype),
        ShapedArray((*batch, num_heads, q_len), np.dtype(np.float32)),
    ]


def _backward_abstract_eval(
    *arrays: Any, names: tuple[str, ...], config: AttentionConfig
) -> list[ShapedArray]:
    batch = _full_batch(names, arrays, has_residuals=True)
    return [ShapedArray(batch + a.shape[-3:], a.dtype) for a in arrays[:3]]


def _gradient_abstract_eval(
    *arrays: Any,
    names: tuple[str, ...],
    of: str,
    num_mapped: int,
    config: AttentionConfig,
) -> list[ShapedArray]:
    assert of in DIFFERENTIABLE_OPTIONS and of in names
    batch = _full_batch(names, arrays, has_residuals=True)
    operand = arrays[3 + names.index(of)]
    shape = batch[:num_mapped] + operand.shape[num_mapped:]
    return [ShapedArray(shape, operand.dtype)]


def _batching_rule(
    prim: Any, operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    operands = [
        jnp.expand_dims(operand, 0) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes)
    ]
    if "num_mapped" in params:
        params["num_mapped"] += 1
    results = prim.bind(*operands, **params)
    return results, [0] * len(results)


def _register(
    which: str, prim: Any, abstract_eval: Callable[..., list[ShapedArray]]
) -> None:
    def typed_abstract_eval(
        *arrays: Any, names: tuple[str, ...], **params: Any
    ) -> list[Any]:
        return sharding.typed(
            abstract_eval(*arrays, names=names, **params),
            lowering.result_names(which, params.get("of")),
            arrays,
            operand_names(names, has_residuals=which != "forward"),
        )

    prim.multiple_results = True
    prim.def_abstract_eval(typed_abstract_eval)
    prim.def_impl(functools.partial(apply_primitive, prim))
    batching.primitive_batchers[prim] = functools.partial(_batching_rule, prim)
    allow_in_shard_map(prim)


_register("forward", flash_attention_forward_p, _forward_abstract_eval)
_register("backward", flash_attention_backward_p, _backward_abstract_eval)
_register("gradient", flash_attention_gradient_p, _gradient_abstract_eval)
lowering.register(
    forward=flash_attention_forward_p,
    backward=flash_attention_backward_p,
    gradient=flash_attention_gradient_p,
)
