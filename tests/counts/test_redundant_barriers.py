"""The checker tells barriers that order something from those that do not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.plugin.device.checked_device import CheckedDevice

pytestmark = pytest.mark.xdist_group("counted_device")

SOURCE = Path(__file__).parent / "kernels.metal"
KERNELS = (
    *("last_barrier", "twice", "tiles", "tiles_in_turn", "every_other_round"),
    *("in_one_threadgroup", "simdgroups", "of_both_kinds", "device_memory"),
    "functions_barriers",
)


@pytest.fixture(scope="module")
def device():
    return CheckedDevice(SOURCE)


def marked() -> dict[int, str]:
    """What kernels.metal says of the barrier in a line, by its number."""
    lines = enumerate(SOURCE.read_text().splitlines(), 1)
    found = ((n, re.search(r"_barrier\(.*// (needed|redundant)$", x)) for n, x in lines)
    return {number: match[1] for number, match in found if match}


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (2, 5)], ids=str)
def test_barriers_are_told_apart(device, order):
    device.clear()
    device.set_lane_order(*order)
    for kernel in KERNELS:
        out = np.zeros(128, np.float32)
        groups = 2 if kernel == "in_one_threadgroup" else 1
        device.run(kernel, {0: out}, threadgroups=(groups, 1, 1), threads=(64, 1, 1))
    assert device.reports() == []
    found = {
        barrier["line"]: "needed" if barrier["is_needed"] else "redundant"
        for barrier in device.barriers()
    }
    assert found == marked()
    assert {Path(barrier["file"]).name for barrier in device.barriers()} == {
        "kernels.metal"
    }


def test_a_barrier_says_where_it_is_and_how_often_it_was_passed(device):
    device.clear()
    device.set_lane_order(0, 0)
    for _ in range(2):
        out = {0: np.zeros(64, np.float32)}
        device.run("simdgroups", out, threads=(64, 1, 1))
    rows = [(b["kernel"], b["scope"], b["executions"]) for b in device.barriers()]
    of_simdgroups = [("simdgroups", "simdgroup", 4)] * 3
    assert rows == of_simdgroups + [("simdgroups", "threadgroup", 2)] * 2
    lines = [barrier["line"] for barrier in device.barriers()]
    assert lines == sorted(lines)
    text = SOURCE.read_text().splitlines()
    assert all("_barrier(" in text[line - 1] for line in lines)


def test_a_barrier_is_needed_only_where_it_was(device):
    """One threadgroup alone of in_one_threadgroup reads nothing of others."""
    device.clear()
    out = {0: np.zeros(128, np.float32)}
    device.run("in_one_threadgroup", out, threads=(64, 1, 1))
    assert [barrier["is_needed"] for barrier in device.barriers()] == [False]
