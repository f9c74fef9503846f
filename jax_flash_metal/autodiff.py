"""Reverse-mode derivative: what the forward pass saves, what the backward pass does.

    p  = exp(x - logsumexp);   delta = rowsum(dout ∘ out) - dlogsumexp
    ds = p ∘ (dout · vᵀ - delta)
    dq = scale * ds · k;       dk = scale * dsᵀ · q;       dv = pᵀ · dout

The forward rule saves the operands, out and logsumexp, never an array of q_len * kv_len
elements. A gradient of logsumexp only changes delta. The fused backward is itself
differentiable, through the formulas of `reference`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from jax_flash_metal import primitives, reference
from jax_flash_metal._jax_compat import checkpoint_name
from jax_flash_metal.config import AttentionConfig, AttentionOperands
from jax_flash_metal.reference import Gradients

Array = jax.Array

# For jax.checkpoint policies such as save_only_these_names.
OUT_NAME = "flash_attention_out"
LOGSUMEXP_NAME = "flash_attention_logsumexp"


class Residuals(NamedTuple):
    operands: AttentionOperands
    out: Array
    logsumexp: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attention(
    operands: AttentionOperands, config: AttentionConfig, fused: bool
) -> tuple[Array, Array]:
    """Returns out and logsumexp; `fused`: through our primitives."""
    if fused:
        return primitives.attention_forward(*operands[:3], config=config)
    return reference.attention(operands, config)


def _attention_fwd(
    operands: AttentionOperands, config: AttentionConfig, fused: bool
) -> tuple[tuple[Array, Array], Residuals]:
    # Through `attention` again: an outer gradient differentiates this rule.
    out, logsumexp = attention(operands, config, fused)
    out = checkpoint_name(out, OUT_NAME)
    logsumexp = checkpoint_name(logsumexp, LOGSUMEXP_NAME)
    return (out, logsumexp), Residuals(operands, out, logsumexp)


def _attention_bwd(
    config: AttentionConfig,
    fused: bool,
    residuals: Residuals,
    cotangents: tuple[Array, Array],
) -> tuple[AttentionOperands]:
    operands, out, logsumexp = residuals
    dout, dlogsumexp = cotangents
    if fused:
        gradients = Gradients(
            *_fused_backward(*operands[:3], out, logsumexp, dout, dlogsumexp, config)
        )
    else:
        gradients = reference.attention_backward(
            operands, out, logsumexp, dout, dlogsumexp, config
        )
    # The other fields stay None on purpose: masks, ids, lengths, offsets and dropout
    # keys are not differentiable.
    return (AttentionOperands(**gradients._asdict()),)


attention.defvjp(_attention_fwd, _attention_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _fused_backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    config: AttentionConfig,
) -> tuple[Array, Array, Array]:
    return primitives.attention_backward(
        query, key, value, out, logsumexp, dout, dlogsumexp, config=config
    )


def _fused_backward_fwd(
    *arguments: Any,
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    # Through `_fused_backward` again, as above: for the third derivative.
    return _fused_backward(*arguments), arguments[:-1]


def _fused_backward_bwd(
    config: AttentionConfig,
    arguments: tuple[Array, ...],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Array, ...]:
    backward = functools.partial(reference.plain_attention_backward, config=config)
    _, pullback = jax.vjp(backward, *arguments)
    gradients: tuple[Array, ...] = pullback(cotangents)
    return gradients


_fused_backward.defvjp(_fused_backward_fwd, _fused_backward_bwd)
