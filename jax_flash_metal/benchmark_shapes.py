"""Named sets of attention shapes that are timed, by `doctor` and by benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Self-attention: q_len = kv_len = length."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    length: int
    head_dim: int

    @property
    def operations(self) -> float:
        """Floating-point operations of a forward pass without a mask."""
        rows = self.batch_size * self.num_heads * self.length
        return 4.0 * rows * self.length * self.head_dim

    def __str__(self) -> str:
        return (
            f"B{self.batch_size} Hq{self.num_heads} Hkv{self.num_kv_heads} "
            f"L{self.length} D{self.head_dim}"
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
}
