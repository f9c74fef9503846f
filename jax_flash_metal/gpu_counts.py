"""What the attention kernels do in a launch, by formulas: products, exp2, bytes …

For the model of time (gpu_model.py). The formulas follow metal_kernels/*.metal, for
calls without bias, mask, window, lengths, softcap or dropout; tests/model compares them
with the counts of the software device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.gpu_planner import (
    GRADIENT_BYTES,
    ITEM_BYTES,
    SCORE_GRADIENT_LIMIT,
    Chunk,
    Rows,
    chunks,
    num_parts,
)
from jax_flash_metal.variant_table import Variant

# Up to so many queries have kernels of their own, which no formula here describes.
SHORT_QUERY = 8

# 32-bit registers per lane for addresses, lengths, loops, row statistics. Assumption.
_OTHER_REGISTERS = 30
# Of keeps_rows() in attention_common.h.
_KEEP_LIMIT = 72
_DELTA_NUMBERS = 4


@dataclasses.dataclass
class Work:
    """Counts of a threadgroup, or of a part of its work, added over its simdgroups.

    Attributes:
      products: Matrix products of 8x8 by 8x8.
      exp2: Instructions (of 32 lanes), like the next four.
      shuffles: simd_shuffle.
      alu: Other arithmetic. An estimate.
      addresses: Computations of a row's address. An estimate.
      loads: Loads and stores. An estimate, in instructions.
      operands: Fragments loaded for products, two elements per lane.
      threadgroup_read, threadgroup_write: Bytes of threadgroup memory.
      device_read, device_write: Bytes of device memory that the lanes ask for.
      shared_read: The part of device_read that other simdgroups of the threadgroup ask
        for at about the same time.
      barriers: Threadgroup barriers.
      tiles: Copies of tiles that everybody waits for.
      phases: Steps that wait for the one before: loads, then products; a softmax.
    """

    products: float = 0
    exp2: float = 0
    shuffles: float = 0
    alu: float = 0
    addresses: float = 0
    loads: float = 0
    operands: float = 0
    threadgroup_read: float = 0
    threadgroup_write: float = 0
    device_read: float = 0
    device_write: float = 0
    shared_read: float = 0
    barriers: float = 0
    tiles: float = 0
    phases: float = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Adds `times` of another one."""
        for name in _WORK_FIELDS:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


_WORK_FIELDS = tuple(field.name for field in dataclasses.fields(Work))


@dataclasses.dataclass
class Launch:
    """A launch: threadgroups, each with some blocks of scores and a fixed part.

    Attributes:
      kernel: Its name, for people.
      dtype: Of the operands.
      block: Work of a block of scores in which nothing is hidden.
      edge: What a block costs more in which something may be.
      fixed: Work of a threadgroup besides its blocks.
      groups: (blocks, edge blocks among them, number of such threadgroups), in the
        order in which they start.
      num_simdgroups: Per threadgroup.
      registers: 32-bit ones per lane, in the loop over blocks.
      threadgroup_bytes: Of memory.
      dram_bytes: That must go through memory: operands once, results once.
      scratch_bytes: Read or written in scratch that may stay in the system-level cache
        if `scratch_size` fits.
      scratch_size: Bytes.
      streamed_bytes: Operand bytes that the threadgroups read, each once: from L2 or
        the system-level cache if `streamed_size` fits.
      streamed_size: Bytes.
    """

    kernel: str
    dtype: str
    block: Work
    fixed: Work
    groups: list[tuple[float, int, int]]
    num_simdgroups: int
    registers: int
    threadgroup_bytes: int
    edge: Work = dataclasses.field(default_factory=Work)
    dram_bytes: float = 0
    scratch_bytes: float = 0
    scratch_size: float = 0
    streamed_bytes: float = 0
    streamed_size: float = 0

    @property
    def num_threadgroups(self) -> int:
        return sum(count for _, _, count in self.groups)

    def total(self) -> Work:
        """The work of all threadgroups."""
        total = Work()
        total.add(self.fixed, self.num_threadgroups)
        total.add(self.block, sum(n * count for n, _, count in self.groups))
        total.add(self.edge, sum(n * count for _, n, count in self.groups))
        return total


# -- Tiles -----------------------------------------------------------------------------


def row_fragments(variant: Variant) -> int:
    """Fragments of 8 rows that a simdgroup owns."""
    if variant.kernel == "attention_backward_dkv":
        return variant.block_kv * variant.roles // (8 * variant.num_simdgroups)
    return variant.block_q // (8 * variant.num_simdgroups)


def other_fragments(variant: Variant) -> int:
    """Fragments of 8 rows of the other side's block."""
    is_dkv = variant.kernel == "attention_backward_dkv"
    return (variant.block_q if is_dkv else variant.block_kv) // 8


def keeps_rows(
    variant: Variant, num_operands: int, num_sums: int, num_scores: int
) -> bool:
    """Whether a simdgroup keeps the rows it owns, as attention_common.h has it.

    In a lane's registers: 2 numbers of each 8x8 fragment, sums and scores up to 72.

    Args:
      num_operands: Of whose rows a simdgroup owns some.
      num_sums: Results that it sums meanwhile.
      num_scores: Blocks of scores that it has at a time.
    """
    rows, size = row_fragments(variant), ITEM_BYTES[variant.dtype]
    sums = num_sums * variant.head_dim // 8
    others = 2 * rows * (sums + num_scores * other_fragments(variant))
    kept = num_operands * rows * variant.head_dim * size // 16
    return kept + others <= _KEEP_LIMIT


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """The sizes of a row that the formulas share."""

    variant: Variant
    head_dim: int

    @property
    def rows(self) -> int:
        return row_fragments(self.variant)

    @property
    def owners(self) -> int:
        """Simdgroups, or pairs of them, that own rows."""
        return self.variant.num_simdgroups // self.variant.roles

    @property
    def others(self) -> int:
        """Fragments of the other side."""
        return other_fragments(self.variant)

    @property
    def columns(self) -> int:
        """Fragments of the columns that exist."""
        return math.ceil(self.head_dim / 8)

    @property
    def loads_per_fragment(self) -> float:
        """One serves two fragments where columns are dealt out (attention_common.h)."""
        return 0.5 if self.head_dim % 16 == 0 else 1

    @property
    def size(self) -> int:
        return ITEM_BYTES[self.variant.dtype]

    @property
    def fragment(self) -> int:
        """Bytes."""
        return 64 * self.size

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the score gradient in scratch."""
        return GRADIENT_BYTES[self.variant.dtype]

    @property
    def is_shared(self) -> bool:
        """Whether tiles are in threadgroup memory."""
        return self.variant.loads == "threadgroup"

    @property
    def num_tiles(self) -> int:
        """Per operand."""
        return math.ceil(self.head_dim / self.variant.block_d)

    def keeps(self, num_operands: int, num_sums: int, num_scores: int) -> bool:
        return keeps_rows(self.variant, num_operands, num_sums, num_scores)

    def registers(self, num_operands: int, num_sums: int, num_scores: int) -> int:
        """By kinds of values alive at once, as keeps_rows() has them."""
        # head_dim is a constant of the compiled kernel: columns beyond take none.
        count = 2 * self.rows * (num_sums * self.columns + num_scores * self.others)
        loaded = self.others
        if self.keeps(num_operands, num_sums, num_scores):
            count += num_operands * self.rows * self.columns * self.size // 2
        else:
            loaded += 2 * self.rows
        return _OTHER_REGISTERS + count + loaded * self.size // 2

    def copy(self, work: Work, num_operands: int, barriers: int) -> None:
        """Adds setting the tiles of a block's operands, all columns of them."""
        if not self.is_shared:
            return
        rows = num_operands * self.others * 8
        elements = rows * self.columns * 8
        work.device_read += rows * self.head_dim * self.size
        work.threadgroup_write += elements * self.size
        # 16 bytes at once, by loads and stores of four elements.
        work.loads += 2 * elements / (4 * 32)
        work.addresses += elements * self.size / (16 * 32)
        work.barriers += barriers * self.num_tiles
        work.tiles += num_operands * self.num_tiles

    def read(self, work: Work, count: float, transposed: float) -> None:
        """Adds reading fragments of tiles, `transposed` of them with two loads.

        `count` is of all simdgroups.
        """
        num_bytes = count * self.fragment
        work.loads += 2 * transposed + (count - transposed) * self.loads_per_fragment
        work.operands += count
        if self.is_shared:
            work.threadgroup_read += num_bytes
        else:
            work.device_read += num_bytes
            work.shared_read += num_bytes

    def tile_rows(self, work: Work, count: float) -> None:
        """Adds the addresses of rows of tiles, which device memory takes to compute."""
        if not self.is_shared:
            work.addresses += count

    def read_rows(
        self, work: Work, fixed: Work, num_operands: int, keeps: bool
    ) -> None:
        """Adds reading the own rows, once or for each block, `num_operands` in all."""
        target = fixed if keeps else work
        count = num_operands * self.owners * self.rows * self.columns
        target.loads += count * self.loads_per_fragment
        target.operands += count
        target.device_read += count * self.fragment
        target.addresses += num_operands * self.owners * self.rows


# -- What the compiler makes of them ---------------------------------------------------

_RESOURCES = Path(__file__).parent / "kernel_resources.json"
_INSTRUCTION_KINDS = ("float_alu", "integer_alu", "branches")
_ACCESS_KINDS = (
    "device_loads",
    "device_stores",
    "threadgroup_loads",
    "threadgroup_stores",
)


@functools.cache
def compiled_resources() -> dict[str, Any]:
    """Estimates by host name (tools/kernel_resources.py); empty if there are none."""
    if not _RESOURCES.is_file():
        return {}
    kernels: dict[str, Any] = json.loads(_RESOURCES.read_text())["kernels"]
    return kernels


def _refine(launch: Launch, variant: Variant, case: str, copies: Work) -> Launch:
    """Takes arithmetic and loads from the compiler, where they are known.

    That is where every simdgroup runs the same loop, whose round is one block. Where
    copies of tiles are loops of their own, the formulas keep them. Registers stay those
    of the formulas: PTX makes a 64-bit register of every address that a load of Apple's
    forms by itself from a base and an offset, and the estimates of kernels that load
    from device memory are mostly these.
    """
    resources = compiled_resources().get(variant.host_name, {}).get(case)
    if not resources:
        return launch
    loop = resources["hot_loop"]
    rounds = loop and loop["every_round"]
    own = launch.block.products / launch.num_simdgroups
    if not rounds or rounds.get("products") != own:
        return launch
    arithmetic = sum(rounds.get(kind, 0) for kind in _INSTRUCTION_KINDS)
    if ITEM_BYTES[variant.dtype] == 2:
        # Pairs of halves are packed there, but not where registers have halves.
        arithmetic -= min(rounds.get("device_loads", 0), rounds.get("integer_alu", 0))
    accesses = sum(rounds.get(kind, 0) for kind in _ACCESS_KINDS)
    launch.block.alu = copies.alu + launch.num_simdgroups * arithmetic
    launch.block.loads = copies.loads + launch.num_simdgroups * accesses
    launch.block.addresses = copies.addresses
    return launch


# -- Kernels ---------------------------------------------------------------------------


def forward(shape: AttentionShape, variant: Variant, is_causal: bool) -> Launch:
    """attention_forward."""
    t = _Tiling(variant, shape.head_dim)
    own = t.owners * t.rows  # row fragments
    keeps = t.keeps(1, 1, 1)
    block, fixed = Work(), Work()
    t.copy(block, 2, barriers=4)
    copied = dataclasses.replace(block)
    t.read_rows(block, fixed, 1, keeps)
    # S = Q Kᵀ, then O += P V
    block.products = own * t.others * 2 * t.columns
    t.read(block, t.owners * t.others * t.columns, t.owners * t.others * t.columns)
    t.read(block, t.owners * t.others * t.columns, 0)
    t.tile_rows(block, 3 * t.owners * t.others)
    # Per element: max, min, mul, sub, exp2, add; per row: their scale, max and min, the
    # correction, and O times it.
    elements = 2 * own * t.others
    block.exp2 = elements + own
    block.alu = 5 * elements + own * (12 + 2 * t.columns)
    block.shuffles = 2 * own
    block.phases = 3
    fixed.shuffles = 2 * own
    fixed.alu = 20 * own
    fixed.loads += own * t.columns * t.loads_per_fragment + own
    fixed.device_write = (
        t.owners * t.rows * 8 * (shape.head_dim * t.size + 4)
    )  # of whole blocks
    edge = _edge(t, own, num_operands=1)
    if t.is_shared:  # whether some thread met a NaN
        edge.barriers = 1
        edge.threadgroup_write = 4 * variant.num_simdgroups
        edge.threadgroup_read = 32 * 4 * variant.num_simdgroups**2
    groups = _visited_by_blocks(shape, variant, is_causal)
    pairs = shape.batch_size * shape.num_heads
    rows = pairs * shape.num_queries
    launch = Launch(
        "attention_forward",
        variant.dtype,
        block,
        fixed,
        _repeat(_in_order(groups, is_causal), pairs),
        variant.num_simdgroups,
        t.registers(1, 1, 1),
        _tile_bytes(t, 1) + 4 * variant.num_simdgroups,
        edge=edge,
        dram_bytes=_row_bytes(shape, t.size, q=2, kv=2) + 4 * rows,
        **_stream(shape, t, groups, 2, variant.block_kv),
    )
    return _refine(launch, variant, "plain", copied)


def backward_dq(shape: AttentionShape, variant: Variant, is_causal: bool) -> Launch:
    """attention_backward_dq, form A."""
    t = _Tiling(variant, shape.head_dim)
    own = t.owners * t.rows
    block, fixed = Work(), Work()
    # K is set twice where the columns are blocked.
    copies = 3 if variant.block_d != variant.head_dim else 2
    t.copy(block, copies, barriers=2 * copies)
    copied = dataclasses.replace(block)
    t.read_rows(block, fixed, 2, t.keeps(2, 1, 2))
    block.products = own * t.others * 3 * t.columns
    reads = t.owners * t.others * t.columns
    t.read(block, 2 * reads, 2 * reads)
    t.read(block, reads, 0)
    t.tile_rows(block, 5 * t.owners * t.others)
    elements = 2 * own * t.others
    block.exp2 = elements
    block.alu = 6 * elements  # scale, shift, remainder, at most 0, delta, multiply
    block.phases = 4
    fixed.loads += own * (t.columns * t.loads_per_fragment + 1)
    fixed.device_read += own * 8 * 16
    fixed.device_write = own * 8 * shape.head_dim * t.size
    groups = _visited_by_blocks(shape, variant, is_causal)
    pairs = shape.batch_size * shape.num_heads
    launch = Launch(
        "attention_backward_dq",
        variant.dtype,
        block,
        fixed,
        _repeat(_in_order(groups, is_causal), pairs),
        variant.num_simdgroups,
        t.registers(2, 1, 2),
        _tile_bytes(t, 1),
        edge=_edge(t, own, num_operands=1),
        dram_bytes=_row_bytes(shape, t.size, q=3, kv=2)
        + (4 + 4 * _DELTA_NUMBERS) * pairs * shape.num_queries,
        **_stream(shape, t, groups, copies, variant.block_kv),
    )
    return _refine(launch, variant, "plain", copied)


def backward_dkv(
    shape: AttentionShape,
    variant: Variant,
    is_causal: bool,
    chunk: Chunk | None = None,
) -> Launch:
    """attention_backward_dkv; with a chunk it writes the score gradient, form B."""
    t = _Tiling(variant, shape.head_dim)
    own = t.owners * t.rows
    is_paired = variant.roles == 2
    writes = chunk is not None
    chunk = chunk or Chunk(shape.batch_size, shape.num_kv_heads, 0, shape.length)
    num_sums = 1 if is_paired else 2
    block, fixed = Work(), Work()
    # Both tiles of Q and dO; twice where the columns are blocked.
    copies = 4 if variant.block_d != variant.head_dim else 2
    t.copy(block, copies, barriers=copies)
    copied = dataclasses.replace(block)
    t.read_rows(block, fixed, 2, t.keeps(num_sums, num_sums, num_sums))
    block.products = own * t.others * 4 * t.columns
    reads = t.owners * t.others * t.columns
    t.read(block, 2 * reads, 2 * reads)
    t.read(block, 2 * reads, 0)
    t.tile_rows(block, 6 * t.owners * t.others)
    # Row statistics: a float4 of 2 queries for each fragment of them, per simdgroup;
    # the lanes of a column ask for the same.
    statistics = 2 * t.others * variant.num_simdgroups
    block.loads += statistics
    block.alu += 2 * statistics
    block.device_read += statistics * 4 * 16
    elements = 2 * own * t.others
    block.exp2 = elements
    block.alu += 6 * elements
    block.phases = 4
    if is_paired:
        block.threadgroup_write += elements * 32 * 4
        block.threadgroup_read += elements * 32 * 4
        block.loads += 2 * elements
        block.alu += 2 * elements
        block.barriers += 1
    if writes:
        block.loads += own * t.others
        block.addresses += own * t.others
        block.alu += elements
        block.device_write += own * t.others * 64 * t.gradient_size
    parts, per_part = num_parts(shape, variant)
    out_size = 4 if parts > 1 else t.size
    fixed.loads += own * 2 * t.columns * t.loads_per_fragment
    fixed.device_write = own * 8 * 2 * shape.head_dim * out_size
    groups_of_heads = shape.num_heads // shape.num_kv_heads
    groups: list[tuple[float, int]] = []
    for part in range(parts):
        for key in range(chunk.first_key, chunk.end_key, variant.block_kv):
            groups.append(
                _visited_queries(
                    shape,
                    key,
                    variant,
                    is_causal,
                    part * per_part,
                    per_part,
                    groups_of_heads,
                )
            )
    pairs = chunk.num_batches * chunk.num_kv_heads
    share = pairs / (shape.batch_size * shape.num_kv_heads)
    keys_share = (chunk.end_key - chunk.first_key) / shape.length
    num_rows = shape.batch_size * shape.num_heads * shape.num_queries
    gradient = (
        pairs
        * groups_of_heads
        * shape.num_queries
        * (chunk.end_key - chunk.first_key)
        * t.gradient_size
        if writes
        else 0
    )
    visible = _visible_share(shape, is_causal)
    partial = (
        parts * pairs * (chunk.end_key - chunk.first_key) * 2 * shape.head_dim * 4
        if parts > 1
        else 0
    )
    weights = t.owners * 8 * t.rows * variant.block_q * 4 if is_paired else 4
    if is_paired and not t.is_shared:  # two in turn
        weights *= 2
    launch = Launch(
        "attention_backward_dkv",
        variant.dtype,
        block,
        fixed,
        _repeat(groups, pairs),
        variant.num_simdgroups,
        t.registers(num_sums, num_sums, num_sums),
        _tile_bytes(t, 2) + weights,
        edge=_edge(t, own, num_operands=2),
        dram_bytes=share
        * (
            _row_bytes(shape, t.size, q=2, kv=0)
            + keys_share * _row_bytes(shape, t.size, q=0, kv=2 + 2 * (parts == 1))
            + (4 + 4 * _DELTA_NUMBERS) * num_rows
        ),
        scratch_bytes=gradient * visible + partial,
        scratch_size=gradient + partial,
        **_stream(shape, t, groups, copies, variant.block_q, pairs),
    )
    return _refine(launch, variant, "scratch" if writes else "plain", copied)


def dkv_combine(shape: AttentionShape, variant: Variant, parts: int) -> Launch:
    """attention_backward_dkv_combine."""
    elements = shape.batch_size * shape.num_kv_heads * shape.length * shape.head_dim
    size = ITEM_BYTES[variant.dtype]
    lanes = 32 * variant.num_simdgroups
    fixed = Work(
        alu=variant.num_simdgroups * (parts + 20),
        addresses=variant.num_simdgroups * (parts + 4),
        loads=variant.num_simdgroups * (parts + 1),
        device_read=lanes * 4 * parts,
        device_write=lanes * size,
        phases=1,
    )
    return Launch(
        "attention_backward_dkv_combine",
        variant.dtype,
        Work(),
        fixed,
        [(0, 0, 2 * math.ceil(elements / lanes))],
        variant.num_simdgroups,
        _OTHER_REGISTERS,
        0,
        dram_bytes=2 * elements * size,
        scratch_bytes=2 * elements * 4 * parts,
        scratch_size=2 * elements * 4 * parts,
    )


def dq_product(
    shape: AttentionShape,
    variant: Variant,
    is_causal: bool,
    chunk: Chunk,
) -> Launch:
    """attention_backward_dq_product: dQ = dS·K of a chunk.

    A block is 8 keys; each simdgroup stops at its own last one. Blocks of columns are
    threadgroups of their own; the work is that of the mean one.
    """
    t = _Tiling(variant, shape.head_dim)
    own = t.owners * t.rows
    columns = t.columns / t.num_tiles
    block, fixed = Work(), Work()
    block.products = own * columns
    t.read(block, t.owners * columns, 0)
    t.tile_rows(block, t.owners)
    # The score gradient lies transposed: two loads.
    block.loads += 2 * own
    block.addresses += own
    block.device_read += own * 64 * t.gradient_size
    block.phases = 1
    groups_of_heads = shape.num_heads // shape.num_kv_heads
    is_whole = chunk.end_key - chunk.first_key == shape.length
    fixed.loads += own * columns * t.loads_per_fragment
    # Chunks of keys leave the sums in float32 and go on with them.
    width = shape.head_dim / t.num_tiles
    fixed.device_write = own * 8 * width * (t.size if is_whole else 4)
    fixed.device_read = own * (0 if is_whole else 8 * width * 4)
    groups = []
    rows = 8 * t.rows
    for first in range(0, shape.num_queries, variant.block_q):
        steps = 0
        for row in range(first, min(first + variant.block_q, shape.num_queries), rows):
            last = min(row + rows, shape.num_queries) - 1
            end = min(chunk.end_key, _visible_end(shape, last, is_causal))
            steps += math.ceil(max(0, end - chunk.first_key) / 8)
        groups.append((steps / t.owners, 0))
    pairs = chunk.num_batches * chunk.num_kv_heads * groups_of_heads
    num_keys = chunk.end_key - chunk.first_key
    gradient = pairs * shape.num_queries * num_keys * t.gradient_size
    share = chunk.num_batches * chunk.num_kv_heads
    all_heads = shape.batch_size * shape.num_kv_heads
    registers = 2 * t.rows * math.ceil(columns)
    registers += (t.rows * t.gradient_size + 2 * t.size) // 2
    launch = Launch(
        "attention_backward_dq_product",
        variant.dtype,
        block,
        fixed,
        _repeat(_in_order(groups, is_causal), pairs * t.num_tiles),
        variant.num_simdgroups,
        _OTHER_REGISTERS + registers,
        0,
        edge=Work(),
        dram_bytes=share / all_heads * _row_bytes(shape, t.size, q=1, kv=1)
        + (0 if is_whole else 4.0 * pairs * shape.num_queries * shape.head_dim),
        scratch_bytes=gradient * _visible_share(shape, is_causal),
        scratch_size=gradient,
        **_stream(shape, t, groups, 1, 8, pairs),
    )
    return _refine(launch, variant, "plain", Work())


def delta(shape: AttentionShape, variant: Variant) -> Launch:
    """attention_delta: a row per simdgroup."""
    size = ITEM_BYTES[variant.dtype]
    rows = shape.batch_size * shape.num_heads * shape.num_queries
    n = variant.num_simdgroups
    steps = math.ceil(shape.head_dim / 32)
    fixed = Work(
        alu=n * (4 * steps + 20 + 15),  # simd_sum: 14.5 clocks
        loads=n * (2 * steps + 4),
        addresses=n * 4,
        device_read=n * (2 * shape.head_dim * size + 2 * 4),
        device_write=n * 4 * _DELTA_NUMBERS,
        phases=2,
    )
    return Launch(
        "attention_delta",
        variant.dtype,
        Work(),
        fixed,
        [
            (
                0,
                0,
                shape.batch_size * shape.num_heads * math.ceil(shape.num_queries / n),
            )
        ],
        n,
        _OTHER_REGISTERS,
        0,
        dram_bytes=_row_bytes(shape, size, q=2, kv=0) + (4 + 4 * _DELTA_NUMBERS) * rows,
    )


# -- Passes ----------------------------------------------------------------------------


def launches(
    shape: AttentionShape,
    rows: Rows,
    pass_: str,
    is_causal: bool,
    limit: int = SCORE_GRADIENT_LIMIT,
) -> list[Launch]:
    """Those of a pass ("forward", "backward" or "forward+backward"), in order."""
    result = []
    if "forward" in pass_:
        result.append(forward(shape, rows.forward, is_causal))
    if "backward" not in pass_:
        return result
    result.append(delta(shape, rows.delta))
    if rows.form == "B":
        assert rows.dq_product is not None
        for chunk in chunks(shape, rows.dkv, limit):
            result.append(backward_dkv(shape, rows.dkv, is_causal, chunk))
            result.append(dq_product(shape, rows.dq_product, is_causal, chunk))
    else:
        assert rows.dq is not None
        result.append(backward_dq(shape, rows.dq, is_causal))
        result.append(backward_dkv(shape, rows.dkv, is_causal))
    parts, _ = num_parts(shape, rows.dkv)
    if parts > 1 and rows.dkv_combine is not None:
        result.append(dkv_combine(shape, rows.dkv_combine, parts))
    return result


# -- Blocks that are visited -----------------------------------------------------------


def _visible_end(shape: AttentionShape, query: int, is_causal: bool) -> int:
    """The end of the keys that a query sees."""
    if not is_causal:
        return shape.length
    return min(max(query + shape.q_offset + 1, 0), shape.length)


def _visible_share(shape: AttentionShape, is_causal: bool) -> float:
    if not shape.num_queries * shape.length:
        return 0.0
    return shape.visible_pairs(is_causal=is_causal) / (shape.num_queries * shape.length)


def _visited_by_blocks(
    shape: AttentionShape, variant: Variant, is_causal: bool
) -> list[tuple[float, int]]:
    """`_visited` of each block of queries, which is a threadgroup."""
    return [
        _visited(shape, first, variant.block_q, variant.block_kv, is_causal)
        for first in range(0, shape.num_queries, variant.block_q)
    ]


def _visited(
    shape: AttentionShape, first: int, block_q: int, block_kv: int, is_causal: bool
) -> tuple[int, int]:
    """Blocks of keys that a block of queries visits, and those with hidden elements."""
    last = min(first + block_q, shape.num_queries) - 1
    end = _visible_end(shape, last, is_causal)
    blocks = math.ceil(end / block_kv)
    interior = 0
    if first + block_q <= shape.num_queries:
        interior = _visible_end(shape, first, is_causal) // block_kv
    return blocks, blocks - min(interior, blocks)


def _visited_queries(
    shape: AttentionShape,
    first_key: int,
    variant: Variant,
    is_causal: bool,
    first_item: int,
    num_items: int,
    groups_of_heads: int,
) -> tuple[int, int]:
    """The same of a block of keys, for items of work: blocks of the heads' queries."""
    per_head = math.ceil(shape.num_queries / variant.block_q)
    begin = max(0, first_key - shape.q_offset) if is_causal else 0
    if begin >= shape.num_queries:
        return 0, 0
    first_block = begin // variant.block_q
    blocks = edges = 0
    end_item = min(first_item + num_items, per_head * groups_of_heads)
    for head in range(first_item // per_head, math.ceil(end_item / per_head)):
        low = max(first_item - head * per_head, first_block)
        high = min(end_item - head * per_head, per_head)
        if high <= low:
            continue
        blocks += high - low
        # The first queries that see every key of the block.
        if first_key + variant.block_kv > shape.length:
            edges += high - low
            continue
        whole = 0
        if is_causal:
            last_key = first_key + variant.block_kv - 1
            whole = math.ceil(max(0, last_key - shape.q_offset) / variant.block_q)
        tail = 1 if high == per_head and shape.num_queries % variant.block_q else 0
        interior = max(0, high - tail - max(low, whole))
        edges += high - low - interior
    return blocks, edges


def _in_order(
    groups: list[tuple[float, int]], is_causal: bool
) -> list[tuple[float, int]]:
    """Blocks of queries as they start: with a causal mask the heaviest one first."""
    return groups[::-1] if is_causal else groups


def _repeat(
    groups: list[tuple[float, int]], times: int
) -> list[tuple[float, int, int]]:
    """The threadgroups of a head, for every head; the grid's x runs fastest."""
    if len(set(groups)) == 1:
        return [(*groups[0], len(groups) * times)]
    return [(*group, 1) for _ in range(times) for group in groups]


# -- Bytes -----------------------------------------------------------------------------


def _row_bytes(shape: AttentionShape, size: int, *, q: float, kv: float) -> float:
    """Bytes of `q` tensors like query and `kv` like key."""
    return (
        shape.batch_size
        * shape.head_dim
        * size
        * (
            q * shape.num_heads * shape.num_queries
            + kv * shape.num_kv_heads * shape.length
        )
    )


def _tile_bytes(t: _Tiling, count: int) -> int:
    """Of threadgroup memory: padded rows, or one element where nothing is copied."""
    if not t.is_shared:
        return count * t.size
    return count * t.others * 8 * (t.variant.block_d * t.size + 16)


def _stream(
    shape: AttentionShape,
    t: _Tiling,
    groups: list[tuple[float, int]],
    num_operands: int,
    block: int,
    pairs: int | None = None,
) -> dict[str, float]:
    """What the threadgroups read of the other side, and how large that is at a time."""
    pairs = pairs or shape.batch_size * shape.num_heads
    rows = sum(blocks for blocks, _ in groups) * block
    return {
        "streamed_bytes": float(num_operands * pairs * rows * shape.head_dim * t.size),
        "streamed_size": float(2 * shape.length * shape.head_dim * t.size),
    }


def _edge(t: _Tiling, own: int, num_operands: int) -> Work:
    """What a block costs more that compares positions and looks for NaN."""
    # The elements of tiles as they are copied, or as each owner of rows loads them.
    owners = 1 if t.is_shared else t.owners
    fragments = num_operands * owners * t.others * t.columns
    return Work(alu=5 * 2 * own * t.others + 3 * 2 * fragments)
