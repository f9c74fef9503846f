"""The public functions: arguments in, checks, the decision, one call of `autodiff`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_flash_metal import autodiff, checks, reference, support
from jax_flash_metal._jax_compat import refuse_in_forked_process, vary_alike
from jax_flash_metal.config import (
    AttentionConfig,
    AttentionOperands,
    Implementation,
)
from jax_flash_metal.support import Explanation

Array = jax.Array

_logger = logging.getLogger("jax_flash_metal")


@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = ...,
    mask: Any = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    q_offset: Any = ...,
    sliding_window: int | tuple[int | None, int | None] | None = ...,
    logits_soft_cap: float | None = ...,
    segment_ids: tuple[Any, Any] | None = ...,
    query_seq_lengths: Any = ...,
    key_value_seq_lengths: Any = ...,
    sinks: Any = ...,
    alibi_slopes: Any = ...,
    dropout_rate: float = ...,
    dropout_key: Any = ...,
    return_logsumexp: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Array: ...


@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = ...,
    mask: Any = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    q_offset: Any = ...,
    sliding_window: int | tuple[int | None, int | None] | None = ...,
    logits_soft_cap: float | None = ...,
    segment_ids: tuple[Any, Any] | None = ...,
    query_seq_lengths: Any = ...,
    key_value_seq_lengths: Any = ...,
    sinks: Any = ...,
    alibi_slopes: Any = ...,
    dropout_rate: float = ...,
    dropout_key: Any = ...,
    return_logsumexp: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Array, Array]: ...


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    segment_ids: tuple[Any, Any] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    return_logsumexp: bool = False,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]:
    """Exact attention whose memory grows with the lengths, not with their product.

        x         = scale * (query · keyᵀ) + bias - alibi_slope * |i + q_offset - j|
        x         = cap * tanh(x / cap)                        with logits_soft_cap
        x         = -inf where query i does not see key j
        logsumexp = log Σ_j exp(x_j)                           (+ the sink's exp)
        out       = dropout(exp(x - logsumexp)) · value

    B batch, T = q_len, S = kv_len, N query heads, K key-value heads (N a multiple of K;
    query head n uses key-value head n // (N // K)), H head_dim, V value_head_dim. The
    batch dimension may be missing in all arguments.

    Args:
      query: [B, T, N, H] in float32, float16, bfloat16 or float64.
      key: [B, S, K, H], same dtype.
      value: [B, S, K, V], same dtype.
      bias: Added to the scaled scores; any floating dtype, broadcastable to
        [B, N, T, S]. -inf hides the key; every finite number is an ordinary number.
      mask: bool, True = attend; broadcastable to [B, N, T, S].
      scale: Multiplies the scores; a Python number. None: 1 / sqrt(H).
      is_causal: Query i sees key j only if j <= i + q_offset.
      q_offset: Position of the first query among the keys: an int, or an integer scalar
        array. None and 0: top-left as in jax.nn; S - T: bottom-right.
      sliding_window: (left, right), inclusive numbers of neighbours of position
        i + q_offset that query i sees; None on a side: no limit; an int n: (n, n).
      logits_soft_cap: A positive Python number.
      segment_ids: (int32 [B, T], int32 [B, S]): tokens see only equal ids.
      query_seq_lengths: int32 [B]; rows from there on give 0.
      key_value_seq_lengths: int32 [B]; keys from there on are hidden.
      sinks: floating [N], one more score per head that has no value.
      alibi_slopes: floating [N].
      dropout_rate: In [0, 1); a Python number.
      dropout_key: A JAX key; needed when dropout_rate > 0. The bit of an element
        depends only on the key and its indices.
      return_logsumexp: Also return logsumexp.
      implementation: "metal": the Metal kernels (on Linux, on the software Metal
        device). "cpu": the native CPU kernels, on JAX's platform cpu. "xla": the
        reference, O(T * S) memory, the only one with forward-mode derivatives. None:
        the kernels that are meant for the platform, native ones on cpu, where they
        cover the call, else the reference; `explain` tells.

    Returns:
      out [B, T, N, V] in the dtype of query; with return_logsumexp also logsumexp
      [B, N, T] (natural logarithm, float32; float64 for float64 inputs).

    Raises:
      ValueError: A shape, dtype or value is wrong.
      TypeError: An argument is of the wrong kind.
      NotImplementedError: implementation="metal" or "cpu" and no kernel covers the
        call.

    Notes:
      A row that sees no key gives 0, logsumexp -inf and no gradient, also with sinks.
      NaN and infinities reach exactly the rows that see them (under
      implementation="xla" that is not so for cotangents). Accumulation is float32.
      Differentiable in query, key, value, bias, sinks and alibi_slopes, in reverse mode
      to any order; logsumexp has a gradient.

    References:
      Dao et al., FlashAttention, arXiv:2205.14135; Dao, FlashAttention-2,
      arXiv:2307.08691; Milakov and Gimelshein, Online normalizer calculation for
      softmax, arXiv:1805.02867.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash_metal import flash_attention
      >>> query = jnp.ones((2, 37, 6, 64))
      >>> key = value = jnp.ones((2, 53, 3, 64))
      >>> flash_attention(query, key, value, is_causal=True).shape
      (2, 37, 6, 64)
    """
    return_logsumexp = checks.flag("return_logsumexp", return_logsumexp)
    operands, config = prepare(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        q_offset=q_offset,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        segment_ids=segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )
    out, logsumexp = run(operands, config)
    if query.ndim == 3:
        out, logsumexp = out[0], logsumexp[0]
    return (out, logsumexp) if return_logsumexp else out


def run(operands: AttentionOperands, config: AttentionConfig) -> tuple[Array, Array]:
    """Returns out and logsumexp of checked operands."""
    if config.implementation == "xla":
        return reference.attention(operands, config)
    reason = support.unfused_reason(operands)
    if reason is not None:
        if config.implementation is not None:
            raise support.demand_kernels(reason, config.implementation)
        log_fallback(f"flash_attention takes the reference: {reason}.")
    # Inside shard_map, before the custom gradient: it does not sum over devices itself.
    arrays, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, vary_alike(arrays))
    return autodiff.attention(operands, config, reason is None)


@functools.cache
def log_fallback(sentence: str) -> None:
    """Logs each sentence once per process."""
    _logger.info("%s", sentence)


def prepare(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: Any = False,
    q_offset: Any = None,
    sliding_window: Any = None,
    logits_soft_cap: Any = None,
    segment_ids: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    broadcast_dropout: bool = False,
    outer_batch_index: Any = 0,
    implementation: Any = None,
) -> tuple[AttentionOperands, AttentionConfig]:
    """Checks everything; gives every operand a batch dimension.

    Not public: broadcast_dropout, one set of dropout bits for all batch indices and
    heads, as Flax has it; outer_batch_index, where this call stands in a larger batch,
    whose elements must not get the same bits.
    """
    if implementation == "metal":
        refuse_in_forked_process()  # before anything runs: JAX would wait for ever
    query = checks.array("query", query)
    key = checks.array("key", key)
    value = checks.array("value", value)
    checks.check_qkv(query, key, value)
    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    batch_size, q_len, num_heads, head_dim = query.shape
    kv_len = key.shape[1]
    scores_shape = (batch_size, num_heads, q_len, kv_len)

    # For the kernels' sake few dtypes; JAX differentiates these casts.
    accumulation = jnp.promote_types(query.dtype, jnp.float32)
    operands: dict[str, Array] = {}
    if bias is not None:
        operands["bias"] = checks.bias(bias, scores_shape, accumulation)
    if mask is not None:
        operands["mask"] = checks.mask(mask, scores_shape)
    if segment_ids is not None:
        ids = checks.segment_ids(
            segment_ids, batch_size, q_len, kv_len, batched=batched
        )
        operands["q_segment_ids"], operands["kv_segment_ids"] = ids
    lengths = (
        ("query_seq_lengths", query_seq_lengths),
        ("key_value_seq_lengths", key_value_seq_lengths),
    )
    for name, length in lengths:
        if length is not None:
            operands[name] = checks.seq_lengths(
                name, length, batch_size, batched=batched
            )
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None:
            checked = checks.per_head(name, per_head, num_heads)
            operands[name] = checked.astype(accumulation)[None]

    is_causal = checks.flag("is_causal", is_causal)
    window = checks.sliding_window(sliding_window)
    offset = checks.q_offset(
        q_offset,
        has_effect=is_causal or sliding_window is not None or alibi_slopes is not None,
    )
    if not isinstance(offset, int):
        operands["q_offset"] = offset[None]
    rate = checks.dropout_rate(dropout_rate, dropout_key)
    if dropout_key is not None:
        dropout_key = checks.dropout_key(dropout_key)
    if rate:
        if dropout_key.shape == (4,):  # of another generator (rbg): mix its halves
            dropout_key = jnp.stack(reference.threefry2x32(*dropout_key))
        operands["dropout_key"] = dropout_key[None]
        step = 0 if broadcast_dropout else 1
        batch_indices = outer_batch_index * batch_size + jnp.arange(batch_size)
        operands["dropout_batch_indices"] = (step * batch_indices).astype(jnp.int32)
        head_indices = step * jnp.arange(num_heads, dtype=jnp.int32)
        operands["dropout_head_indices"] = head_indices[None]

    config = AttentionConfig(
        scale=checks.scale(scale, head_dim),
        is_causal=is_causal,
        q_offset=offset if isinstance(offset, int) else 0,
        sliding_window=window,
        logits_soft_cap=checks.logits_soft_cap(logits_soft_cap),
        dropout_rate=rate,
        implementation=checks.implementation(implementation),
    )
    return AttentionOperands(query, key, value, **operands), config


def explain(*args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Which implementation `flash_attention` takes for these arguments, and why.

    It knows nothing of the program around the call: inside a `shard_map` over some of
    the mesh's axes, without JAX's partitioner Shardy, the call takes the reference
    whatever this says.

    Args:
      *args: As for `flash_attention`; arrays may be `jax.ShapeDtypeStruct`s.
      platform: A JAX platform; None: `jax.default_backend()`.
      **kwargs: As for `flash_attention`.

    Returns:
      An `Explanation`; its text is one line.

    Raises:
      ValueError, TypeError: As `flash_attention` does.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_flash_metal
      >>> x = jax.ShapeDtypeStruct((2, 37, 6, 64), jnp.float32)
      >>> print(jax_flash_metal.explain(x, x, x, implementation="xla"))
      xla: implementation='xla' asks for the reference.
    """
    operands, config = prepare_abstract(*args, **kwargs)
    return support.explain(operands, config, platform or jax.default_backend())


def is_supported(*args: Any, **kwargs: Any) -> bool:
    """Whether the kernels cover these arguments of `flash_attention`.

    That is, whether `implementation="metal"` or "cpu" is accepted on a platform that
    has these kernels; both cover the same.
    Arguments and exceptions as for `explain`.
    """
    operands, _ = prepare_abstract(*args, **kwargs)
    return support.unfused_reason(operands) is None


def prepare_abstract(
    *args: Any, return_logsumexp: Any = False, **kwargs: Any
) -> tuple[AttentionOperands, AttentionConfig]:
    """`prepare` on shapes: runs it on tracers, so both see the same arguments."""
    checks.flag("return_logsumexp", return_logsumexp)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
    is_array = [isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) for x in leaves]
    prepared: list[tuple[AttentionOperands, AttentionConfig]] = []

    def prepare_shapes(arrays: list[Any]) -> None:
        rest = iter(arrays)
        merged = [next(rest) if a else x for a, x in zip(is_array, leaves)]
        prepare_args, prepare_kwargs = jax.tree.unflatten(tree, merged)
        prepared.append(prepare(*prepare_args, **prepare_kwargs))

    jax.eval_shape(prepare_shapes, [x for a, x in zip(is_array, leaves) if a])
    return prepared[0]


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = ...,
    mask: Any = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Any = ...,
    key_value_seq_lengths: Any = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: Implementation = ...,
    return_residual: Literal[False] = ...,
) -> Array: ...


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = ...,
    mask: Any = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Any = ...,
    key_value_seq_lengths: Any = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: Implementation = ...,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention` through our kernels: a drop-in replacement.

    Formula, shapes and exceptions as in `flash_attention`. The arguments are those of
    the newest jax.nn function, on every JAX version.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H].
      value: [B, S, K, V] or [S, K, V].
      bias: Broadcastable to [B, N, T, S].
      mask: bool, broadcastable to [B, N, T, S].
      scale: None: 1 / sqrt(H).
      is_causal: Query i sees key j only if j <= i.
      query_seq_lengths: int32 [B].
      key_value_seq_lengths: int32 [B].
      local_window_size: (left, right), inclusive, or an int for both.
      implementation: None, "metal", "cpu" or "xla", see `flash_attention`.
      return_residual: Also return logsumexp as [B, T, N] in the dtype of key.

    Returns:
      out [B, T, N, V]; with return_residual a pair of it and the residual.

    Raises:
      ValueError, TypeError, NotImplementedError: As `flash_attention`.

    Notes:
      Differences from jax.nn: a fully masked row gives 0 and the residual -inf (there:
      the mean of value and a large finite number); NaN in hidden positions does not
      leak; value_head_dim may differ from head_dim; the residual has a gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_flash_metal import dot_product_attention
      >>> x = jnp.ones((2, 37, 6, 64))
      >>> dot_product_attention(x, x, x, is_causal=True).shape
      (2, 37, 6, 64)
    """
    return_residual = checks.flag("return_residual", return_residual)
    out, logsumexp = flash_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        sliding_window=checks.sliding_window(local_window_size, "local_window_size"),
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        return_logsumexp=True,
        implementation=implementation,
    )
    if not return_residual:
        return out
    return out, jnp.swapaxes(logsumexp, -1, -2).astype(out.dtype)


def merge_partials(
    outs: Sequence[Array], logsumexps: Sequence[Array], sinks: Any = None
) -> tuple[Array, Array]:
    """Attention over all keys from attentions over disjoint parts of the keys.

        logsumexp = log(Σ_i exp(logsumexp_i) + exp(sink))
        out       = Σ_i exp(logsumexp_i - logsumexp) * out_i

    For ring attention and split decoding. Parts of which a row sees nothing (logsumexp
    -inf) count nothing. Differentiable.

    Args:
      outs: Each [*B, T, N, V], as `flash_attention` returns them.
      logsumexps: Each [*B, N, T], of the same calls.
      sinks: floating [N], counted once for all parts, which are then computed without.
        As in `flash_attention`, a row that sees no key has none. (Where every row sees
        a key of one part, that part may have been given the sinks instead.)

    Returns:
      out [*B, T, N, V] in the dtype of the first out, and logsumexp [*B, N, T].

    Raises:
      ValueError: No parts, different numbers of parts, shapes that do not agree, or a
        dtype that is not floating.
      TypeError: Not sequences of arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_flash_metal import flash_attention, merge_partials
      >>> x = jnp.ones((2, 36, 6, 64))
      >>> halves = jnp.split(x, 2, axis=1)
      >>> parts = [flash_attention(x, h, h, return_logsumexp=True) for h in halves]
      >>> merge_partials(*zip(*parts))[0].shape
      (2, 36, 6, 64)
    """
    outs, logsumexps = (
        checks.parts("outs", outs),
        checks.parts("logsumexps", logsumexps),
    )
    if not outs or len(outs) != len(logsumexps):
        raise ValueError(
            "outs and logsumexps must have the same number of parts, at least 1, but "
            f"got {len(outs)} and {len(logsumexps)}."
        )
    for out, lse in zip(outs, logsumexps):
        same = out.shape == outs[0].shape and lse.shape == logsumexps[0].shape
        rows = out.shape[:-3] + out.shape[-2:-4:-1]
        if not same or out.ndim < 3 or lse.shape != rows:
            raise ValueError(
                "outs and logsumexps must have the shapes (*batch, q_len, num_heads, "
                "head_dim) and (*batch, num_heads, q_len), the same for all parts, but "
                f"got {[o.shape for o in outs]} and {[x.shape for x in logsumexps]}."
            )
    stacked = jnp.stack(logsumexps)
    has_keys = (stacked > -jnp.inf).any(0) | jnp.isnan(stacked).any(0)
    # Finite operands in the rows without keys, so that the gradient has no inf - inf.
    safe = jnp.where(has_keys, stacked, 0)
    terms = safe
    if sinks is not None:
        sinks = checks.per_head("sinks", sinks, outs[0].shape[-2])
        sink = jnp.broadcast_to(sinks.astype(safe.dtype)[:, None], has_keys.shape)
        terms = jnp.concatenate([safe, jnp.where(has_keys, sink, 0)[None]])
    logsumexp = jax.nn.logsumexp(terms, axis=0)
    weights = jnp.where(has_keys, jnp.exp(safe - logsumexp), 0)
    weights = jnp.swapaxes(weights, -1, -2)[..., None]
    parts = jnp.stack(outs).astype(weights.dtype)
    # What counts nothing may hold anything: 0 * NaN is NaN.
    counts = jnp.swapaxes(stacked != -jnp.inf, -1, -2)[..., None]
    parts = jnp.where(counts, parts, 0)
    out = (weights * parts).sum(0).astype(outs[0].dtype)
    return out, jnp.where(has_keys, logsumexp, -jnp.inf)
