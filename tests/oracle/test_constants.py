"""Every enumerator of the Apple layer: by a compiler, and in metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from plugin import build
from tests.oracle import downloads, oracles, our_table

pytestmark = pytest.mark.xdist_group("oracle")

# What metal-cpp wants of headers that zig does not carry.
STUBS = {
    "CoreFoundation/CoreFoundation.h": "typedef double CFTimeInterval;\n",
    "IOSurface/IOSurfaceRef.h": "typedef struct __IOSurface* IOSurfaceRef;\n",
}


def compile_assertions(constants: Mapping[str, int], folder: Path) -> None:
    """Lets a compiler compare; BuildError names those that differ or are not there."""
    for name, text in STUBS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    lines = ["#include <Foundation/Foundation.hpp>", "#include <Metal/Metal.hpp>"]
    for name, value in constants.items():
        namespace = "MTL" if name.startswith("MTL") else "NS"
        spelling = f"{namespace}::{name.removeprefix(namespace)}"
        lines.append(
            f"static_assert(static_cast<unsigned long>({spelling}) == {value}, "
            f'"{name} is not {value}");'
        )
    source = folder / "constants.cc"
    source.write_text("\n".join([*lines, ""]))
    target = build.TARGETS["macos-arm64"].zig_triple
    build.run_zig(
        [
            *("c++", "-target", target, "-std=c++17", "-w", "-fblocks", f"-I{folder}"),
            *(f"-I{oracles.metal_cpp_folder()}", "-c", str(source)),
            *("-o", str(folder / "constants.o")),
        ]
    )


def test_values_are_metal_cpps(tmp_path: Path) -> None:
    constants = our_table.read().constants
    assert len(constants) > 10
    compile_assertions(constants, tmp_path)


def test_values_are_the_metadatas() -> None:
    known = {
        **oracles.metadata_constants(downloads.folder_of("pyobjc-metal") / "Metal"),
        **oracles.metadata_constants(
            downloads.folder_of("pyobjc-foundation") / "Foundation"
        ),
    }
    constants = our_table.read().constants
    assert {name: known.get(name) for name in constants} == constants


def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    text = (our_table.HEADERS / "constants.h").read_text()
    for right, wrong in (
        ("MTLDataTypeBool, 53", "MTLDataTypeBool, 52"),
        ("MTLResourceStorageModePrivate, 0x20", "MTLResourceStorageModePrivate, 2"),
        ("MTLLanguageVersion3_1,", "MTLLanguageVersion31,"),
    ):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    changed = our_table.read_changed({"constants.h": text})
    with pytest.raises(build.BuildError) as caught:
        compile_assertions(changed.constants, tmp_path)
    for message in (
        "MTLDataTypeBool is not 52",
        "MTLResourceStorageModePrivate is not 2",
        "no member named 'LanguageVersion31'",
    ):
        assert message in str(caught.value)
