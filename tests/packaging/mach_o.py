"""What a dylib for macOS says, as plain values: lief's objects die with their file.

The code signature is read here, byte by byte: macOS kills a process that loads an
edited library, without a word of why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from pathlib import Path

import lief

# Of the CodeDirectory: macOS 11 on Apple silicon loads no code without a signature; an
# ad-hoc one, made by the linker, is enough.
ADHOC, LINKER_SIGNED = 0x2, 0x20000
WEAK_DEFINITION, WEAK_REFERENCE = 0x80, 0x40  # in a symbol's description


@dataclasses.dataclass(frozen=True)
class Binding:
    """A symbol that dyld fills in."""

    symbol: str
    library: str  # "" if it may be from anywhere
    is_weak: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """The ad-hoc signature, and whether it fits the file."""

    identifier: str
    flags: int
    page_size: int
    signed_bytes: int  # from the beginning of the file
    position: int  # where it is in the file
    num_pages: int
    wrong_pages: list[int]


@dataclasses.dataclass(frozen=True)
class Facts:
    """See the module."""

    cpu: str
    file_type: str
    flags: set[str]
    install_name: str
    platform: str
    minimum_os: tuple[int, ...]
    libraries: list[str]
    rpaths: list[str]
    exports: set[str]
    weak_symbols: list[str]
    coalesced_bytes: int  # of bindings that dyld joins over all libraries
    bindings: list[Binding]
    segments: list[tuple[str, int, int]]  # name, address, place in the file
    sections: dict[str, tuple[int, int]]  # by name: address and size
    functions: dict[str, int]  # addresses of symbols in __text
    unwind: list[tuple[int, int]]  # address where an encoding begins, and the encoding
    signature: Signature | None


def read_facts(path: Path) -> Facts:
    """Reads a library with one architecture."""
    file = lief.MachO.parse(str(path))
    assert file is not None and file.size == 1
    binary = file.at(0)
    libraries = [str(library.name) for library in binary.libraries]
    own = [str(c.name) for c in binary.commands if c.command.name == "ID_DYLIB"]
    (install_name,) = own
    return Facts(
        cpu=binary.header.cpu_type.name,
        file_type=binary.header.file_type.name,
        flags={flag.name for flag in binary.header.flags_list},
        install_name=install_name,
        platform=binary.build_version.platform.name,
        minimum_os=tuple(binary.build_version.minos),
        libraries=[name for name in libraries if name != install_name],
        rpaths=[str(c.path) for c in binary.commands if c.command.name == "RPATH"],
        exports={str(symbol.name) for symbol in binary.exported_symbols},
        weak_symbols=[
            str(symbol.name)
            for symbol in binary.symbols
            if symbol.description & (WEAK_DEFINITION | WEAK_REFERENCE)
        ],
        coalesced_bytes=binary.dyld_info.weak_bind[1],
        bindings=[
            Binding(
                str(binding.symbol.name),
                str(binding.library.name) if binding.has_library else "",
                bool(binding.weak_import),
            )
            for binding in binary.bindings
            if binding.has_symbol
        ],
        segments=[(s.name, s.virtual_address, s.file_offset) for s in binary.segments],
        sections={s.name: (s.virtual_address, s.size) for s in binary.sections},
        functions=_functions(binary),
        unwind=read_unwind_info(bytes(_section(binary, "__unwind_info").content)),
        signature=read_signature(path.read_bytes(), binary.code_signature),
    )


def _section(binary: lief.MachO.Binary, name: str) -> lief.MachO.Section:
    return next(section for section in binary.sections if section.name == name)


def _functions(binary: lief.MachO.Binary) -> dict[str, int]:
    text = _section(binary, "__text")
    end = text.virtual_address + text.size
    return {
        str(symbol.name): symbol.value
        for symbol in binary.symbols
        if text.virtual_address <= symbol.value < end
    }


def read_unwind_info(content: bytes) -> list[tuple[int, int]]:
    """How to leave the frames of which addresses: an exception's way out.

    An index of pages of entries; the last of the index only says where the code ends. A
    page has whole words, or 24 bits of address and the number of an encoding: of those
    common to all pages, then the page's own.
    """

    def words(place: int, count: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{count}I", content, place)

    version, common_at, num_common, _, _, index_at, num_pages = words(0, 7)
    assert version == 1
    common = words(common_at, num_common)
    found: list[tuple[int, int]] = []
    for number in range(num_pages):
        start, page, _ = words(index_at + 12 * number, 3)
        if page == 0:
            found.append((start, 0))
            continue
        (kind,) = words(page, 1)
        entries, count = struct.unpack_from("<HH", content, page + 4)
        if kind == 2:
            places = range(page + entries, page + entries + 8 * count, 8)
            found += [words(place, 2) for place in places]  # type: ignore[misc]
            continue
        assert kind == 3, f"unknown kind of page: {kind}"
        encodings = common + words(
            page + struct.unpack_from("<H", content, page + 8)[0],
            struct.unpack_from("<H", content, page + 10)[0],
        )
        found += [
            (start + (entry & 0xFFFFFF), encodings[entry >> 24])
            for entry in words(page + entries, count)
        ]
    return found


def read_signature(
    content: bytes, command: lief.MachO.CodeSignature | None
) -> Signature | None:
    """Parses the blob that `command` places in the file, and hashes every page."""
    if command is None:
        return None
    start = command.data_offset
    magic, _, count = struct.unpack_from(">III", content, start)
    assert magic == 0xFADE0CC0, f"not an embedded signature: {magic:#x}"
    index = [
        struct.unpack_from(">II", content, start + 12 + 8 * i) for i in range(count)
    ]
    directory = start + dict(index)[0]  # slot 0 is the CodeDirectory
    magic, _, _, flags, hashes, name, _, pages, limit, size, kind, _, page = (
        struct.unpack_from(">IIIIIIIIIBBBB", content, directory)
    )
    assert magic == 0xFADE0C02, f"not a CodeDirectory: {magic:#x}"
    assert (kind, size) == (2, 32), f"not SHA-256: kind {kind} of {size} bytes"
    wrong = []
    for number in range(pages):
        first = number << page
        actual = hashlib.sha256(content[first : min(first + (1 << page), limit)])
        place = directory + hashes + size * number
        if actual.digest() != content[place : place + size]:
            wrong.append(number)
    return Signature(
        identifier=content[directory + name :].split(b"\0", 1)[0].decode(),
        flags=flags,
        page_size=1 << page,
        signed_bytes=limit,
        position=start,
        num_pages=pages,
        wrong_pages=wrong,
    )
