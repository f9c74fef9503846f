"""What the checker counts, on kernels whose every count is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.plugin.device.checked_device import CheckedDevice

pytestmark = pytest.mark.xdist_group("counted_device")

# In every lane order, for what a lane does is counted when it does it.
ORDERS = [(0, 0), (1, 0), (2, 7)]
FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh")


@pytest.fixture(scope="module")
def loaded():
    return CheckedDevice(Path(__file__).parent / "kernels.metal")


@pytest.fixture(params=ORDERS, ids=str)
def device(loaded, request):
    loaded.set_lane_order(*request.param)
    loaded.clear()
    yield loaded
    loaded.set_lane_order(0, 0)


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


def factors(rounds: int = 0) -> np.ndarray:
    """The struct Factors."""
    values = np.array([2.0, 3.0, 0.0], np.float32)
    values[2:].view(np.int32)[0] = rounds
    return values


def expect(counts, **expected) -> None:
    """Every count is as expected; those that are not given are 0."""
    found = {name: value for name, value in counts.items() if value not in (0, {})}
    found["calls"] = {name: n for name, n in counts["calls"].items() if n}
    assert sorted(counts["calls"]) == sorted(FUNCTIONS)
    assert found == {"calls": {}, **expected}


# What each dispatch below has in common.
def grid(kernel: str, x: int, threads: int) -> dict[str, object]:
    simdgroups = x * -(-threads // 32)
    return {"kernel": kernel, "grid": [x, 1, 1], "threads": threads,
            "threadgroups": x, "simdgroups": simdgroups}  # fmt: skip


def test_functions_are_counted_by_lanes(device):
    buffers = {0: zeros(144), 3: zeros(144)}
    device.run("functions", buffers, threadgroups=(3, 1, 1), threads=(48, 1, 1))
    (counts,) = device.counts()
    expect(
        counts,
        **grid("functions", 3, 48),
        calls={"exp": 144, "exp2": 3 * 144 + 72, "log": 144, "log2": 288, "tanh": 144},
        device_bytes_read=4 * 144,
        device_bytes_written=4 * 144,
        buffers={"0": [4 * 144, 0], "3": [0, 4 * 144]},
    )


def test_simd_functions_are_counted_by_simdgroups(device):
    out = {0: np.zeros(320, np.int32)}
    device.run("simd_functions", out, threadgroups=(2, 1, 1), threads=(160, 1, 1))
    (counts,) = device.counts()
    expect(
        counts,
        **grid("simd_functions", 2, 160),
        shuffles=2 * 5 * 4,
        votes=2 * 2,
        reductions=2 * 4 * 3,
        device_bytes_written=4 * 320,
        buffers={"0": [0, 4 * 320]},
    )


@pytest.mark.parametrize("is_odd_path", [False, True])
def test_bytes_are_counted_by_buffers(device, is_odd_path):
    buffers = {1: zeros(256), 2: np.zeros(16, np.float16), 4: zeros(128)}
    device.run("memory", buffers, threadgroups=(1, 1, 1), threads=(64, 1, 1),
               values={0: factors()}, constants={0: is_odd_path})  # fmt: skip
    (counts,) = device.counts()
    written = 64 * (8 if is_odd_path else 4)
    expect(
        counts,
        **grid("memory", 1, 64),
        threadgroup_barriers=1,
        device_bytes_read=64 * 16 + 16 * 2,
        device_bytes_written=written,
        buffers={"1": [64 * 16, 0], "2": [16 * 2, 0], "4": [0, written]},
        constant_bytes_read=64 * 8,
        threadgroup_bytes_read=64 * 8,
        threadgroup_bytes_written=64 * 4,
        threadgroup_memory_bytes=256,
    )


def test_what_lanes_read_together_counts_once(device):
    buffers = {0: np.zeros(32, np.int32), 2: np.zeros(96, np.int32)}
    device.run("shared_reads", buffers, threads=(96, 1, 1), values={1: factors(7)})
    (counts,) = device.counts()
    assert counts["buffers"]["0"] == [3 * 4 * (1 + 8 + 7 + 2), 0]
    assert counts["threadgroup_bytes_read"] == 96 * 4
    assert counts["constant_bytes_read"] % (96 * 4) == 0


@pytest.mark.parametrize("rounds", [0, 1, 50])
def test_products_are_counted_by_simdgroups(device, rounds):
    device.run("products", {1: zeros(64)}, threadgroups=(2, 1, 1), threads=(64, 1, 1),
               values={0: factors(rounds)})  # fmt: skip
    (counts,) = device.counts()
    assert counts["products"] == 2 * (2 * 2 * rounds + 1)


def test_barriers_are_counted_by_what_they_are_for(device):
    device.run("barriers", {0: zeros(96)}, threadgroups=(2, 1, 1), threads=(96, 1, 1))
    (counts,) = device.counts()
    expect(
        counts,
        **grid("barriers", 2, 96),
        threadgroup_barriers=2 * 5,
        simdgroup_barriers=2 * 2,
        device_bytes_written=2 * 4 * 96,
        buffers={"0": [0, 2 * 4 * 96]},
    )


def test_dispatches_are_counted_one_by_one_in_order(device):
    device.run("barriers", {0: zeros(32)})
    device.run("products", {1: zeros(32)}, values={0: factors(3)}, repeats=2)
    counts = device.counts()
    assert [c["kernel"] for c in counts] == ["barriers", "products", "products"]
    assert [c["products"] for c in counts] == [0, 6, 6]
    device.clear()
    assert device.counts() == []
