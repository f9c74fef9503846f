"""Reads the container of compiled Metal libraries (.metallib).

Apple does not document it; this is what MLX's library looks like. Little-endian:

    0   "MTLB"
    16  u64, size of the file
    24  four times u64 offset, u64 size: the list of functions, public metadata, private
        metadata, bitcode

The list is a u32 count and the entries. An entry is its u32 size, then fields of a tag
of four letters, a u16 length and that many bytes, ended by the tag "ENDT". Fields used
here: NAME (ends with a 0), HASH (SHA-256 of the bitcode), OFFT (three u64, the last one
is where the bitcode begins in its section), MDSZ (u64, its size).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path


class MetallibError(Exception):
    """Not a Metal library as described above, or no such function in it."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    start: int  # in the file
    size: int
    sha256: bytes


class Metallib:
    """The functions of one library."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        if self._data[:4] != b"MTLB":
            raise MetallibError(f"{path.name} is no Metal library.")
        (size,) = self._unpack("<Q", 16)
        if size != len(self._data):
            raise MetallibError(
                f"{path.name} should have {size} bytes, but has {len(self._data)}."
            )
        self._entries = dict(self._read_list())

    def names(self) -> list[str]:
        """Of all functions, in their order in the file."""
        return list(self._entries)

    def bitcode(self, name: str) -> bytes:
        """The AIR module of a function: LLVM bitcode with that function alone."""
        if name not in self._entries:
            raise MetallibError(f"the library has no function {name}.")
        entry = self._entries[name]
        data = self._data[entry.start : entry.start + entry.size]
        if hashlib.sha256(data).digest() != entry.sha256:
            raise MetallibError(f"{name}: the bitcode does not have its hash.")
        return data

    def matrix_products(self) -> dict[tuple[str, str, str, str], int]:
        """In how many functions simdgroups multiply matrices of these types.

        The types are those of d = a * b + c, as AIR calls them: f32, f16, bf16.
        """
        intrinsic = re.compile(
            rb"air\.simdgroup_matrix_8x8_multiply_accumulate"
            + rb"\.v64(f32|f16|bf16)" * 4
        )
        counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
        for entry in self._entries.values():
            module = self._data[entry.start : entry.start + entry.size]
            d, a, b, c = 0, 1, 2, 3
            counts.update(
                (types[d], types[a], types[b], types[c])
                for types in {
                    tuple(t.decode() for t in match)
                    for match in intrinsic.findall(module)
                }
            )
        return dict(counts)

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(form, self._data, offset)

    def _read_list(self) -> Iterator[tuple[str, _Entry]]:
        sections = self._unpack("<8Q", 24)
        functions, bitcode = sections[0], sections[6]
        (count,) = self._unpack("<I", functions)
        position = functions + 4
        for _ in range(count):
            (size,) = self._unpack("<I", position)
            fields = self._read_fields(position + 4, position + size)
            name = fields[b"NAME"].rstrip(b"\0").decode()
            start = bitcode + struct.unpack("<3Q", fields[b"OFFT"])[2]
            (length,) = struct.unpack("<Q", fields[b"MDSZ"])
            yield name, _Entry(start, length, fields[b"HASH"])
            position += size

    def _read_fields(self, position: int, end: int) -> dict[bytes, bytes]:
        fields: dict[bytes, bytes] = {}
        while position < end:
            tag = self._data[position : position + 4]
            if tag == b"ENDT":
                return fields
            (length,) = self._unpack("<H", position + 4)
            fields[tag] = self._data[position + 6 : position + 6 + length]
            position += 6 + length
        raise MetallibError("an entry of the list of functions has no end.")
