"""Time of one attention call on the software Metal device.

    python -m tests.benchmarks.software_device

A figure for the tests' own speed; it says nothing about a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support import native

SHAPE = (1, 1024, 2, 64)  # batch, length, heads, head_dim
REPEATS = 5


def best(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one to warm up."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Prints forward and backward times for 1 thread and for all CPUs."""
    rng = np.random.default_rng(0)
    query, key, value, dout = (rng.standard_normal(SHAPE, np.float32) for _ in range(4))
    out, lse = native.run_forward(query, key, value)
    for threads in (1, len(os.sched_getaffinity(0))):
        native.set_threads(threads)
        forward = best(lambda: native.run_forward(query, key, value))
        backward = best(
            lambda: native.run_backward(
                query, key, value, out, lse, dout, np.zeros_like(lse)
            )
        )
        print(
            f"B1 H2 L1024 D64 float32, {threads} thread(s): "
            f"forward {forward:.3f} s, backward {backward:.3f} s"
        )


if __name__ == "__main__":
    main()
