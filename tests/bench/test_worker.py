"""What workers compare and measure, in this process."""

import math
import sys

import jax
import numpy as np
import pytest

import jax_flash_metal
from jax_flash_metal import bench_worker
from jax_flash_metal.bench_measure import Case, case_from_json
from jax_flash_metal.benchmark_shapes import AttentionShape

SHAPE = AttentionShape(2, 6, 3, 53, 16, q_len=37)


CASES = (
    Case(SHAPE, "float32", False, "forward"),
    Case(SHAPE, "float32", True, "forward+backward"),
    Case(AttentionShape(2, 4, 4, 24, 8), "bfloat16", True, "forward+backward"),
)


def test_case_and_json():
    case = CASES[0]
    assert case_from_json(case.as_json() | {"expected": "file"}) == case


def test_inputs_are_the_same_for_both_passes():
    forward, both, half = CASES
    one, two = bench_worker.inputs(forward), bench_worker.inputs(both)
    assert list(one) == ["query", "key", "value"]
    assert list(two) == [*one, "dout"]
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
    assert one["query"].shape == (2, 37, 6, 16) and one["key"].shape == (2, 53, 3, 16)
    assert bench_worker.inputs(half)["query"].dtype.name == "bfloat16"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_expected(case, tmp_path, monkeypatch):
    """Blocks and heads, put together, are the whole."""
    shape = case.shape
    groups = shape.num_heads // shape.num_kv_heads
    rows = 15  # no divisor of the number of queries
    monkeypatch.setattr(bench_worker, "_SCORES_BYTES", 4 * groups * shape.length * rows)
    file = tmp_path / "expected.npz"
    request = {**case.as_json(), "expected": str(file)}
    facts = bench_worker.Expected().prepare(request)
    assert facts["heads"] == shape.batch_size * shape.num_kv_heads

    def attend(query, key, value):
        return jax_flash_metal.flash_attention(
            query,
            key,
            value,
            is_causal=case.is_causal,
            q_offset=shape.q_offset if case.is_causal else None,
            implementation="xla",
        )

    arrays = list(bench_worker.inputs(case).values())
    if case.pass_ == "forward":
        results = (attend(*arrays),)
    else:
        out, pullback = jax.vjp(attend, *arrays[:3])
        results = (out, *pullback(arrays[3]))
    named = {
        name: np.asarray(result, np.float32)
        for name, result in zip(bench_worker.RESULTS[case.pass_], results)
    }
    error = bench_worker.compare(case, named, file)
    assert error < (1e-5 if case.dtype == "float32" else 0.02)
    for name in named:
        wrong = named | {name: named[name].copy()}
        wrong[name][-1, -1, -1] += 1.0  # one row of the last head
        error = bench_worker.compare(case, wrong, file)
        assert error > bench_worker.TOLERANCES[case.dtype]


def test_heads_of_large_problems():
    small = Case(SHAPE, "float32", False, "forward")
    assert len(bench_worker.checked_heads(small)) == 6
    large = Case(
        AttentionShape(2, 8, 8, 2048, 64), "float32", False, "forward+backward"
    )
    heads = bench_worker.checked_heads(large)
    assert heads[0] == (0, 0) and heads[-1] == (1, 7) and 2 < len(heads) < 16
    huge = Case(AttentionShape(1, 8, 8, 1 << 17, 64), "float32", False, "forward")
    assert bench_worker.checked_heads(huge) == [(0, 7)]


def test_row_error():
    wanted = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert bench_worker.row_error(wanted, wanted) == 0
    mean = math.sqrt(25 / 2)
    found = wanted + np.array([[0.0, 0.1], [0.2, 0.0]])
    expected = pytest.approx(0.2 / mean, rel=1e-5)
    assert bench_worker.row_error(found, wanted) == expected
    assert bench_worker.row_error(found[:1], wanted) == math.inf
    assert bench_worker.row_error(np.full((2, 2), np.nan), wanted) == math.inf
    assert bench_worker.row_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_peak_memory():
    size = 64 << 20

    def call():
        large = np.ones(size, np.uint8)
        return large[:8].copy()

    result, peak = bench_worker.peak_memory(call)
    assert result.shape == (8,)
    assert 0.9 * size < peak < 1.3 * size
    # Again: memory that was given back is not forgotten.
    assert 0.9 * size < bench_worker.peak_memory(call)[1] < 1.3 * size


@pytest.mark.parametrize("name", ["cpu", "xla", "jax.nn", "torch", "mlx"])
def test_implementations_are_right(name, tmp_path):
    if name in ("torch", "mlx"):
        pytest.importorskip("torch" if name == "torch" else "mlx.core")
    for i, case in enumerate(CASES):
        request = {**case.as_json(), "expected": str(tmp_path / f"{i}.npz")}
        bench_worker.Expected().prepare(request)
        subject = bench_worker.subject(name)
        assert subject.load()
        facts = subject.prepare(request)
        assert facts["error"] <= facts["tolerance"], case
        assert facts["runs"]
        subject.call()


def test_subjects_are_those_of_the_command():
    from jax_flash_metal.bench import IMPLEMENTATIONS

    internal = {"expected", "machine", "tune"}
    assert set(IMPLEMENTATIONS) | internal == set(bench_worker.SUBJECTS)
