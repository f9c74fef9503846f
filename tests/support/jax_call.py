"""A case as a call of the public function: jitted, with every gradient.

Public calls have one batch dim, and sinks, slopes, q_offset and the dropout key are the
same for all of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import flash_attention
from tests.support.cases import DIFFERENTIABLE
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import Results

_SHARED = ("q_offset", "sinks", "alibi_slopes", "dropout_key")


def public(case):
    """The case with the operands' batch dims as the public function has them.

    And without a q_offset that has no effect, which it refuses.
    """
    assert len(case.batch) == 1
    if not has_offset(case):
        case = dataclasses.replace(case, q_offset=0, traced_offset=False)
    whole = {name: case.batch for name in case.features if name not in ("bias", "mask")}
    return dataclasses.replace(
        case,
        query_batch=None,
        key_batch=None,
        value_batch=None,
        feature_batch={**case.feature_batch, **whole, **dict.fromkeys(_SHARED, (1,))},
    )


def has_offset(case):
    """Whether q_offset says anything."""
    has_window = case.sliding_window not in (None, (None, None))
    return case.is_causal or has_window or case.slopes


def make_public_arguments(case):
    """Keyword arguments of flash_attention, and of reference_f64.attention, for it."""
    arguments = make_arguments(case)
    if not has_offset(case):
        del arguments["q_offset"]
    for name in _SHARED:
        if name in arguments and isinstance(arguments[name], np.ndarray):
            arguments[name] = arguments[name][0]
    ids = [arguments.pop(f"{side}_segment_ids", None) for side in ("q", "kv")]
    if case.segments:
        arguments["segment_ids"] = tuple(ids)
    for name in ("dropout_batch_indices", "dropout_head_indices"):
        arguments.pop(name, None)  # those of a call of its own
    return arguments


def run(implementation, inputs, **arguments) -> Results:
    """All results of the call, as NumPy arrays."""
    traced = {n: x for n, x in arguments.items() if is_array(x)}
    static = {n: x for n, x in arguments.items() if n not in traced}
    call = functools.partial(results, implementation, static)
    arrays = jax.jit(call)(inputs.operands, traced, inputs.dout, inputs.dlogsumexp)
    return Results(*(None if x is None else np.asarray(x) for x in arrays))


def run_case(implementation, case) -> Results:
    return run(implementation, make_inputs(case), **make_public_arguments(case))


def results(implementation, static, operands, traced, dout, dlogsumexp):
    """The fields of Results, traceable."""
    differentiable = {n: traced[n] for n in DIFFERENTIABLE.values() if n in traced}
    rest = {n: x for n, x in traced.items() if n not in differentiable}

    def attend(operands, differentiable):
        return flash_attention(
            *operands,
            **differentiable,
            **rest,
            **static,
            return_logsumexp=True,
            implementation=implementation,
        )

    (out, logsumexp), pullback = jax.vjp(attend, operands, differentiable)
    gradients, others = pullback((jnp.asarray(dout), jnp.asarray(dlogsumexp)))
    return (
        *(out, logsumexp, *gradients),
        *(others.get(operand) for operand in DIFFERENTIABLE.values()),
    )


def is_array(x):
    """Also the pair of segment ids, but not that of a window."""
    first = x[0] if isinstance(x, tuple) else x
    return isinstance(first, (np.ndarray, np.generic, jax.Array))
