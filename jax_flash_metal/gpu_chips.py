"""Facts of Apple's GPUs that the model of time (gpu_model.py) is made of.

Nothing here was measured by this project: every number is published by someone else, or
marked as an assumption. docs/model.md says how far to trust them. M5's matrix units
("neural accelerators") are not described: the kernels do not use them.
"""

from __future__ import annotations

import dataclasses

# Where the numbers are from.
SOURCES = {
    "metal-benchmarks": "https://github.com/philipturner/metal-benchmarks (README)",
    "metal-flash-attention": "https://github.com/philipturner/metal-flash-attention "
    "(README; AttentionDescriptor+Parameters.swift)",
    "chips-and-cheese": "https://chipsandcheese.com/2022/05/21/"
    "igpu-cache-setups-compared-including-m1/",
    "apple": "Apple's announcements of the chips (memory bandwidth, number of cores)",
    "hmc-tech": "https://hmc-tech.com/gpu/ (clocks as that site lists them)",
    "llama.cpp-1642": "https://github.com/ggml-org/llama.cpp/pull/1642",
    "infr-4": "https://github.com/kryptic-sh/infr/pull/4",
    "ferrox-151": "https://github.com/antonellof/ferrox/pull/151",
    "mlx-1610": "https://github.com/ml-explore/mlx/pull/1610",
    "mlx-2995": "https://github.com/ml-explore/mlx/pull/2995",
    "mlx-3241": "https://github.com/ml-explore/mlx/pull/3241",
    "device-benchmarks": "https://github.com/chsasank/device-benchmarks/pull/7 and /13",
}


# -- Chips -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU.

    Attributes:
      family: N of MTLGPUFamilyAppleN.
      cores: Of the GPU.
      clock_mhz: The highest one. Fanless machines do not hold it.
      dram_gbs: Nominal memory bandwidth, GB/s.
      slc_mb: System-level cache, MB; shared with the CPUs.
      source: Keys of SOURCES, and what is an assumption.
    """

    name: str
    family: int
    cores: int
    clock_mhz: float
    dram_gbs: float
    slc_mb: float
    source: str

    @property
    def flops(self) -> float:
        """Peak float32 operations per second: two per multiply-add."""
        return self.cores * 2 * LANES_PER_CORE * self.clock_mhz * 1e6


_MEASURED = "metal-benchmarks; bandwidth: apple"
_REPORTED = "clock: hmc-tech; cores, bandwidth: apple; SLC: assumption"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("M1", 7, 8, 1278, 68, 8, _MEASURED),
        Chip("M1 Pro", 7, 16, 1296, 200, 24, _MEASURED),
        Chip("M1 Max", 7, 32, 1296, 400, 48, _MEASURED),
        Chip("M1 Ultra", 7, 64, 1296, 800, 96, _MEASURED),
        Chip("M2", 8, 10, 1398, 100, 8, _MEASURED),
        Chip("M2 Pro", 8, 19, 1398, 200, 24, _MEASURED),
        Chip("M2 Max", 8, 38, 1398, 400, 48, _MEASURED),
        Chip("M2 Ultra", 8, 76, 1398, 800, 96, "two of M2 Max; bandwidth: apple"),
        Chip("M3", 9, 10, 1398, 100, 8, _REPORTED),
        Chip("M3 Pro", 9, 18, 1398, 150, 12, _REPORTED),
        Chip("M3 Max", 9, 40, 1398, 400, 48, _REPORTED),
        # 3.76 TFLOP/s; metal-flash-attention reckons with 3.58 for 10 cores, others
        # with up to 4.6. Shares of the peak do not depend on it, only the part of DRAM
        # does.
        Chip("M4", 9, 10, 1470, 120, 8, _REPORTED),
        # 1470 to 1678 MHz in the lists; 1578 is assumed.
        Chip("M4 Pro", 9, 20, 1578, 273, 24, _REPORTED + "; clock: assumption"),
        Chip("M4 Max", 9, 40, 1578, 546, 48, _REPORTED + "; clock: assumption"),
    )
}

# -- A core ----------------------------------------------------------------------------

# Four schedulers of 32 lanes; a multiply-add per lane and clock, float32 or float16
# (metal-benchmarks, "Operations per Second").
SCHEDULERS = 4
LANES_PER_CORE = 32 * SCHEDULERS

# simdgroup_matrix product of 8x8 by 8x8 (512 multiply-adds), clocks of a scheduler
# between two independent ones, and until its result is there (metal-benchmarks,
# MATMUL<8x8>). Of mixed products (float16 operands, float32 sum) there is no
# measurement: the operands' dtype is assumed to decide. bfloat16: as float16 from
# family 9 on; before, there is no such arithmetic (metal-flash-attention emulates it),
# so float32 and conversions.
PRODUCT_CLOCKS = {"float16": 17.0, "bfloat16": 17.0, "float32": 18.0}
PRODUCT_LATENCY = 2  # times as long
FIRST_FAMILY_WITH_BFLOAT16 = 9

# Clocks of a scheduler per instruction of a simdgroup (metal-benchmarks, "Instruction
# Throughputs"): add, multiply, fma, max, select, compare 1; a shuffle 2. exp2 goes to a
# unit of its own that takes one per 4 clocks, besides the others: 1 to issue.
ALU_CLOCKS = 1.0
SHUFFLE_CLOCKS = 2.0
EXP2_CLOCKS = 1.0
EXP2_UNIT_CLOCKS = 4.0
# The address of a row, where the compiler's own count is not known. Assumption: about 9
# instructions, as in the estimates of compiled kernels (docs/real-gpu.md).
ADDRESS_CLOCKS = 9.0
# Assumption: a load or store instruction takes one slot, whatever its width.
LOAD_CLOCKS = 1.0

# Bytes per clock of a core: threadgroup memory and L1 (metal-benchmarks 64; 671 GB/s of
# an M1 in chips-and-cheese are 65.6), L2 (metal-benchmarks ~32; 384 GB/s are 37.6).
ON_CORE_BYTES = 64.0
L2_BYTES = 32.0
# Clocks of latency (chips-and-cheese, M1 at 1278 MHz: 43, 76, 266 ns).
L1_LATENCY = 55.0
L2_LATENCY = 97.0
SLC_LATENCY = 340.0
# A threadgroup barrier, all simdgroups being there. Assumption.
BARRIER_CLOCKS = 20.0

# Per core (metal-benchmarks, "On-Chip Memory"); registers are 32 bits wide and per
# lane.
REGISTER_BYTES = 208 * 1024
MAX_REGISTERS = 128
THREADGROUP_BYTES = 60 * 1024
MAX_SIMDGROUPS = 96  # 3072 threads
# From family 9 on registers, threadgroup memory and L1 share one memory ("dynamic
# caching"); its size is not published. Assumption: what the three were before.
FIRST_FAMILY_WITH_LARGE_L1 = 9
SHARED_MEMORY_BYTES = REGISTER_BYTES + THREADGROUP_BYTES + 8 * 1024

# Family 9 issues instructions of different kinds at once. Which part of what is no
# product goes beside products is fitted to one number: metal-flash-attention's forward
# at D = 64 takes 94 % of the peak on M3 where it takes 86 % on M1.
OVERLAP = {7: 0.0, 8: 0.0, 9: 0.7}

# -- Beyond the core -------------------------------------------------------------------

# Part of the nominal bandwidth that a kernel reaches: 317.6 of 409.6 GB/s on M1 Max
# (llama.cpp-1642). The system-level cache has about twice the nominal bandwidth
# (metal-benchmarks, "SLC BW/Cycle").
DRAM_SHARE = 0.78
SLC_TIMES_DRAM = 2.0
# Assumption: the GPU has half of the system-level cache.
SLC_PART = 0.5
# Part of what threadgroups stream that the L2 answers, because others read it at about
# the same time. Assumption; some there must be: metal-flash-attention's forward on M4
# (16 rows per threadgroup, D = 64) streams 202 GB/s, more than 2 · 0.78 · 120.
L2_HITS = 0.5

# From the end of a kernel to the start of one that needs its result, seconds: published
# are 1.2 µs (infr-4) and 5.2 µs (ferrox-151).
LAUNCH_SECONDS = 2.5e-6
