"""XLA FFI call frames built by hand: what no JAX would send, and what a newer one may.

Mirrors plugin/ffi/xla_ffi.h. `call` is the caller's side of the ABI.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np

BUFFER = 1
ARRAY, DICTIONARY, SCALAR, STRING = 1, 2, 3, 4
PRED, S32, S64, U32, F32, F64 = 1, 4, 5, 8, 11, 12
# XLA's type by NumPy's name.
TYPES = {"bool": PRED, "int32": S32, "uint32": U32, "float32": F32}
INSTANTIATE, PREPARE, INITIALIZE, EXECUTE = 0, 1, 2, 3
METADATA = 1
CAPABILITIES, NATIVE_BUFFERS = 0x4A464D01, 0x4A464D02  # plugin/ffi/native_buffers.h

_HEAD = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p)]


# Of a forward call by the Metal device, sorted by name, as XLA sends them.
_ATTRIBUTES = (
    ("backend", S64, 0),
    ("dropout_rate", F64, 0),
    ("is_causal", PRED, 0),
    ("logits_soft_cap", F32, 0),
    ("operands", S64, 0),
    ("q_offset", S64, 0),
    ("scale", F32, 0.25),
    ("version", S64, 3),
    ("window_left", S64, -1),
    ("window_right", S64, -1),
)


def attributes(**changed: Any) -> list[tuple[str, int, Any]]:
    """Those of a good forward call, some of them changed: name, type, value."""
    return [(name, t, changed.get(name, value)) for name, t, value in _ATTRIBUTES]


class Version(ctypes.Structure):
    _fields_ = [*_HEAD, ("major", ctypes.c_int32), ("minor", ctypes.c_int32)]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("api_version", Version),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),  # newer than the handler
    ]


class Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    ]


class Capabilities(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("takes_native_buffers", ctypes.c_int32),
    ]


class ErrorCreateArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int32)]


ErrorCreate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorCreateArgs))


class ErrorDestroyArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("error", ctypes.c_void_p)]


ErrorDestroy = ctypes.CFUNCTYPE(None, ctypes.POINTER(ErrorDestroyArgs))
Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class ScheduleArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("context", ctypes.c_void_p),
        ("task", Task),
        ("data", ctypes.c_void_p),
    ]


Schedule = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ScheduleArgs))


class Api(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("api_version", Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ErrorCreate),
        # Null, so that a handler that uses any other slot does not live to tell.
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", ErrorDestroy),
        ("slots", ctypes.c_void_p * 8),
        ("thread_pool_schedule", Schedule),
    ]


class Buffer(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_void_p),
    ]


class ByteSpan(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("value", ctypes.c_void_p)]


class Values(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    ]


class Attributes(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    ]


class CallFrame(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int32),
        ("arguments", Values),
        ("results", Values),
        ("attributes", Attributes),
        ("future", ctypes.c_void_p),  # newer than the handler
    ]


@dataclasses.dataclass
class Error:
    """What the handler passed to XLA_FFI_Error_Create."""

    code: int
    message: str


class Frame:
    """A call frame and all it points to. Change any part, then `call` a handler.

    Attributes:
      frame: The CallFrame.
      buffers: Operands and results, in order.
      dims: The shape of each buffer, an array of c_int64.
      types: For each list ("arguments", "results", "attributes"), its type tags.
      scalars: One per attribute.
      names: One ByteSpan per attribute.
    """

    def __init__(
        self,
        operands: list[np.ndarray],
        results: list[np.ndarray],
        attributes: list[tuple[str, int, Any]],
    ) -> None:
        self._alive: list[Any] = [operands, results]
        self.types: dict[str, Any] = {}
        self.buffers: list[Buffer] = []
        self.dims: list[Any] = []
        self._errors: list[Error] = []
        self._error_create = ErrorCreate(self._record)
        self.api = Api(
            struct_size=ctypes.sizeof(Api),
            api_version=Version(ctypes.sizeof(Version), None, 0, 3),
            error_create=self._error_create,
        )
        self.frame = CallFrame(
            struct_size=CallFrame.future.offset,
            api=ctypes.addressof(self.api),
            stage=EXECUTE,
            arguments=self._values("arguments", operands),
            results=self._values("results", results),
            attributes=self._attributes(attributes),
        )

    def call(self, handler: Any) -> Error | None:
        """Calls the handler as XLA would: None, or the error that it returned."""
        self._errors.clear()
        handler.argtypes = (ctypes.c_void_p,)
        handler.restype = ctypes.c_void_p
        returned = handler(ctypes.addressof(self.frame))
        assert bool(returned) == bool(self._errors), "error created but not returned"
        assert len(self._errors) <= 1
        return self._errors[0] if self._errors else None

    def keep(self, thing: Any) -> int:
        """The address of a ctypes object that lives as long as the frame."""
        self._alive.append(thing)
        return ctypes.addressof(thing)

    def _record(self, args: Any) -> int:
        self._errors.append(Error(args[0].code, args[0].message.decode()))
        return 1  # any address: the handler may only pass it on

    def _values(self, what: str, arrays: list[np.ndarray]) -> Values:
        buffers = [self._buffer(array) for array in arrays]
        self.types[what] = (ctypes.c_int32 * len(arrays))(*[BUFFER] * len(arrays))
        return Values(
            struct_size=ctypes.sizeof(Values),
            size=len(arrays),
            types=ctypes.addressof(self.types[what]),
            values=self._pointers(buffers),
        )

    def _buffer(self, array: np.ndarray) -> Buffer:
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.dims.append(dims)
        buffer = Buffer(
            struct_size=ctypes.sizeof(Buffer),
            dtype=TYPES[array.dtype.name],
            data=array.ctypes.data,
            rank=array.ndim,
            dims=ctypes.addressof(dims),
        )
        self.buffers.append(buffer)
        return buffer

    def _attributes(self, attributes: list[tuple[str, int, Any]]) -> Attributes:
        storage = {
            **{PRED: ctypes.c_uint8, S64: ctypes.c_int64},
            **{F32: ctypes.c_float, F64: ctypes.c_double},
        }
        self.scalars = [
            Scalar(dtype, self.keep(storage[dtype](value)))
            for _, dtype, value in attributes
        ]
        self.names = [ByteSpan(name.encode(), len(name)) for name, _, _ in attributes]
        count = len(attributes)
        self.types["attributes"] = (ctypes.c_int32 * count)(*[SCALAR] * count)
        return Attributes(
            struct_size=ctypes.sizeof(Attributes),
            size=count,
            types=ctypes.addressof(self.types["attributes"]),
            names=self._pointers(self.names),
            values=self._pointers(self.scalars),
        )

    def _pointers(self, things: list[Any]) -> int:
        array = (ctypes.c_void_p * len(things))(*map(ctypes.addressof, things))
        return self.keep(array)
