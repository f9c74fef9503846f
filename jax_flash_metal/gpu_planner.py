"""What the planner would launch on GPUs that are not here: its rules, in Python.

For the model of time (gpu_counts.py, gpu_model.py). Those that count are in
plugin/attention (variants.cc, choices.cc, plan_backward.cc, plan_context.h);
tests/model/test_launches.py holds these to the same answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from jax_flash_metal import variant_table
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.variant_table import Variant

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Of the score gradient in form B's scratch.
GRADIENT_BYTES = {"float32": 4, "float16": 4, "bfloat16": 2}
SCORE_GRADIENT_LIMIT = 64 << 20

_TARGET_SIMDGROUPS = 1024
_MAX_PARTIAL_BYTES = 16 << 20
_MIN_QUERIES_PER_PART = 1024
_CHUNK_KEYS = 128

# -- Rows of the variant table ---------------------------------------------------------


def default_variant(
    kernel: str, dtype: str, head_dim: int, family: int, rows: Iterable[Variant] = ()
) -> Variant:
    """The row that the planner takes unless it was told another (variants.cc).

    Raises:
      LookupError: The table has none.
    """
    admissible = [
        row
        for row in (rows or variant_table.variants())
        if row.kernel == kernel
        and row.dtype == dtype
        and row.head_dim >= head_dim
        and row.is_default
        and row.min_family <= family
    ]
    if not admissible:
        raise LookupError(f"no row of {kernel} for {dtype}, head_dim {head_dim}")
    # min() takes the first of equals.
    return min(admissible, key=lambda row: (row.head_dim, -row.min_family))


def default_form(dtype: str, head_dim: int, family: int, num_scores: int) -> str:
    """The form of the backward pass, "A" or "B", as DefaultBackwardForm() has it."""
    for row in variant_table.backward_forms():
        if (
            row.dtype == dtype
            and head_dim <= row.head_dim
            and family >= row.min_family
            and num_scores >= row.min_scores
        ):
            return row.form
    return "A"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of the table that a problem runs with, and the form of its backward."""

    forward: Variant
    delta: Variant
    dkv: Variant
    dq: Variant | None
    dq_product: Variant | None
    dkv_combine: Variant | None
    form: str


def default_rows(
    shape: AttentionShape,
    dtype: str,
    family: int,
    limit: int = SCORE_GRADIENT_LIMIT,
) -> Rows:
    """Those of the planner on a GPU of the family; `limit`: of form B's scratch."""

    def row(kernel: str) -> Variant:
        return default_variant(kernel, dtype, shape.head_dim, family)

    def optional(kernel: str) -> Variant | None:
        try:
            return row(kernel)
        except LookupError:
            return None

    return Rows(
        row("attention_forward"),
        row("attention_delta"),
        row("attention_backward_dkv"),
        optional("attention_backward_dq"),
        optional("attention_backward_dq_product"),
        optional("attention_backward_dkv_combine"),
        default_form(dtype, shape.head_dim, family, shape.num_queries * shape.length)
        if _keeps_to_limit(shape, dtype, limit)
        else "A",
    )


# -- How the backward pass is cut ------------------------------------------------------


def num_parts(shape: AttentionShape, variant: Variant) -> tuple[int, int]:
    """Parts of the sums of dK and dV, and blocks of queries in each."""
    blocks = (
        shape.num_heads
        // shape.num_kv_heads
        * math.ceil(shape.num_queries / variant.block_q)
    )
    elements = shape.batch_size * shape.num_kv_heads * shape.length * 2 * shape.head_dim
    simdgroups = (
        math.ceil(shape.length / variant.block_kv)
        * shape.num_kv_heads
        * shape.batch_size
        * variant.num_simdgroups
    )
    min_blocks = math.ceil(_MIN_QUERIES_PER_PART / variant.block_q)
    most = min(blocks // min_blocks, _MAX_PARTIAL_BYTES // (4 * elements))
    wanted = min(max(_TARGET_SIMDGROUPS // simdgroups, 1), max(most, 1))
    per_part = math.ceil(blocks / wanted)
    return math.ceil(blocks / per_part), per_part


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one launch of dK, dV computes in form B."""

    num_batches: int
    num_kv_heads: int
    first_key: int
    end_key: int


def chunks(
    shape: AttentionShape, variant: Variant, limit: int = SCORE_GRADIENT_LIMIT
) -> Iterator[Chunk]:
    """The chunks of form B, whose score gradients take at most `limit` bytes each."""

    def num_bytes(keys: int) -> int:
        return _gradient_bytes(shape, variant.dtype, keys)

    units = limit // num_bytes(shape.length)
    batches, heads, keys = 1, 1, shape.length
    if units >= shape.num_kv_heads:
        heads = shape.num_kv_heads
        batches = units // heads
    elif units > 0:
        heads = math.ceil(shape.num_kv_heads / math.ceil(shape.num_kv_heads / units))
    else:
        step = math.lcm(_CHUNK_KEYS, variant.block_kv)
        keys = max(1, limit // num_bytes(step)) * step
    for batch in range(0, shape.batch_size, batches):
        for head in range(0, shape.num_kv_heads, heads):
            for key in range(0, shape.length, keys):
                yield Chunk(
                    min(batches, shape.batch_size - batch),
                    min(heads, shape.num_kv_heads - head),
                    key,
                    min(key + keys, shape.length),
                )


def _keeps_to_limit(shape: AttentionShape, dtype: str, limit: int) -> bool:
    """Whether form B does: for a head at a time, or the fewest keys and sums of dQ."""
    groups = shape.num_heads // shape.num_kv_heads
    sums = groups * shape.num_queries * shape.head_dim * 4
    return (
        _gradient_bytes(shape, dtype, shape.length) <= limit
        or _gradient_bytes(shape, dtype, _CHUNK_KEYS) + sums <= limit
    )


def _gradient_bytes(shape: AttentionShape, dtype: str, keys: int) -> int:
    """Of the score gradient of a key-value head, with all its query heads."""
    groups = shape.num_heads // shape.num_kv_heads
    queries = math.ceil(shape.num_queries / 8) * 8
    return groups * queries * math.ceil(keys / 8) * 8 * GRADIENT_BYTES[dtype]
