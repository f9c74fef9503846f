"""What one attention call is: its static options and its arrays, as two records.

No checks (`checks`) and no decisions (`support`) here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

Implementation: TypeAlias = Literal["metal", "xla"] | None
IMPLEMENTATIONS: tuple[Implementation, ...] = (None, "metal", "xla")


class SegmentIds(NamedTuple):
    """Segments of packed sequences' tokens: int32 [batch, q_len], [batch, kv_len]."""

    q: Any
    kv: Any


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Static options: part of the compiled program, hashable.

    Attributes:
      scale: Multiplies the scores.
      is_causal: Query i sees key j only if j <= i + q_offset.
      q_offset: Position of the first query among the keys; unused when the operands
        have a traced `q_offset`.
      sliding_window: Inclusive counts (left, right) of visible neighbours, None for a
        side without limit.
      logits_soft_cap: cap of `cap * tanh(x / cap)`.
      dropout_rate: In [0, 1).
      implementation: What the caller asked for; None is decided per platform.
    """

    scale: float
    is_causal: bool = False
    q_offset: int = 0
    sliding_window: tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    implementation: Implementation = None


class AttentionOperands(NamedTuple):
    """The arrays of a call; None for what the call does not use.

    `*B` are any number of leading batch dimensions (one for the public functions), the
    same for all of query, key and value except that inside our primitives a dimension
    may be 1 for a shared operand. bias and mask have the rank of the scores, every
    dimension full or 1.
    """

    query: jax.Array  # [*B, q_len, num_heads, head_dim]
    key: jax.Array  # [*B, kv_len, num_kv_heads, head_dim]
    value: jax.Array  # [*B, kv_len, num_kv_heads, value_head_dim]
    bias: jax.Array | None = None  # [*B, num_heads, q_len, kv_len]
    mask: jax.Array | None = None  # bool, like bias
    q_offset: jax.Array | None = None  # int32 scalar, replaces config.q_offset
    q_segment_ids: jax.Array | None = None  # int32 [*B, q_len]
    kv_segment_ids: jax.Array | None = None  # int32 [*B, kv_len]
    query_seq_lengths: jax.Array | None = None  # int32 [*B]
    key_value_seq_lengths: jax.Array | None = None  # int32 [*B]
    sinks: jax.Array | None = None  # [num_heads]
    alibi_slopes: jax.Array | None = None  # [num_heads]
    dropout_key: jax.Array | None = None  # uint32 [2] or [4]
    dropout_batch_indices: jax.Array | None = None  # int32 [*B]
    dropout_head_indices: jax.Array | None = None  # int32 [num_heads]
