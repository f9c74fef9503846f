"""What others published of attention on Apple's GPUs, and models of their kernels.

Only to see how far off the model of gpu_model.py is (docs/model.md). The kernels are
described by what decides their time, from reading their sources.
"""

from __future__ import annotations

import dataclasses
import math

from jax_flash_metal import gpu_model
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.gpu_chips import CHIPS, DRAM_SHARE, LAUNCH_SECONDS, Chip
from jax_flash_metal.gpu_counts import Launch, Work
from jax_flash_metal.gpu_planner import ITEM_BYTES


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published number and the model's.

    Attributes:
      source: Key of gpu_chips.SOURCES.
      what: Of which kernel, chip and problem.
      low, high: The published number, or range.
      predicted: The model's.
      unit: "%" of the peak, "×" the unfused form, or "ms".
      is_fitted: Whether a constant of the model was made of it.
    """

    source: str
    what: str
    low: float
    high: float
    predicted: float
    unit: str
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """Relative to the nearest number of the range."""
        nearest = min(max(self.predicted, self.low), self.high)
        return self.predicted / nearest - 1


# -- metal-flash-attention -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _MfaBlocks:
    """A row of its parameter file (FP16; AttentionDescriptor+Parameters.swift).

    Attributes:
      parallel, traversal, head: Sizes of a block: rows, of the other side, columns.
      cached: Operands that stay in registers.
    """

    parallel: int
    traversal: int
    head: int
    cached: tuple[str, ...]


_MFA_BLOCKS = {
    # (kernel, family, head_dim)
    ("forward", 7, 64): _MfaBlocks(32, 128, 32, ("Q", "O")),
    ("forward", 7, 128): _MfaBlocks(32, 128, 32, ("Q",)),
    ("forward", 7, 256): _MfaBlocks(32, 128, 32, ()),
    ("forward", 9, 64): _MfaBlocks(16, 128, 32, ("Q", "O")),
    ("forward", 9, 128): _MfaBlocks(16, 128, 32, ("O",)),
    ("forward", 9, 256): _MfaBlocks(16, 128, 32, ()),
    ("dq", 7, 64): _MfaBlocks(32, 64, 32, ("dQ",)),
    ("dq", 7, 128): _MfaBlocks(32, 64, 32, ()),
    ("dq", 7, 256): _MfaBlocks(32, 64, 32, ()),
    ("dq", 9, 64): _MfaBlocks(16, 64, 8, ("Q", "dO", "dQ")),
    ("dq", 9, 128): _MfaBlocks(16, 64, 32, ("Q", "dQ")),
    ("dq", 9, 256): _MfaBlocks(16, 128, 32, ()),
    ("dkv", 7, 64): _MfaBlocks(32, 64, 32, ("dV",)),
    ("dkv", 7, 128): _MfaBlocks(32, 64, 32, ()),
    ("dkv", 7, 256): _MfaBlocks(32, 64, 32, ()),
    ("dkv", 9, 64): _MfaBlocks(16, 32, 16, ("V", "dV", "dK")),
    ("dkv", 9, 128): _MfaBlocks(16, 128, 16, ("dV", "dK")),
    ("dkv", 9, 256): _MfaBlocks(16, 128, 32, ()),
}
# Operands of rows and results of each kernel, and its products.
_MFA_KERNELS = {
    "forward": (("Q",), ("O",), 2),
    "dq": (("Q", "dO"), ("dQ",), 3),
    "dkv": (("K", "V"), ("dK", "dV"), 4),
}


def mfa_launch(kernel: str, chip: Chip, head_dim: int, length: int) -> Launch:
    """A kernel of metal-flash-attention, float16, one head, no mask.

    A simdgroup owns 8 rows; S or dP are products of tiles that are read transposed. On
    M1 and M2 tiles come by asynchronous copies (no instructions), on M3 from device
    memory. What is not cached is read, and a result written too, for every block.
    """
    row_operands, results, num_products = _MFA_KERNELS[kernel]
    blocks = _MFA_BLOCKS[kernel, 7 if chip.family < 9 else 9, head_dim]
    size, columns = 2, head_dim // 8
    simdgroups = blocks.parallel // 8
    others = blocks.traversal // 8
    work, fixed = Work(), Work()
    work.products = simdgroups * others * num_products * columns
    tile_reads = simdgroups * others * columns * num_products
    transposed = simdgroups * others * columns * (num_products + 1) // 2
    if kernel == "forward":
        transposed = simdgroups * others * columns
    work.loads = tile_reads + transposed
    num_bytes = tile_reads * 64 * size
    operands = 2  # tiles of two operands, once per product
    if chip.family < 9:
        work.threadgroup_read = num_bytes
        copied = num_products * blocks.traversal * head_dim * size
        work.device_read = work.threadgroup_write = copied
        work.tiles = num_products * head_dim / blocks.head
        work.barriers = 2 * work.tiles
    else:
        work.device_read = work.shared_read = num_bytes
    for operand in row_operands:
        target = fixed if operand in blocks.cached else work
        target.loads += simdgroups * columns
        target.device_read += simdgroups * columns * 64 * size
    for result in results:
        if result not in blocks.cached:  # two loads and stores of two floats per lane
            work.loads += 2 * simdgroups * columns
            work.device_read += simdgroups * columns * 64 * 4
            work.device_write += simdgroups * columns * 64 * 4
    elements = 2 * simdgroups * others
    work.exp2 = elements
    work.alu = 4 * elements
    if kernel == "forward":
        work.shuffles = 2 * simdgroups
        work.alu += simdgroups * (5 + 2 * columns)
    work.phases = num_products
    fixed.device_write += len(results) * blocks.parallel * head_dim * 4
    fixed.loads += len(results) * simdgroups * columns
    registers = 30 + 2 * others * (1 if kernel == "forward" else 2)
    registers += sum(columns for o in row_operands if o in blocks.cached)
    registers += sum(2 * columns for r in results if r in blocks.cached)
    return Launch(
        f"metal-flash-attention {kernel}",
        "float16",
        work,
        fixed,
        [(length // blocks.traversal, 0, length // blocks.parallel)],
        simdgroups,
        registers,
        blocks.traversal * blocks.head * size if chip.family < 9 else 0,
        dram_bytes=(2 * operands + 2) * length * head_dim * size,
        streamed_bytes=operands * length * head_dim * size * (length / blocks.parallel),
        streamed_size=operands * length * head_dim * size,
    )


# "Long enough": its figures are for sequences so long that the GPU is full.
_MFA_LENGTH = 32768
# README, "Compute Utilization": forward, and forward and backward, in per cent.
_MFA_SHARES = {
    ("M1 Max", 64): (86, 62),
    ("M1 Max", 128): (85, 63),
    ("M1 Max", 256): (86, 64),
    ("M4", 64): (94, 71),
    ("M4", 128): (91, 69),
    ("M4", 256): (82, 61),
}


def mfa_figures() -> list[Figure]:
    """Shares of the ALU's peak, in its accounting: (2D + 5) N² and (7D + 10) N²."""
    figures = []
    for (name, head_dim), shares in _MFA_SHARES.items():
        chip = CHIPS[name]
        shape = AttentionShape(1, 1, 1, _MFA_LENGTH, head_dim)
        seconds = {
            kernel: gpu_model.predict(
                chip, mfa_launch(kernel, chip, head_dim, _MFA_LENGTH)
            ).seconds
            for kernel in _MFA_KERNELS
        }
        for pass_, published, time in (
            ("forward", shares[0], seconds["forward"]),
            ("forward+backward", shares[1], sum(seconds.values())),
        ):
            share = gpu_model.share_of_peak(chip, shape, pass_, False, time, softmax=5)
            figures.append(
                Figure(
                    "metal-flash-attention",
                    f"{name}, D = {head_dim}, {pass_}",
                    published,
                    published,
                    100 * share,
                    "%",
                    is_fitted=(head_dim, pass_) == (64, "forward") and name == "M4",
                )
            )
    return figures


# -- MLX's forward ---------------------------------------------------------------------

# mlx-1610, M3 Max, B1 H32 D64 float16: seconds of 320 calls (40 times 8), unfused,
# fused.
_MLX_FORWARD = {
    512: (0.141, 0.077),
    1024: (0.474, 0.251),
    2048: (1.400, 0.954),
    4096: (5.424, 3.747),
}
_MLX_CALLS = 320


def mlx_forward_launch(length: int, heads: int, is_causal: bool = False) -> Launch:
    """MLX's fused forward (steel attention) for D = 64: 32 x 32 blocks, 4 simdgroups.

    Each simdgroup owns 8 rows; Q, K and V are staged in threadgroup memory and all
    fragments are read from there, Q's for every block.
    """
    columns, others, simdgroups, size = 8, 4, 4, 2
    work, fixed = Work(), Work()
    work.products = simdgroups * others * 2 * columns
    work.loads = simdgroups * (2 * others + 1) * columns
    work.threadgroup_read = simdgroups * (2 * others + 1) * columns * 64 * size
    tile = 32 * 64 * size
    work.device_read = work.threadgroup_write = 2 * tile
    work.loads += 2 * 2 * tile / (16 * 32)
    work.tiles = 2
    work.barriers = 4
    elements = 2 * simdgroups * others
    work.exp2 = elements + simdgroups
    work.alu = 5 * elements + simdgroups * (5 + 2 * columns)
    work.shuffles = 2 * simdgroups
    work.phases = 3
    fixed.device_write = 32 * 64 * size
    return Launch(
        "MLX steel attention",
        "float32",  # its fragments are float32
        work,
        fixed,
        _causal_groups(length, heads, 32, 32, is_causal),
        simdgroups,
        30 + 16 + 8 + 8 + 8,
        32 * 72 * size * 2 + 64 * 40 * size,
        dram_bytes=4 * heads * length * 64 * size,
    )


def _causal_groups(
    length: int, heads: int, rows: int, columns: int, is_causal: bool
) -> list[tuple[float, int, int]]:
    if not is_causal:
        return [(math.ceil(length / columns), 0, heads * math.ceil(length / rows))]
    return [
        (math.ceil(min(first + rows, length) / columns), 0, 1)
        for _ in range(heads)
        for first in range(0, length, rows)
    ]


def mlx_forward_figures() -> list[Figure]:
    """Milliseconds per call."""
    chip = CHIPS["M3 Max"]
    figures = []
    for length, (unfused, fused) in _MLX_FORWARD.items():
        shape = AttentionShape(1, 32, 32, length, 64)
        figures.append(
            Figure(
                "mlx-1610",
                f"M3 Max, B1 H32 L{length} D64 float16, unfused forward",
                unfused / _MLX_CALLS * 1e3,
                unfused / _MLX_CALLS * 1e3,
                gpu_model.unfused_seconds(
                    chip, shape, "float16", "forward", False, gpu_model.MLX_PASSES
                )
                * 1e3,
                "ms",
            )
        )
        figures.append(
            Figure(
                "mlx-1610",
                f"M3 Max, B1 H32 L{length} D64 float16, fused forward",
                fused / _MLX_CALLS * 1e3,
                fused / _MLX_CALLS * 1e3,
                gpu_model.predict(chip, mlx_forward_launch(length, 32)).seconds * 1e3,
                "ms",
            )
        )
    return figures


# -- The kernels of MLX's pull requests ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _VjpBlocks:
    """Of the kernels of mlx-3241: sizes of blocks, simdgroups of dK, dV."""

    dq_keys: int
    dkv_queries: int
    dkv_keys: int
    dkv_simdgroups: int


_VJP_BLOCKS = {64: _VjpBlocks(32, 32, 32, 1), 128: _VjpBlocks(16, 16, 16, 2)}


def vjp_dq_launch(shape: AttentionShape, chip: Chip, is_causal: bool) -> Launch:
    """dQ: 32 queries in 4 simdgroups; Kᵀ, Vᵀ and K in turn through one tile.

    Six barriers per block of keys; Q and dO stay in registers, in float32.
    """
    blocks, size = _VJP_BLOCKS[shape.head_dim], 2
    columns, others, simdgroups = shape.head_dim // 8, blocks.dq_keys // 8, 4
    work, fixed = Work(), Work()
    work.products = simdgroups * others * 3 * columns
    work.loads = simdgroups * others * 3 * columns
    work.threadgroup_read = work.loads * 64 * size
    tile = blocks.dq_keys * shape.head_dim * size
    work.device_read = work.threadgroup_write = 3 * tile
    # Loads of 8 to 16 bytes; two of the three tiles are stored element by element.
    work.loads += 3 * tile / (16 * 32) + (2 + 1 / 8) * tile / (size * 32)
    work.tiles, work.barriers = 3, 6
    elements = 2 * simdgroups * others
    work.exp2, work.alu, work.phases = elements, 5 * elements, 4
    fixed.device_write = 32 * shape.head_dim * size
    fixed.device_read = 2 * 32 * shape.head_dim * size
    pairs = shape.batch_size * shape.num_heads
    registers = 30 + 3 * 2 * columns + 2 * 2 * others + 2 * others
    return Launch(
        "MLX pull request dQ",
        "float32",
        work,
        fixed,
        _causal_groups(shape.length, pairs, 32, blocks.dq_keys, is_causal),
        simdgroups,
        registers,
        2 * 32 * (shape.head_dim + 8) * size
        + shape.head_dim * (blocks.dq_keys + 8) * size,
        dram_bytes=6 * pairs * shape.length * shape.head_dim * size,
    )


def vjp_dkv_launch(shape: AttentionShape, chip: Chip, is_causal: bool) -> Launch:
    """dK, dV: one or two simdgroups own all keys of a block, all columns, in float32.

    Per block of queries Q, dO, Kᵀ and Vᵀ are staged; P and dS are scattered to
    threadgroup memory and read back transposed. Its author counts 364 registers for
    D = 128 with one simdgroup, 202 with the sizes used here; 128 are there.
    """
    blocks, size = _VJP_BLOCKS[shape.head_dim], 2
    columns, simdgroups = shape.head_dim // 8, blocks.dkv_simdgroups
    queries = blocks.dkv_queries // 8 // simdgroups
    keys = blocks.dkv_keys // 8
    work, fixed = Work(), Work()
    work.products = simdgroups * queries * keys * 4 * columns
    reads = simdgroups * (
        queries * columns  # Q
        + 2 * keys * columns  # Kᵀ, Vᵀ
        + 2 * queries * columns  # dO twice
        + 2 * keys * queries  # Pᵀ, dSᵀ
    )
    scattered = simdgroups * 2 * keys * queries
    tiles = 2 * (blocks.dkv_queries + blocks.dkv_keys) * shape.head_dim * size
    work.loads = reads + 2 * scattered
    work.threadgroup_read = reads * 64 * size
    work.threadgroup_write = scattered * 64 * size + tiles
    work.device_read = tiles
    transposed = 2 * blocks.dkv_keys * shape.head_dim
    work.loads += tiles / (16 * 32) + transposed / 32 + tiles / (2 * 16 * 32)
    work.tiles, work.barriers = 3, 8
    elements = 2 * simdgroups * queries * keys
    work.exp2, work.alu, work.phases = elements, 5 * elements, 6
    groups_of_heads = shape.num_heads // shape.num_kv_heads
    pairs = shape.batch_size * shape.num_kv_heads
    per_head = math.ceil(shape.length / blocks.dkv_queries)
    groups: list[tuple[float, int, int]] = []
    for first in range(0, shape.length, blocks.dkv_keys):
        skipped = first // blocks.dkv_queries if is_causal else 0
        groups.append(((per_head - skipped) * groups_of_heads, 0, 1))
    if not is_causal:
        groups = [(groups[0][0], 0, len(groups) * pairs)]
    else:
        groups *= pairs
    registers = (
        30
        + 2 * 2 * keys * columns  # dK, dV
        + 2 * queries * columns  # Q
        + 3 * 2 * queries * keys  # S, dP, Pᵀ
    )
    fixed.device_write = 2 * blocks.dkv_keys * shape.head_dim * size
    return Launch(
        "MLX pull request dK, dV",
        "float32",
        work,
        fixed,
        groups,
        simdgroups,
        registers,
        2 * blocks.dkv_queries * (shape.head_dim + 8) * size
        + shape.head_dim * (blocks.dkv_keys + 8) * size,
        dram_bytes=6 * pairs * shape.length * shape.head_dim * size,
    )


def vjp_seconds(
    chip: Chip, shape: AttentionShape, pass_: str, is_causal: bool
) -> float:
    """Of MLX with mlx-3241: its forward, delta by array operations, two kernels."""
    pairs = shape.batch_size * shape.num_heads
    size = ITEM_BYTES["float16"]
    seconds = 0.0
    if "forward" in pass_:
        launch = mlx_forward_launch(shape.length, pairs, is_causal)
        # By its products and loads, which grow with head_dim.
        seconds += gpu_model.predict(chip, launch).seconds * shape.head_dim / 64
    if "backward" in pass_:
        rows = pairs * shape.length * shape.head_dim * size
        # delta: product (read 2, write 1), then sum (read 1).
        seconds += 4 * rows / (chip.dram_gbs * 1e9 * DRAM_SHARE) + 2 * LAUNCH_SECONDS
        for launch in (
            vjp_dq_launch(shape, chip, is_causal),
            vjp_dkv_launch(shape, chip, is_causal),
        ):
            seconds += gpu_model.predict(chip, launch).seconds
    return seconds


def seed_dq_launch(shape: AttentionShape, is_causal: bool) -> Launch:
    """dQ of mlx-2995: 32 queries, 4 simdgroups, Q, dO, Kᵀ and V in threadgroup memory.

    Every step over 8 columns loads its fragments between two simdgroup barriers, so no
    load is issued before the products of the step before.
    """
    size, simdgroups = 2, 4
    keys = 32 if shape.head_dim <= 64 else 16
    columns, others = shape.head_dim // 8, keys // 8
    work, fixed = Work(), Work()
    work.products = simdgroups * others * 3 * columns
    reads = simdgroups * columns * (2 * (1 + others) + others)
    work.threadgroup_read = reads * 64 * size
    tile = keys * shape.head_dim * size
    work.device_read = work.threadgroup_write = 2 * tile
    # V and K are read transposed once; K is stored element by element.
    work.loads = reads + 2 * simdgroups * columns * others
    work.loads += 2 * tile / (16 * 32) + tile / (size * 32) + tile / (16 * 32)
    work.tiles, work.barriers = 2, 2
    elements = 2 * simdgroups * others
    work.exp2, work.alu = elements, 8 * elements
    work.phases = 2 * columns + 1
    fixed.device_write = 32 * shape.head_dim * size
    fixed.device_read = 4 * 32 * shape.head_dim * size
    pairs = shape.batch_size * shape.num_heads
    registers = 30 + 2 * columns + 2 * 2 * others + 2 * others * columns
    memory = {64: 19200, 128: 28160}[shape.head_dim]
    return Launch(
        "mlx-2995 dQ",
        "float32",
        work,
        fixed,
        _causal_groups(shape.length, pairs, 32, keys, is_causal),
        simdgroups,
        registers,
        memory,
        dram_bytes=6 * pairs * shape.length * shape.head_dim * size,
    )


def seed_dkv_launch(shape: AttentionShape, is_causal: bool) -> Launch:
    """dK, dV of mlx-2995: 4 simdgroups own 8 queries each for S and dP, then a quarter
    of the columns for dK and dV; P and dS go through threadgroup memory in float32.

    delta is computed again for every block of keys. The query heads of a group follow
    one another.
    """
    size, simdgroups = 2, 4
    keys = 32 if shape.head_dim <= 64 else 16
    columns, others = shape.head_dim // 8, keys // 8
    work, fixed = Work(), Work()
    work.products = simdgroups * others * 4 * columns
    narrow: float = simdgroups * columns * 2 * (1 + others)  # S, dP
    narrow += 2 * simdgroups * 4 * columns / 4  # Q, dO as right operands
    staged = 2 * simdgroups * 4 * others  # dSᵀ, Pᵀ
    scattered = 2 * simdgroups * others
    work.threadgroup_read = narrow * 64 * size + staged * 64 * 4
    tiles = 2 * 32 * shape.head_dim * size
    work.threadgroup_write = tiles + scattered * 64 * 4
    work.device_read = 2 * tiles  # Q, dO; O and dO again for delta
    work.loads = narrow + simdgroups * columns * others + staged + 2 * scattered
    work.loads += 3 * tiles / (16 * 32)
    # delta: 8 rows per simdgroup, each a simd_sum of 14.5 clocks.
    work.shuffles = simdgroups * 8 * 7
    work.alu = simdgroups * 8 * 2 * shape.head_dim / 32
    elements = 2 * simdgroups * others
    work.exp2 = elements
    work.alu += 8 * elements
    work.tiles, work.barriers = 2, 7
    work.phases = 2 * columns + 8 + 8  # the rows of delta follow one another, too
    pairs = shape.batch_size * shape.num_kv_heads
    per_head = math.ceil(shape.length / 32)
    heads = shape.num_heads // shape.num_kv_heads
    groups: list[tuple[float, int, int]] = []
    for first in range(0, shape.length, keys):
        groups.append(((per_head - (first // 32 if is_causal else 0)) * heads, 0, 1))
    groups *= pairs
    if not is_causal:
        groups = [(groups[0][0], 0, len(groups))]
    registers = 30 + 2 * 2 * others * columns // 4 + 3 * 2 * others + 2 * columns // 4
    fixed.device_write = 2 * keys * shape.head_dim * size
    memory = {64: 26 * 1024, 128: 24 * 1024}[shape.head_dim]
    return Launch(
        "mlx-2995 dK, dV",
        "float32",
        work,
        fixed,
        groups,
        simdgroups,
        registers,
        memory,
        dram_bytes=6 * pairs * shape.length * shape.head_dim * size,
    )


def seed_seconds(
    chip: Chip, shape: AttentionShape, pass_: str, is_causal: bool
) -> float:
    """Of MLX with the fused backward of mlx-2995, float16."""
    launches = []
    if "backward" in pass_:
        launches = [seed_dq_launch(shape, is_causal), seed_dkv_launch(shape, is_causal)]
    forward = 0.0
    if "forward" in pass_:
        forward = vjp_seconds(chip, shape, "forward", is_causal)
    return forward + gpu_model.seconds_of(chip, launches)


# What the text of mlx-3241 says of fused over unfused, backward with its forward (M3
# Max, B1 H32, float16); the rows of its tables were not to be had.
_VJP_RATIOS = (
    (64, (512, 1024, 2048, 4096), True, 1.17, 1.37),
    (128, (1024, 2048), True, 0.67, 0.76),
    (64, (1024, 2048, 4096), False, 0.36, 0.70),
    (128, (1024, 2048), False, 0.36, 0.70),
)
# Of mlx-2995 on an M4 MacBook Air, as issue 7 quotes it: the thread's table was not to
# be had, nor its dtype and rows. The larger shapes of the set "seed".
_SEED_RATIO = (0.77, 0.82)
_SEED_SHAPES = tuple(
    AttentionShape(1, 32, 8, length, head_dim)
    for head_dim in (64, 128)
    for length in (512, 1024, 2048)
)


def unfused_mlx_seconds(chip: Chip, shape: AttentionShape, is_causal: bool) -> float:
    """MLX's unfused forward and backward, float16."""
    return gpu_model.unfused_seconds(
        chip, shape, "float16", "forward+backward", is_causal, gpu_model.MLX_PASSES
    )


def vjp_figures() -> list[Figure]:
    """Fused over unfused, of the pull requests' kernels."""
    figures = []
    for head_dim, lengths, is_causal, low, high in _VJP_RATIOS:
        for length in lengths:
            chip = CHIPS["M3 Max"]
            shape = AttentionShape(1, 32, 32, length, head_dim)
            ratio = unfused_mlx_seconds(chip, shape, is_causal) / vjp_seconds(
                chip, shape, "forward+backward", is_causal
            )
            mask = "causal" if is_causal else "no mask"
            what = f"M3 Max, {shape} float16, {mask}, fused backward"
            figures.append(Figure("mlx-3241", what, low, high, ratio, "×"))
    chip = CHIPS["M4"]
    for shape in _SEED_SHAPES:
        ratio = unfused_mlx_seconds(chip, shape, False) / seed_seconds(
            chip, shape, "forward+backward", False
        )
        what = f"M4, {shape} float16, no mask, fused backward"
        figures.append(Figure("mlx-2995", what, *_SEED_RATIO, ratio, "×"))
    return figures


def all_figures() -> list[Figure]:
    return [*mfa_figures(), *mlx_forward_figures(), *vjp_figures()]
