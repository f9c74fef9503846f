"""The library for macOS as a file. It is looked at; test_emulated_mac.py runs its code.

Each rule of complaints() is there because breaking it would show on a Mac only.
"""

from __future__ import annotations

import bisect
import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin import build
from tests.packaging import mach_o
from tests.packaging.test_library import OURS, read_facts

pytestmark = pytest.mark.xdist_group("packaging")

TARGET = build.TARGETS["macos-arm64"]
SYSTEM = "/usr/lib/libSystem.B.dylib"
# The linker's own, in every dylib that zig makes: the addresses of the file's header.
LINKERS = {"__mh_dylib_header", "___dso_handle"}


def complaints(path: Path) -> list[str]:
    """What is wrong with a dylib: a sentence each."""
    facts = mach_o.read_facts(path)
    found = []

    def expect(what: str, got: object, expected: object) -> None:
        if got != expected:
            found.append(f"{what}: expected {expected}, got {got}")

    expect("CPU", facts.cpu, "ARM64")
    expect("file type", facts.file_type, "DYLIB")
    expect("platform", facts.platform, "MACOS")
    expect("minimum OS", facts.minimum_os, (14, 0, 0))
    expect("install name", facts.install_name, f"@rpath/{TARGET.library}")
    expect("rpaths", facts.rpaths, [])
    # libc++ is inside; Metal and the Objective-C runtime are opened when first needed.
    expect("libraries", facts.libraries, [SYSTEM])
    strange = {name for name in facts.exports - LINKERS if not OURS.fullmatch(name[1:])}
    expect("exports that are not ours", strange, set())
    # dyld joins weak symbols of all libraries: ours could get those of another libc++.
    joined = facts.flags & {"WEAK_DEFINES", "BINDS_TO_WEAK"}
    expect("flags", joined, set())
    expect("weak symbols", facts.weak_symbols, [])
    expect("bytes of coalesced bindings", facts.coalesced_bytes, 0)
    elsewhere = [b for b in facts.bindings if b.library != SYSTEM or b.is_weak]
    expect("bindings outside libSystem", elsewhere, [])
    # 16 KiB are a page on Apple silicon: segments with their own protection start one.
    odd = [s for s in facts.segments if s[1] % 0x4000 or s[2] % 0x4000]
    expect("segments off a page", odd, [])
    expect("alignment of TLVs", facts.sections["__thread_vars"][0] % 8, 0)
    found += _unwind_complaints(facts)
    found += _signature_complaints(path, facts)
    content = path.read_bytes()
    found += [
        f"a path of this machine, {folder}, is in it"
        for folder in _local_folders()
        if f"{folder}/".encode() in content
    ]
    return found


def _unwind_complaints(facts: mach_o.Facts) -> list[str]:
    """Functions that an exception could not leave: it would end the process there."""
    starts = [start for start, _ in facts.unwind]
    if starts != sorted(starts):
        return ["the unwind information is not in the order of addresses"]

    def is_covered(address: int) -> bool:
        entry = bisect.bisect_right(starts, address) - 1
        return entry >= 0 and facts.unwind[entry][1] != 0

    bare = [
        name
        for name, place in facts.functions.items()
        # The linker's jumps to functions that are far away: never in a call chain.
        if not is_covered(place) and not name.endswith("__thunk")
    ]
    return [f"functions without unwind information: {bare}"] if bare else []


def _signature_complaints(path: Path, facts: mach_o.Facts) -> list[str]:
    signature = facts.signature
    if signature is None:
        return ["no code signature"]
    size = path.stat().st_size
    expected = dataclasses.replace(
        signature,
        identifier=TARGET.library,
        flags=mach_o.ADHOC | mach_o.LINKER_SIGNED,
        page_size=0x4000,
        # Everything before the signature is signed, in whole pages but for the last.
        signed_bytes=signature.position,
        num_pages=-(-signature.position // 0x4000),
        wrong_pages=[],
    )
    found = []
    if signature != expected:
        found.append(f"signature: expected {expected}, got {signature}")
    if not 0 < size - signature.position < 0x10000:
        found.append(f"the signature at {signature.position} is not the end of {size}")
    return found


def _local_folders() -> list[Path]:
    spec = importlib.util.find_spec("ziglang")
    assert spec is not None and spec.origin is not None
    return [
        build.ROOT,
        Path.home(),
        Path(tempfile.gettempdir()),
        Path(sys.prefix),
        Path(spec.origin).parent,
        build.default_cache().folder,
    ]


def test_packaged_dylib(dylib: Path) -> None:
    assert complaints(dylib) == []


def test_exceptions_have_handlers(dylib: Path) -> None:
    """Some functions have landing pads: the entries say so, and with which routine."""
    facts = mach_o.read_facts(dylib)
    assert len(facts.functions) > 1000
    assert len(facts.unwind) > 1000
    has_handlers, personality = 1 << 30, 3 << 28
    encodings = {encoding for _, encoding in facts.unwind}
    assert any(e & has_handlers and e & personality for e in encodings)


def test_it_exports_what_the_library_for_linux_exports(
    dylib: Path, library: Path
) -> None:
    exports = mach_o.read_facts(dylib).exports
    assert exports >= LINKERS
    assert {name[1:] for name in exports - LINKERS} == read_facts(library).exports


def test_it_has_every_kernel_inside(dylib: Path) -> None:
    content = dylib.read_bytes()
    rows = build.load_variants()
    assert [row for row in rows if row.instantiation().encode() not in content] == []
    for name in {row.source for row in rows}:
        last_line = (build.KERNEL_DIR / f"{name}.metal").read_text().splitlines()[-3]
        assert last_line.encode() in content
    assert b'#include "' not in content


@pytest.mark.slow
def test_it_is_the_same_in_every_build(dylib: Path, tmp_path: Path) -> None:
    """Compiled again from nothing: no time, no path, no order of threads gets in."""
    cache = build.Cache(tmp_path / "cache")
    output = tmp_path / TARGET.library
    again = build.build(target="macos-arm64", output=output, cache=cache)
    assert again.read_bytes() == dylib.read_bytes()


# -- The rules themselves ------------------------------------------------------------


def _edit(path: Path, target: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) >= 1 and len(old) == len(new)
    target.write_bytes(content.replace(old, new, 1))
    return target


def _link(tmp_path: Path, skip: str, extra: str = "", *flags: str) -> Path:
    """Another dylib: of the packaged one's objects without `skip`, with `extra`."""
    target = dataclasses.replace(TARGET, link_flags=(*TARGET.link_flags, *flags))
    cache = build.default_cache()
    request = build.Request(
        kernel_dir=build.KERNEL_DIR,
        only=None,
        head_dims=None,
        flavour="fast",
        target=target,
        cache=cache,
    )
    generated = build.generated_headers(cache)
    sources = [path for path in build.cpp_sources(target) if path.name != skip]
    if extra:
        sources.append(cache.text(extra, ".cc"))
    objects = [build.compile_cpp(request, path, generated) for path in sources]
    return build.link(request, objects, tmp_path / TARGET.library)


def _flipped_bit(dylib: Path, folder: Path) -> Path:
    return _edit(dylib, folder / TARGET.library, b"Metal cannot be", b"metal cannot be")


def _renamed(dylib: Path, folder: Path) -> Path:
    # As install_name_tool would, without signing it again.
    return _edit(dylib, folder / TARGET.library, b"@rpath/lib", b"/local/lib")


def _without_new_delete(dylib: Path, folder: Path) -> Path:
    return _link(folder, "new_delete.cc")


def _with_iostream(dylib: Path, folder: Path) -> Path:
    return _link(
        folder,
        "",
        "#include <iostream>\n"
        'extern "C" [[gnu::visibility("default")]] '
        "void jfm_say() { std::cout << 1; }\n",
    )


def _with_a_visible_function(dylib: Path, folder: Path) -> Path:
    return _link(
        folder, "", '[[gnu::visibility("default")]] int Forgotten() { return 1; }\n'
    )


def _with_an_undefined_function(dylib: Path, folder: Path) -> Path:
    text = 'extern "C" int nowhere(); int jfm_use = nowhere();\n'
    return _link(folder, "", text, "-Wl,-undefined,dynamic_lookup")


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (_flipped_bit, r"wrong_pages=\[\d+\]"),
        (_renamed, r"install name: expected @rpath.*got /local/lib"),
        (_without_new_delete, "exports that are not ours: .*__Zn"),
        (_without_new_delete, "flags: .*WEAK_DEFINES"),
        (_with_iostream, "bytes of coalesced bindings"),
        (_with_a_visible_function, "exports that are not ours: .*Forgotten"),
        (_with_an_undefined_function, "bindings outside libSystem.*nowhere"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[Path, Path], Path], complaint: str, dylib: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        found = complaints(plant(dylib, tmp_path))
        assert not found, "\n".join(found)


def test_a_function_without_unwind_information_is_found(dylib: Path) -> None:
    facts = mach_o.read_facts(dylib)
    assert _unwind_complaints(facts) == []
    half = facts.unwind[len(facts.unwind) // 2 :]
    (complaint,) = _unwind_complaints(dataclasses.replace(facts, unwind=half))
    assert complaint.startswith("functions without unwind information")


def test_an_undefined_symbol_is_an_error_of_the_link(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=r"undefined symbol: .*nowhere"):
        _link(tmp_path, "", 'extern "C" int nowhere(); int jfm_use = nowhere();\n')
