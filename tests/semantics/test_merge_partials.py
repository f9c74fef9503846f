"""Attention over parts of the keys, merged, is attention over all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import flash_attention, merge_partials
from tests.semantics import attention_cases as cases
from tests.semantics.attention_cases import B, N, S, T, V
from tests.support.closeness import assert_close

# Causal: the early rows see nothing of the later parts, the first rows of none.
PARTS = [(0, 11), (11, 30), (30, S)]
OFFSET = -4
NAMES = ("dquery", "dkey", "dvalue", "dsinks")


def in_parts(query, key, value, sinks, implementation=None):
    results = [
        flash_attention(
            query,
            key[:, start:end],
            value[:, start:end],
            is_causal=True,
            q_offset=OFFSET - start,
            return_logsumexp=True,
            implementation=implementation,
        )
        for start, end in PARTS
    ]
    return merge_partials(*zip(*results), sinks=sinks)


def whole(query, key, value, sinks):
    return flash_attention(
        *(query, key, value),
        is_causal=True,
        q_offset=OFFSET,
        sinks=sinks,
        return_logsumexp=True,
        implementation="xla",
    )


@functools.partial(jax.jit, static_argnums=0)
def results_and_gradients(attend, operands, cotangents):
    results, pullback = jax.vjp(attend, *operands)
    return results, pullback(cotangents)


@pytest.mark.parametrize(
    ("implementation", "with_sinks"),
    [("xla", True), ("metal", True), ("metal", False), ("cpu", True)],
)
def test_value_and_gradients(implementation, with_sinks):
    rng = np.random.default_rng(3)
    operands = cases.qkv(rng, np.float32)
    cotangents = cases.normal(rng, B, T, N, V), cases.normal(rng, B, N, T)
    options = {"sinks": None}
    if with_sinks:
        operands += (cases.normal(rng, N),)
        options = {}
    merged = functools.partial(in_parts, implementation=implementation, **options)
    plain = functools.partial(whole, **options)
    (out, lse), gradients = results_and_gradients(merged, operands, cotangents)
    (want_out, want_lse), wanted = results_and_gradients(plain, operands, cotangents)
    assert_close("out", out, np.asarray(want_out), "float32")
    # Rows without keys have the same -inf in both.
    blind = np.isneginf(np.asarray(want_lse))
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), blind)
    assert blind[..., :-OFFSET].all() and not blind[..., -OFFSET:].any()
    lse, want_lse = (np.where(blind, 0, np.asarray(x)) for x in (lse, want_lse))
    assert_close("logsumexp", lse, want_lse, "float32")
    for name, got, want in zip(NAMES, gradients, wanted):
        assert_close(name, got, np.asarray(want), "float32")


attend = functools.partial(
    flash_attention, return_logsumexp=True, implementation="metal"
)


def test_sinks_of_one_part():
    """The same as sinks of all, if every row sees a key there."""
    rng = np.random.default_rng(3)
    query, key, value = cases.qkv(rng, np.float32)
    sinks = cases.normal(rng, N)
    pairs = [(key[:, start:end], value[:, start:end]) for start, end in PARTS]
    of_one = [
        attend(query, *pair, sinks=of_part)
        for pair, of_part in zip(pairs, (None, sinks, None))
    ]
    of_none = [attend(query, *pair) for pair in pairs]
    one, other = merge_partials(*zip(*of_one)), merge_partials(*zip(*of_none), sinks)
    assert_close("out", one[0], np.asarray(other[0]), "float32")
    assert_close("logsumexp", one[1], np.asarray(other[1]), "float32")


def test_without_batch_dimension_and_narrow_dtypes():
    rng = np.random.default_rng(3)
    query, key, value = (x[0] for x in cases.qkv(rng, np.dtype(np.float16)))
    parts = [attend(query, key[start:end], value[start:end]) for start, end in PARTS]
    out, lse = merge_partials(*zip(*parts))
    assert out.dtype == jnp.float16 and lse.dtype == jnp.float32
    assert_close("out", out, np.asarray(attend(query, key, value)[0]), "float16")


def test_one_part():
    part = attend(*cases.qkv(np.random.default_rng(3), np.float32))
    out, lse = merge_partials(*zip(part))
    np.testing.assert_array_equal(out, part[0])
    np.testing.assert_array_equal(lse, part[1])


def test_what_counts_nothing_may_hold_anything():
    out, logsumexp = jnp.ones((2, 5, 3, 4)), jnp.zeros((2, 3, 5))
    nothing = jnp.full_like(out, jnp.nan), jnp.full_like(logsumexp, -jnp.inf)
    merged = merge_partials([out, nothing[0]], [logsumexp, nothing[1]])
    np.testing.assert_array_equal(merged[0], out)
    np.testing.assert_array_equal(merged[1], logsumexp)


@pytest.mark.parametrize(
    ("outs", "error", "message"),
    [
        (None, TypeError, "outs must be a sequence of arrays, but got NoneType."),
        (
            [jnp.ones((2, 5, 3, 4), jnp.int32)],
            ValueError,
            "outs must have a floating dtype, but got outs of dtype int32.",
        ),
    ],
)
def test_wrong_parts(outs, error, message):
    with pytest.raises(error) as caught:
        merge_partials(outs, [jnp.zeros((2, 3, 5))])
    assert str(caught.value) == message
