"""The compile options of a program, made into those of its segments.

A field-by-field filter over the protobuf wire format, so that every option that this
file does not name reaches the host as it came, unknown ones included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Field numbers of CompileOptionsProto and of the message in its field 3. Dropped is
# what speaks of the program's own arguments and results, which segments do not have.
_BUILD_OPTIONS = 3
_DEBUG_OPTIONS = 3  # in the build options; it has maps
_DROPPED = frozenset((1,))  # argument_layouts
_DROPPED_BUILD_OPTIONS = frozenset(
    (
        2,  # result_layout
        12,  # allow_spmd_sharding_propagation_to_output
        18,  # allow_spmd_sharding_propagation_to_parameters
    )
)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def for_segments(options: bytes) -> bytes:
    """CompileOptionsProto without what describes arguments and results.

    Raises:
      ValueError: the bytes are not a protobuf message.
    """
    return _filter(options, _DROPPED, {_BUILD_OPTIONS: _DROPPED_BUILD_OPTIONS})


def canonical(options: bytes) -> bytes:
    """The same for equal options: protobuf writes a map in any order."""
    return _sorted_fields(options, (_BUILD_OPTIONS, _DEBUG_OPTIONS))


def _sorted_fields(message: bytes, path: tuple[int, ...]) -> bytes:
    """Fields in sorted order, also in the messages along the path of field numbers."""
    return b"".join(
        sorted(
            _sorted_fields(payload, path[1:])
            if wire_type == _LENGTH and path[:1] == (number,)
            else field
            for number, wire_type, field, payload in _fields(message)
        )
    )


def _filter(
    message: bytes, dropped: frozenset[int], nested: Mapping[int, frozenset[int]]
) -> bytes:
    parts = []
    for number, wire_type, field, payload in _fields(message):
        if number in dropped:
            continue
        if number in nested and wire_type == _LENGTH:
            inner = _filter(payload, nested[number], {})
            tag = number << 3 | _LENGTH
            parts += [_encode_varint(tag), _encode_varint(len(inner)), inner]
        else:
            parts.append(field)
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    """(field number, wire type, the whole field, the payload of a length-delimited)."""
    position = 0
    while position < len(message):
        start = position
        tag, position = _varint(message, position)
        wire_type = tag & 7
        payload_start = position
        if wire_type == _VARINT:
            _, position = _varint(message, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _LENGTH:
            length, payload_start = _varint(message, position)
            position = payload_start + length
        else:
            raise ValueError(f"protobuf wire type {wire_type} in the compile options")
        if position > len(message):
            raise ValueError("the compile options end in the middle of a field")
        yield (
            tag >> 3,
            wire_type,
            message[start:position],
            message[payload_start:position],
        )


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends."""
    value = shift = 0
    while True:
        if position >= len(message):
            raise ValueError("the compile options end in the middle of a field")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
