"""The CPU kernels on XLA's thread pool, which a hand-made call frame stands for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import ffi_frame, native
from tests.support.ffi_frame import Frame

TARGET = "jax_flash_metal_forward_v3"
BATCH, LENGTH, HEADS, WIDTH = 3, 200, 4, 32
TINY = 8  # a length with less work than it takes to wake a thread
CONTEXT = 77  # opaque to handlers
NUM_THREADS = 4


@pytest.fixture(autouse=True)
def _num_threads() -> Iterator[None]:
    native.set_threads(NUM_THREADS)
    yield
    native.set_threads(0)


class Call:
    """A forward call, its result, and the pool that it may ask for help."""

    def __init__(self, length: int = LENGTH) -> None:
        rng = np.random.default_rng(0)
        shape = (BATCH, length, HEADS, WIDTH)
        self.operands = [rng.standard_normal(shape, np.float32) for _ in range(3)]
        self.out = np.full(shape, np.nan, np.float32)
        self.logsumexp = np.full((BATCH, HEADS, length), np.nan, np.float32)
        attributes = ffi_frame.attributes(backend=1, is_causal=1)
        self.frame = Frame(self.operands, [self.out, self.logsumexp], attributes)
        self.frame.frame.context = CONTEXT
        self.tasks: list[Any] = []
        self.destroyed: list[int] = []
        self._alive = (
            ffi_frame.Schedule(self._schedule),
            ffi_frame.ErrorDestroy(self._destroy),
        )
        self.frame.api.thread_pool_schedule, self.frame.api.error_destroy = self._alive

    def run(self) -> None:
        assert self.frame.call(getattr(native.load(), TARGET)) is None

    def assert_right(self) -> None:
        options = {"scale": 0.25, "is_causal": True}
        expected = native.cpu.run_forward(*self.operands, **options)
        np.testing.assert_array_equal(self.out, expected[0])
        np.testing.assert_array_equal(self.logsumexp, expected[1])

    def schedule(self, task: Any, data: int) -> int | None:
        """What the pool does with a task; the address of an error, or None."""
        self.tasks.append((task, data))
        return None

    def _schedule(self, args: Any) -> int | None:
        args = args[0]
        assert args.struct_size == ctypes.sizeof(ffi_frame.ScheduleArgs)
        assert args.extensions is None
        assert args.context == CONTEXT
        address = ctypes.cast(args.task, ctypes.c_void_p).value
        return self.schedule(ffi_frame.Task(address), args.data)

    def _destroy(self, args: Any) -> None:
        assert args[0].struct_size == ctypes.sizeof(ffi_frame.ErrorDestroyArgs)
        self.destroyed.append(args[0].error)


def test_tasks_may_run_when_the_call_is_over() -> None:
    call = Call()
    call.run()
    call.assert_right()
    assert 1 <= len(call.tasks) <= NUM_THREADS - 1
    call.out[:] = 5
    for task, data in call.tasks:
        task(data)
    assert (call.out == 5).all(), "nothing was left to do"


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("length", [TINY, LENGTH])
def test_a_number_of_threads_is_meant(length: int, num_threads: int) -> None:
    """Also where the work is too little to be worth it: tests rely on that."""
    native.set_threads(num_threads)
    call = Call(length)
    call.run()
    call.assert_right()
    assert 1 <= len(call.tasks) <= num_threads - 1


@pytest.mark.parametrize("length", [TINY, LENGTH])
def test_little_work_is_not_handed_out(length: int) -> None:
    """By default; the calling thread is done before a helper has woken up."""
    native.set_threads(0)
    num_threads = int(native.cpu.device_facts()["num_cores"])
    call = Call(length)
    call.run()
    call.assert_right()
    if length == TINY or num_threads == 1:
        assert call.tasks == []
    else:
        assert 1 <= len(call.tasks) <= num_threads - 1


def test_tasks_help() -> None:
    threads: list[threading.Thread] = []

    class Threads(Call):
        def schedule(self, task: Any, data: int) -> None:
            threads.append(threading.Thread(target=task, args=(data,)))
            threads[-1].start()

    call = Threads()
    for _ in range(20):
        call.out[:] = np.nan
        call.run()
        call.assert_right()
    assert len(threads) >= 20
    for thread in threads:
        thread.join()


def test_tasks_may_run_at_once() -> None:
    class AtOnce(Call):
        def schedule(self, task: Any, data: int) -> None:
            self.tasks.append(None)
            task(data)

    call = AtOnce()
    call.run()
    call.assert_right()
    assert call.tasks


def test_a_pool_that_refuses() -> None:
    class Refuses(Call):
        def schedule(self, task: Any, data: int) -> int:
            return 1234

    call = Refuses()
    call.run()
    call.assert_right()
    assert call.destroyed, "XLA's errors belong to who gets them"
    assert set(call.destroyed) == {1234}


@pytest.mark.parametrize("lacks", ["context", "slot", "size", "threads"])
def test_no_pool(lacks: str) -> None:
    call = Call()
    if lacks == "context":
        call.frame.frame.context = None
    elif lacks == "slot":
        call.frame.api.thread_pool_schedule = ffi_frame.Schedule()
    elif lacks == "size":
        call.frame.api.struct_size = ffi_frame.Api.thread_pool_schedule.offset
    else:
        native.set_threads(1)
    call.run()
    call.assert_right()
    assert call.tasks == []


def test_the_metal_device_asks_for_no_help() -> None:
    call = Call()
    backend = ctypes.c_int64.from_address(call.frame.scalars[0].value)
    backend.value = 0
    call.run()
    assert np.isfinite(call.out).all()
    assert call.tasks == []


def test_native_buffers() -> None:
    """Which only the objects of the Metal device are."""
    call = Call()
    extension = ffi_frame.Extension(struct_size=24, type=ffi_frame.NATIVE_BUFFERS)
    call.frame.frame.extensions = call.frame.keep(extension)
    error = call.frame.call(getattr(native.load(), TARGET))
    assert error is not None
    assert error.message == (
        f"{TARGET}: query is an object of the device, which the CPU kernels cannot "
        'read: use implementation="metal".'
    )
