"""The library's C ABI in NumPy: kernels without JAX, one call each.

Results come back from memory that was filled with NaN, so an element that no kernel
writes fails every comparison. Mirrors plugin/c_api/c_api.h.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_flash_metal import platforms

MAX_BATCH_DIMS = 16
DTYPES = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
}


class Tensor(ctypes.Structure):
    """JfmTensor. Strides in elements; batch stride 0 = shared."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size_bytes", ctypes.c_int64),
        ("num_batch_dims", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("batch_strides", ctypes.c_int64 * MAX_BATCH_DIMS),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    ]


FORWARD_OPERANDS = ("query", "key", "value")
FORWARD_RESULTS = ("out", "logsumexp")
BACKWARD_OPERANDS = (
    *(*FORWARD_OPERANDS, *FORWARD_RESULTS),
    *("dout", "dlogsumexp"),
)
BACKWARD_RESULTS = ("dquery", "dkey", "dvalue")
STATISTICS = ("logsumexp", "dlogsumexp")  # [*batch, heads, rows], float32


class Problem(ctypes.Structure):
    """JfmAttentionProblem."""

    _fields_ = [
        ("dtype", ctypes.c_int32),
        ("num_batch_dims", ctypes.c_int32),
        ("batch_sizes", ctypes.c_int64 * MAX_BATCH_DIMS),
        ("q_len", ctypes.c_int64),
        ("kv_len", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_head_dim", ctypes.c_int64),
        ("q_offset", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("is_causal", ctypes.c_int32),
        *((name, Tensor) for name in (*BACKWARD_OPERANDS, *BACKWARD_RESULTS)),
    ]


class NativeError(Exception):
    """The library's error: `code` as in absl::StatusCode, and the message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


_MAX_KERNEL_NAMES = 1 << 16  # bytes; a plan repeats its names per outer batch index

# Names of the kernels that calls through this module have run (variant_coverage.py).
used_kernels: set[str] = set()


@functools.cache
def load(path: Path = platforms.LIBRARY) -> ctypes.CDLL:
    """The library (or another build of it) with the types of its functions."""
    library = platforms.load_library(path)
    text = (ctypes.c_char_p, ctypes.c_size_t)
    for function in (library.jfm_attention_forward, library.jfm_attention_backward):
        function.argtypes = (ctypes.POINTER(Problem), *text)
    library.jfm_attention_kernels.argtypes = (
        ctypes.POINTER(Problem),
        ctypes.c_int,
        *text,
    )
    return library


def set_threads(num_threads: int, *, library: ctypes.CDLL | None = None) -> None:
    """Threads of the software device from now on; 0 = one per CPU."""
    (library or load()).jfm_set_threads(num_threads)


def run_forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int = 0,
    library: ctypes.CDLL | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """out [*batch, q_len, num_heads, value_head_dim] and logsumexp [*batch, N, q_len].

    Operands: any number of batch dimensions, the same for all, each of the full size or
    1 (shared); any strides (broadcast, transposed or sliced views are passed as they
    are) as long as the last dimension is dense and no stride is negative.
    """
    operands = dict(zip(FORWARD_OPERANDS, (query, key, value)))
    problem = make_problem(
        operands, scale=scale, is_causal=is_causal, q_offset=q_offset
    )
    results = attach_results(problem, operands, FORWARD_RESULTS)
    call("jfm_attention_forward", problem, library)
    out, logsumexp = results.values()
    return out, logsumexp


def run_backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out: np.ndarray,
    logsumexp: np.ndarray,
    dout: np.ndarray,
    dlogsumexp: np.ndarray | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int = 0,
    library: ctypes.CDLL | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dquery, dkey and dvalue with the full batch sizes; dlogsumexp None = zeros."""
    if dlogsumexp is None:
        dlogsumexp = np.zeros_like(logsumexp)
    values = (query, key, value, out, logsumexp, dout, dlogsumexp)
    operands = dict(zip(BACKWARD_OPERANDS, values))
    problem = make_problem(
        operands, scale=scale, is_causal=is_causal, q_offset=q_offset
    )
    results = attach_results(problem, operands, BACKWARD_RESULTS)
    call("jfm_attention_backward", problem, library)
    dquery, dkey, dvalue = results.values()
    return dquery, dkey, dvalue


def make_problem(
    operands: dict[str, np.ndarray],
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int = 0,
) -> Problem:
    """The problem with its operands attached, and no results yet.

    Points into the operands: keep them alive while it is in use.
    """
    query, key, value = (operands[name] for name in FORWARD_OPERANDS)
    batch = np.broadcast_shapes(*(_batch(n, x) for n, x in operands.items()))
    problem = Problem(
        dtype=DTYPES[query.dtype],
        num_batch_dims=len(batch),
        batch_sizes=batch,
        q_len=query.shape[-3],
        kv_len=key.shape[-3],
        num_heads=query.shape[-2],
        num_kv_heads=key.shape[-2],
        head_dim=query.shape[-1],
        value_head_dim=value.shape[-1],
        q_offset=q_offset,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal=is_causal,
    )
    for name, operand in operands.items():
        setattr(problem, name, make_tensor(name, operand, batch))
    return problem


def make_tensor(name: str, array: np.ndarray, batch: tuple[int, ...]) -> Tensor:
    """Describes the array's memory as it is; size-1 batch dimensions become shared."""
    is_statistic = name in STATISTICS
    if not is_statistic and array.size and array.shape[-1] > 1:
        assert array.strides[-1] == array.itemsize, f"{name}: last dimension not dense"
    strides = [stride // array.itemsize for stride in array.strides]
    own_batch = _batch(name, array)
    batch_strides = tuple(
        stride if size == full else 0
        for stride, size, full in zip(strides, own_batch, batch)
    )
    inner = strides[len(own_batch) :]
    head_stride, row_stride = inner if is_statistic else (inner[1], inner[0])
    num_elements = array.size and 1 + sum(
        (size - 1) * stride for size, stride in zip(array.shape, strides)
    )
    return Tensor(
        data=array.ctypes.data,
        size_bytes=num_elements * array.itemsize,
        num_batch_dims=len(own_batch),
        batch_strides=batch_strides,
        head_stride=head_stride,
        row_stride=row_stride,
    )


def call(function: str, problem: Problem, library: ctypes.CDLL | None = None) -> None:
    """Runs a function of the C ABI; its error becomes a NativeError."""
    error = ctypes.create_string_buffer(1024)
    code = getattr(library or load(), function)(
        ctypes.byref(problem), error, len(error)
    )
    if code:
        raise NativeError(code, error.value.decode())
    used_kernels.update(kernels(problem, function.endswith("backward"), library))


def kernels(
    problem: Problem, backward: bool, library: ctypes.CDLL | None = None
) -> list[str]:
    """Names of the kernels that a pass launches, in order."""
    text = ctypes.create_string_buffer(_MAX_KERNEL_NAMES)
    code = (library or load()).jfm_attention_kernels(
        ctypes.byref(problem), backward, text, len(text)
    )
    assert code == 0, text.value.decode()
    return text.value.decode().splitlines()


def _batch(name: str, array: np.ndarray) -> tuple[int, ...]:
    return array.shape[: -2 if name in STATISTICS else -3]


def attach_results(
    problem: Problem, operands: dict[str, np.ndarray], names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """NaN-filled results, attached to the problem."""
    batch = tuple(problem.batch_sizes[: problem.num_batch_dims])
    shapes = {
        "out": (problem.q_len, problem.num_heads, problem.value_head_dim),
        "logsumexp": (problem.num_heads, problem.q_len),
        "dquery": operands["query"].shape[-3:],
        "dkey": operands["key"].shape[-3:],
        "dvalue": operands["value"].shape[-3:],
    }
    results = {}
    for name in names:
        dtype = np.float32 if name in STATISTICS else operands["query"].dtype
        results[name] = np.full((*batch, *shapes[name]), np.nan, dtype)
        setattr(problem, name, make_tensor(name, results[name], batch))
    return results
