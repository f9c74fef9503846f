"""What one attention call is: its static options and its arrays, as two records.

No checks (`checks`) and no decisions (`support`) here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:  # attention_library uses the tables below without JAX
    import jax

Backend: TypeAlias = Literal["metal", "cpu"]  # which of our kernels
# In the order of the custom calls' attribute `backend`.
BACKENDS: tuple[Backend, ...] = ("metal", "cpu")

Implementation: TypeAlias = Literal["metal", "cpu", "xla"] | None
IMPLEMENTATIONS: tuple[Implementation, ...] = (None, *BACKENDS, "xla")


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

    `*B` are the call's leading batch dimensions (one for the public functions, vmap
    adds more), the same number for all operands, each of the full size or 1 (shared).
    bias and mask may have size 1 in every other dimension too.
    """

    query: jax.Array  # [*B, q_len, num_heads, head_dim]
    key: jax.Array  # [*B, kv_len, num_kv_heads, head_dim]
    value: jax.Array  # [*B, kv_len, num_kv_heads, value_head_dim]
    bias: jax.Array | None = None  # [*B, num_heads, q_len, kv_len]
    mask: jax.Array | None = None  # bool, like bias
    q_offset: jax.Array | None = None  # int32 [*B], replaces config.q_offset
    q_segment_ids: jax.Array | None = None  # int32 [*B, q_len]
    kv_segment_ids: jax.Array | None = None  # int32 [*B, kv_len]
    query_seq_lengths: jax.Array | None = None  # int32 [*B]
    key_value_seq_lengths: jax.Array | None = None  # int32 [*B]
    sinks: jax.Array | None = None  # [*B, num_heads]
    alibi_slopes: jax.Array | None = None  # [*B, num_heads]
    dropout_key: jax.Array | None = None  # uint32 [*B, 2]
    dropout_batch_indices: jax.Array | None = None  # int32 [*B]
    dropout_head_indices: jax.Array | None = None  # int32 [*B, num_heads]


# The optional ones; bit i of the custom calls' attribute `operands` is the i-th.
OPTIONAL_OPERANDS = AttentionOperands._fields[3:]

# Those with a gradient besides query, key and value, in the order of the custom calls'
# attribute `gradient_of`.
DIFFERENTIABLE_OPTIONS = ("bias", "sinks", "alibi_slopes")

# The dimensions of every array of a call after its batch dimensions, a letter for each:
# T q_len, S kv_len, N num_heads, K num_kv_heads, H head_dim, V value_head_dim, W words.
DIMS = {
    "query": "TNH",
    "key": "SKH",
    "value": "SKV",
    "bias": "NTS",
    "mask": "NTS",
    "q_offset": "",
    "q_segment_ids": "T",
    "kv_segment_ids": "S",
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "sinks": "N",
    "alibi_slopes": "N",
    "dropout_key": "W",
    "dropout_batch_indices": "",
    "dropout_head_indices": "N",
    "out": "TNV",
    "logsumexp": "NT",
    "dout": "TNV",
    "dlogsumexp": "NT",
    "dquery": "TNH",
    "dkey": "SKH",
    "dvalue": "SKV",
}


def operand_names(names: tuple[str, ...], has_residuals: bool) -> tuple[str, ...]:
    """The operands of a pass in order; `names`: those of the optional ones it has."""
    operands = ("query", "key", "value", *names)
    residuals = ("out", "logsumexp", "dout", "dlogsumexp")
    return operands + residuals if has_residuals else operands


def batch_of(name: str, array: Any) -> tuple[int, ...]:
    """The batch sizes of an array of a call, by its name in DIMS."""
    shape: tuple[int, ...] = array.shape
    return shape[: len(shape) - len(DIMS[name])]


def full_batch(arrays: Mapping[str, Any]) -> tuple[int, ...]:
    """The batch sizes of a call from those of its arrays, by their names in DIMS."""
    batches = [batch_of(name, a) for name, a in arrays.items() if a is not None]
    return tuple(np.broadcast_shapes(*batches))
