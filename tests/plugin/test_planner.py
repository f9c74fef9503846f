"""How much work a launch is taken for, and calls that are too large to be planned.

Nothing runs. Which kernels a call takes, and that parts of a launch give the same bits,
are in tests/kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import native

B, T, S, N, K, H = 2, 37, 53, 6, 3, 16


def make_problem(of: str = "", **options: Any) -> tuple[native.Problem, Any]:
    """Of an operand's gradient or the forward pass; and what it points into."""
    query, key = np.ones((B, T, N, H), np.float32), np.ones((B, S, K, H), np.float32)
    operands = {"query": query, "key": key, "value": key}
    if not of:
        problem = native.make_problem(operands, **options)
        results = native.attach_results(problem, operands, native.FORWARD_RESULTS)
        return problem, [operands, options, results]
    rows = np.ones((B, N, T), np.float32)
    operands |= {"out": query, "logsumexp": rows, "dout": query, "dlogsumexp": rows}
    problem = native.make_problem(operands, **options)
    gradient = native.attach_gradient(problem, of, options[of])
    return problem, [operands, options, gradient]


def count(of: str = "", **options: Any) -> int:
    """The launches of the pass."""
    problem, _alive = make_problem(of, **options)
    return native.num_launches(problem, "gradient" if of else "forward")


@pytest.fixture
def max_launch_work() -> Iterator[Callable[[float], None]]:
    function = native.load().jfm_set_max_launch_work
    function.argtypes = (ctypes.c_double,)
    yield function
    function(0)


def test_work_is_counted_without_what_the_window_hides(
    max_launch_work: Callable[[float], None],
) -> None:
    # Operations of a launch: 4 · H per pair that is seen.
    pairs = B * N * T * S
    max_launch_work(4 * H * pairs / 2)
    assert count() == 2
    # 4 + 1 + 3 keys of 53.
    assert count(sliding_window=(4, 3), q_offset=8) == 1
    assert count(sliding_window=(4, 3), q_offset=np.zeros(1, np.int32)) == 1
    max_launch_work(4 * H * B * N * T * 8 * 1.01)
    assert count(sliding_window=(4, 3), q_offset=8) == 1
    assert count(sliding_window=(5, 3), q_offset=8) == 2
    assert count(sliding_window=(4, 3), q_offset=np.zeros(1, np.int32)) == 1
    # Half of the rows are before the keys.
    assert count(sliding_window=(14, 0), q_offset=-18) == 1
    assert count(is_causal=True, sliding_window=(7, 99), q_offset=8) == 1
    max_launch_work(4 * H * pairs / 2)
    assert count(sliding_window=(None, 0)) == 1
    assert count(sliding_window=(0, None)) == 2


def test_launches_that_only_read_are_cut_too(
    max_launch_work: Callable[[float], None],
) -> None:
    # 32 operations per byte: two float32 rows of delta, three numbers of a sink's row.
    delta, sinks = (32 * B * N * T * size for size in (2 * H * 4, 12))
    options = {"sinks": np.ones((1, N), np.float32)}
    assert count("sinks", **options) == 2
    max_launch_work(sinks * 1.01)
    assert count("sinks", **options) > 2  # delta in parts
    max_launch_work(delta * 0.99)
    assert count("sinks", **options) == 2 + 1
    max_launch_work(1)
    assert count("sinks", **options) == B * N * -(-T // 4) + N
    # A byte for each element that the mask has; the forward pass has more work.
    mask = np.ones((B, 1, T, S), bool)
    whole = count()
    assert count(mask=mask) == whole + B * 2
    assert count(mask=mask[:1, :, :1]) == whole + 1
    max_launch_work(32 * B * 2 * 2 * 32 * 32)
    assert count(mask=mask) == count() + 1


def test_a_product_that_no_number_holds_is_refused() -> None:
    """Also where no memory is looked at, and where nothing is in it."""
    for sizes, text in (
        ((2**40, 2**40), f"{2**40}, {2**40}"),
        ((0, 2**60), f"0, {2**60}"),
        ((1, 2**39), f"1, {2**39}"),
    ):
        problem, _alive = make_problem("sinks", sinks=np.ones((1, N), np.float32))
        problem.num_batch_dims = len(sizes)
        for name in (
            *native.BACKWARD_OPERANDS,
            *("sinks", "gradient"),
        ):
            getattr(problem, name).num_batch_dims = len(sizes)
        for i, size in enumerate(sizes):
            problem.batch_sizes[i] = size
        message = (
            "the batch sizes, num_heads, q_len and kv_len must have a product of at "
            rf"most 2\^52, but got batch sizes \[{text}\], num_heads=6, q_len=37 and "
            "kv_len=53."
        )
        with pytest.raises(native.NativeError, match=message):
            native.kernels(problem, "gradient")
        assert native.num_launches(problem, "gradient") == -1


def test_a_sum_that_no_index_can_count_is_refused() -> None:
    """Nothing of this size runs; nor does it with a wrong number."""
    slopes = np.ones((B, N), np.float32)
    problem, _alive = make_problem("alibi_slopes", alibi_slopes=slopes)
    problem.q_len = problem.kv_len = 2**24
    problem.num_heads = problem.num_kv_heads = 4
    with pytest.raises(native.NativeError, match="over more than 2\\^31 - 1 blocks"):
        native.kernels(problem, "gradient")
