"""The facts of chips that the model is made of agree with what their sources say."""

import itertools
import re

import pytest

from jax_flash_metal import gpu_chips
from jax_flash_metal.gpu_chips import CHIPS, SOURCES

# metal-benchmarks' own GFLOP/s in float32, a column beside its clocks and cores.
GFLOPS = {
    "M1": 2617,
    "M1 Pro": 5308,
    "M1 Max": 10617,
    "M1 Ultra": 21233,
    "M2": 3579,
    "M2 Pro": 6800,
    "M2 Max": 13600,
}


@pytest.mark.parametrize("name", GFLOPS)
def test_peak_is_the_published_one(name):
    assert CHIPS[name].flops / 1e9 == pytest.approx(GFLOPS[name], rel=1e-3)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_fact_of_a_chip_has_a_source(chip):
    words = re.split(r"[:;,] *", chip.source)
    assert any(word in SOURCES for word in words) or "two of M2 Max" in words
    assert chip.family in gpu_chips.OVERLAP
    # A core can be fed at the rate at which published kernels run: 8 bytes of DRAM
    # per clock at most, 2 at least (metal-benchmarks: 7.7 to 9.9 for the largest ones).
    per_clock = chip.dram_gbs * 1e9 / (chip.clock_mhz * 1e6 * chip.cores)
    assert 5 < per_clock < 10


@pytest.mark.parametrize("generation", ["M1", "M2", "M3", "M4"])
def test_larger_chips_of_a_generation_have_more_of_everything(generation):
    chips = [chip for name, chip in CHIPS.items() if name.split()[0] == generation]
    for smaller, larger in itertools.pairwise(chips):
        assert smaller.cores < larger.cores
        assert smaller.dram_gbs < larger.dram_gbs
        assert smaller.slc_mb < larger.slc_mb
        assert smaller.family == larger.family


def test_latency_of_a_product_hides_behind_a_second_one():
    # 34 and 36 clocks, 17 and 18 apart (metal-benchmarks).
    for dtype, latency in (("float16", 34), ("float32", 36)):
        assert gpu_chips.PRODUCT_CLOCKS[dtype] * gpu_chips.PRODUCT_LATENCY == latency


def test_measured_bandwidths_are_near_the_assumed_ones():
    # chips-and-cheese, M1: L1 671 GB/s, L2 384 GB/s, all cores.
    clocks = CHIPS["M1"].clock_mhz * 1e6 * CHIPS["M1"].cores
    assert 671e9 / clocks == pytest.approx(gpu_chips.ON_CORE_BYTES, rel=0.05)
    assert 384e9 / clocks == pytest.approx(gpu_chips.L2_BYTES, rel=0.2)
