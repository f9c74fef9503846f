"""Plain unfused attention in the input dtype: what rule 1 of the tolerances uses.

As a framework without a fused kernel would do it: every array-valued step is rounded to
the input dtype, matrix products accumulate in float32. Not a reference.
"""

import numpy as np

from tests.support.reference_f64 import Forward, Gradients


def attention(query, key, value, *, scale, is_causal=False, q_offset=0) -> Forward:
    dtype = query.dtype
    probs, logsumexp = _probs(_scores(query, key, scale, is_causal, q_offset), dtype)
    out = _product("...kgts,...skh->...tkgh", probs, value, dtype)
    return Forward(_merge_groups(out), logsumexp.reshape(*_heads_shape(logsumexp)))


def attention_gradients(
    query, key, value, dout, dlogsumexp, *, scale, is_causal=False, q_offset=0
) -> Gradients:
    """The contract's formulas: p = exp(x - lse), delta = rowsum(dout * out) - dlse."""
    dtype = query.dtype
    num_kv_heads = key.shape[-2]
    round_ = _rounder(dtype)
    x = _scores(query, key, scale, is_causal, q_offset)
    probs, logsumexp = _probs(x, dtype)
    out = _product("...kgts,...skh->...tkgh", probs, value, dtype)
    shift = np.where(np.isneginf(logsumexp), np.float32(0), logsumexp)
    probs = round_(np.exp(x - shift[..., None]))
    q, do = _split_groups(query, num_kv_heads), _split_groups(dout, num_kv_heads)
    dlse = dlogsumexp.reshape(
        *dlogsumexp.shape[:-2], num_kv_heads, -1, dlogsumexp.shape[-1]
    )
    dp = _product("...tkgh,...skh->...kgts", do, value, dtype)
    product = round_(do.astype(np.float32) * out)
    delta = round_(np.moveaxis(product.sum(-1), -3, -1)) - dlse
    ds = round_(probs * round_(dp - delta[..., None]))
    ds = round_(ds * np.float32(scale))
    batch = ds.shape[:-4]
    dquery = _product("...kgts,...skh->...tkgh", ds, key, dtype)
    dkey = _product("...kgts,...tkgh->...skh", ds, q, dtype)
    dvalue = _product("...kgts,...tkgh->...skh", probs, do, dtype)
    full = [
        np.broadcast_to(x, (*batch, *x.shape[-3:]))
        for x in (_merge_groups(dquery), dkey, dvalue)
    ]
    return Gradients(*full, dbias=None, dsinks=None)


def _scores(query, key, scale, is_causal, q_offset):
    """[..., kv heads, groups, q_len, kv_len], float32 arrays of rounded values."""
    round_ = _rounder(query.dtype)
    q = _split_groups(query, key.shape[-2])
    x = _product("...tkgh,...skh->...kgts", q, key, query.dtype)
    x = round_(x * np.float32(scale))
    if is_causal:
        row, column = np.ogrid[: x.shape[-2], : x.shape[-1]]
        x = np.where(column <= row + q_offset, x, np.float32(-np.inf))
    return x


def _probs(x, dtype):
    """probs like x, and logsumexp."""
    round_ = _rounder(dtype)
    largest = x.max(-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isneginf(largest), np.float32(0), largest)
    e = round_(np.exp(round_(x - shift)))
    total = round_(e.sum(-1, keepdims=True))
    probs = round_(e / np.where(total == 0, np.float32(1), total))
    with np.errstate(divide="ignore"):
        logsumexp = (shift + np.log(total))[..., 0]
    return probs, logsumexp


def _rounder(dtype):
    def round_(x):
        # Overflow in float16 is the baseline's own failure, not a warning of ours.
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype).astype(np.float32)

    return round_


def _product(subscripts, a, b, dtype):
    a, b = a.astype(np.float32), b.astype(np.float32)
    return _rounder(dtype)(np.einsum(subscripts, a, b, optimize=True))


def _split_groups(x, num_kv_heads):
    return x.reshape(*x.shape[:-2], num_kv_heads, -1, x.shape[-1])


def _merge_groups(x):
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _heads_shape(logsumexp):
    *batch, kv_heads, groups, q_len = logsumexp.shape
    return (*batch, kv_heads * groups, q_len)
