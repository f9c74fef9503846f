"""The library's C ABI in NumPy: attention, one call each, without JAX's runtime.

Mirrors plugin/c_api/c_api.h; the only copy of its structs. For the proof of the kernels
(kernel_proof.py), `doctor` and the tests; programs go through the custom calls instead.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAX_BATCH_DIMS = 16
# JfmDtype by the dtype's name.
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

FORWARD_OPERANDS = ("query", "key", "value")
FORWARD_RESULTS = ("out", "logsumexp")
BACKWARD_OPERANDS = (
    *(*FORWARD_OPERANDS, *FORWARD_RESULTS),
    *("dout", "dlogsumexp"),
)
BACKWARD_RESULTS = ("dquery", "dkey", "dvalue")
STATISTICS = ("logsumexp", "dlogsumexp")  # [*batch, heads, rows], float32


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


class AttentionError(Exception):
    """The library's error: `code` as in absl::StatusCode, and the message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


RESOURCE_EXHAUSTED = 8  # of absl::StatusCode


@dataclasses.dataclass(frozen=True)
class CallShape:
    """What decides which kernels a call launches. The batch does not."""

    dtype: str
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @classmethod
    def of(cls, query: Any, key: Any, value: Any) -> CallShape:
        """Of operands [*batch, rows, heads, width]: anything with a shape and dtype."""
        return cls(
            np.dtype(query.dtype).name,
            query.shape[-3],
            key.shape[-3],
            query.shape[-2],
            key.shape[-2],
            query.shape[-1],
            value.shape[-1],
        )


# Bytes. A compiler's log is long.
_MAX_TEXT = 1 << 16


class AttentionLibrary:
    """The functions of a loaded library, see platforms.load_library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = declare(library)

    def run_forward(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        q_offset: int = 0,
    ) -> tuple[Array, Array]:
        """out [*batch, q_len, num_heads, value_head_dim], logsumexp [*batch, N, q_len].

        Operands: any number of batch dimensions, the same for all, each of the full
        size or 1 (shared); any strides (broadcast, transposed or sliced views are
        passed as they are) as long as the last dimension is dense and no stride is
        negative. Results come from memory that was filled with NaN, so that an element
        that no kernel writes fails every comparison.
        """
        operands = dict(zip(FORWARD_OPERANDS, (query, key, value)))
        problem = make_problem(
            operands, scale=scale, is_causal=is_causal, q_offset=q_offset
        )
        results = attach_results(problem, operands, FORWARD_RESULTS)
        self.run(problem, backward=False)
        out, logsumexp = results.values()
        return out, logsumexp

    def run_backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        logsumexp: Array,
        dout: Array,
        dlogsumexp: Array | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        q_offset: int = 0,
    ) -> tuple[Array, Array, Array]:
        """dquery, dkey, dvalue with the full batch sizes; dlogsumexp None = zeros."""
        if dlogsumexp is None:
            dlogsumexp = np.zeros_like(logsumexp)
        values = (query, key, value, out, logsumexp, dout, dlogsumexp)
        operands = dict(zip(BACKWARD_OPERANDS, values))
        problem = make_problem(
            operands, scale=scale, is_causal=is_causal, q_offset=q_offset
        )
        results = attach_results(problem, operands, BACKWARD_RESULTS)
        self.run(problem, backward=True)
        dquery, dkey, dvalue = results.values()
        return dquery, dkey, dvalue

    def run(self, problem: Problem, backward: bool) -> None:
        """Runs a pass and waits.

        Raises:
          AttentionError: It failed.
        """
        name = "jfm_attention_backward" if backward else "jfm_attention_forward"
        self._call(getattr(self._library, name), ctypes.byref(problem))

    def compile(self, problem: Problem, backward: bool) -> None:
        """Gets the compiled pipelines that a pass needs; runs nothing.

        Raises:
          AttentionError: There is no device, or its compiler rejects a kernel.
        """
        function = self._library.jfm_attention_compile
        self._call(function, ctypes.byref(problem), int(backward))

    def kernels(self, problem: Problem, backward: bool) -> list[str]:
        """Names of the kernels that a pass launches, each once, in order.

        Raises:
          AttentionError: No kernels take the problem.
        """
        function = self._library.jfm_attention_kernels
        return self._text(function, ctypes.byref(problem), int(backward)).splitlines()

    def device_facts(self) -> dict[str, str]:
        """What is known of the device that calls run on.

        Raises:
          AttentionError: There is none; the message says why.
        """
        text = self._text(self._library.jfm_device_facts)
        return dict(line.split("=", 1) for line in text.splitlines())

    def kernel_digest(self) -> str:
        """A hash of the library's kernels."""
        digest: bytes = self._library.jfm_kernel_digest()
        return digest.decode()

    def _call(self, function: Any, *arguments: Any) -> str:
        """Calls a function that ends in (char* text, size_t); returns what it wrote.

        A text that does not fit has lost its end.
        """
        text = ctypes.create_string_buffer(_MAX_TEXT)
        code = function(*arguments, text, len(text))
        written = text.value.decode(errors="replace")
        if code:
            raise AttentionError(code, written)
        return written

    def _text(self, function: Any, *arguments: Any) -> str:
        """As _call, of lines, each of which has its end.

        Raises:
          AttentionError: The function failed.
          RuntimeError: Its text was cut, which never happens.
        """
        written = self._call(function, *arguments)
        if len(written.encode()) + 1 >= _MAX_TEXT or written[-1:] not in ("", "\n"):
            raise RuntimeError(
                f"the native library's text must be lines of fewer than {_MAX_TEXT} "
                f"bytes together, but the end is missing: …{written[-80:]!r}"
            )
        return written


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the library's functions their types."""
    problem, text = ctypes.POINTER(Problem), (ctypes.c_char_p, ctypes.c_size_t)
    for name, arguments in {
        "jfm_attention_forward": (problem, *text),
        "jfm_attention_backward": (problem, *text),
        "jfm_attention_kernels": (problem, ctypes.c_int, *text),
        "jfm_attention_compile": (problem, ctypes.c_int, *text),
        "jfm_device_facts": text,
    }.items():
        getattr(library, name).argtypes = arguments
    library.jfm_kernel_digest.restype = ctypes.c_char_p
    return library


def make_problem(
    operands: Mapping[str, Array],
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int = 0,
) -> Problem:
    """The problem with its operands attached, and no results yet.

    Points into the operands: keep them alive while it is in use.
    """
    shape = CallShape.of(*(operands[name] for name in FORWARD_OPERANDS))
    batch = np.broadcast_shapes(*(_batch(n, x) for n, x in operands.items()))
    problem = _problem(shape, batch, scale, is_causal, q_offset)
    for name, operand in operands.items():
        setattr(problem, name, make_tensor(name, operand, batch))
    return problem


def shape_problem(
    shape: CallShape, *, is_causal: bool = False, q_offset: int = 0
) -> Problem:
    """A problem without memory or batch, for `kernels` and `compile`."""
    problem = _problem(shape, (), None, is_causal, q_offset)
    for name in (*BACKWARD_OPERANDS, *BACKWARD_RESULTS):
        if name in STATISTICS:
            tensor = Tensor(head_stride=shape.q_len, row_stride=1)
        else:
            is_key = name in ("key", "value", "dkey", "dvalue")
            is_value = name in ("value", "dvalue", "out", "dout")
            heads = shape.num_kv_heads if is_key else shape.num_heads
            width = shape.value_head_dim if is_value else shape.head_dim
            tensor = Tensor(head_stride=width, row_stride=heads * width)
        setattr(problem, name, tensor)
    return problem


def _problem(
    shape: CallShape,
    batch: Sequence[int],
    scale: float | None,
    is_causal: bool,
    q_offset: int,
) -> Problem:
    return Problem(
        batch_sizes=tuple(batch),
        num_batch_dims=len(batch),
        scale=shape.head_dim**-0.5 if scale is None else scale,
        is_causal=is_causal,
        q_offset=q_offset,
        **dataclasses.asdict(shape) | {"dtype": DTYPES[shape.dtype]},
    )


def make_tensor(name: str, array: Array, batch: tuple[int, ...]) -> Tensor:
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


def attach_results(
    problem: Problem, operands: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Array]:
    """NaN-filled results, attached to the problem."""
    batch = tuple(problem.batch_sizes[: problem.num_batch_dims])
    shapes: dict[str, tuple[int, ...]] = {
        "out": (problem.q_len, problem.num_heads, problem.value_head_dim),
        "logsumexp": (problem.num_heads, problem.q_len),
        "dquery": operands["query"].shape[-3:],
        "dkey": operands["key"].shape[-3:],
        "dvalue": operands["value"].shape[-3:],
    }
    results: dict[str, Array] = {}
    for name in names:
        dtype = np.float32 if name in STATISTICS else operands["query"].dtype
        results[name] = np.full((*batch, *shapes[name]), np.nan, dtype)
        setattr(problem, name, make_tensor(name, results[name], batch))
    return results


def _batch(name: str, array: Array) -> tuple[int, ...]:
    shape: tuple[int, ...] = array.shape
    return shape[: -2 if name in STATISTICS else -3]
