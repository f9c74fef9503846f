"""Reverse-mode derivative: what the forward pass saves, what the backward pass does.

    p  = exp(x - logsumexp);   delta = rowsum(dout ∘ out) - dlogsumexp
    ds = p ∘ (dout · vᵀ - delta)
    dq = scale * ds · k;       dk = scale * dsᵀ · q;       dv = pᵀ · dout
    dbias, dsinks, dslopes: sums of ds and delta, see `reference`

The forward rule saves the operands, out and logsumexp, never an array of q_len * kv_len
elements. A gradient of logsumexp only changes delta. The gradients of bias, sinks and
alibi_slopes are calls of their own, so that one which nobody uses disappears from the
program. All of them are themselves differentiable, through the formulas of `reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from jax_flash_metal import primitives, reference
from jax_flash_metal._jax_compat import checkpoint_name
from jax_flash_metal.config import (
    DIFFERENTIABLE_OPTIONS,
    AttentionConfig,
    AttentionOperands,
)

Array = jax.Array

# For jax.checkpoint policies such as save_only_these_names.
OUT_NAME = "flash_attention_out"
LOGSUMEXP_NAME = "flash_attention_logsumexp"


class Residuals(NamedTuple):
    operands: AttentionOperands
    out: Array
    logsumexp: Array


class BackwardOperands(NamedTuple):
    operands: AttentionOperands
    out: Array
    logsumexp: Array
    dout: Array
    dlogsumexp: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attention(
    operands: AttentionOperands, config: AttentionConfig, fused: bool
) -> tuple[Array, Array]:
    """Returns out and logsumexp; `fused`: through our primitives."""
    if fused:
        return primitives.attention_forward(operands, config=config)
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
    arguments = BackwardOperands(*residuals, *cotangents)
    backward: Callable[..., tuple[Array, Array, Array]] = _plain_backward
    gradient: Callable[..., Array] = _plain_gradient
    if fused:
        backward, gradient = _fused_backward, _fused_gradient
    others = {
        name: gradient(arguments, config, name)
        for name in DIFFERENTIABLE_OPTIONS
        if getattr(residuals.operands, name) is not None
    }
    # The other fields stay None on purpose: masks, ids, lengths, offsets and dropout
    # keys are not differentiable.
    return (AttentionOperands(*backward(arguments, config), **others),)


attention.defvjp(_attention_fwd, _attention_bwd)


def _plain_backward(
    arguments: BackwardOperands, config: AttentionConfig
) -> tuple[Array, Array, Array]:
    return reference.attention_backward(*arguments, config)


def _plain_gradient(
    arguments: BackwardOperands, config: AttentionConfig, of: str
) -> Array:
    return reference.operand_gradient(of, *arguments, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _fused_backward(
    arguments: BackwardOperands, config: AttentionConfig
) -> tuple[Array, Array, Array]:
    return primitives.attention_backward(*arguments, config=config)


def _fused_backward_fwd(
    arguments: BackwardOperands, config: AttentionConfig
) -> tuple[tuple[Array, Array, Array], BackwardOperands]:
    # Through `_fused_backward` again, as above: for the third derivative.
    return _fused_backward(arguments, config), arguments


def _fused_backward_bwd(
    config: AttentionConfig,
    arguments: BackwardOperands,
    cotangents: tuple[Array, Array, Array],
) -> tuple[BackwardOperands]:
    _, pullback = jax.vjp(lambda a: _plain_backward(a, config), arguments)
    (gradients,) = pullback(cotangents)
    return (gradients,)


_fused_backward.defvjp(_fused_backward_fwd, _fused_backward_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fused_gradient(
    arguments: BackwardOperands, config: AttentionConfig, of: str
) -> Array:
    return primitives.operand_gradient(of, *arguments, config=config)


def _fused_gradient_fwd(
    arguments: BackwardOperands, config: AttentionConfig, of: str
) -> tuple[Array, BackwardOperands]:
    return _fused_gradient(arguments, config, of), arguments


def _fused_gradient_bwd(
    config: AttentionConfig, of: str, arguments: BackwardOperands, cotangent: Array
) -> tuple[BackwardOperands]:
    _, pullback = jax.vjp(lambda a: _plain_gradient(a, config, of), arguments)
    (gradients,) = pullback(cotangent)
    return (gradients,)


_fused_gradient.defvjp(_fused_gradient_fwd, _fused_gradient_bwd)
