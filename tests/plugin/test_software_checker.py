"""The checker build of the software Metal device: what it reports, and what not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plugin.device.checked_device import CheckedDevice
from tests.plugin.device.library import DeviceError

pytestmark = pytest.mark.xdist_group("software_device")

ORDERS = {"forward": (0, 0), "reverse": (1, 0), "random": (2, 3)}


@pytest.fixture(scope="module")
def loaded():
    return CheckedDevice()


@pytest.fixture(params=ORDERS)
def checker(loaded, request):
    loaded.set_lane_order(*ORDERS[request.param])
    loaded.clear()
    yield loaded
    loaded.set_lane_order(0, 0)


def zeros(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.float32)


def test_ordered_accesses_are_no_race(checker):
    x = np.random.default_rng(1).standard_normal((4, 16, 16)).astype(np.float32)
    out = np.zeros_like(x)
    checker.run(
        "transpose", {0: x, 1: out}, threadgroups=(4, 1, 1), threads=(256, 1, 1)
    )
    np.testing.assert_array_equal(out, x.transpose(0, 2, 1) + np.float32(2))
    out = zeros()
    checker.run("simdgroup_exchange", {0: out}, threads=(64, 1, 1))
    np.testing.assert_array_equal(out, np.arange(64) ^ 1)
    # A dispatch is ordered after the one before.
    values = np.arange(32, dtype=np.int32)
    amount = np.array([1], np.int32)
    checker.run("increment", {0: values}, values={1: amount}, repeats=3)
    assert checker.reports() == []


@pytest.mark.parametrize(
    ("kernel", "kind", "options"),
    [
        ("simdgroup_race", "race", {"threads": (64, 1, 1)}),
        ("race_across_simdgroups", "race", {"threads": (64, 1, 1)}),
        ("race_of_threadgroups", "race: two writes", {"threadgroups": (2, 1, 1)}),
        ("device_race", "race", {}),
        ("undefined_memory", "uninitialized read", {"threads": (64, 1, 1)}),
        ("past_an_array", "read out of bounds", {}),
        ("before_the_start", "write out of bounds", {}),
    ],
)
def test_a_fault_is_reported(checker, kernel, kind, options):
    checker.run(kernel, {0: zeros()}, **options)
    assert any(found.startswith(kind) for found in checker.kinds())


def test_a_write_after_an_earlier_threadgroup_read_is_a_race(checker):
    buffers = {0: zeros(32), 1: zeros(64)}
    checker.run("late_write", buffers, threadgroups=(2, 1, 1))
    assert checker.kinds() == {"race: write after read"}


def test_a_read_past_the_end_names_the_buffer(checker):
    checker.run("past_the_end", {0: zeros(32), 1: zeros(32)})
    ((kind, kernel, where, offset, details),) = checker.reports()
    assert (kind, kernel) == ("read out of bounds", "past_the_end")
    assert where == "buffer(1) + 128"
    assert int(offset, 16) > 0
    assert details == "threadgroup (0, 0, 0), thread 31"


def test_an_output_is_uninitialized_if_the_test_says_so(checker):
    out = zeros(32)
    checker.run("reads_output", {0: out})
    assert checker.kinds() == set()
    checker.mark_uninitialized(out)
    checker.run("reads_output", {0: out})
    assert checker.kinds() == {"uninitialized read"}
    checker.clear()
    checker.run("reads_output", {0: out})
    assert checker.kinds() == set()


def test_a_wild_write_is_an_error_and_not_a_crash(checker):
    with pytest.raises(DeviceError, match="wild: a write outside every buffer"):
        checker.run("wild", {0: zeros(32)})
    assert checker.kinds() == {"wild write"}


def test_an_argument_that_does_not_exist_cannot_be_read(checker):
    out, source = zeros(32), np.arange(32, dtype=np.float32)
    checker.run("optional_source", {0: out, 1: source}, constants={0: True})
    np.testing.assert_array_equal(out, source)
    assert checker.kinds() == set()
    with pytest.raises(DeviceError, match="a read outside every buffer"):
        checker.run("optional_source", {0: out, 1: source}, constants={0: False})


def test_bytes_beside_each_other_are_no_race(checker):
    out = np.zeros(65, np.uint8)
    checker.run("neighbour_bytes", {0: out}, threads=(64, 1, 1))
    np.testing.assert_array_equal(out, [*range(64), 0])
    assert checker.kinds() == set()


def test_only_what_was_written_is_copied_back(checker):
    # The same memory bound twice: the reader must not undo what the writer did.
    memory = np.ones(64, np.float32)
    out, first = memory[32:], memory[:33]
    checker.run("past_the_end", {0: out, 1: first})
    np.testing.assert_array_equal(memory, np.ones(64))
    assert checker.kinds() == set()
