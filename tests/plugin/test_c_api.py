"""The C ABI: strides and shared dimensions in any form, and errors for bad problems."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable

import numpy as np
import pytest

from jax_flash_metal import __version__
from tests.support import native
from tests.support.native import NativeError, Problem, Tensor

INVALID_ARGUMENT = 3


def random_operands(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"query": (2, 5, 6, 8), "key": (2, 7, 3, 8), "value": (2, 7, 3, 4)}
    return {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }


def test_layout_of_the_structs() -> None:
    # plugin/c_api/c_api.cc asserts the same sizes.
    assert (ctypes.sizeof(Tensor), ctypes.sizeof(Problem)) == (168, 1880)


def test_version() -> None:
    assert native.load().jfm_version().decode() == __version__


def test_shared_operands_equal_copies() -> None:
    operands = random_operands()
    shared = {**operands, "key": operands["key"][:1], "value": operands["value"][:1]}
    copies = {name: np.repeat(x, 2 // len(x), axis=0) for name, x in shared.items()}
    views = {name: np.broadcast_to(x, copies[name].shape) for name, x in shared.items()}
    expected = native.run_forward(**copies)
    for variant in (shared, views):
        for result, want in zip(native.run_forward(**variant), expected):
            np.testing.assert_array_equal(result, want)


def test_strided_operands_equal_copies() -> None:
    operands = random_operands()
    expected = native.run_forward(**operands)
    transposed = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
        for name, x in operands.items()
    }
    sliced = {
        name: np.pad(x, ((1, 1), (2, 0), (0, 3), (4, 4)), constant_values=np.nan)[
            1:-1, 2:, :-3, 4:-4
        ]
        for name, x in operands.items()
    }
    for variant in (transposed, sliced):
        for result, want in zip(native.run_forward(**variant), expected):
            np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("num_batch_dims", [0, 1, 3, 16])
def test_batch_dimensions(num_batch_dims: int) -> None:
    """Every second dimension has size 2, shared in turn by query and by key."""
    first = {name: x[0] for name, x in random_operands().items()}
    sizes = [2 if i % 2 == 0 and i < 6 else 1 for i in range(num_batch_dims)]
    batches = {
        "query": [1 if i % 4 == 0 else size for i, size in enumerate(sizes)],
        "key": [1 if i % 4 == 2 else size for i, size in enumerate(sizes)],
        "value": sizes,
    }
    rng = np.random.default_rng(1)
    operands = {
        name: rng.standard_normal((*batches[name], *x.shape), np.float32)
        for name, x in first.items()
    }
    out, logsumexp = native.run_forward(**operands)
    assert out.shape == (*sizes, 5, 6, 4)
    for index in np.ndindex(*sizes):
        one = {
            name: x[tuple(i % n for i, n in zip(index, x.shape))]
            for name, x in operands.items()
        }
        expected_out, expected_logsumexp = native.run_forward(**one)
        np.testing.assert_array_equal(out[index], expected_out)
        np.testing.assert_array_equal(logsumexp[index], expected_logsumexp)


# -- Bad problems --------------------------------------------------------------------


def good_problem() -> tuple[Problem, list[np.ndarray]]:
    """A problem that runs, and the arrays it points into."""
    operands = random_operands()
    out = np.full((2, 5, 6, 4), np.nan, np.float32)
    logsumexp = np.full((2, 6, 5), np.nan, np.float32)
    problem = native.make_problem(operands)
    problem.out = native.make_tensor("out", out, (2,))
    problem.logsumexp = native.make_tensor("logsumexp", logsumexp, (2,))
    return problem, [*operands.values(), out, logsumexp]


def on(name: str, field: str, value: object) -> Callable[[Problem], None]:
    """Changes a field of a tensor."""
    return lambda problem: setattr(getattr(problem, name), field, value)


def of(field: str, value: object) -> Callable[[Problem], None]:
    """Changes a field of the problem."""
    return lambda problem: setattr(problem, field, value)


def batch_stride(name: str, value: int) -> Callable[[Problem], None]:
    return lambda problem: getattr(problem, name).batch_strides.__setitem__(0, value)


BAD = {
    "dtype must be from 0 to 2, but got 3.": of("dtype", 3),
    "num_batch_dims must be from 0 to 16, but got 17.": of("num_batch_dims", 17),
    "num_batch_dims must be from 0 to 16, but got -1.": of("num_batch_dims", -1),
    "is_causal must be from 0 to 1, but got 2.": of("is_causal", 2),
    "num_batch_dims of key must be the problem's, 1, but got 2.": on(
        "key", "num_batch_dims", 2
    ),
    "size_bytes of value must be at least 0, but got -4.": on(
        "value", "size_bytes", -4
    ),
    "q_len must be at least 0, but got -1.": of("q_len", -1),
    "batch size 0 must be at least 0, but got -2.": of("batch_sizes", (-2,)),
    "num_heads must be at least 1, but got 0.": of("num_heads", 0),
    "head_dim must be at least 1, but got 0.": of("head_dim", 0),
    "num_heads must be a multiple of num_kv_heads, but got num_heads=6 and "
    "num_kv_heads=4.": of("num_kv_heads", 4),
    "query must have memory for at least 480 float32 elements, but got a null "
    "pointer.": on("query", "data", None),
    "key must have memory for at least 336 float32 elements, but got 1340 bytes.": on(
        "key", "size_bytes", 1340
    ),
    "value must have memory for at least 252 float32 elements, but got 672 bytes.": on(
        "value", "row_stride", 26
    ),
    "out must have memory for at least 240 float32 elements, but got 956 bytes.": on(
        "out", "size_bytes", 956
    ),
    "row stride of query must be at least 0, but got -48.": on(
        "query", "row_stride", -48
    ),
    "batch stride 0 of out must be at least 1, but got 0.": batch_stride("out", 0),
    "head stride of logsumexp must be at least 1, but got 0.": on(
        "logsumexp", "head_stride", 0
    ),
    "key has more elements than 64 bits can count.": on("key", "row_stride", 2**62),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_problem(sentence: str) -> None:
    problem, _ = good_problem()
    BAD[sentence](problem)
    with pytest.raises(NativeError) as caught:
        native.call("jfm_attention_forward", problem)
    assert str(caught.value) == sentence
    assert caught.value.code == INVALID_ARGUMENT


def test_good_problem_runs() -> None:
    problem, arrays = good_problem()
    native.call("jfm_attention_forward", problem)
    assert np.isfinite(arrays[-2]).all()


def test_null_problem() -> None:
    error = ctypes.create_string_buffer(64)
    assert native.load().jfm_attention_forward(None, error, 64) == INVALID_ARGUMENT
    assert error.value == b"problem is a null pointer."


def test_error_text_is_cut_to_its_buffer() -> None:
    error = ctypes.create_string_buffer(b"x" * 9)
    assert native.load().jfm_attention_backward(None, error, 8) == INVALID_ARGUMENT
    assert error.raw == b"problem\0x\0"
    assert native.load().jfm_attention_backward(None, None, 0) == INVALID_ARGUMENT


def test_success_clears_the_error_text() -> None:
    problem, _ = good_problem()
    error = ctypes.create_string_buffer(b"old news", 64)
    function = native.load().jfm_attention_forward
    assert function(ctypes.byref(problem), error, len(error)) == 0
    assert error.value == b""


# -- What is not a run ----------------------------------------------------------------


def test_compile_runs_nothing() -> None:
    problem, arrays = good_problem()
    error = ctypes.create_string_buffer(b"old news", 64)
    function = native.load().jfm_attention_compile
    for backward in (0, 1):
        problem.head_dim = 8
        attach_backward(problem)
        assert function(ctypes.byref(problem), backward, error, len(error)) == 0
        assert error.value == b""
    assert np.isnan(arrays[-2]).all()
    problem.head_dim = 257
    assert function(ctypes.byref(problem), 0, error, len(error)) == INVALID_ARGUMENT
    assert error.value.startswith(b"head_dim must be between 1 and 256")


def attach_backward(problem: Problem) -> None:
    """Gives the tensors of the backward pass the batch dimensions of the problem."""
    for name in (*native.BACKWARD_OPERANDS, *native.BACKWARD_RESULTS):
        getattr(problem, name).num_batch_dims = problem.num_batch_dims


def test_device_facts() -> None:
    text = ctypes.create_string_buffer(4096)
    assert native.load().jfm_device_facts(text, len(text)) == 0
    facts = dict(line.split("=", 1) for line in text.value.decode().splitlines())
    assert facts["device"] == "software"
    assert facts["name"] == "software Metal device"
    assert int(facts["num_cores"]) == len(os.sched_getaffinity(0))
    assert int(facts["max_threadgroup_memory_bytes"]) == 32768
    assert int(facts["max_threads_per_threadgroup"]) == 1024
    assert facts["has_unified_memory"] in ("0", "1")
    assert set(facts) >= {"family", "system", "max_buffer_bytes", "memory_limit_bytes"}


def test_kernel_digest_is_of_the_kernels() -> None:
    digest = native.load().jfm_kernel_digest
    digest.restype = ctypes.c_char_p
    assert re.fullmatch(r"[0-9a-f]{64}", digest().decode())
