"""Attention over parts of the keys, merged, is attention over all keys."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import flash_attention, merge_partials
from tests.semantics import attention_cases as cases
from tests.semantics.attention_cases import S
from tests.support.closeness import assert_close


def in_parts(query, key, value):
    # Causal: the early rows see nothing of the later parts.
    parts = [(0, 11), (11, 30), (30, S)]
    results = [
        flash_attention(
            query,
            key[:, start:end],
            value[:, start:end],
            is_causal=True,
            q_offset=-start,
            return_logsumexp=True,
        )
        for start, end in parts
    ]
    return merge_partials(*zip(*results))


def whole(query, key, value):
    return flash_attention(query, key, value, is_causal=True, return_logsumexp=True)


def test_value_and_gradients():
    qkv = cases.qkv(np.random.default_rng(3), np.float32)
    rng = np.random.default_rng(4)
    (out, lse), pullback = jax.vjp(in_parts, *qkv)
    (want_out, want_lse), want_pullback = jax.vjp(whole, *qkv)
    assert_close("out", out, np.asarray(want_out), "float32")
    assert_close("logsumexp", lse, np.asarray(want_lse), "float32")
    cotangents = tuple(jnp.asarray(cases.normal(rng, *x.shape)) for x in (out, lse))
    names = ("dquery", "dkey", "dvalue")
    for name, got, want in zip(names, pullback(cotangents), want_pullback(cotangents)):
        assert_close(name, got, np.asarray(want), "float32")


def test_rows_that_no_part_sees():
    query, key, value = cases.qkv(np.random.default_rng(3), np.float32)

    def merged(query):
        part = flash_attention(
            *(query, key, value), is_causal=True, q_offset=-4, return_logsumexp=True
        )
        return merge_partials(*zip(part, part))

    out, lse = merged(query)
    assert (np.asarray(out[:, :4]) == 0).all()
    assert np.isneginf(np.asarray(lse[..., :4])).all()
    gradient = jax.grad(lambda query: merged(query)[0].sum())(query)
    assert np.isfinite(np.asarray(gradient)).all()
