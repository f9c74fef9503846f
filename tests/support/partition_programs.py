"""Programs with custom calls, each in two forms: with the calls, and in plain JAX.

A program is a function of `ops` and arrays. `ops` is CALLS or PLAIN: the same functions
as typed FFI calls of targets that nothing registers, or as jax.numpy.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import stablehlo
from jax_flash_metal._jax_compat import ffi
from tests.support import plan_executor

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def ffi_call(target, results, *operands, **attributes):
    if JAX_VERSION >= (0, 5):
        return ffi.ffi_call(target, results)(*operands, **attributes)
    return ffi.ffi_call(target, results, *operands, **attributes)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# The mathematics, for NumPy and for jax.numpy.


def _affine(np_, x, scale):
    return (x * scale + 1).astype(x.dtype)


def _pair(np_, x, y):
    return x + y, x * y


def _attention(np_, q, k, v):
    scores = np_.einsum("btd,bsd->bts", q, k) * np.float32(0.5)
    weights = np_.exp(scores - scores.max(-1, keepdims=True))
    probs = weights / weights.sum(-1, keepdims=True)
    return probs, np_.einsum("bts,bsd->btd", probs, v)


def _attention_backward(np_, q, k, v, g):
    probs, _ = _attention(np_, q, k, v)
    dv = np_.einsum("bts,btd->bsd", probs, g)
    dprobs = np_.einsum("btd,bsd->bts", g, v)
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True))
    dscores = dscores * np.float32(0.5)
    dq = np_.einsum("bts,bsd->btd", dscores, k)
    dk = np_.einsum("bts,btd->bsd", dscores, q)
    return dq, dk, dv


HANDLERS = {
    "test_affine": lambda attributes, x, types: [
        _affine(np, x[0], attributes["scale"])
    ],
    "test_pair": lambda attributes, x, types: list(_pair(np, *x)),
    "test_attention": lambda attributes, x, types: [_attention(np, *x)[1]],
    "test_attention_backward": lambda attributes, x, types: list(
        _attention_backward(np, *x)
    ),
}
TARGETS = frozenset(HANDLERS)


def _make_ops(*, as_calls):
    def affine_of(scale):
        @jax.custom_vjp
        def affine(x):
            if as_calls:
                return ffi_call("test_affine", like(x), x, scale=np.float32(scale))
            return _affine(jnp, x, np.float32(scale))

        # The backward is a call as well.
        affine.defvjp(lambda x: (affine(x), ()), lambda _, g: (affine(g) - 1,))
        return affine

    def pair(x, y):
        if as_calls:
            return tuple(ffi_call("test_pair", (like(x), like(y)), x, y))
        return _pair(jnp, x, y)

    @jax.custom_vjp
    def attention(q, k, v):
        if as_calls:
            return ffi_call("test_attention", like(q), q, k, v)
        return _attention(jnp, q, k, v)[1]

    def attention_backward(saved, g):
        if as_calls:
            results = tuple(map(like, saved))
            return tuple(ffi_call("test_attention_backward", results, *saved, g))
        return _attention_backward(jnp, *saved, g)

    attention.defvjp(lambda *qkv: (attention(*qkv), qkv), attention_backward)
    return types.SimpleNamespace(
        affine=lambda x, scale=2.0: affine_of(scale)(x),
        pair=pair,
        attention=attention,
    )


CALLS = _make_ops(as_calls=True)
PLAIN = _make_ops(as_calls=False)


def lower(function, *arguments, **jit_options):
    """The program's bytes, as a plugin gets them, and the arguments that it takes."""
    lowered = jax.jit(function, **jit_options).lower(*arguments)
    program = stablehlo.serialize(lowered.compiler_ir("stablehlo"), None)
    leaves = jax.tree.leaves(arguments)
    kept = lowered._lowering.compile_args.get("kept_var_idx", range(len(leaves)))
    return program, [np.asarray(x) for i, x in enumerate(leaves) if i in kept]


def lower_with_calls(program, *arguments, **jit_options):
    return lower(functools.partial(program, CALLS), *arguments, **jit_options)


def run_and_compare(program, *arguments, handlers=HANDLERS, **jit_options):
    """Runs `program` in parts and whole, and compares; returns plan and executor."""
    code, kept = lower_with_calls(program, *arguments, **jit_options)
    plan = plan_executor.plan(code, handlers)
    executor = plan_executor.PlanExecutor(plan, handlers)
    results = executor.run(*kept)
    expected = jax.jit(functools.partial(program, PLAIN))(*arguments)
    assert_close(results, jax.tree.leaves(expected))
    return plan, executor


def assert_close(results, expected, rtol=1e-5, atol=1e-6):
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected):
        wanted = np.asarray(wanted)
        assert result.shape == wanted.shape and result.dtype == wanted.dtype
        if np.issubdtype(wanted.dtype, np.inexact):
            np.testing.assert_allclose(result, wanted, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(result, wanted)


def from_text(text: str) -> bytes:
    """A portable artifact of StableHLO text."""
    module, _ = stablehlo.parse(text.encode())
    return stablehlo.serialize(module, None)


def plan_text(text: str, targets, **options):
    return plan_executor.plan(from_text(text), targets, **options)
