"""The unfused definition of attention in plain jax.numpy: every rule of the contract.

The meaning that the kernels are held to, and what runs where there is no kernel. Scores
and sums are float32 (float64 for float64 inputs) and memory is O(q_len * kv_len). Plain
differentiable code: forward mode, reverse mode and any order of both.

    x     = scale * (q · kᵀ) + bias - slope * |i + q_offset - j|
    x     = cap * tanh(x / cap)
    p     = exp(x - logsumexp) over the visible keys, 0 elsewhere
    out   = dropout(p) · v

    delta = rowsum(dout ∘ out) - dlogsumexp
    dp    = dropout(dout · vᵀ)
    ds    = p ∘ (dp - delta) ∘ (1 - (x / cap)²)
    dq    = scale * ds · k;   dk = scale * dsᵀ · q;   dv = dropout(p)ᵀ · dout
    dbias = ds summed over the axes that bias broadcasts;  dsinks = -Σ p_sink ∘ delta
    dslopes = -Σ ds ∘ |i + q_offset - j|

A non-finite input must reach the rows that see it and no others, but 0 * NaN is NaN in
every product. So non-finite elements are replaced by 0 and the rows that see one are
poisoned: their visible scores become NaN.

Letters of the einsums: t queries, s keys, k key-value heads, g query heads per
key-value head, h head_dim, `...` batch dimensions, each full or 1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash_metal.config import AttentionConfig, AttentionOperands, full_batch

Array = jax.Array


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _jit(function: _Function) -> _Function:
    """Compiled as a whole also outside a program, where it would be 100 dispatches.

    The body broadcasts and promotes implicitly, also where the user forbids it to their
    own code.
    """

    @functools.wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    static = [
        name
        for name in inspect.signature(function).parameters
        if name in ("config", "of", "num_mapped")
    ]
    return cast(_Function, jax.jit(body, static_argnames=static))


@_jit
def attention(
    operands: AttentionOperands, config: AttentionConfig
) -> tuple[Array, Array]:
    """Returns out [*B, q_len, num_heads, value_head_dim], logsumexp [*B, N, q_len]."""
    batch = full_batch(operands._asdict())
    scores = _scores(operands, config)
    sinks = None if operands.sinks is None else _per_head(operands.sinks, operands)
    probs, logsumexp = _softmax(scores, sinks)
    weights = _dropout(probs, operands, config)
    out = _einsum("...kgts,...skh->...tkgh", weights, _finite(operands.value))
    out = jnp.where(_move_rows_first(scores.has_keys), out, 0)
    out = _merge_heads(out, axis=-3).astype(operands.query.dtype)
    logsumexp = _merge_heads(logsumexp, axis=-3)
    return (
        jnp.broadcast_to(out, batch + out.shape[-3:]),
        jnp.broadcast_to(logsumexp, batch + logsumexp.shape[-2:]),
    )


@_jit
def attention_backward(
    operands: AttentionOperands,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    config: AttentionConfig,
) -> tuple[Array, Array, Array]:
    """Returns dquery, dkey, dvalue from the residuals, with the full batch sizes."""
    batch = _full_batch(operands, out, logsumexp, dout, dlogsumexp)
    num_kv_heads = operands.key.shape[-2]
    rows = _backward_rows(operands, out, logsumexp, dout, dlogsumexp, config)
    probs, dx = _score_gradients(rows, operands, config)

    query = _split_heads(_finite(operands.query), num_kv_heads, axis=-2)
    key = _finite(operands.key)
    dquery = config.scale * _einsum("...kgts,...skh->...tkgh", dx, key)
    dkey = config.scale * _einsum("...kgts,...tkgh->...skh", dx, query)
    weights = _dropout(probs, operands, config)
    dvalue = _einsum("...kgts,...tkgh->...skh", weights, rows.dout)

    def full(gradient: Array, primal: Array) -> Array:
        shape = batch + gradient.shape[-3:]
        return jnp.broadcast_to(gradient, shape).astype(primal.dtype)

    return (
        full(_merge_heads(dquery, axis=-3), operands.query),
        full(dkey, operands.key),
        full(dvalue, operands.value),
    )


@_jit
def operand_gradient(
    of: str,
    operands: AttentionOperands,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    config: AttentionConfig,
    num_mapped: int = 0,
) -> Array:
    """The gradient of bias, sinks or alibi_slopes, from the residuals.

    It is summed over every dimension in which the operand has size 1, but for the first
    `num_mapped` batch dimensions, in which it is full.
    """
    batch = _full_batch(operands, out, logsumexp, dout, dlogsumexp)
    rows = _backward_rows(operands, out, logsumexp, dout, dlogsumexp, config)
    if of == "sinks":
        assert operands.sinks is not None
        operand = operands.sinks
        sinks = _per_head(operand, operands)
        has_keys = rows.scores.has_keys
        log_probs = jnp.where(has_keys, sinks - rows.logsumexp - rows.rest, 0)
        gradient = jnp.where(has_keys, -jnp.exp(log_probs) * rows.delta, 0)
        gradient = _merge_heads(gradient, axis=-3).sum(-1)
    elif of == "alibi_slopes":
        assert operands.alibi_slopes is not None
        operand = operands.alibi_slopes
        _, dx = _score_gradients(rows, operands, config)
        gradient = -dx * _distance(operands, config)
        gradient = _merge_heads(gradient, axis=-4).sum((-1, -2))
    else:
        assert of == "bias" and operands.bias is not None
        operand = operands.bias
        _, dx = _score_gradients(rows, operands, config)
        gradient = _merge_heads(dx, axis=-4)
    # Full before it is summed: a batch dimension that no part of it walks counts often.
    rank = len(batch)
    gradient = jnp.broadcast_to(gradient, batch + gradient.shape[rank:])
    shape = batch[:num_mapped] + operand.shape[num_mapped:]
    return _sum_to(gradient, shape).astype(operand.dtype)


def _full_batch(operands: AttentionOperands, *residuals: Array) -> tuple[int, ...]:
    names = ("out", "logsumexp", "dout", "dlogsumexp")
    return full_batch({**operands._asdict(), **dict(zip(names, residuals))})


class _BackwardRows(NamedTuple):
    """What the backward pass needs per query."""

    scores: _Scores
    # [..., k, g, t]; p = exp(x - logsumexp - rest). 0 without keys, NaN for a bad
    # cotangent; rest is 0 but for a logsumexp too large to hold it.
    logsumexp: Array
    rest: Array
    delta: Array  # [..., k, g, t]
    dout: Array  # [..., t, k, g, h], finite


def _backward_rows(
    operands: AttentionOperands,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    config: AttentionConfig,
) -> _BackwardRows:
    num_kv_heads = operands.key.shape[-2]
    scores = _scores(operands, config)
    out = _split_heads(out.astype(scores.x.dtype), num_kv_heads, axis=-2)
    dout = _split_heads(dout, num_kv_heads, axis=-2)
    logsumexp = _split_heads(logsumexp, num_kv_heads, axis=-2)
    dlogsumexp = _split_heads(dlogsumexp, num_kv_heads, axis=-2)
    bad_cotangent = ~_move_rows_last(jnp.isfinite(dout).all(-1)) | ~jnp.isfinite(
        dlogsumexp
    )
    dout, dlogsumexp = _finite(dout), _finite(dlogsumexp)
    logsumexp = jnp.where(scores.has_keys, logsumexp, 0) + _nan_where(bad_cotangent)
    delta = _move_rows_last((dout * out).sum(-1)) - dlogsumexp
    # Beyond 4096, float32 has lost 1e-4 and more of the logsumexp, at 1e9 (a padding
    # bias on all keys) all of log(sum). There the row is summed again.
    sinks = None if operands.sinks is None else _per_head(operands.sinks, operands)
    _, row_max, total = _row_sums(scores, sinks)
    is_coarse = jnp.abs(logsumexp) > 4096
    rest = jnp.where(is_coarse, jnp.log(jnp.where(is_coarse, total, 1)), 0)
    logsumexp = jnp.where(is_coarse, row_max, logsumexp)
    return _BackwardRows(scores, logsumexp, rest, delta, dout)


def _score_gradients(
    rows: _BackwardRows, operands: AttentionOperands, config: AttentionConfig
) -> tuple[Array, Array]:
    """Returns probs and the gradient of the scores before the softcap."""
    scores, logsumexp = rows.scores, rows.logsumexp[..., None]
    visible = scores.visible
    # Hidden scores are replaced before exp: a value that overflows there would make
    # the derivative of this function 0 * inf.
    x = jnp.where(visible, scores.x, logsumexp)
    probs = jnp.where(visible, jnp.exp(x - logsumexp - rows.rest[..., None]), 0)
    dprobs = _einsum("...tkgh,...skh->...kgts", rows.dout, _finite(operands.value))
    dprobs = _dropout(dprobs, operands, config)
    dx = jnp.where(visible, probs * (dprobs - rows.delta[..., None]), 0)
    if config.logits_soft_cap is not None:
        dx = dx * (1 - jnp.square(scores.x / config.logits_soft_cap))
    return probs, dx


class _Scores(NamedTuple):
    x: Array  # [..., k, g, t, s] after the softcap; 0 where hidden, NaN where poisoned
    visible: Array  # bool, every dimension full or 1, [..., s] full
    has_keys: Array  # bool [..., k, g, t]: the row is not fully masked


def _scores(operands: AttentionOperands, config: AttentionConfig) -> _Scores:
    num_kv_heads = operands.key.shape[-2]
    query = _split_heads(_finite(operands.query), num_kv_heads, axis=-2)
    x = _einsum("...tkgh,...skh->...kgts", query, _finite(operands.key))
    x = config.scale * x
    if operands.bias is not None:
        x = x + _split_heads(_finite(operands.bias), num_kv_heads, axis=-3)
    if operands.alibi_slopes is not None:
        slopes = _per_head(_finite(operands.alibi_slopes), operands)
        x = x - slopes[..., None] * _distance(operands, config)

    visible = _visible(operands, config)
    has_keys = visible.any(-1)
    poison = _nan_where(_sees_non_finite(operands, visible))
    # Before the softcap, whose derivative at a hidden NaN would be one.
    x = jnp.where(visible, x + poison[..., None], 0)
    if config.logits_soft_cap is not None:
        x = config.logits_soft_cap * jnp.tanh(x / config.logits_soft_cap)
    return _Scores(x, visible, has_keys)


def _softmax(scores: _Scores, sinks: Array | None) -> tuple[Array, Array]:
    """Returns probs [..., k, g, t, s] and logsumexp [..., k, g, t]."""
    weights, row_max, total = _row_sums(scores, sinks)
    probs = jnp.where(scores.visible, weights / total[..., None], 0)
    logsumexp = jnp.where(scores.has_keys, row_max + jnp.log(total), -jnp.inf)
    return probs, logsumexp


def _row_sums(scores: _Scores, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Returns exp(x - row_max), row_max, which is finite, and the sum, 1 without keys.

    Every operand of exp and log is finite in hidden places too, so that derivatives
    never meet 0 * inf. The row maximum cancels; it needs no derivative.
    """
    x, visible, has_keys = scores
    hidden_low = lax.stop_gradient(jnp.where(visible, x, -jnp.inf))
    row_max = hidden_low.max(-1, initial=-jnp.inf)
    if sinks is not None:
        row_max = jnp.maximum(row_max, lax.stop_gradient(sinks))
    row_max = jnp.where(has_keys, row_max, 0)
    x = jnp.where(visible, x, row_max[..., None])
    weights = jnp.where(visible, jnp.exp(x - row_max[..., None]), 0)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(jnp.where(has_keys, sinks, row_max) - row_max)
    return weights, row_max, jnp.where(has_keys, total, 1)


def _visible(operands: AttentionOperands, config: AttentionConfig) -> Array:
    """Which keys each query sees, as bool [..., k or 1, g or 1, t or 1, s]."""
    q_len, kv_len = operands.query.shape[-3], operands.key.shape[-3]
    num_kv_heads = operands.key.shape[-2]
    batch_rank = operands.query.ndim - 3
    visible = jnp.ones((1,) * (batch_rank + 3) + (kv_len,), bool)

    if operands.mask is not None:
        visible &= _split_heads(operands.mask, num_kv_heads, axis=-3)
    if operands.bias is not None:
        visible &= _split_heads(operands.bias, num_kv_heads, axis=-3) != -jnp.inf

    key_position = jnp.arange(kv_len)
    past = _query_positions(operands, config) - key_position
    if config.is_causal:
        visible &= past >= 0
    if config.sliding_window is not None:
        left, right = config.sliding_window
        if left is not None:
            visible &= past <= left
        if right is not None:
            visible &= past >= -right

    if operands.q_segment_ids is not None and operands.kv_segment_ids is not None:
        same = (
            operands.q_segment_ids[..., :, None]
            == operands.kv_segment_ids[..., None, :]
        )
        visible &= same[..., None, None, :, :]
    if operands.query_seq_lengths is not None:
        lengths = operands.query_seq_lengths[..., None, None, None, None]
        visible &= jnp.arange(q_len)[:, None] < lengths
    if operands.key_value_seq_lengths is not None:
        lengths = operands.key_value_seq_lengths[..., None, None, None, None]
        visible &= key_position < lengths
    return visible


def _sees_non_finite(operands: AttentionOperands, visible: Array) -> Array:
    """Which rows [..., k, g, t] see a NaN or an infinity in an input."""
    num_kv_heads = operands.key.shape[-2]

    def rows_with_non_finite(a: Array) -> Array:
        return ~jnp.isfinite(a).all(-1)

    bad_keys = rows_with_non_finite(operands.key) | rows_with_non_finite(operands.value)
    bad = jnp.swapaxes(bad_keys, -1, -2)[..., :, None, None, :]
    if operands.bias is not None:
        bad |= ~jnp.isfinite(_split_heads(operands.bias, num_kv_heads, axis=-3))
    bad_rows = _move_rows_last(
        _split_heads(rows_with_non_finite(operands.query), num_kv_heads, axis=-1)
    )
    if operands.alibi_slopes is not None:
        bad_rows |= ~jnp.isfinite(_per_head(operands.alibi_slopes, operands))
    return (visible & bad).any(-1) | (visible.any(-1) & bad_rows)


def _query_positions(operands: AttentionOperands, config: AttentionConfig) -> Array:
    """i + q_offset as [..., 1, 1, t, 1]."""
    positions = jnp.arange(operands.query.shape[-3])[:, None]
    if operands.q_offset is None:
        return positions + config.q_offset
    return positions + operands.q_offset[..., None, None, None, None]


def _distance(operands: AttentionOperands, config: AttentionConfig) -> Array:
    """ALiBi's |i + q_offset - j|, as [..., 1, 1, t, s]."""
    positions = _query_positions(operands, config)
    distance = jnp.abs(positions - jnp.arange(operands.key.shape[-3]))
    return distance.astype(_accumulation_dtype(operands.query))


def _dropout(
    probs: Array, operands: AttentionOperands, config: AttentionConfig
) -> Array:
    """Linear in `probs`: drops and rescales; the same bits in every pass."""
    if config.dropout_rate == 0.0:
        return probs
    keep_probability = 1.0 - config.dropout_rate
    bits = dropout_bits(operands)
    threshold = min(round(keep_probability * 2**32), 2**32 - 1)
    keep = _split_heads(bits < jnp.uint32(threshold), operands.key.shape[-2], axis=-3)
    return jnp.where(keep, probs / keep_probability, 0)


def dropout_bits(operands: AttentionOperands) -> Array:
    """The dropout bits, uint32 [*B, num_heads, q_len, kv_len].

    Element (i, j) of batch index b and head index n is word j % 2 of
    threefry(subkey, (i, j // 2)) with subkey = threefry(key, (b, n)): it depends on
    nothing else, so no block size, device or transformation changes it.
    """
    key = operands.dropout_key
    batch, heads = operands.dropout_batch_indices, operands.dropout_head_indices
    assert key is not None and batch is not None and heads is not None
    q_len, kv_len = operands.query.shape[-3], operands.key.shape[-3]
    subkey = threefry2x32(
        *(key[..., 0, None], key[..., 1, None]),
        *(batch[..., None].astype(jnp.uint32), heads.astype(jnp.uint32)),
    )
    num_pairs = (kv_len + 1) // 2
    words = threefry2x32(
        subkey[0][..., None, None],
        subkey[1][..., None, None],
        jnp.arange(q_len, dtype=jnp.uint32)[:, None],
        jnp.arange(num_pairs, dtype=jnp.uint32),
    )
    bits = jnp.stack(words, axis=-1)
    return bits.reshape(*bits.shape[:-2], 2 * num_pairs)[..., :kv_len]


def threefry2x32(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), elementwise on uint32."""
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def _accumulation_dtype(a: Array) -> jnp.dtype:
    return jnp.promote_types(a.dtype, jnp.float32)


def _finite(a: Array) -> Array:
    """`a` in the accumulation dtype, with 0 for NaN and infinities."""
    a = a.astype(_accumulation_dtype(a))
    return jnp.where(jnp.isfinite(a), a, 0)


def _nan_where(condition: Array) -> Array:
    return jnp.where(condition, jnp.float32(jnp.nan), jnp.float32(0))


def _einsum(subscripts: str, *operands: Array) -> Array:
    # HIGHEST: accelerators must not round float32 products to fewer bits.
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


def _split_heads(a: Array, num_kv_heads: int, axis: int) -> Array:
    """Turns the num_heads axis (counted from the end) into (k, g); 1 into (1, 1)."""
    axis += a.ndim
    heads = a.shape[axis]
    split = (1, 1) if heads == 1 else (num_kv_heads, heads // num_kv_heads)
    return a.reshape(*a.shape[:axis], *split, *a.shape[axis + 1 :])


def _merge_heads(a: Array, axis: int) -> Array:
    """Turns the axes (k, g), k at `axis` counted from the end, into num_heads."""
    axis += a.ndim
    heads = a.shape[axis] * a.shape[axis + 1]
    return a.reshape(*a.shape[:axis], heads, *a.shape[axis + 2 :])


def _per_head(a: Array, operands: AttentionOperands) -> Array:
    """[..., num_heads] to [..., k, g, 1] in the accumulation dtype."""
    a = a.astype(_accumulation_dtype(operands.query))
    return _split_heads(a, operands.key.shape[-2], axis=-1)[..., None]


def _move_rows_last(a: Array) -> Array:
    """[..., t, k, g] to [..., k, g, t]."""
    return jnp.moveaxis(a, -3, -1)


def _move_rows_first(a: Array) -> Array:
    """[..., k, g, t] to [..., t, k, g, 1]."""
    return jnp.moveaxis(a, -1, -3)[..., None]


def _sum_to(a: Array, shape: tuple[int, ...]) -> Array:
    """Sums the axes over which an array of `shape` was broadcast."""
    axes = tuple(i for i, size in enumerate(shape) if size != a.shape[i])
    return a.sum(axes, keepdims=True)
