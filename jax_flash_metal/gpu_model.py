"""A model of the time of attention on Apple's GPUs: predictions, not measurements.

From the counts of gpu_counts.py and the facts of gpu_chips.py; docs/model.md explains
it and says how far off it is where others have measured. It picks the default rows of
the variant table (rank) and is printed by `python -m jax_flash_metal bench --model`.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math

from jax_flash_metal import gpu_counts, gpu_planner
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.gpu_chips import (
    ADDRESS_CLOCKS,
    ALU_CLOCKS,
    BARRIER_CLOCKS,
    CHIPS,
    DRAM_SHARE,
    EXP2_CLOCKS,
    EXP2_UNIT_CLOCKS,
    FIRST_FAMILY_WITH_BFLOAT16,
    FIRST_FAMILY_WITH_LARGE_L1,
    L1_LATENCY,
    L2_BYTES,
    L2_HITS,
    L2_LATENCY,
    LAUNCH_SECONDS,
    LOAD_CLOCKS,
    MAX_REGISTERS,
    MAX_SIMDGROUPS,
    ON_CORE_BYTES,
    OVERLAP,
    PRODUCT_CLOCKS,
    REGISTER_BYTES,
    SCHEDULERS,
    SHARED_MEMORY_BYTES,
    SHUFFLE_CLOCKS,
    SLC_LATENCY,
    SLC_PART,
    SLC_TIMES_DRAM,
    THREADGROUP_BYTES,
    Chip,
)
from jax_flash_metal.gpu_counts import Launch, Work
from jax_flash_metal.gpu_planner import ITEM_BYTES, Rows
from jax_flash_metal.variant_table import Variant, variants

# Of form B's scratch (plugin/attention/plan_context.h); a Mac's memory allows it.
_GRADIENT_BYTES_PER_CORE = 24 << 20


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one launch.

    Attributes:
      seconds: Of all.
      limit: What decides: "issue", "stalls", "on-core", "L2", "SLC" or "DRAM".
      shares: Each limit's own time as a part of the time without the launch's overhead.
      simdgroups: Resident per core.
    """

    seconds: float
    limit: str
    shares: dict[str, float]
    simdgroups: int


def resident_simdgroups(chip: Chip, launch: Launch) -> int:
    """Simdgroups of a core at a time, whole threadgroups; at least one."""
    registers = min(max(launch.registers, 16), MAX_REGISTERS) * 32 * 4
    per_group = launch.num_simdgroups
    if chip.family >= FIRST_FAMILY_WITH_LARGE_L1:
        size = per_group * registers + launch.threadgroup_bytes
        groups = SHARED_MEMORY_BYTES // size
    else:
        groups = REGISTER_BYTES // (per_group * registers)
        if launch.threadgroup_bytes:
            groups = min(groups, THREADGROUP_BYTES // launch.threadgroup_bytes)
    groups = min(groups, MAX_SIMDGROUPS // per_group)
    # No more than there are, spread over the cores.
    groups = min(groups, math.ceil(launch.num_threadgroups / chip.cores))
    return max(1, groups) * per_group


@dataclasses.dataclass(frozen=True)
class _Load:
    """What some work asks of a core; it adds up.

    Attributes:
      products, others: Clocks of a scheduler.
      exp2: Clocks of the unit for it.
      on_core, l2: Bytes.
      waits: Clocks that a simdgroup waits in, were it alone.
    """

    products: float
    others: float
    exp2: float
    on_core: float
    l2: float
    waits: float


def _load(chip: Chip, launch: Launch, work: Work) -> _Load:
    emulates = launch.dtype == "bfloat16" and chip.family < FIRST_FAMILY_WITH_BFLOAT16
    dtype = "float32" if emulates else launch.dtype
    others = (
        work.alu * ALU_CLOCKS
        + work.exp2 * EXP2_CLOCKS
        + work.shuffles * SHUFFLE_CLOCKS
        + work.addresses * ADDRESS_CLOCKS
        + work.loads * LOAD_CLOCKS
        # Each loaded element of a product is shifted to the left.
        + (work.operands * 2 * ALU_CLOCKS if emulates else 0)
    )
    device = work.device_read + work.device_write
    # What simdgroups share passes a small L1 for each of them.
    is_shared = chip.family >= FIRST_FAMILY_WITH_LARGE_L1
    twice = work.shared_read * (1 - 1 / launch.num_simdgroups) if is_shared else 0
    step = L1_LATENCY if launch.threadgroup_bytes > 64 else L2_LATENCY
    return _Load(
        products=work.products * PRODUCT_CLOCKS[dtype],
        others=others,
        exp2=work.exp2 * EXP2_UNIT_CLOCKS,
        on_core=work.threadgroup_read + work.threadgroup_write + device,
        l2=device - twice,
        waits=work.tiles * (SLC_LATENCY + L1_LATENCY)
        + work.phases * step
        + work.barriers * BARRIER_CLOCKS,
    )


def _spill(launch: Launch) -> Work:
    """What the registers beyond the limit cost a block: written and read back once."""
    excess = max(0, launch.registers - MAX_REGISTERS) * launch.num_simdgroups
    return Work(loads=2 * excess, device_read=128 * excess, device_write=128 * excess)


@dataclasses.dataclass(frozen=True)
class _GroupTime:
    """Of a threadgroup, in clocks of a core that works for it alone."""

    issue: float
    stalls: float
    on_core: float
    l2: float

    @property
    def clocks(self) -> float:
        return max(self.issue, self.stalls, self.on_core, self.l2)


def _group_times(
    chip: Chip, launch: Launch, resident: int
) -> dict[tuple[float, int], _GroupTime]:
    """By numbers of blocks and of edge blocks."""
    fixed, block, edge, spill = (
        _load(chip, launch, work)
        for work in (launch.fixed, launch.block, launch.edge, _spill(launch))
    )

    def of(blocks: float, edges: float) -> _GroupTime:
        def total(name: str) -> float:
            of_block = getattr(block, name) + getattr(spill, name)
            of_edges = edges * getattr(edge, name)
            all_: float = getattr(fixed, name) + blocks * of_block + of_edges
            return all_

        products, others = total("products"), total("others")
        together = max(products, others)
        together += (1 - OVERLAP[chip.family]) * min(products, others)
        issue = max(together, total("exp2")) / SCHEDULERS
        # Alone, a simdgroup takes its own clocks and its waits; `resident` overlap.
        alone = issue * SCHEDULERS / launch.num_simdgroups + total("waits")
        return _GroupTime(
            issue,
            alone * launch.num_simdgroups / resident,
            total("on_core") / ON_CORE_BYTES,
            total("l2") / L2_BYTES,
        )

    kinds = {(blocks, edges) for blocks, edges, _ in launch.groups}
    return {kind: of(*kind) for kind in kinds}


def _makespan(
    chip: Chip, launch: Launch, times: dict[tuple[float, int], float]
) -> float:
    """Clocks until the last core is done: each next threadgroup goes to the idlest."""
    if len(launch.groups) == 1:
        blocks, edges, count = launch.groups[0]
        return math.ceil(count / chip.cores) * times[blocks, edges]
    cores = [0.0] * min(chip.cores, launch.num_threadgroups)
    for blocks, edges, count in launch.groups:
        for _ in range(count):
            heapq.heapreplace(cores, cores[0] + times[blocks, edges])
    return max(cores)


def predict(chip: Chip, launch: Launch) -> Prediction:
    """The time of a launch by its largest limit, and the overhead of launching."""
    resident = resident_simdgroups(chip, launch)
    groups = _group_times(chip, launch, resident)
    clock = chip.clock_mhz * 1e6
    last = _makespan(chip, launch, {kind: t.clocks for kind, t in groups.items()})
    cores = min(chip.cores, launch.num_threadgroups)
    parts = {"issue": 0.0, "stalls": 0.0, "on-core": 0.0, "L2": 0.0}
    for blocks, edges, count in launch.groups:
        time = groups[blocks, edges]
        for name, value in zip(parts, (time.issue, time.stalls, time.on_core, time.l2)):
            parts[name] += value * count / cores / clock
    dram, slc = launch.dram_bytes, launch.streamed_bytes * (1 - L2_HITS)
    cache = chip.slc_mb * 1e6 * SLC_PART
    missed = slc * max(0.0, 1 - cache / max(launch.streamed_size, 1.0))
    dram, slc = dram + missed, slc - missed
    if launch.scratch_size > cache:
        dram += launch.scratch_bytes
    else:
        slc += launch.scratch_bytes
    bandwidth = chip.dram_gbs * 1e9 * DRAM_SHARE
    if dram <= cache:  # just written by the kernel before, or soon read again
        dram, slc = 0.0, slc + dram
    parts["DRAM"] = dram / bandwidth
    parts["SLC"] = (slc + dram) / (bandwidth * SLC_TIMES_DRAM)
    body = max(last / clock, parts["DRAM"], parts["SLC"])
    return Prediction(
        body + LAUNCH_SECONDS,
        max(parts, key=lambda name: parts[name]),
        {name: value / body for name, value in parts.items()},
        resident,
    )


def seconds_of(chip: Chip, launches: list[Launch]) -> float:
    """The time of launches one after the other."""
    return sum(predict(chip, launch).seconds for launch in launches)


# -- Ours ------------------------------------------------------------------------------


def attention_seconds(
    chip: Chip,
    shape: AttentionShape,
    dtype: str,
    pass_: str,
    is_causal: bool,
    rows: Rows | None = None,
) -> float:
    """Of this package's kernels, with the rows of the table unless others are given."""
    return seconds_of(
        chip, attention_launches(chip, shape, dtype, pass_, is_causal, rows)
    )


def attention_launches(
    chip: Chip,
    shape: AttentionShape,
    dtype: str,
    pass_: str,
    is_causal: bool,
    rows: Rows | None = None,
) -> list[Launch]:
    """Those of a pass on the chip; the rows as attention_seconds() takes them."""
    limit = score_gradient_limit(chip)
    rows = rows or gpu_planner.default_rows(shape, dtype, chip.family, limit)
    return gpu_counts.launches(shape, rows, pass_, is_causal, limit)


def score_gradient_limit(chip: Chip) -> int:
    """Bytes of form B's scratch on the chip."""
    return max(gpu_planner.SCORE_GRADIENT_LIMIT, chip.cores * _GRADIENT_BYTES_PER_CORE)


# Operations of forward and of the five-product backward in units of q_len·kv_len.
# metal-flash-attention counts 5 more for the softmax of each, which products do not.
def work_of(
    shape: AttentionShape, pass_: str, is_causal: bool, softmax: int = 0
) -> float:
    """Multiply-adds of the five-product algorithm; `softmax`: 5 as others count it."""
    pairs = (
        shape.batch_size * shape.num_heads * shape.visible_pairs(is_causal=is_causal)
    )
    per_pair = 0
    if "forward" in pass_:
        per_pair += 2 * shape.head_dim + softmax
    if "backward" in pass_:
        per_pair += 5 * shape.head_dim + softmax
    return float(pairs * per_pair)


def share_of_peak(
    chip: Chip,
    shape: AttentionShape,
    pass_: str,
    is_causal: bool,
    seconds: float,
    softmax: int = 0,
) -> float:
    """The part of the chip's peak that the five-product algorithm then takes."""
    work = work_of(shape, pass_, is_causal, softmax)
    return 2 * work / (seconds * chip.flops)


# -- The unfused form ------------------------------------------------------------------

# Part of the peak that plain products reach: issue 7 says 85 %. Measured are 80 to 83 %
# (M3 Max and M4 Max in float32, device-benchmarks), so this favours the unfused form.
PLAIN_PRODUCT_SHARE = 0.85
# Rows and columns of what a threadgroup of a plain product computes, and the part of
# the sum that it has in threadgroup memory at a time (MLX's steel_gemm, 4 simdgroups).
_TILE, _TILE_DEPTH = 64, 16


@dataclasses.dataclass(frozen=True)
class UnfusedPasses:
    """Bytes per score, as numbers of items of the input dtype, of passes over them.

    Attributes:
      softmax: Of the softmax, besides its neighbours' own reading and writing.
      gradient: Of the gradient of the softmax.
      launches_forward, launches_backward: Kernels.
    """

    softmax: int
    gradient: int
    launches_forward: int
    launches_backward: int


# As few passes as can be: softmax reads S and writes P; its gradient reads P and dP and
# writes dS.
BEST_PASSES = UnfusedPasses(2, 3, 3, 5)
# MLX's automatic gradient of its softmax: P∘dP; its row sums; times P; the difference
# (each an elementwise kernel): 3 + 1 + 2 + 3 items.
MLX_PASSES = UnfusedPasses(2, 9, 4, 9)


def plain_product_launch(
    dtype: str, batch: int, rows: int, columns: int, depth: int
) -> Launch:
    """A batch of [rows, depth] by [depth, columns]; what it cannot be faster than.

    Each of four simdgroups has 4 by 4 fragments of a tile.
    """
    size, simdgroups, side = ITEM_BYTES[dtype], 4, 4
    steps = _TILE_DEPTH // 8
    loaded = simdgroups * 2 * side * steps
    copied = 2 * _TILE * _TILE_DEPTH * size
    block = Work(
        products=simdgroups * side * side * steps,
        loads=loaded * 1.5 + 2 * copied / (8 * 32),
        operands=loaded,
        threadgroup_read=loaded * 64 * size,
        threadgroup_write=copied,
        device_read=copied,
        barriers=2,
        tiles=1,
        phases=1,
    )
    fixed = Work(
        loads=simdgroups * side * side, device_write=_TILE * _TILE * size, phases=1
    )
    tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    return Launch(
        "plain product",
        dtype,
        block,
        fixed,
        [(math.ceil(depth / _TILE_DEPTH), 0, batch * tiles)],
        simdgroups,
        30 + 2 * side * side + 2 * side * size // 2,
        2 * _TILE * (_TILE_DEPTH * size + 16),
    )


def unfused_seconds(
    chip: Chip,
    shape: AttentionShape,
    dtype: str,
    pass_: str,
    is_causal: bool,
    passes: UnfusedPasses = BEST_PASSES,
    launch_seconds: float = LAUNCH_SECONDS,
) -> float:
    """Of plain products and softmax passes over [q_len, kv_len] arrays.

    A causal mask is one more array, shared by the heads, and saves nothing. P is kept
    for the backward pass, so that nothing is computed twice: two products forward, four
    backward (dV, dP, dQ, dK). A product takes its share of the peak, or what its grid
    and its waits allow (plain_product_launch).
    """
    scores = shape.batch_size * shape.num_heads * shape.num_queries * shape.length
    size = ITEM_BYTES[dtype]
    bandwidth = chip.dram_gbs * 1e9 * DRAM_SHARE
    if scores * size <= chip.slc_mb * 1e6 * SLC_PART:
        bandwidth *= SLC_TIMES_DRAM
    rows = shape.batch_size * shape.head_dim * size
    q_bytes = rows * shape.num_heads * shape.num_queries
    kv_bytes = rows * shape.num_kv_heads * shape.length
    pairs = shape.batch_size * shape.num_heads
    operations = 2.0 * scores * shape.head_dim
    least = max(
        operations / (chip.flops * PLAIN_PRODUCT_SHARE),
        (scores * size + q_bytes + kv_bytes) / bandwidth,
    )

    def product(rows: int, columns: int, depth: int) -> float:
        """Of every head, as a sum over `depth`; without the overhead of a launch."""
        launch = plain_product_launch(dtype, pairs, rows, columns, depth)
        return max(least, predict(chip, launch).seconds - LAUNCH_SECONDS)

    queries, keys, width = shape.num_queries, shape.length, shape.head_dim
    seconds = 0.0
    if "forward" in pass_:
        seconds += product(queries, keys, width)  # S
        seconds += product(queries, width, keys)  # out
        seconds += passes.softmax * scores * size / bandwidth
        seconds += passes.launches_forward * launch_seconds
    if "backward" in pass_:
        seconds += product(queries, keys, width)  # dP
        seconds += product(queries, width, keys)  # dQ
        seconds += 2 * product(keys, width, queries)  # dV, dK
        seconds += passes.gradient * scores * size / bandwidth
        seconds += passes.launches_backward * launch_seconds
    return seconds


# -- Choosing rows ---------------------------------------------------------------------


def representative_shape(head_dim: int) -> AttentionShape:
    """What a row is chosen for: long enough that only its speed counts."""
    return AttentionShape(1, 32, 32, 2048, head_dim)


_CHIPS_OF_FAMILY = {7: ("M1", "M1 Max"), 8: ("M2", "M2 Max"), 9: ("M3", "M4", "M4 Max")}


def family_chips(family: int) -> list[Chip]:
    """The chips that stand for a family."""
    return [CHIPS[name] for name in _CHIPS_OF_FAMILY[family]]


def launch_of(
    shape: AttentionShape, row: Variant, is_causal: bool, form: str, dkv: Variant | None
) -> list[Launch]:
    """What a row of a tiled kernel does for a problem. `dkv`: beside a product."""
    if row.kernel == "attention_forward":
        return [gpu_counts.forward(shape, row, is_causal)]
    if row.kernel == "attention_backward_dq":
        return [gpu_counts.backward_dq(shape, row, is_causal)]
    if row.kernel == "attention_backward_dkv":
        if form == "A":
            return [gpu_counts.backward_dkv(shape, row, is_causal)]
        return [
            gpu_counts.backward_dkv(shape, row, is_causal, chunk)
            for chunk in gpu_planner.chunks(shape, row)
        ]
    assert row.kernel == "attention_backward_dq_product" and dkv is not None
    return [
        gpu_counts.dq_product(shape, row, is_causal, chunk)
        for chunk in gpu_planner.chunks(shape, dkv)
    ]


# The kernels whose rows the model can tell apart.
TILED_KERNELS = (
    "attention_forward",
    "attention_backward_dq",
    "attention_backward_dkv",
    "attention_backward_dq_product",
)


@functools.cache
def row_seconds(row: Variant, family: int, form: str = "B") -> float:
    """The mean over the family's chips and masks, as a multiple of two products."""
    shape = representative_shape(row.head_dim)
    dkv = None
    if row.kernel == "attention_backward_dq_product":
        dkv = gpu_planner.default_variant(
            "attention_backward_dkv", row.dtype, row.head_dim, family
        )
    total = 0.0
    for chip in family_chips(family):
        for is_causal in (False, True):
            seconds = seconds_of(chip, launch_of(shape, row, is_causal, form, dkv))
            work = work_of(shape, "forward", is_causal)
            total += seconds * chip.flops / work
    return total


def rank(
    kernel: str, dtype: str, head_dim: int, family: int, form: str = "B"
) -> list[tuple[float, Variant]]:
    """The table's rows of a kernel for exactly this head_dim, the fastest first.

    The first number is the time as a multiple of the fastest one's.
    """
    rows = [
        row
        for row in variants()
        if row.kernel == kernel and row.dtype == dtype and row.head_dim == head_dim
    ]
    timed = sorted(
        ((row_seconds(row, family, form), row) for row in rows),
        key=lambda pair: pair[0],
    )
    return [(seconds / timed[0][0], row) for seconds, row in timed]


def rank_forms(
    shape: AttentionShape, dtype: str, chip: Chip, is_causal: bool
) -> dict[str, float]:
    """Seconds of the backward pass in each form that the table has kernels for."""
    rows = gpu_planner.default_rows(shape, dtype, chip.family)
    available = {"A": rows.dq, "B": rows.dq_product}
    return {
        form: attention_seconds(
            chip,
            shape,
            dtype,
            "backward",
            is_causal,
            dataclasses.replace(rows, form=form),
        )
        for form, row in available.items()
        if row is not None
    }
