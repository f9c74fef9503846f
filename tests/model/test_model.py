"""The model itself: which limit decides, what it reacts to, and how it compares."""

import dataclasses

import pytest

from jax_flash_metal import gpu_counts, gpu_model, gpu_planner
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.gpu_chips import CHIPS, LAUNCH_SECONDS, PRODUCT_CLOCKS
from jax_flash_metal.gpu_counts import Launch, Work

M1, M4 = CHIPS["M1"], CHIPS["M4"]


def launch(groups=((100, 0, 80),), **others):
    settings = {
        "kernel": "test",
        "dtype": "float16",
        "block": Work(products=400),
        "fixed": Work(),
        "groups": list(groups),
        "num_simdgroups": 4,
        "registers": 64,
        "threadgroup_bytes": 0,
    } | others
    return Launch(**settings)


def body(chip, launch):
    return gpu_model.predict(chip, launch).seconds - LAUNCH_SECONDS


def test_products_alone_take_their_clocks():
    expected = 100 * 400 * PRODUCT_CLOCKS["float16"] / 4 * 10 / (M1.clock_mhz * 1e6)
    assert body(M1, launch()) == pytest.approx(expected)
    prediction = gpu_model.predict(M1, launch())
    assert prediction.limit == "issue"
    assert prediction.shares["issue"] == pytest.approx(1)


def test_float32_products_are_slower():
    ratio = body(M1, launch(dtype="float32")) / body(M1, launch())
    assert ratio == pytest.approx(18 / 17)


def test_bfloat16_is_emulated_before_family_9():
    loads = launch(block=Work(products=400, operands=200))
    bfloat = dataclasses.replace(loads, dtype="bfloat16")
    assert body(M1, bfloat) > 1.05 * body(M1, loads)
    assert body(M4, bfloat) == body(M4, loads)


def test_family_9_overlaps_part_of_what_is_no_product():
    work = Work(products=400, alu=1000)
    on_m1, on_m4 = (
        body(chip, launch(block=work)) / body(chip, launch()) for chip in (M1, M4)
    )
    assert on_m1 == pytest.approx(1 + 1000 / 6800)
    assert on_m4 == pytest.approx(1 + 0.3 * 1000 / 6800)


@pytest.mark.parametrize(
    ("limit", "change"),
    [
        ("on-core", {"block": Work(products=400, threadgroup_read=400 * 280)}),
        ("L2", {"block": Work(products=400, device_read=400 * 140)}),
        ("DRAM", {"dram_bytes": 1e10}),
        ("SLC", {"streamed_bytes": 1e10, "streamed_size": 1e5}),
        ("DRAM", {"streamed_bytes": 1e10, "streamed_size": 1e12}),
        ("SLC", {"scratch_bytes": 1e10, "scratch_size": 1e6}),
        ("DRAM", {"scratch_bytes": 1e10, "scratch_size": 1e10}),
        ("stalls", {"block": Work(products=4, tiles=8), "threadgroup_bytes": 32768}),
    ],
)
def test_the_largest_limit_decides(limit, change):
    # 64 bytes a clock are 272 per product, 32 are 136: four schedulers, 17 clocks.
    prediction = gpu_model.predict(M1, launch(**change))
    assert prediction.limit == limit
    assert prediction.shares[limit] == pytest.approx(1, rel=0.01)


def test_what_simdgroups_share_passes_a_large_l1_once():
    shared = Work(products=400, device_read=400 * 140, shared_read=400 * 140)
    assert gpu_model.predict(M1, launch(block=shared)).limit == "L2"
    assert gpu_model.predict(M4, launch(block=shared)).limit == "issue"


@pytest.mark.parametrize(
    ("change", "simdgroups"),
    [
        ({}, 24),  # registers: 208 KB of 128 bytes per simdgroup and register
        ({"registers": 128}, 12),
        ({"registers": 300}, 12),  # there are no more
        ({"threadgroup_bytes": 16384}, 12),  # three of 60 KB
        ({"threadgroup_bytes": 32768}, 4),
        ({"groups": [(100, 0, 9)]}, 8),  # nine on eight cores
    ],
)
def test_resident_simdgroups(change, simdgroups):
    assert gpu_model.resident_simdgroups(M1, launch(**change)) == simdgroups


def test_few_resident_simdgroups_leave_waits_bare():
    work = Work(products=400, tiles=2, phases=3)
    alone = launch(block=work, threadgroup_bytes=32768)
    three = launch(block=work, threadgroup_bytes=16384)
    assert body(M1, alone) > 1.3 * body(M1, three)


def test_registers_beyond_the_limit_cost_time():
    spilled = launch(registers=200)
    assert body(M1, spilled) > 1.1 * body(M1, launch(registers=128))


def test_a_grid_that_does_not_divide_by_the_cores_waits_for_the_last():
    whole, one_more = launch([(100, 0, 80)]), launch([(100, 0, 81)])
    assert body(M1, one_more) == pytest.approx(body(M1, whole) * 11 / 10)


def test_heavy_threadgroups_first_fill_the_cores_better():
    groups = [(n, 0, 1) for n in range(1, 31)]
    light_first, heavy_first = launch(groups), launch(groups[::-1])
    assert body(M1, heavy_first) < 0.95 * body(M1, light_first)
    assert light_first.total().products == heavy_first.total().products


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_longer_and_wider_take_longer(dtype, is_causal):
    def seconds(length, head_dim):
        shape = AttentionShape(1, 8, 8, length, head_dim)
        return gpu_model.attention_seconds(
            M4, shape, dtype, "forward+backward", is_causal
        )

    assert 3 < seconds(2048, 64) / seconds(1024, 64) < 4.2
    assert 1.5 < seconds(2048, 128) / seconds(2048, 64) < 2.5


def test_causal_attention_takes_about_half():
    shape = AttentionShape(1, 32, 32, 4096, 64)
    full, causal = (
        gpu_model.attention_seconds(M4, shape, "float16", "forward+backward", mask)
        for mask in (False, True)
    )
    assert 0.49 < causal / full < 0.56
    # Which the unfused form cannot.
    unfused = [
        gpu_model.unfused_seconds(M4, shape, "float16", "forward+backward", mask)
        for mask in (False, True)
    ]
    assert unfused[0] == unfused[1]


def test_unfused_products_run_at_their_share_and_arrays_pass_memory():
    shape = AttentionShape(1, 40, 40, 4096, 256)  # a multiple of tiles on every core
    scores = 40 * 4096**2
    forward = gpu_model.unfused_seconds(M4, shape, "float16", "forward", False)
    products = 2 * 2 * scores * 256 / (0.85 * M4.flops)
    softmax = 2 * scores * 2 / (M4.dram_gbs * 1e9 * 0.78)
    assert forward == pytest.approx(products + softmax + 3 * LAUNCH_SECONDS, rel=1e-3)


def test_shares_count_five_products_backward():
    shape = AttentionShape(2, 3, 3, 100, 64)
    scores = 2 * 3 * 100**2
    assert gpu_model.work_of(shape, "forward", False) == scores * 2 * 64
    assert gpu_model.work_of(shape, "forward+backward", False, 5) == scores * (
        7 * 64 + 10
    )
    peak = 2 * gpu_model.work_of(shape, "forward", False) / M4.flops
    share = gpu_model.share_of_peak(M4, shape, "forward", False, 2 * peak)
    assert share == pytest.approx(0.5)


def test_ranking_is_by_time_and_of_the_head_dim_alone():
    ranked = gpu_model.rank("attention_forward", "float16", 64, 9)
    assert ranked[0][0] == 1 and sorted(ranked, key=lambda r: r[0]) == ranked
    assert {row.head_dim for _, row in ranked} == {64}
    assert len(ranked) > 1


def test_forms_are_compared():
    shape = AttentionShape(1, 16, 16, 2048, 128)
    forms = gpu_model.rank_forms(shape, "float16", M4, False)
    assert set(forms) == {"A", "B"}
    assert forms["B"] < forms["A"]


def test_a_chunk_that_fits_the_cache_is_cheaper():
    shape = AttentionShape(1, 8, 8, 2048, 64)
    rows = gpu_planner.default_rows(shape, "float32", 9)
    rows = dataclasses.replace(rows, form="B")
    in_cache, in_memory = (
        sum(
            gpu_model.predict(M4, launch).shares["DRAM"]
            for launch in gpu_counts.launches(shape, rows, "backward", False, limit)
            if launch.kernel == "attention_backward_dq_product"
        )
        / count
        for limit, count in ((2 << 20, 64), (64 << 20, 2))
    )
    assert in_cache < in_memory
