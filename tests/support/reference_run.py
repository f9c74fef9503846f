"""The package's own reference (implementation="xla") behind native.py's signatures.

So that what judges the kernels judges it too, on the same calls.
"""

import functools

import jax
import numpy as np

from jax_flash_metal import reference
from jax_flash_metal.config import AttentionConfig, AttentionOperands

_OPTIONS = (
    *("is_causal", "sliding_window", "logits_soft_cap"),
    "dropout_rate",
)


def run_forward(query, key, value, **arguments):
    call = _call(query, key, value, **arguments)
    return _numpy(reference.attention(*call))


def run_backward(query, key, value, out, logsumexp, dout, dlogsumexp=None, **arguments):
    return _backward(
        reference.attention_backward,
        (query, key, value, out, logsumexp, dout, dlogsumexp),
        arguments,
    )


def run_gradient(
    of, query, key, value, out, logsumexp, dout, dlogsumexp=None, **arguments
):
    return _backward(
        functools.partial(reference.operand_gradient, of),
        (query, key, value, out, logsumexp, dout, dlogsumexp),
        arguments,
    )


def _backward(function, arrays, arguments):
    query, key, value, out, logsumexp, dout, dlogsumexp = arrays
    operands, config = _call(query, key, value, **arguments)
    if dlogsumexp is None:
        dlogsumexp = np.zeros_like(logsumexp)
    return _numpy(function(operands, out, logsumexp, dout, dlogsumexp, config=config))


def _call(query, key, value, *, scale=None, q_offset=0, **arguments):
    options = {n: arguments.pop(n) for n in _OPTIONS if n in arguments}
    if isinstance(q_offset, np.ndarray):
        arguments["q_offset"], q_offset = q_offset, 0
    if scale is None:
        scale = query.shape[-1] ** -0.5
    config = AttentionConfig(scale=scale, q_offset=q_offset, **options)
    return AttentionOperands(query, key, value, **arguments), config


def _numpy(results):
    return jax.tree.map(
        np.asarray, tuple(results) if isinstance(results, list) else results
    )
