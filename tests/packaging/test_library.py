"""The libraries as files: what they export, what they need, what they give away."""

from __future__ import annotations

import re
from pathlib import Path

import lief
import pytest

from plugin import build

pytestmark = pytest.mark.xdist_group("packaging")

OURS = re.compile(r"jfm_\w+|jax_flash_metal_(forward|backward)_v1")
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|libpthread|librt|ld-linux-.*)\.so\.\d+"
)


def parse(path: Path) -> lief.ELF.Binary:
    binary = lief.ELF.parse(str(path))
    assert binary is not None
    return binary


def check(path: Path) -> None:
    """What holds for a library on every platform."""
    binary = parse(path)
    exports = {str(symbol.name) for symbol in binary.exported_symbols}
    assert {"jfm_version", "jfm_attention_forward", "jfm_attention_backward"} <= exports
    assert {"jax_flash_metal_forward_v1", "jax_flash_metal_backward_v1"} <= exports
    assert [name for name in exports if not OURS.fullmatch(name)] == []
    needed = [str(name) for name in binary.libraries]
    assert [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []
    assert newest_glibc(binary) <= (2, 17)
    assert str(build.ROOT).encode() not in path.read_bytes()


def newest_glibc(binary: lief.ELF.Binary) -> tuple[int, ...]:
    names = [
        str(version.name)
        for library in binary.symbols_version_requirement
        for version in library.get_auxiliary_symbols()
    ]
    versions = [name[len("GLIBC_") :] for name in names if name.startswith("GLIBC_")]
    return max(tuple(map(int, version.split("."))) for version in versions)


def test_packaged_library(library: Path) -> None:
    check(library)
    assert not [
        symbol.name
        for symbol in parse(library).exported_symbols
        if str(symbol.name).startswith("jfm_software_")
    ], "the checker's controls are in the packaged library"


def test_aarch64_library(tmp_path: Path) -> None:
    """Cross-built and looked at; nothing here can run it. One kernel stands for all."""
    path = build.build(
        target="linux-aarch64",
        only=["attention_delta"],
        output=tmp_path / build.LIBRARY_NAME,
    )
    check(path)
    assert parse(path).header.machine_type == lief.ELF.ARCH.AARCH64


@pytest.mark.slow
def test_aarch64_library_with_all_kernels(tmp_path: Path) -> None:
    path = build.build(target="linux-aarch64", output=tmp_path / build.LIBRARY_NAME)
    check(path)
    for variant in build.load_variants():
        assert variant.host_name.encode() in path.read_bytes()
