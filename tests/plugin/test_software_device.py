"""The software Metal device by itself: Metal's rules, its errors, its threads."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from tests.plugin.device.library import DeviceError, TestDevice

pytestmark = pytest.mark.xdist_group("software_device")


@pytest.fixture(scope="module")
def device():
    return fast_device()


@functools.cache
def fast_device() -> TestDevice:
    return TestDevice("fast")


@pytest.fixture(autouse=True)
def default_threads(device):
    yield
    device.set_threads(0)


# -- Positions, function constants, order ------------------------------------------


def test_every_thread_knows_its_place(device):
    threads, groups = (8, 4, 3), (2, 3, 2)
    grid = [t * g for t, g in zip(threads, groups)]
    out = np.zeros((*reversed(grid), 4), np.uint32)
    device.run("positions", {0: out}, threadgroups=groups, threads=threads)
    z, y, x = np.indices(out.shape[:3])
    index = ((z % 3) * 4 + y % 4) * 8 + x % 8
    np.testing.assert_array_equal(out[..., 0], x // 8 + 10 * (y // 4) + 100 * (z // 3))
    np.testing.assert_array_equal(out[..., 1], index)
    np.testing.assert_array_equal(out[..., 2], index // 32)
    np.testing.assert_array_equal(out[..., 3], index % 32)


def test_dispatches_of_a_command_buffer_run_in_order(device):
    values = np.arange(320, dtype=np.int32)
    device.run(
        "increment",
        {0: values},
        values={1: np.array([3], np.int32)},
        threadgroups=(10, 1, 1),
        repeats=5,
    )
    expected = np.arange(320)
    for _ in range(5):
        expected = 2 * expected + 3
    np.testing.assert_array_equal(values, expected)


def test_pipelines_with_different_constants_run_at_the_same_time(device):
    device.set_threads(3)

    def run(offset: int) -> np.ndarray:
        out = np.zeros(64 * 32, np.int32)
        device.run(
            "constants",
            {0: out},
            constants={0: bool(offset % 2), 1: offset},
            threadgroups=(32, 1, 1),
            threads=(64, 1, 1),
        )
        return out

    with ThreadPoolExecutor(6) as pool:
        for offset, out in zip(range(60), pool.map(run, range(60))):
            assert set(out) == {50 * (offset + offset % 2)}


def test_a_buffer_that_is_not_bound_can_be_read(device):
    out = np.zeros(32, np.int32)
    device.run("reads_unbound", {0: out})
    assert (out == 1).all()


@pytest.mark.parametrize("groups", [(0, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_an_empty_grid_runs_nothing(device, groups):
    out = np.zeros(32, np.int32)
    device.run("reads_unbound", {0: out}, threadgroups=groups)
    assert (out == 0).all()


# -- Simd operations and matrices --------------------------------------------------


def test_simd_operations(device):
    x = np.random.default_rng(1).integers(-100, 100, 32).astype(np.int32)
    out = np.zeros((16, 32), np.int32)
    device.run("simd_operations", {0: x, 1: out})
    lane = np.arange(32)
    expected = [
        x[::-1],
        x[lane ^ 5],
        np.where(lane >= 3, x[lane - 3], x),
        np.where(lane < 29, x[(lane + 3) % 32], x),
        x[7],
        x.sum(),
        x.max(),
        x.min(),
        np.bitwise_and.reduce(x),
        np.bitwise_or.reduce(x),
        np.bitwise_xor.reduce(x),
        np.cumsum(x),
        np.cumsum(x) - x,
        1,
        0,
        1,
    ]
    for row, (got, want) in enumerate(zip(out, expected)):
        np.testing.assert_array_equal(got, np.broadcast_to(want, 32), f"row {row}")


def test_simd_operations_in_turn_do_not_disturb_each_other(device):
    out = np.zeros(32, np.int32)
    device.run("simd_in_turn", {0: out})
    lane, i = np.arange(32), np.arange(100)
    expected = (100 * (lane ^ 1) + i.sum()) + (lane ^ 2) * i.sum()
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("kernel", "a_type", "b_type", "d_type"),
    [
        ("product_float", np.float32, np.float32, np.float32),
        ("product_half", np.float16, np.float16, np.float16),
        ("product_mixed", np.float16, ml_dtypes.bfloat16, np.float32),
    ],
)
def test_matrix_product(device, kernel, a_type, b_type, d_type):
    # Small integers: every sum is exact, in any order.
    random = np.random.default_rng(2)
    a, b, d = (
        random.integers(-4, 5, (8, 8)).astype(t) for t in (a_type, b_type, d_type)
    )
    product = a.astype(float) @ b.astype(float).T
    expected = d.astype(float) + 2 * product
    device.run(kernel, {0: a, 1: b, 2: d})
    np.testing.assert_array_equal(d.astype(float), expected)


def test_products_are_fused_and_in_order(device):
    random = np.random.default_rng(3)
    a, b, d = (random.standard_normal((8, 8)).astype(np.float32) for _ in range(3))
    expected = d.astype(np.float64) + 2 * (
        a.astype(np.float64) @ b.T.astype(np.float64)
    )
    again = d.copy()
    device.run("product_float", {0: a, 1: b, 2: d})
    device.run("product_float", {0: a, 1: b, 2: again})
    np.testing.assert_array_equal(d, again)
    np.testing.assert_allclose(d, expected, rtol=0, atol=4e-6)


def test_some_lanes_may_look_at_a_product(device):
    out = np.zeros((32, 2), np.float32)
    device.run("product_looked_at_by_some", {0: out})
    lane = np.arange(32)
    is_diagonal = _fragment_row(lane) == _fragment_col(lane)
    total, x, seen = 0.0, 2.0, np.zeros(32)
    for i in range(20):
        total += x
        seen += np.where(lane % 3 == i % 3, total, 0)
        x = 2 * x * 0.5
    np.testing.assert_allclose(out[:, 1], np.where(is_diagonal, total, 0))
    np.testing.assert_allclose(out[:, 0], np.where(is_diagonal, seen, 0))


def _fragment_row(lane):
    return ((lane >> 2) & 4) | ((lane >> 1) & 3)


def _fragment_col(lane):
    return ((lane >> 1) & 4) | ((lane & 1) << 1)


# -- Types and math ----------------------------------------------------------------


def test_every_half_becomes_the_right_float(device):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.zeros(halves.shape, np.float32)
    device.run("half_to_float", {0: halves, 1: out}, threadgroups=(2048, 1, 1))
    np.testing.assert_array_equal(out, halves.astype(np.float32))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("float_to_half", np.float16), ("float_to_bfloat", ml_dtypes.bfloat16)],
)
def test_floats_round_to_nearest_even(device, kernel, dtype):
    random = np.random.default_rng(4)
    bits = random.integers(0, 1 << 32, 1 << 15, dtype=np.uint64).astype(np.uint32)
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[np.isfinite(every)]
    ties = every[:-1] / 2 + every[1:] / 2
    small = random.standard_normal(1 << 15).astype(np.float32) * 1e-6
    values = np.concatenate([bits.view(np.float32), every, ties, small])
    values = np.resize(values, -(-len(values) // 32) * 32).astype(np.float32)
    out = np.zeros(values.shape, dtype)
    device.run(kernel, {0: values, 1: out}, threadgroups=(len(values) // 32, 1, 1))
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
    is_nan = np.isnan(values)
    assert np.isnan(out[is_nan].astype(np.float32)).all()
    np.testing.assert_array_equal(
        out[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16)
    )


def test_math(device):
    x = np.random.default_rng(5).standard_normal(256).astype(np.float32) * 20
    x[:4] = [np.nan, np.inf, -np.inf, 0]
    out = np.zeros((7, 256), np.float32)
    count = np.array([256], np.int32)
    device.run("math", {0: x, 1: out}, values={2: count}, threadgroups=(8, 1, 1))
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = [
            np.exp2(wide),
            np.log2(np.abs(wide)),
            np.tanh(wide),
            wide * wide + 1,
            np.where(np.isnan(wide), -1, np.clip(wide, -1, 1)),
            np.where(np.isnan(wide), 1, np.where(np.isinf(wide), 2, 0)),
            wide + 6,
        ]
    for row, (got, want) in enumerate(zip(out, expected)):
        np.testing.assert_allclose(
            got, want, rtol=3e-6, atol=3e-6, err_msg=f"row {row}"
        )


# -- Threadgroup memory ------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threadgroup_memory_belongs_to_the_threadgroup(device, num_threads):
    device.set_threads(num_threads)
    x = np.random.default_rng(6).standard_normal((40, 16, 16)).astype(np.float32)
    out = np.zeros_like(x)
    device.run(
        "transpose", {0: x, 1: out}, threadgroups=(40, 1, 1), threads=(256, 1, 1)
    )
    np.testing.assert_array_equal(out, x.transpose(0, 2, 1) + np.float32(2))


def test_threadgroup_memory_starts_as_nan(device):
    out = np.zeros((64, 64), np.float32)
    for row in out:
        device.run("undefined_memory", {0: row}, threads=(64, 1, 1))
    assert (out[:, 5] == 1).all()
    assert np.isnan(np.delete(out, 5, axis=1)).all()


def test_threadgroup_memory_up_to_32_kb(device):
    out = np.zeros(64, np.float32)
    device.run("memory_full", {0: out}, threads=(64, 1, 1))
    np.testing.assert_array_equal(out, np.arange(64))


# -- Errors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("memory_too_large", "memory_too_large: .*32768.* bytes of threadgroup memory"),
        ("barrier_for_some", "barrier_for_some: .*barrier.* not all threads reach"),
        ("barriers_apart", "barriers_apart: .*different barriers"),
        ("simd_for_some", "simd_for_some: .*simdgroup function.* not all lanes"),
        ("simd_different", "simd_different: .*different simdgroup functions"),
        ("product_for_some", "product_for_some: .*simdgroup"),
        ("barrier_or_simd", "barrier_or_simd: .*simdgroup function.* not all lanes"),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_breach_of_the_rules_is_an_error(device, kernel, message, num_threads):
    device.set_threads(num_threads)
    out = np.zeros(64, np.int32)
    for _ in range(3):
        with pytest.raises(DeviceError, match=message):
            device.run(kernel, {0: out}, threadgroups=(5, 1, 1), threads=(64, 1, 1))
    # The device lives on.
    test_some_lanes_may_look_at_a_product(device)


def test_an_unknown_kernel_is_an_error(device):
    with pytest.raises(DeviceError, match="no kernel named 'nonsense'") as error:
        device.run("nonsense", {})
    assert error.value.code == 5


@pytest.mark.parametrize("threads", [(0, 1, 1), (1025, 1, 1), (32, 32, 2)])
def test_a_wrong_threadgroup_size_is_an_error(device, threads):
    with pytest.raises(DeviceError, match="1 to 1024 threads, but got"):
        device.run("reads_unbound", {}, threads=threads)
