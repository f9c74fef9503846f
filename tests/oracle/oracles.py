"""Independent statements of Apple's interfaces: selectors with types, and functions.

metal-cpp: Apple's own C++ headers. Protocols: the methods that Apple's compiler wrote
into pyobjc's extension modules. Metadata: what pyobjc's tools read from Apple's SDK.
NSObject.h: Apple's header, which zig carries. Imports: what programs for macOS bind to.
None knows everything.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lief

from tests.oracle import downloads, encoding
from tests.oracle.encoding import Signature

# Signatures by (class or protocol, selector); several where sources differ.
Methods = dict[tuple[str, str], set[Signature]]
NOT_SAID = "."  # a type that the source leaves open


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One source. `owners`: False where it does not say which class has a method."""

    name: str
    methods: Methods
    owners: bool = True

    def signatures(self, owner: str, selector: str) -> set[Signature]:
        """What it says of a method; empty if nothing."""
        if self.owners:
            return self.methods.get((owner, selector), set())
        return set().union(
            *(found for (_, name), found in self.methods.items() if name == selector)
        )

    def agrees(self, owner: str, selector: str, ours: Signature) -> bool | None:
        """Whether one of its signatures is ours; None if it knows none."""
        known = self.signatures(owner, selector)
        return any(_matches(one, ours) for one in known) if known else None


def _matches(theirs: Signature, ours: Signature) -> bool:
    types = zip((theirs.result, *theirs.arguments), (ours.result, *ours.arguments))
    return len(theirs.arguments) == len(ours.arguments) and all(
        their_type in (NOT_SAID, our_type) for their_type, our_type in types
    )


# -- metal-cpp -----------------------------------------------------------------------

_SELECTOR = re.compile(r'_(?:MTL|NS)_PRIVATE_DEF_SEL\(\s*(\w+),\s*"([^"]+)"')
_CLASS = re.compile(r"_(?:MTL|NS)_PRIVATE_DEF_CLS\((\w+)\)")
_ENUM = re.compile(r"_(?:MTL|NS)_(?:ENUM|OPTIONS)\(\s*([\w:]+),\s*(\w+)")
_BLOCK_ALIAS = re.compile(r"^using (\w+) = void \(\^\)", re.MULTILINE)
_POINTER_ALIAS = re.compile(r"^using (\w+) = [\w:]+\*;", re.MULTILINE)
_FUNCTION = re.compile(
    r"_(?:MTL|NS)_INLINE\s+(?P<result>[^;{}()]*?)\b(?P<owner>(?:MTL|NS)::\w+)::\w+"
    r"\((?P<parameters>[^;{}]*)\)(?:\s*const)?\s*\{"
    # A function that sends to anything else has parameters that are not the method's.
    r"[^{}]*?\((?:this|_(?:MTL|NS)_PRIVATE_CLS\(\w+\)), "
    r"_(?:MTL|NS)_PRIVATE_SEL\((?P<accessor>\w+)\)[^{}]*\}"
)
# NS::Referencing<T> is how metal-cpp writes NSObject's methods.
_REFERENCING = re.compile(
    r"_NS_INLINE\s+(?P<result>[^;{}()]*?)\bNS::Referencing<_Class, _Base>::\w+"
    r"\((?P<parameters>)\)(?:\s*const)?\s*\{"
    r"[^{}]*?_NS_PRIVATE_SEL\((?P<accessor>\w+)\)[^{}]*\}"
)
_CPP_TYPES = {
    "void": "v",
    "UInteger": "Q",
    "uint64_t": "Q",
    "Integer": "q",
    "bool": "B",
    "double": "d",
    "char*": "*",
    "void*": "^v",
    "Size": "{QQQ}",
}


def metal_cpp_folder() -> Path:
    """Where its headers are."""
    return downloads.folder_of("metal-cpp") / "mlx" / "include" / "metal_cpp"


@functools.cache
def _metal_cpp_text() -> str:
    folder = metal_cpp_folder()
    paths = sorted([*folder.glob("Foundation/*.hpp"), *folder.glob("Metal/*.hpp")])
    return "\n".join(path.read_text() for path in paths)


def metal_cpp_classes() -> set[str]:
    """The classes that it looks up by name."""
    return set(_CLASS.findall(_metal_cpp_text()))


def metal_cpp() -> Oracle:
    """From the bodies of its functions: each sends one selector, and its parameters."""
    text = _metal_cpp_text()
    selectors = dict(_SELECTOR.findall(text))
    enums = {name: base.split("::")[-1] for base, name in _ENUM.findall(text)}
    blocks = set(_BLOCK_ALIAS.findall(text))
    pointers = set(_POINTER_ALIAS.findall(text))

    def encode(written: str) -> str:
        if "(^" in written:
            return "@?"
        name = re.sub(r"\b(class|const|struct)\b|\b\w+::|\s", "", written)
        name = enums.get(name, name)
        if name in _CPP_TYPES:
            return _CPP_TYPES[name]
        if name.endswith("**") or (name.endswith("*") and name[:-1] in pointers):
            return "^@"
        if name in blocks:
            return "@?"
        if name.endswith("*"):
            return "@"
        return f"?{name}"  # compares unequal to all of ours

    methods: Methods = {}
    matches = [*_FUNCTION.finditer(text), *_REFERENCING.finditer(text)]
    for match in matches:
        if match["accessor"] not in selectors:
            continue
        owner = match.groupdict().get("owner", "NS::Object").replace("::", "")
        key = (owner, selectors[match["accessor"]])
        types = [_without_name(part) for part in _parameters(match["parameters"])]
        signature = Signature(encode(match["result"]), tuple(map(encode, types)))
        methods.setdefault(key, set()).add(signature)
    return Oracle("metal-cpp", methods)


def _parameters(text: str) -> Iterator[str]:
    """The parameters of a list; commas in brackets do not part them."""
    depth, start = 0, 0
    for position, character in enumerate(text + ","):
        if character == "," and depth == 0:
            if text[start:position].strip():
                yield text[start:position].strip()
            start = position + 1
        depth += (character in "(<") - (character in ")>")


def _without_name(parameter: str) -> str:
    return parameter if "(^" in parameter else re.sub(r"\w+$", "", parameter)


# -- Protocols in pyobjc's extension modules -----------------------------------------

_RELATIVE_METHODS = 0x80000000  # of a method list: 32-bit offsets, not pointers


def protocols(folder: Path) -> Oracle:
    """All methods of the protocols in the extension modules of `folder`."""
    methods: Methods = {}
    for path in sorted(folder.glob("_*.so")):
        for (owner, selector), types in _protocol_methods(path):
            methods.setdefault((owner, selector), set()).add(encoding.method(types))
    return Oracle(f"protocols of {folder.name}", methods)


class _Image:
    """The arm64 part of a Mach-O file, read by address."""

    def __init__(self, path: Path) -> None:
        file = lief.MachO.parse(str(path))
        assert file is not None, path
        cpu = lief.MachO.Header.CPU_TYPE.ARM64
        self.file = file  # owns the binary
        self.binary = next(b for b in file if b.header.cpu_type == cpu)

    def numbers(self, form: str, address: int) -> tuple[int, ...]:
        size = struct.calcsize("<" + form)
        content = self.binary.get_content_from_virtual_address(address, size)
        return struct.unpack("<" + form, bytes(content))

    def text(self, address: int) -> str:
        content = b""
        while b"\0" not in content:
            part = self.binary.get_content_from_virtual_address(
                address + len(content), 64
            )
            content += bytes(part)
        return content.split(b"\0")[0].decode()

    def section(self, name: str) -> tuple[int, int]:
        """Address and size; (0, 0) if there is none."""
        for section in self.binary.sections:
            if section.name == name:
                return section.virtual_address, section.size
        return 0, 0


def _protocol_methods(path: Path) -> Iterator[tuple[tuple[str, str], str]]:
    image = _Image(path)
    start, size = image.section("__objc_protolist")
    for (protocol,) in (image.numbers("Q", start + i) for i in range(0, size, 8)):
        # isa, name, protocols; then lists: required, of the class, optional, both.
        _, name, _, *lists = image.numbers("7Q", protocol)
        for address in filter(None, lists):
            for selector, types in _method_list(image, address):
                yield (image.text(name), selector), types


def _method_list(image: _Image, address: int) -> Iterator[tuple[str, str]]:
    size_and_flags, count = image.numbers("II", address)
    size = size_and_flags & 0xFFFC
    for entry in range(address + 8, address + 8 + count * size, size):
        if size_and_flags & _RELATIVE_METHODS:
            to_selector, to_types = image.numbers("ii", entry)
            (selector,) = image.numbers("Q", entry + to_selector)
            types = entry + 4 + to_types
        else:
            selector, types = image.numbers("QQ", entry)
        yield image.text(selector), image.text(types)


# -- pyobjc's metadata ---------------------------------------------------------------


class _Objc:
    """Stands for the module objc while a metadata file runs: notes what it is told."""

    arch = "arm64"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def registerMetaDataForSelector(
        self, owner: bytes, selector: bytes, data: dict[str, Any]
    ) -> None:
        self.calls.append((owner.decode(), selector.decode(), data))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


@functools.cache
def _run_metadata(folder: Path) -> tuple[_Objc, dict[str, Any]]:
    objc = _Objc()
    text = (folder / "_metadata.py").read_text()
    names: dict[str, Any] = {"objc": objc}
    code = compile(text.replace("import objc, sys", "import sys"), str(folder), "exec")
    exec(code, names)  # a file of a pinned hash
    return objc, names


def metadata(folder: Path) -> Oracle:
    """What pyobjc has to tell its bridge; types that the bridge finds itself are open.

    Protocols are all called NSObject in it, so it does not tell owners apart.
    """
    objc, _ = _run_metadata(folder)
    methods: Methods = {}
    for owner, selector, data in objc.calls:
        known = data.get("arguments", {})
        arguments = tuple(
            _metadata_type(known.get(2 + i)) for i in range(selector.count(":"))
        )
        signature = Signature(_metadata_type(data.get("retval")), arguments)
        methods.setdefault((owner, selector), set()).add(signature)
    return Oracle(f"metadata of {folder.name}", methods, owners=False)


# pyobjc's own letters.
_METADATA_LETTERS = {"Z": "B", "^t": "*"}


def _metadata_type(described: dict[str, Any] | None) -> str:
    if described is None:
        return NOT_SAID
    if "callable" in described:
        return "@?"
    written = described.get("type", NOT_SAID)
    text = written if isinstance(written, str) else written.decode()
    try:
        (one,) = encoding.split(text)
    except ValueError:
        return NOT_SAID  # a few entries of Foundation have only a qualifier
    return _METADATA_LETTERS.get(one, one)


def metadata_constants(folder: Path) -> dict[str, int]:
    """The values of enumerators."""
    _, names = _run_metadata(folder)
    found = re.findall(r"\$(\w+)@(-?\d+)(?=\$)", names["enums"])
    return {name: int(value) for name, value in found}


# -- NSObject.h ----------------------------------------------------------------------

_OBJC_METHOD = re.compile(
    r"^[-+] \(([^)]*)\)(\w+)(?:(:)\(([^)]*)\)\w+)?[ ;]", re.MULTILINE
)
_OBJC_TYPES = {
    "instancetype": "@",
    "id": "@",
    "void": "v",
    "oneway void": "v",
    "BOOL": "B",
    "Class": "#",
    "SEL": ":",
    "NSUInteger": "Q",
}


def _zig_headers() -> Path:
    spec = importlib.util.find_spec("ziglang")
    assert spec is not None and spec.origin is not None
    (folder,) = Path(spec.origin).parent.glob("lib/libc/include/any-*/objc")
    return folder


def ns_object() -> Oracle:
    """Methods with one argument at most, of Apple's header in the zig package."""
    methods: Methods = {}
    text = (_zig_headers() / "NSObject.h").read_text()
    for written, name, colon, argument in _OBJC_METHOD.findall(text):
        result, *arguments = (
            _OBJC_TYPES.get(one, f"?{one}") for one in (written, argument) if one
        )
        signature = Signature(result, (*arguments,))
        methods.setdefault(("NSObject", name + colon), set()).add(signature)
    return Oracle("NSObject.h", methods)


def all_oracles() -> list[Oracle]:
    """Every one of selectors."""
    metal = downloads.folder_of("pyobjc-metal") / "Metal"
    foundation = downloads.folder_of("pyobjc-foundation") / "Foundation"
    return [
        metal_cpp(),
        protocols(metal),
        metadata(metal),
        metadata(foundation),
        ns_object(),
    ]


# -- Functions -----------------------------------------------------------------------

_C_FUNCTION = re.compile(
    r"^(?:OBJC_EXPORT [^()\n]*)?((?:objc|sel)_\w+)\(", re.MULTILINE
)


def imported_functions() -> dict[str, set[str]]:
    """C names by the system library that programs for macOS bind them to."""
    found: dict[str, set[str]] = {}
    paths = [
        *downloads.folder_of("metal-cpp").glob("mlx/lib/*.dylib"),
        *downloads.folder_of("pyobjc-core").glob("objc/*.so"),
        *downloads.folder_of("pyobjc-metal").glob("Metal/*.so"),
        *downloads.folder_of("psutil").glob("psutil/*.so"),
    ]
    for path in paths:
        image = _Image(path)
        for binding in image.binary.bindings:
            if binding.has_symbol and binding.has_library:
                name = str(binding.symbol.name).removeprefix("_")
                found.setdefault(name, set()).add(str(binding.library.name))
    return found


def declared_functions() -> set[str]:
    """C names that Apple's headers of libobjc, in the zig package, declare."""
    path = _zig_headers() / "runtime.h"
    return set(_C_FUNCTION.findall(path.read_text()))
