"""The library's C ABI in NumPy: attention, one call each, without JAX's runtime.

Mirrors plugin/c_api/c_api.h; the only copy of its structs. For the proof of the kernels
(kernel_proof.py), `doctor` and the tests; programs go through the custom calls instead.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

# In the orders of JfmBackend, JfmGradientOf, JfmAttentionProblem's tensors, JfmOperand.
from jax_flash_metal.config import (
    BACKENDS,
    DIFFERENTIABLE_OPTIONS,
    DIMS,
    OPTIONAL_OPERANDS,
    Backend,
)

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAX_BATCH_DIMS = 16
# JfmDtype by the dtype's name.
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

PASSES = ("forward", "backward", "gradient")  # JfmPass

FORWARD_OPERANDS = ("query", "key", "value")
FORWARD_RESULTS = ("out", "logsumexp")
BACKWARD_OPERANDS = (
    *(*FORWARD_OPERANDS, *FORWARD_RESULTS),
    *("dout", "dlogsumexp"),
)
BACKWARD_RESULTS = ("dquery", "dkey", "dvalue")
STATISTICS = ("logsumexp", "dlogsumexp")  # [*batch, heads, rows], float32

# The dtypes of those that do not have query's; bias has one of its own.
_DTYPES_OF: dict[str, type[np.generic]] = {
    "mask": np.bool_,
    "dropout_key": np.uint32,
    **dict.fromkeys(("logsumexp", "dlogsumexp", "sinks", "alibi_slopes"), np.float32),
    **dict.fromkeys(("q_offset", "q_segment_ids", "kv_segment_ids"), np.int32),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), np.int32),
    **dict.fromkeys(("dropout_batch_indices", "dropout_head_indices"), np.int32),
}
_NO_LIMIT = -1


class Tensor(ctypes.Structure):
    """JfmTensor. Strides in elements; stride 0 = shared, of a gradient: summed."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size_bytes", ctypes.c_int64),
        ("num_batch_dims", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("batch_strides", ctypes.c_int64 * MAX_BATCH_DIMS),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
    ]


# The member of the problem where the tensor's name is already taken.
_MEMBERS = {"q_offset": "q_offsets"}


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
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("dropout_rate", ctypes.c_double),
        ("scale", ctypes.c_float),
        ("logits_soft_cap", ctypes.c_float),
        ("is_causal", ctypes.c_int32),
        ("operands", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("gradient_of", ctypes.c_int32),
        ("backend", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        *((_MEMBERS.get(name, name), Tensor) for name in (*DIMS, "gradient")),
    ]


class AttentionError(Exception):
    """The library's error: `code` as in absl::StatusCode, and the message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


# Of absl::StatusCode.
RESOURCE_EXHAUSTED = 8
_OUT_OF_RANGE = 11


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


# Bytes. A compiler's log is long; so is a plan, which says how much it needs.
_MAX_TEXT = 1 << 16
_MIN_TEXT = 1 << 12


class AttentionLibrary:
    """The functions of a loaded library, see platforms.load_library.

    Args:
      library: Loaded.
      backend: Of the problems that run_forward and the like make, among BACKENDS.
    """

    def __init__(self, library: ctypes.CDLL, *, backend: Backend = "metal") -> None:
        self._library = declare(library)
        self._backend = backend

    def run_forward(
        self, query: Array, key: Array, value: Array, **options: Any
    ) -> tuple[Array, Array]:
        """out [*batch, q_len, num_heads, value_head_dim], logsumexp [*batch, N, q_len].

        Operands: any number of batch dimensions, the same for all, each of the full
        size or 1 (shared); so may be all dimensions of bias and mask. Any strides
        (broadcast, transposed or sliced views are passed as they are) as long as the
        last dimension is dense (of bias and mask: or shared) and no stride is negative.
        Results come from memory that was filled with NaN, so that an element that no
        kernel writes fails every comparison.

        Options: those of make_problem.
        """
        operands = dict(zip(FORWARD_OPERANDS, (query, key, value)))
        problem = make_problem(operands, backend=self._backend, **options)
        results = attach_results(problem, operands, FORWARD_RESULTS)
        self.run(problem, "forward")
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
        **options: Any,
    ) -> tuple[Array, Array, Array]:
        """dquery, dkey, dvalue with the full batch sizes; dlogsumexp None = zeros."""
        values = (query, key, value, out, logsumexp, dout)
        operands = _backward_operands(values, dlogsumexp)
        problem = make_problem(operands, backend=self._backend, **options)
        results = attach_results(problem, operands, BACKWARD_RESULTS)
        self.run(problem, "backward")
        dquery, dkey, dvalue = results.values()
        return dquery, dkey, dvalue

    def run_gradient(
        self,
        of: str,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        logsumexp: Array,
        dout: Array,
        dlogsumexp: Array | None = None,
        *,
        shape: Sequence[int] | None = None,
        **options: Any,
    ) -> Array:
        """The gradient of one of DIFFERENTIABLE_OPTIONS, which the options must have.

        Args:
          shape: Of the gradient: each dimension is that of the operand's full size, or
            1, where the gradient is summed. None: the operand's shape.
        """
        values = (query, key, value, out, logsumexp, dout)
        operands = _backward_operands(values, dlogsumexp)
        problem = make_problem(operands, backend=self._backend, **options)
        gradient = attach_gradient(problem, of, options[of], shape)
        self.run(problem, "gradient")
        return gradient

    def run(self, problem: Problem, which: str) -> None:
        """Runs one of PASSES and waits.

        Raises:
          AttentionError: It failed.
        """
        function = getattr(self._library, f"jfm_attention_{which}")
        self._call(function, ctypes.byref(problem))

    def compile(self, problem: Problem, which: str) -> None:
        """Gets the compiled pipelines that a pass needs; runs nothing.

        Raises:
          AttentionError: There is no device, or its compiler rejects a kernel.
        """
        function = self._library.jfm_attention_compile
        self._call(function, ctypes.byref(problem), PASSES.index(which))

    def plan(self, problem: Problem, which: str) -> dict[str, Any]:
        """What a pass would launch, as jfm_attention_plan describes it; runs nothing.

        Raises:
          AttentionError: No kernels take the problem.
        """
        plan = self._plan(problem, which, _MAX_TEXT)
        while "needed" in plan:  # more than before only if somebody sets a limit
            plan = self._plan(problem, which, plan["needed"])
        return plan

    def outline(self, problem: Problem, which: str) -> dict[str, Any]:
        """The plan, perhaps without its launches, which may be thousands.

        Raises:
          AttentionError: No kernels take the problem.
        """
        return self._plan(problem, which, _MIN_TEXT)

    def kernels(self, problem: Problem, which: str) -> list[str]:
        """Names of the kernels that a pass launches, each once, in order.

        Raises:
          AttentionError: No kernels take the problem.
        """
        kernels: list[str] = self._plan(problem, which, _MIN_TEXT)["kernels"]
        return kernels

    def num_launches(self, problem: Problem, which: str) -> int:
        """Launches of a pass; 1 by the CPU kernels.

        Raises:
          AttentionError: No kernels take the problem.
        """
        count: int = self._plan(problem, which, _MIN_TEXT)["num_launches"]
        return count

    def _plan(self, problem: Problem, which: str, size: int) -> dict[str, Any]:
        """In a text of `size` bytes: if it does not fit, "needed" for "launches"."""
        function = self._library.jfm_attention_plan
        arguments = (ctypes.byref(problem), PASSES.index(which))
        try:
            text = self._call(function, *arguments, size=size)
        except AttentionError as error:
            if error.code != _OUT_OF_RANGE:
                raise
            text = str(error)
        plan: dict[str, Any] = json.loads(text)
        return plan

    def set_kernel_choices(self, text: str) -> None:
        """Which kernels calls take, as measured, for the process and from now on.

        Args:
          text: Lines as jfm_set_kernel_choices takes them; "": the library's own.

        Raises:
          AttentionError: A line is wrong: the message has its number. Nothing changed.
        """
        self._call(self._library.jfm_set_kernel_choices, text.encode())

    def set_gpu_family(self, family: int) -> None:
        """Plans as on the Apple GPU family, for the process; -1: as the device says."""
        self._library.jfm_set_gpu_family(family)

    def set_score_gradient_limit(self, size_bytes: int) -> None:
        """Of the score gradient in scratch at once, for the process; 0: the default."""
        self._library.jfm_set_score_gradient_limit(size_bytes)

    def device_facts(self) -> dict[str, str]:
        """What is known of what calls run on: the device, or the CPU.

        Raises:
          AttentionError: There is no device; the message says why.
        """
        function = self._library.jfm_device_facts
        text = self._text(function, BACKENDS.index(self._backend))
        return dict(line.split("=", 1) for line in text.splitlines())

    def cpu_isas(self) -> list[str]:
        """Instruction sets that the CPU kernels can use on this machine, best last."""
        return self._text(self._library.jfm_cpu_isas).splitlines()

    def set_cpu_isa(self, name: str = "") -> None:
        """Which of cpu_isas() to use from now on; "": the best."""
        if self._library.jfm_cpu_set_isa(name.encode()):
            raise ValueError(f"name must be among {self.cpu_isas()}, but got {name!r}.")

    def measure_cpu_peak(self, dtype: str) -> float:
        """Floating-point operations per second of one thread in products of matrices.

        For some milliseconds, in the CPU's first cache: what no kernel can exceed.
        """
        peak: float = self._library.jfm_cpu_measure_peak(DTYPES[dtype])
        return peak

    def kernel_digest(self) -> str:
        """A hash of the library's kernels."""
        digest: bytes = self._library.jfm_kernel_digest()
        return digest.decode()

    def _call(self, function: Any, *arguments: Any, size: int = _MAX_TEXT) -> str:
        """Calls a function that ends in (char* text, size_t); returns what it wrote.

        A text that does not fit has lost its end.
        """
        text = ctypes.create_string_buffer(size)
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


def _backward_operands(
    values: Sequence[Array], dlogsumexp: Array | None
) -> dict[str, Array]:
    """BACKWARD_OPERANDS by name, from the first ones and the last."""
    operands = dict(zip(BACKWARD_OPERANDS, values))
    if dlogsumexp is None:
        dlogsumexp = np.zeros_like(operands["logsumexp"])
    return operands | {"dlogsumexp": dlogsumexp}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the library's functions their types."""
    problem, text = ctypes.POINTER(Problem), (ctypes.c_char_p, ctypes.c_size_t)
    for name, arguments in {
        "jfm_attention_forward": (problem, *text),
        "jfm_attention_backward": (problem, *text),
        "jfm_attention_gradient": (problem, *text),
        "jfm_attention_plan": (problem, ctypes.c_int, *text),
        "jfm_attention_compile": (problem, ctypes.c_int, *text),
        "jfm_device_facts": (ctypes.c_int, *text),
        "jfm_set_kernel_choices": (ctypes.c_char_p, *text),
        "jfm_set_gpu_family": (ctypes.c_int,),
        "jfm_set_score_gradient_limit": (ctypes.c_int64,),
        "jfm_cpu_isas": text,
        "jfm_cpu_set_isa": (ctypes.c_char_p,),
        "jfm_cpu_measure_peak": (ctypes.c_int,),
    }.items():
        getattr(library, name).argtypes = arguments
    library.jfm_kernel_digest.restype = ctypes.c_char_p
    library.jfm_cpu_measure_peak.restype = ctypes.c_double
    return library


def make_problem(
    operands: Mapping[str, Array],
    *,
    backend: Backend = "metal",
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int | Array = 0,
    sliding_window: tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    **optional: Array | None,
) -> Problem:
    """The problem with its operands attached, and no results yet.

    Points into the operands: keep them alive while it is in use.

    Args:
      operands: Those of the pass that a call cannot be without.
      backend: Among BACKENDS.
      scale: None: 1 / sqrt(head_dim).
      is_causal: As the following ones in docs/semantics.md.
      q_offset: An int, or an int32 array with the batch dimensions.
      sliding_window: None: no limit.
      logits_soft_cap: None: none.
      dropout_rate: With the three dropout operands.
      optional: The rest of OPTIONAL_OPERANDS; None: not given.
    """
    unknown = optional.keys() - set(OPTIONAL_OPERANDS)
    if unknown:
        raise TypeError(f"operands must be among {OPTIONAL_OPERANDS}: {unknown}.")
    if isinstance(q_offset, np.ndarray):
        optional["q_offset"], q_offset = q_offset, 0
    given = {name: x for name, x in optional.items() if x is not None}
    shape = CallShape.of(*(operands[name] for name in FORWARD_OPERANDS))
    tensors = {**operands, **given}
    batch = np.broadcast_shapes(*(_batch(n, x) for n, x in tensors.items()))
    left, right = sliding_window or (None, None)
    problem = Problem(
        backend=BACKENDS.index(backend),
        batch_sizes=tuple(batch),
        num_batch_dims=len(batch),
        scale=shape.head_dim**-0.5 if scale is None else scale,
        is_causal=is_causal,
        q_offset=q_offset,
        window_left=_NO_LIMIT if left is None else left,
        window_right=_NO_LIMIT if right is None else right,
        logits_soft_cap=logits_soft_cap or 0,
        dropout_rate=dropout_rate,
        operands=sum(1 << OPTIONAL_OPERANDS.index(name) for name in given),
        bias_dtype=DTYPES[given["bias"].dtype.name] if "bias" in given else 0,
        **dataclasses.asdict(shape) | {"dtype": DTYPES[shape.dtype]},
    )
    for name, array in tensors.items():
        expected = _dtype_of(name, operands["query"].dtype)
        if name != "bias" and array.dtype != expected:
            raise TypeError(f"{name} must be {expected}, but got {array.dtype}.")
        setattr(problem, _MEMBERS.get(name, name), make_tensor(name, array, batch))
    return problem


def shape_problem(
    shape: CallShape,
    *,
    backend: Backend = "metal",
    is_causal: bool = False,
    q_offset: int = 0,
) -> Problem:
    """A plain problem without memory or batch, for `plan` and `compile`."""
    problem = Problem(
        backend=BACKENDS.index(backend),
        scale=shape.head_dim**-0.5,
        is_causal=is_causal,
        q_offset=q_offset,
        window_left=_NO_LIMIT,
        window_right=_NO_LIMIT,
        **dataclasses.asdict(shape) | {"dtype": DTYPES[shape.dtype]},
    )
    for name in (*BACKWARD_OPERANDS, *BACKWARD_RESULTS):
        if name in STATISTICS:
            tensor = Tensor(head_stride=shape.q_len, row_stride=1)
        else:
            sizes = sizes_of(problem)
            _, heads, width = (sizes[letter] for letter in DIMS[name])
            tensor = Tensor(head_stride=width, row_stride=heads * width)
        setattr(problem, name, tensor)
    return problem


def _dtype_of(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a tensor, from that of query."""
    return np.dtype(_DTYPES_OF.get(name, dtype))


def sizes_of(shape: CallShape | Problem) -> dict[str, int]:
    """The size of each letter of DIMS."""
    return {
        **{"T": shape.q_len, "S": shape.kv_len},
        **{"N": shape.num_heads, "K": shape.num_kv_heads},
        **{"H": shape.head_dim, "V": shape.value_head_dim, "W": 2},
    }


def make_tensor(name: str, array: Array, batch: tuple[int, ...]) -> Tensor:
    """Describes the array's memory as it is; dimensions of size 1 become shared.

    Args:
      name: In DIMS; of a gradient: that of its operand.
      array: Whose last dimension must be dense or, in bias and mask, shared.
      batch: The full batch sizes.
    """
    dims = DIMS[name]
    # NumPy may give an empty array strides of 0, which would mean shared.
    laid_out = array if array.size else np.empty([n or 1 for n in array.shape], np.int8)
    strides = [stride // laid_out.itemsize for stride in laid_out.strides]
    own_batch = _batch(name, array)
    num_elements = array.size and 1 + sum(
        (size - 1) * stride for size, stride in zip(array.shape, strides)
    )
    tensor = Tensor(
        data=array.ctypes.data,
        size_bytes=num_elements * array.itemsize,
        num_batch_dims=len(own_batch),
        batch_strides=tuple(
            stride if size == full else 0
            for stride, size, full in zip(strides, own_batch, batch)
        ),
    )
    is_broadcast = "S" in dims and "T" in dims
    inner = zip(dims, array.shape[len(own_batch) :], strides[len(own_batch) :])
    for letter, size, stride in inner:
        member = _stride_member(dims, letter)
        if is_broadcast and size == 1:
            stride = 0
        allowed = (0, 1) if member == "col_stride" else (1,)
        if member in (None, "col_stride") and array.size and size > 1:
            assert stride in allowed, f"{name}: last dimension not dense"
        if member is not None:
            setattr(tensor, member, stride)
    return tensor


def _stride_member(dims: str, letter: str) -> str | None:
    """The member of Tensor that has the stride of a dimension; None: it is dense."""
    if letter in "NK":
        return "head_stride"
    if letter == "S" and "T" in dims:
        return "col_stride"
    return "row_stride" if letter in "TS" else None


def attach_results(
    problem: Problem, operands: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Array]:
    """NaN-filled results of the forward or backward pass, attached to the problem."""
    batch, sizes = _batch_of(problem), sizes_of(problem)
    results: dict[str, Array] = {}
    for name in names:
        shape = (*batch, *(sizes[letter] for letter in DIMS[name]))
        dtype = _dtype_of(name, operands["query"].dtype)
        results[name] = np.full(shape, np.nan, dtype)
        setattr(problem, name, make_tensor(name, results[name], batch))
    return results


def attach_gradient(
    problem: Problem, of: str, operand: Array, shape: Sequence[int] | None = None
) -> Array:
    """The NaN-filled gradient of an operand, attached; see run_gradient."""
    gradient = np.full(operand.shape if shape is None else shape, np.nan, operand.dtype)
    problem.gradient_of = DIFFERENTIABLE_OPTIONS.index(of)
    problem.gradient = make_tensor(of, gradient, _batch_of(problem))
    return gradient


def _batch_of(problem: Problem) -> tuple[int, ...]:
    return tuple(problem.batch_sizes[: problem.num_batch_dims])


def _batch(name: str, array: Array) -> tuple[int, ...]:
    shape: tuple[int, ...] = array.shape
    return shape[: len(shape) - len(DIMS[name])]
