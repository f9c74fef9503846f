"""The custom-call runtime by itself, and third-party handlers to call with it."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jaxlib
import ml_dtypes
import numpy as np

from jax_flash_metal import plan
from plugin import build

FOLDER = Path(__file__).parent
HEADERS = Path(jaxlib.__file__).parent / "include"
TOKEN = 17
TYPES = {  # xla::PrimitiveType
    np.dtype(np.bool_): 1,
    np.dtype(np.int8): 2,
    np.dtype(np.int16): 3,
    np.dtype(np.int32): 4,
    np.dtype(np.int64): 5,
    np.dtype(np.uint8): 6,
    np.dtype(np.uint16): 7,
    np.dtype(np.uint32): 8,
    np.dtype(np.uint64): 9,
    np.dtype(np.float16): 10,
    np.dtype(np.float32): 11,
    np.dtype(np.float64): 12,
    np.dtype(np.complex64): 15,
    np.dtype(ml_dtypes.bfloat16): 16,
    np.dtype(np.complex128): 18,
}
# A NumPy scalar or array, text, or a dictionary of these.
Attribute = object


class CallError(Exception):
    """An error of the runtime; `code` as in plugin/status.h."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Error(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("size", ctypes.c_size_t)]


class _Addresses(ctypes.Structure):
    _fields_ = [("data", ctypes.POINTER(ctypes.c_void_p)), ("count", ctypes.c_size_t)]


class _Context(ctypes.Structure):
    _fields_ = [
        ("run_id", ctypes.c_int64),
        ("device_ordinal", ctypes.c_int32),
        ("user_data_type", ctypes.c_int64),
        ("user_data", ctypes.c_void_p),
    ]


def shared_library(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    compiler: str | None = None,
) -> Path:
    """Compiles test sources, with jaxlib's headers; cached. None: zig's compiler."""
    files = [
        path
        for source in sources
        for path in build.included_files(source, [build.ROOT, HEADERS])
    ]
    key = build.digest(compiler or build.zig_version(), flags, build.content_of(files))

    def compile_to(new: Path) -> None:
        arguments = [
            *("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", *flags),
            *(f"-I{build.ROOT}", f"-isystem{HEADERS}"),
            *(str(source) for source in sources),
            *("-o", str(new)),
        ]
        if compiler is None:
            target = build.TARGETS[build.host_target()].zig_triple
            build.run_zig(["c++", "-target", target, *arguments])
        else:
            subprocess.run([compiler, *arguments], check=True)

    cache = build.default_cache()
    cache.folder.mkdir(parents=True, exist_ok=True)
    # The machine has few cores, and test processes start together.
    with open(Path(tempfile.gettempdir()) / "jfm_handlers_build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cache.get(key, f"/{name}.so", compile_to)


@functools.cache
def handlers(compiler: str | None = None) -> ctypes.CDLL:
    """handlers/*.cc: third-party code with a C++ runtime of its own."""
    sources = sorted((FOLDER / "handlers").glob("*.cc"))
    library = ctypes.CDLL(str(shared_library("handlers", sources, [], compiler)))
    library.NumCounters.restype = ctypes.c_int64
    library.NumDeleted.restype = ctypes.c_int64
    for name in ("CounterTypeId", "PayloadTypeId"):
        getattr(library, name).restype = ctypes.POINTER(ctypes.c_int64)
    return library


@functools.cache
def runtime() -> ctypes.CDLL:
    """The custom-call part of the plugin with the driver."""
    pjrt = build.ROOT / "plugin" / "pjrt"
    sources = [*sorted((pjrt / "custom_call").glob("*.cc")), pjrt / "plan.cc"]
    flags = ["-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-Wl,-z,defs"]
    path = shared_library(
        "custom_calls", [*sources, FOLDER / "custom_call_driver.cc"], flags
    )
    library = ctypes.CDLL(str(path))
    library.jfm_test_time.restype = ctypes.c_double
    library.jfm_test_destroy.argtypes = [ctypes.c_void_p]
    return library


def address(function: object) -> int:
    """Of a function of a library that ctypes loaded; None is a null pointer."""
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def register(
    name: str,
    execute: object,
    *,
    instantiate: object = None,
    prepare: object = None,
    initialize: object = None,
    api_version: int = 1,
) -> None:
    """Registers a handler's functions under a target name."""
    stages = (ctypes.c_void_p * 4)(
        *map(address, (instantiate, prepare, initialize, execute))
    )
    check(runtime().jfm_test_register, name.encode(), stages, api_version)


def register_type(name: str, type_id: object, deleter: object = None) -> None:
    """Registers a type; its id is assigned unless there is one."""
    check(
        runtime().jfm_test_register_type,
        name.encode(),
        type_id,
        ctypes.c_void_p(address(deleter)),
    )


def attributes(values: Mapping[str, Attribute]) -> plan.Attributes:
    """Attributes as JAX makes them of NumPy values, in the plan's form."""
    return tuple((name, _attribute(value)) for name, value in values.items())


def _attribute(value: object) -> plan.Array | plan.Scalar | str | plan.Attributes:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return attributes(value)
    if isinstance(value, np.ndarray):
        return plan.Array(TYPES[value.dtype], value.size, value.tobytes())
    assert isinstance(value, np.generic)
    return plan.Scalar(TYPES[value.dtype], value.tobytes())


class Call:
    """One call site. None among the operands and results is a token."""

    def __init__(
        self,
        target: str,
        operands: Sequence[np.ndarray | None],
        results: Sequence[np.ndarray | None],
        **attributes_: Attribute,
    ) -> None:
        call = plan.Call(
            target,
            attributes(attributes_),
            tuple(map(_tensor, operands)),
            tuple(map(_tensor, results)),
            aliases=(),
            has_side_effect=False,
        )
        self.create(call)

    def create(self, call: plan.Call) -> None:
        """Makes the call site in C++."""
        block = plan.Block(0, [], [], [], [])
        data = plan.encode(plan.Plan("", b"", b"", b"", [], [call], [block], -1, [], 0))
        self.handle = ctypes.c_void_p()
        check(
            runtime().jfm_test_create,
            data,
            ctypes.c_size_t(len(data)),
            ctypes.byref(self.handle),
        )

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the call site, and the state of its instantiation."""
        if self.handle:
            runtime().jfm_test_destroy(self.handle)
            self.handle = None

    def __call__(
        self,
        operands: Sequence[np.ndarray | None],
        results: Sequence[np.ndarray | None],
        *,
        run_id: int = 1,
        device_ordinal: int = 0,
        user_data: tuple[int, int] = (0, 0),
    ) -> None:
        context = _Context(run_id, device_ordinal, *user_data)
        check(
            runtime().jfm_test_execute,
            self.handle,
            ctypes.byref(_addresses(operands)),
            ctypes.byref(_addresses(results)),
            ctypes.byref(context),
        )

    def takes_native(self) -> bool:
        """Whether the handler takes objects of the device."""
        return bool(runtime().jfm_test_takes_native(self.handle))

    def execute_native(
        self, operands: Sequence[int | None], results: Sequence[int | None]
    ) -> None:
        """Executes it with such objects, which are numbers here."""
        lists = [
            _Addresses((ctypes.c_void_p * len(data))(*data), len(data))
            for data in (operands, results)
        ]
        check(runtime().jfm_test_execute_native, self.handle, *map(ctypes.byref, lists))

    def time(
        self,
        operands: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        repeats: int,
    ) -> float:
        """Nanoseconds per execution."""
        return float(
            runtime().jfm_test_time(
                self.handle,
                ctypes.byref(_addresses(operands)),
                ctypes.byref(_addresses(results)),
                repeats,
            )
        )


def call(
    target: str,
    operands: Sequence[np.ndarray | None],
    results: Sequence[np.ndarray | None],
    **attributes_: Attribute,
) -> None:
    """Makes a call site and executes it once."""
    Call(target, operands, results, **attributes_)(operands, results)


def _tensor(array: np.ndarray | None) -> plan.Tensor:
    if array is None:
        return plan.Tensor(TOKEN, ())
    return plan.Tensor(TYPES[array.dtype], array.shape)


def _addresses(arrays: Sequence[np.ndarray | None]) -> _Addresses:
    assert all(a is None or a.flags.c_contiguous for a in arrays)
    data = [None if a is None else a.ctypes.data for a in arrays]
    return _Addresses((ctypes.c_void_p * len(data))(*data), len(data))


def check(function: object, *arguments: object) -> None:
    """Calls a function of the driver; its error becomes a CallError."""
    text = ctypes.create_string_buffer(4096)
    error = _Error(ctypes.cast(text, ctypes.c_char_p), len(text))
    code = function(*arguments, ctypes.byref(error))  # type: ignore[operator]
    if code:
        raise CallError(code, text.value.decode())
