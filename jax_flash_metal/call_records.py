"""One custom call operation, written down for the executor: types, attributes, layouts.

Reads operations; changes none. The attributes are those that XLA gives to a typed FFI
handler, in the same types, and a few more that it refuses (16-bit floats, arrays of
booleans).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jax_flash_metal.plan import (
    UNIMPLEMENTED,
    Array,
    Attributes,
    Call,
    PartitionError,
    Scalar,
    Tensor,
)

# MLIR's name: xla::PrimitiveType, bits.
_ELEMENTS = {
    "i1": (1, 8),
    "i8": (2, 8),
    "i16": (3, 16),
    "i32": (4, 32),
    "i64": (5, 64),
    "ui8": (6, 8),
    "ui16": (7, 16),
    "ui32": (8, 32),
    "ui64": (9, 64),
    "f16": (10, 16),
    "f32": (11, 32),
    "f64": (12, 64),
    "complex<f32>": (15, 64),
    "bf16": (16, 16),
    "complex<f64>": (18, 128),
    "f8E5M2": (19, 8),
    "f8E4M3FN": (20, 8),
    "i4": (21, 4),
    "ui4": (22, 4),
    "f8E4M3B11FNUZ": (23, 8),
    "f8E5M2FNUZ": (24, 8),
    "f8E4M3FNUZ": (25, 8),
    "i2": (26, 2),
    "ui2": (27, 2),
    "f8E4M3": (28, 8),
    "f8E3M4": (29, 8),
    "f4E2M1FN": (32, 4),
    "f8E8M0FNU": (33, 8),
}
_TOKEN_TYPE = 17
_TOKEN_NAMES = frozenset(("!stablehlo.token", "!mhlo.token"))

# How a number of an element type is packed; bool as one byte.
_PACKED = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "ui8": "B",
    "ui16": "H",
    "ui32": "I",
    "ui64": "Q",
    "f16": "e",
    "f32": "f",
    "f64": "d",
}
# Whose dense attributes the bindings give to NumPy. Others end the process.
_DENSE = frozenset(_PACKED)

_TYPED_FFI = 4  # api_version


@dataclasses.dataclass(frozen=True)
class ValueType:
    """An MLIR type, understood.

    Attributes:
      mlir: The type itself.
      tensor: None for what no buffer can hold; `reason` says why.
      num_bytes: 0 for tokens.
    """

    mlir: Any
    tensor: Tensor | None
    num_bytes: int
    is_token: bool
    reason: str


def value_type(mlir: Any) -> ValueType:
    """Never raises: a type that cannot cross a cut may still live inside a segment."""
    text = str(mlir)
    if text in _TOKEN_NAMES:
        return ValueType(mlir, Tensor(_TOKEN_TYPE, ()), 0, True, "")
    try:
        ranked = ir.RankedTensorType(mlir)
    except (ValueError, TypeError):
        return ValueType(mlir, None, 0, False, f"the type {text} has no buffer")
    if not ranked.has_static_shape or ranked.encoding is not None:
        return ValueType(mlir, None, 0, False, f"the shape of {text} is dynamic")
    element = str(ranked.element_type)
    if element not in _ELEMENTS:
        reason = f"the element type {element} is not known"
        return ValueType(mlir, None, 0, False, reason)
    dtype, bits = _ELEMENTS[element]
    dims = tuple(ranked.shape)
    num_bytes = (bits * int(np.prod(dims, dtype=object)) + 7) // 8
    return ValueType(mlir, Tensor(dtype, dims), num_bytes, False, "")


def target_of(op: Any) -> str:
    """The target's name of a stablehlo.custom_call."""
    name: str = ir.StringAttr(op.attributes["call_target_name"]).value
    return name


def has_side_effect(op: Any) -> bool:
    attributes = op.attributes
    return "has_side_effect" in attributes and bool(
        ir.BoolAttr(attributes["has_side_effect"]).value
    )


def call_record(op: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Call:
    """The call as the executor makes it.

    Args:
      op: A stablehlo.custom_call.
      operands: The buffers' types; a buffer in another layout than row-major has the
        dimensions in the order in which they lie in memory.
      results: Likewise.
    """
    target = target_of(op)
    return Call(
        target=target,
        attributes=_typed_attributes(op, target),
        operands=_logical(operands, layouts(op, "operand_layouts")),
        results=_logical(results, layouts(op, "result_layouts")),
        aliases=_aliases(op, target),
        has_side_effect=has_side_effect(op),
    )


def layouts(op: Any, name: str) -> list[list[int]] | None:
    """Per operand or result: dimensions from the fastest in memory to the slowest."""
    if name not in op.attributes:
        return None
    return [
        list(map(int, np.array(layout))) for layout in ir.ArrayAttr(op.attributes[name])
    ]


def memory_order(layout: Sequence[int]) -> list[int]:
    """The dimensions from the slowest to the fastest: what a transpose takes."""
    return list(reversed(layout))


def _logical(
    tensors: Sequence[Tensor], layouts_: Sequence[Sequence[int]] | None
) -> tuple[Tensor, ...]:
    if layouts_ is None:
        return tuple(tensors)
    logical = []
    for tensor, layout in zip(tensors, layouts_):
        dims = list(tensor.dims)
        for size, dimension in zip(tensor.dims, memory_order(layout)):
            dims[dimension] = size
        logical.append(Tensor(tensor.dtype, tuple(dims)))
    return tuple(logical)


def _aliases(op: Any, target: str) -> tuple[tuple[int, int], ...]:
    if "output_operand_aliases" not in op.attributes:
        return ()
    pairs = []
    for attribute in ir.ArrayAttr(op.attributes["output_operand_aliases"]):
        alias = stablehlo.OutputOperandAlias(attribute)
        # One result is not a tuple: its index is empty.
        result = [*alias.output_tuple_indices, 0][0]
        if len(alias.output_tuple_indices) > 1 or alias.operand_tuple_indices:
            raise PartitionError(
                UNIMPLEMENTED,
                f"custom call {target}: aliases inside of tuples are not supported.",
            )
        pairs.append((int(alias.operand_index), int(result)))
    return tuple(pairs)


# -- Attributes ----------------------------------------------------------------------


def _typed_attributes(op: Any, target: str) -> Attributes:
    attributes = op.attributes
    # Where jax puts them, at every version; then where StableHLO has a place for them.
    for name in ("mhlo.backend_config", "backend_config"):
        # The text first: a dictionary is known by its brace, and a complex array in it
        # would end the process when touched.
        if name not in attributes or not str(attributes[name]).startswith("{"):
            continue
        if "complex<" in str(attributes[name]):
            raise _unsupported(target, name, "complex numbers")
        return _dictionary(target, ir.DictAttr(attributes[name]))
    if "api_version" in attributes:
        version = ir.IntegerAttr(attributes["api_version"]).value
        if version == _TYPED_FFI and "backend_config" not in attributes:
            return ()
    raise PartitionError(
        UNIMPLEMENTED,
        f"custom call {target}: only typed FFI custom calls are supported, and this "
        "one has no attribute dictionary; make it with jax.ffi.ffi_call.",
    )


def _dictionary(target: str, dictionary: Any) -> Attributes:
    entries = [dictionary[index] for index in range(len(dictionary))]
    decoded = [(e.name, _attribute(target, e.name, e.attr)) for e in entries]
    return tuple(sorted(decoded, key=lambda entry: entry[0].encode()))


def _attribute(
    target: str, name: str, attribute: Any
) -> Array | Scalar | str | Attributes:
    if isinstance(attribute, ir.BoolAttr):
        return _scalar("i1", bool(attribute.value))
    if isinstance(attribute, (ir.IntegerAttr, ir.FloatAttr)):
        element = str(attribute.type)
        if element in _PACKED:
            return _scalar(element, attribute.value)
        if element == "bf16":
            # The upper half of a float32, which holds the value exactly.
            data = struct.pack("<f", attribute.value)[2:]
            return Scalar(_ELEMENTS[element][0], data)
        raise _unsupported(target, name, f"the type {element}")
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes.decode("utf-8", "surrogateescape")
    if isinstance(attribute, ir.DictAttr):
        return _dictionary(target, attribute)
    for kind, element in _DENSE_ARRAYS:
        if isinstance(attribute, kind):
            return _array(element, list(attribute))
    if isinstance(attribute, ir.DenseElementsAttr):
        element = str(ir.RankedTensorType(attribute.type).element_type)
        if element == "i1":
            # To ask jaxlib 0.4.34 for these as a buffer can end the process.
            bits = ir.DenseIntElementsAttr(attribute)
            return _array(element, [bits[i] for i in range(len(bits))])
        if element in _DENSE:
            return _array(element, np.array(attribute).ravel().tolist())
    raise _unsupported(target, name, f"the value {attribute}")


_DENSE_ARRAYS = (
    (ir.DenseBoolArrayAttr, "i1"),
    (ir.DenseI8ArrayAttr, "i8"),
    (ir.DenseI16ArrayAttr, "i16"),
    (ir.DenseI32ArrayAttr, "i32"),
    (ir.DenseI64ArrayAttr, "i64"),
    (ir.DenseF32ArrayAttr, "f32"),
    (ir.DenseF64ArrayAttr, "f64"),
)


def _scalar(element: str, value: Any) -> Scalar:
    return Scalar(_ELEMENTS[element][0], struct.pack("<" + _PACKED[element], value))


def _array(element: str, values: list[Any]) -> Array:
    data = struct.pack(f"<{len(values)}{_PACKED[element]}", *values)
    return Array(_ELEMENTS[element][0], len(values), data)


def _unsupported(target: str, name: str, what: str) -> PartitionError:
    return PartitionError(
        UNIMPLEMENTED,
        f"custom call {target}: attribute {name} has {what}, which XLA FFI has no type "
        "for.",
    )
