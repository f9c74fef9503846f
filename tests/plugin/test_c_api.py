"""The C ABI: strides and shared dimensions in any form, and errors for bad problems."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jax_flash_metal import __version__, attention_library
from jax_flash_metal.attention_library import AttentionLibrary
from jax_flash_metal.config import BACKENDS
from tests.support import native
from tests.support.native import NativeError, Problem, Tensor

INVALID_ARGUMENT = 3
OUT_OF_RANGE = 11


def random_operands(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"query": (2, 5, 6, 8), "key": (2, 7, 3, 8), "value": (2, 7, 3, 4)}
    return {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }


def test_layout_of_the_structs() -> None:
    # plugin/c_api/c_api.cc asserts the same sizes.
    assert (ctypes.sizeof(Tensor), ctypes.sizeof(Problem)) == (176, 4296)


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


# -- Optional operands ---------------------------------------------------------------


def all_options(*batch: int) -> dict[str, Any]:
    """Every option and optional operand for random_operands, in full size."""
    rng = np.random.default_rng(2)
    batch = batch or (2,)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal((*batch, *shape), np.float32)

    def ints(*shape: int) -> np.ndarray:
        return np.array(rng.integers(0, 2, (*batch, *shape)), np.int32)

    return {
        "is_causal": True,
        "q_offset": ints(),
        "sliding_window": (4, None),
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.25,
        "bias": floats(6, 5, 7),
        "mask": rng.random((*batch, 6, 5, 7)) < 0.8,
        "q_segment_ids": ints(5),
        "kv_segment_ids": ints(7),
        "query_seq_lengths": ints() + 4,
        "key_value_seq_lengths": ints() + 5,
        "sinks": floats(6),
        "alibi_slopes": floats(6),
        "dropout_key": rng.integers(0, 2**32, (*batch, 2), np.uint32),
        "dropout_batch_indices": ints(),
        "dropout_head_indices": ints(6) + np.arange(6, dtype=np.int32),
    }


def results_of(options: dict[str, Any]) -> list[np.ndarray]:
    """All results of all passes."""
    operands = list(random_operands().values())
    forward = native.run_forward(*operands, **options)
    operands += [*forward, *forward[:1], np.ones_like(forward[1])]
    return [
        *forward,
        *native.run_backward(*operands, **options),
        *(native.run_gradient(of, *operands, **options) for of in DIFFERENTIABLE),
    ]


DIFFERENTIABLE = ("bias", "sinks", "alibi_slopes")
ARRAYS = [name for name, x in all_options().items() if isinstance(x, np.ndarray)]


def assert_same_bits(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, want in zip(actual, expected):
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("name", ARRAYS)
def test_strided_optional_operand_equals_a_copy(name: str) -> None:
    options = all_options()
    x = options[name]
    # Between others along all axes but the last, which is dense.
    around = [(1, 1)] * (x.ndim - 1) + [(2, 3)]
    if name not in ("bias", "mask", "dropout_key"):
        around[-1] = (1, 1)
    wide = np.pad(x, around, constant_values=77)
    strided = wide[tuple(slice(a, -b) for a, b in around)]
    assert_same_bits(results_of({**options, name: strided}), results_of(options))


@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, axis) for name in ("bias", "mask") for axis in range(4)]
    + [(name, 0) for name in ARRAYS if name not in ("bias", "mask")],
)
def test_shared_optional_operand_equals_copies(name: str, axis: int) -> None:
    options = all_options()
    one = np.take(options[name], [0], axis)
    view = np.broadcast_to(one, options[name].shape)
    expected = results_of({**options, name: view.copy()})
    # The gradients first: that of an operand of size 1 is the sum over its copies.
    for of, copies in zip(DIFFERENTIABLE, expected[5:]):
        if of == name:
            total = results_of({**options, name: one})[5 + DIFFERENTIABLE.index(of)]
            want = copies.sum(axis, keepdims=True, dtype=np.float32)
            np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-5)
    for shared in (one, view):
        actual = results_of({**options, name: shared})
        assert_same_bits(actual[:5], expected[:5])


def test_many_batch_dimensions_with_all_options() -> None:
    """Each operand is shared over dimensions of its own: few of them merge."""
    sizes = (2, 1, 2, 1, 2, 2, 2)
    rng = np.random.default_rng(3)
    options = all_options(*sizes)
    plain = {k: v for k, v in options.items() if k not in ARRAYS}
    inner = {name: x.shape[1:] for name, x in random_operands().items()}
    arrays = {
        n: rng.standard_normal((*sizes, *s), np.float32) for n, s in inner.items()
    }
    for name, x in (arrays | {name: options[name] for name in ARRAYS}).items():
        ends = rng.integers(1, np.array(sizes) + 1)
        arrays[name] = x[tuple(slice(end) for end in ends)]
    actual = native.run_forward(**arrays, **plain)
    for index in np.ndindex(*sizes):
        one = {
            name: np.array(x[tuple(i % n for i, n in zip(index, x.shape))])
            for name, x in arrays.items()
        }
        for result, want in zip(actual, native.run_forward(**one, **plain)):
            np.testing.assert_array_equal(result[index], want)


@pytest.mark.parametrize("of", DIFFERENTIABLE)
def test_gradient_summed_over_any_dimensions(of: str) -> None:
    sizes = (2, 3, 2)
    rng = np.random.default_rng(4)
    options = all_options(*sizes)
    inner = {name: x.shape[1:] for name, x in random_operands().items()}
    operands = [rng.standard_normal((*sizes, *s), np.float32) for s in inner.values()]
    operands += native.run_forward(*operands, **options)
    operands += [rng.standard_normal(x.shape, np.float32) for x in operands[3:]]
    whole = native.run_gradient(of, *operands, **options)
    exact = whole.astype(np.float64)
    num_inner = whole.ndim - len(sizes)
    for axes in itertools.product((False, True), repeat=whole.ndim):
        if num_inner == 1 and axes[-1]:
            continue  # one per head, always
        summed = tuple(i for i, is_summed in enumerate(axes) if is_summed)
        shape = [1 if i in summed else n for i, n in enumerate(whole.shape)]
        gradient = native.run_gradient(of, *operands, shape=shape, **options)
        want = exact.sum(summed, keepdims=True)
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-4)


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


def full_problem() -> tuple[Problem, list[Any]]:
    """The forward pass with everything, and what it points into."""
    operands, options = random_operands(), all_options()
    problem = native.make_problem(operands, **options)
    results = native.attach_results(problem, operands, native.FORWARD_RESULTS)
    return problem, [operands, options, results]


BAD_OPTIONS = {
    "operands must be from 0 to 4095, but got -1.": of("operands", -1),
    "bias_dtype must be from 0 to 2, but got 3.": of("bias_dtype", 3),
    "gradient_of must be from 0 to 2, but got -1.": of("gradient_of", -1),
    "backend must be from 0 to 1, but got -1.": of("backend", -1),
    "backend must be from 0 to 1, but got 2.": of("backend", 2),
    "num_batch_dims of mask must be the problem's, 1, but got 0.": on(
        "mask", "num_batch_dims", 0
    ),
    "size_bytes of sinks must be at least 0, but got -1.": on(
        "sinks", "size_bytes", -1
    ),
    "column stride of bias must be 0 or 1, but got 2.": on("bias", "col_stride", 2),
    "column stride of mask must be 0 or 1, but got -1.": on("mask", "col_stride", -1),
    "row stride of q_segment_ids must be at least 0, but got -1.": on(
        "q_segment_ids", "row_stride", -1
    ),
    "head stride of alibi_slopes must be at least 0, but got -6.": on(
        "alibi_slopes", "head_stride", -6
    ),
    "batch stride 0 of q_offset must be at least 0, but got -1.": batch_stride(
        "q_offsets", -1
    ),
    "bias must have memory for at least 420 float32 elements, but got 1676 bytes.": on(
        "bias", "size_bytes", 1676
    ),
    "bias must have memory for at least 420 float16 elements, but got 838 bytes.": (
        lambda p: (of("bias_dtype", 1)(p), on("bias", "size_bytes", 838)(p))
    ),
    "mask must have memory for at least 420 bool elements, but got 419 bytes.": on(
        "mask", "size_bytes", 419
    ),
    "q_offset must have memory for at least 2 int32 elements, but got 7 bytes.": on(
        "q_offsets", "size_bytes", 7
    ),
    "kv_segment_ids must have memory for at least 14 int32 elements, but got a null "
    "pointer.": on("kv_segment_ids", "data", None),
    "dropout_key must have memory for at least 4 uint32 elements, but got 12 bytes.": (
        on("dropout_key", "size_bytes", 12)
    ),
    "dropout_head_indices must have memory for at least 37 int32 elements, but got 48 "
    "bytes.": on("dropout_head_indices", "head_stride", 6),
    "sinks has more elements than 64 bits can count.": on(
        "sinks", "head_stride", 2**62
    ),
    "q_segment_ids, kv_segment_ids must be given together, but got only "
    "q_segment_ids.": of("operands", 0xFFF & ~(1 << 4)),
    "dropout_key, dropout_batch_indices, dropout_head_indices must be given together, "
    "but got only dropout_key, dropout_head_indices.": of(
        "operands", 0xFFF & ~(1 << 10)
    ),
    "dropout_rate must be above 0 and below 1 with dropout operands, but got -0.5.": of(
        "dropout_rate", -0.5
    ),
    "dropout_rate must be 0 without dropout operands, but got 0.25.": of(
        "operands", 0x1FF
    ),
    "window_left must be at least -1 (no limit), but got -2.": of("window_left", -2),
    "window_right must be at least -1 (no limit), but got -3.": of("window_right", -3),
    "logits_soft_cap must be finite and at least 0 (none), but got nan.": of(
        "logits_soft_cap", float("nan")
    ),
}


@pytest.mark.parametrize("sentence", BAD_OPTIONS)
def test_bad_options(sentence: str) -> None:
    problem, _alive = full_problem()
    BAD_OPTIONS[sentence](problem)
    with pytest.raises(NativeError) as caught:
        native.call("jfm_attention_forward", problem)
    assert str(caught.value) == sentence
    assert caught.value.code == INVALID_ARGUMENT


def test_operands_that_are_not_given_are_not_looked_at() -> None:
    problem, alive = full_problem()
    problem.operands = 0
    problem.dropout_rate = 0
    for name in (*ARRAYS, "q_offsets"):
        if name != "q_offset":
            setattr(problem, name, Tensor(num_batch_dims=-7))
    native.call("jfm_attention_forward", problem)
    assert np.isfinite(alive[2]["out"]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_dimensions_that_an_operand_has_not(backend: str) -> None:
    operands = random_operands()
    lengths = np.array([5, 3], np.int32)
    problem = native.make_problem(
        operands, backend=backend, key_value_seq_lengths=lengths
    )
    results = native.attach_results(problem, operands, native.FORWARD_RESULTS)
    native.call("jfm_attention_forward", problem)
    expected = results["out"].copy()
    tensor = problem.key_value_seq_lengths
    tensor.head_stride, tensor.row_stride, tensor.col_stride = 1, 7, 1
    native.call("jfm_attention_forward", problem)
    np.testing.assert_array_equal(results["out"], expected)


def gradient_problem(of: str) -> tuple[Problem, list[Any]]:
    operands, options = random_operands(), all_options()
    out = np.ones((2, 5, 6, 4), np.float32)
    logsumexp = np.ones((2, 6, 5), np.float32)
    operands |= {"out": out, "logsumexp": logsumexp, "dout": out}
    operands["dlogsumexp"] = logsumexp
    problem = native.make_problem(operands, **options)
    gradient = native.attach_gradient(problem, of, options[of])
    return problem, [operands, options, gradient]


@pytest.mark.parametrize(
    ("name", "sentence", "change"),
    [
        (
            "sinks",
            "gradient_of names sinks, but the call has no operand sinks.",
            of("operands", 0xFFF & ~(1 << 7)),
        ),
        (
            "bias",
            "gradient must have memory for at least 420 float32 elements, but got 1676 "
            "bytes.",
            on("gradient", "size_bytes", 1676),
        ),
        (
            "alibi_slopes",
            "gradient must have memory for at least 12 float32 elements, but got a "
            "null pointer.",
            on("gradient", "data", None),
        ),
        (
            "bias",
            "row stride of gradient must be at least 0, but got -7.",
            on("gradient", "row_stride", -7),
        ),
        (
            "bias",
            "column stride of gradient must be 0 or 1, but got 5.",
            on("gradient", "col_stride", 5),
        ),
    ],
)
def test_bad_gradient(
    name: str, sentence: str, change: Callable[[Problem], None]
) -> None:
    problem, _alive = gradient_problem(name)
    native.call("jfm_attention_gradient", problem)
    change(problem)
    with pytest.raises(NativeError) as caught:
        native.call("jfm_attention_gradient", problem)
    assert str(caught.value) == sentence


def test_a_gradient_cannot_be_summed_over_outer_batch_dimensions() -> None:
    """More of them than the kernels address, and nothing merges."""
    operands, options = random_operands(), all_options()
    first = {name: x[0] for name, x in operands.items()}
    bias = options["bias"][0]
    batch = (2, 3, 2, 3, 2)
    for i, name in enumerate(first):
        shape = [1 if axis % 2 == i % 2 else n for axis, n in enumerate(batch)]
        first[name] = np.ones((*shape, *first[name].shape), np.float32)
    out = np.ones((*batch, 5, 6, 4), np.float32)
    logsumexp = np.ones((*batch, 6, 5), np.float32)
    arguments = (*first.values(), out, logsumexp, out)
    whole = np.broadcast_to(bias, (*batch, *bias.shape))
    gradient = native.run_gradient("bias", *arguments, bias=whole)
    assert np.isfinite(gradient).all()
    with pytest.raises(NativeError) as caught:
        native.run_gradient(
            "bias", *arguments, bias=whole, shape=(1, *batch[1:], *bias.shape)
        )
    assert str(caught.value) == (
        "the gradient of bias cannot be summed over outer batch dimensions of a call "
        "with more than 4 of them, but got batch sizes [2, 3, 2, 3, 2]."
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sentence", BAD)
def test_bad_problem(sentence: str, backend: str) -> None:
    problem, _ = good_problem()
    problem.backend = BACKENDS.index(backend)
    BAD[sentence](problem)
    with pytest.raises(NativeError) as caught:
        native.call("jfm_attention_forward", problem)
    assert str(caught.value) == sentence
    assert caught.value.code == INVALID_ARGUMENT


@pytest.mark.parametrize("backend", BACKENDS)
def test_good_problem_runs(backend: str) -> None:
    problem, arrays = good_problem()
    problem.backend = BACKENDS.index(backend)
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
    problem.bias = problem.gradient = Tensor(num_batch_dims=1, col_stride=1)
    for number in range(len(native.PASSES)):
        problem.operands = 1 if native.PASSES[number] == "gradient" else 0
        attach_backward(problem)
        assert function(ctypes.byref(problem), number, error, len(error)) == 0
        assert error.value == b""
    assert np.isnan(arrays[-2]).all()
    problem.head_dim = 257
    assert function(ctypes.byref(problem), 0, error, len(error)) == INVALID_ARGUMENT
    assert error.value.startswith(b"head_dim must be between 1 and 256")


@pytest.mark.parametrize("number", [-1, 3])
def test_unknown_pass(number: int) -> None:
    problem, _ = good_problem()
    text = ctypes.create_string_buffer(64)
    for name in ("plan", "compile"):
        function = getattr(native.load(), f"jfm_attention_{name}")
        code = function(ctypes.byref(problem), number, text, len(text))
        assert code == INVALID_ARGUMENT
        assert text.value == b"pass must be from 0 to 2, but got %d." % number


def attach_backward(problem: Problem) -> None:
    """Gives the tensors of the backward pass the batch dimensions of the problem."""
    for name in (*native.BACKWARD_OPERANDS, *native.BACKWARD_RESULTS):
        getattr(problem, name).num_batch_dims = problem.num_batch_dims


def test_device_facts() -> None:
    facts = AttentionLibrary(native.load()).device_facts()
    assert facts["device"] == "software"
    assert facts["name"] == "software Metal device"
    assert int(facts["num_cores"]) == len(os.sched_getaffinity(0))
    assert int(facts["max_threadgroup_memory_bytes"]) == 32768
    assert int(facts["max_threads_per_threadgroup"]) == 1024
    assert facts["has_unified_memory"] in ("0", "1")
    assert set(facts) >= {"family", "system", "max_buffer_bytes", "memory_limit_bytes"}


def test_the_cpu_kernels_are_one_launch_each() -> None:
    problem, arrays = good_problem()
    problem.backend = BACKENDS.index("cpu")
    try:
        for isa in native.cpu.cpu_isas():
            native.cpu.set_cpu_isa(isa)
            plan = native.cpu.plan(problem, "forward")
            kernels = [launch["kernel"] for launch in plan["launches"]]
            assert kernels == [f"cpu_forward_float32_{isa}"]
    finally:
        native.cpu.set_cpu_isa()
    assert plan["launches"][0].keys() == metal_launch().keys()
    assert (plan["family"], plan["form"], plan["scratch_bytes"]) == (0, "", {})
    native.cpu.compile(problem, "forward")
    assert np.isnan(arrays[-2]).all()
    problem.head_dim = 257
    for act in (native.cpu.compile, native.cpu.plan):
        with pytest.raises(NativeError, match="head_dim must be between 1 and 256"):
            act(problem, "forward")


def metal_launch() -> dict[str, Any]:
    (launch,) = native.plan(good_problem()[0], "forward")["launches"][:1]
    return launch


def test_a_plan_that_does_not_fit_says_so() -> None:
    problem, _alive = good_problem()
    function = native.load().jfm_attention_plan
    whole = ctypes.create_string_buffer(1 << 16)
    assert function(ctypes.byref(problem), 0, whole, len(whole)) == 0
    assert whole.value.startswith(b'{"class": "float32 d8 v4 q8 k8 n16 g2", "family"')
    assert whole.value.endswith(b"]}\n")
    size = len(whole.value) + 1
    plan = json.loads(whole.value)
    del plan["launches"]
    text = ctypes.create_string_buffer(size)
    assert function(ctypes.byref(problem), 0, text, size) == 0
    assert text.value == whole.value
    for given in (size - 1, 4096):
        assert function(ctypes.byref(problem), 0, text, given) == OUT_OF_RANGE
        short = json.loads(text.value)
        assert size <= short.pop("needed") <= len(whole)
        assert short == plan
    assert function(ctypes.byref(problem), 0, text, 70) == OUT_OF_RANGE
    assert text.value == whole.value[:69]
    assert function(ctypes.byref(problem), 0, None, 0) == OUT_OF_RANGE
    assert function(None, 0, whole, len(whole)) == INVALID_ARGUMENT
    assert whole.value == b"problem is a null pointer."


def test_choices_may_be_null() -> None:
    function = native.load().jfm_set_kernel_choices
    error = ctypes.create_string_buffer(b"old news", 64)
    assert function(None, error, 64) == 0
    assert error.value == b""
    assert function(b"x", None, 0) == INVALID_ARGUMENT


def test_unknown_instruction_set() -> None:
    chosen = native.cpu.device_facts()["family"]
    with pytest.raises(ValueError, match=f"among .*'{chosen}'.* but got 'mmx'"):
        native.cpu.set_cpu_isa("mmx")
    assert native.cpu.device_facts()["family"] == chosen


def test_peak_of_the_cpu() -> None:
    for dtype in attention_library.DTYPES:
        assert 1e8 < native.cpu.measure_cpu_peak(dtype) < 1e13
    assert native.load().jfm_cpu_measure_peak(3) == 0


def test_facts_of_the_cpu() -> None:
    facts = native.cpu.device_facts()
    assert facts["device"] == "cpu"
    assert facts["name"].strip()
    assert facts["family"] == native.cpu.cpu_isas()[-1]
    assert facts["system"] == f"{platform.system()} {platform.release()}"
    assert int(facts["num_cores"]) == len(os.sched_getaffinity(0))
    assert facts["has_unified_memory"] == "1"


def test_facts_of_an_unknown_backend() -> None:
    text = ctypes.create_string_buffer(64)
    for backend in (-1, 2):
        assert native.load().jfm_device_facts(backend, text, 64) == INVALID_ARGUMENT
        assert text.value == b"backend must be from 0 to 1, but got %d." % backend


def test_kernel_digest_is_of_the_kernels() -> None:
    digest = native.load().jfm_kernel_digest
    digest.restype = ctypes.c_char_p
    assert re.fullmatch(r"[0-9a-f]{64}", digest().decode())
