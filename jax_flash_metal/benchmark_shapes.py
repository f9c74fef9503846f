"""Attention problems that are timed, by `bench` and `doctor`, and what they cost.

Plain values: imports neither JAX nor NumPy.
"""

from __future__ import annotations

import dataclasses

# What is timed. Backward alone is not: no implementation can run it without a forward.
PASSES = ("forward", "forward+backward")
DTYPES = ("float32", "float16", "bfloat16")

# Products of query rows with key columns in the five-product accounting: QKᵀ and PV
# forward; QKᵀ again, dO·Vᵀ, dV, dQ and dK backward.
_PRODUCTS = {"forward": 2, "forward+backward": 2 + 5}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The sizes of a problem.

    Attributes:
      length: Of keys and values; also of queries, unless q_len is given.
      q_len: Of queries, for decoding; None: self-attention.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    length: int
    head_dim: int
    q_len: int | None = None

    @property
    def num_queries(self) -> int:
        return self.length if self.q_len is None else self.q_len

    @property
    def q_offset(self) -> int:
        """Of a causal mask: the last query sees the last key, as in decoding."""
        return self.length - self.num_queries

    @property
    def operations(self) -> float:
        """Floating-point operations of a forward pass without a mask."""
        return self.count_operations("forward", is_causal=False)

    def count_operations(self, pass_: str, *, is_causal: bool) -> float:
        """Of the products alone, two per multiply-add; hidden pairs are not counted.

        4·H·pairs·D for forward, 14·H·pairs·D for forward+backward: softmax is left out,
        and so is what an implementation computes more than once.
        """
        pairs = self.visible_pairs(is_causal=is_causal)
        heads = self.batch_size * self.num_heads
        return 2.0 * _PRODUCTS[pass_] * heads * pairs * self.head_dim

    def visible_pairs(self, *, is_causal: bool) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        if not is_causal:
            return self.num_queries * self.length
        # Query i sees min(max(i + offset + 1, 0), length) keys.
        first = max(0, -self.q_offset)  # the first query that sees a key
        sees_first = first + self.q_offset + 1
        return (self.num_queries - first) * (sees_first + self.length) // 2

    def __str__(self) -> str:
        queries = "" if self.q_len is None else f"Lq{self.q_len} "
        return (
            f"B{self.batch_size} Hq{self.num_heads} Hkv{self.num_kv_heads} "
            f"{queries}L{self.length} D{self.head_dim}"
        )


def _seed() -> tuple[AttentionShape, ...]:
    rows = (
        *((2, 8, 8, length, 64) for length in (1, 4, 8)),
        (2, 8, 8, 8, 128),
        *((2, 8, 8, length, 64) for length in (32, 64, 128)),
        *((2, 8, 8, length, 128) for length in (128, 256)),
        *((1, 32, 8, length, dim) for length in (512, 1024, 2048) for dim in (64, 128)),
        *((2, 32, kv_heads, 256, 64) for kv_heads in (8, 4)),
    )
    return tuple(AttentionShape(*row) for row in rows)


SHAPE_SETS: dict[str, tuple[AttentionShape, ...]] = {
    # The tables of the MLX pull request that this project started from.
    "seed": _seed(),
    # One of each kind of kernel, in seconds on the software device.
    "small": (
        AttentionShape(2, 8, 8, 8, 64),
        AttentionShape(2, 8, 8, 64, 64),
        AttentionShape(2, 8, 2, 128, 128),
    ),
    # How time and memory grow with the length.
    "lengths": tuple(AttentionShape(1, 8, 8, n, 64) for n in (512, 1024, 2048, 4096)),
    "long": tuple(AttentionShape(1, 8, 8, n, 64) for n in (4096, 8192, 16384)),
    # Where a call's fixed cost shows.
    "short": (
        AttentionShape(2, 8, 8, 64, 64),
        AttentionShape(8, 4, 4, 128, 32),
        AttentionShape(1, 8, 8, 16, 128),
    ),
    # The next token, and eight at once, from a cache of keys and values.
    "decode": (
        *(AttentionShape(1, 32, 8, n, 128, q_len=1) for n in (1024, 4096, 16384)),
        AttentionShape(1, 32, 8, 4096, 128, q_len=8),
    ),
    # Grouped and multi-query heads.
    "gqa": (
        AttentionShape(1, 8, 2, 2048, 128),
        AttentionShape(1, 32, 8, 1024, 64),
        AttentionShape(1, 8, 1, 2048, 64),
    ),
}
