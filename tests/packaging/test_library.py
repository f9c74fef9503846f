"""The libraries as files: what they export, what they need, what they give away."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import lief
import pytest

from plugin import build

pytestmark = pytest.mark.xdist_group("packaging")

TARGET = build.TARGETS[build.host_target()]

ABI = {
    *("jfm_version", "jfm_abi_version", "jfm_set_threads"),
    *("jfm_attention_forward", "jfm_attention_backward", "jfm_attention_compile"),
    *("jfm_attention_plan", "jfm_device_facts", "jfm_kernel_digest"),
    *("jfm_set_kernel_choices", "jfm_set_gpu_family", "jfm_set_score_gradient_limit"),
    *("jfm_attention_gradient", "jfm_set_cache_folder"),
    *("jfm_cpu_isas", "jfm_cpu_set_isa", "jfm_cpu_measure_peak"),
    *("jax_flash_metal_forward_v3", "jax_flash_metal_backward_v3"),
    "jax_flash_metal_gradient_v3",
    *("GetPjrtApi", "jfm_pjrt_configure", "jfm_pjrt_reply"),
    *("jfm_pjrt_register_handler", "jfm_pjrt_register_type"),
}
OURS = re.compile(r"GetPjrtApi|(jfm|jax_flash_metal)_\w+")
SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux-.*)\.so\.\d+")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an ELF file says, as plain values: lief's objects die with their file."""

    machine: str
    exports: set[str]
    needed: list[str]
    glibc: list[tuple[int, ...]]


def read_facts(path: Path) -> Facts:
    binary = lief.ELF.parse(str(path))
    assert binary is not None
    versions = [
        str(version.name)
        for library in binary.symbols_version_requirement
        for version in library.get_auxiliary_symbols()
    ]
    return Facts(
        machine=binary.header.machine_type.name,
        exports={str(symbol.name) for symbol in binary.exported_symbols},
        needed=[str(name) for name in binary.libraries],
        glibc=[
            tuple(map(int, version[len("GLIBC_") :].split(".")))
            for version in versions
            if version.startswith("GLIBC_")
        ],
    )


def defined_symbols(path: Path) -> set[str]:
    binary = lief.ELF.parse(str(path))
    assert binary is not None
    return {str(symbol.name) for symbol in binary.symbols if symbol.shndx != 0}


def check(path: Path, machine: str) -> None:
    """What holds for a packaged library on every platform."""
    facts = read_facts(path)
    assert facts.machine == machine
    assert facts.exports >= ABI
    assert [name for name in facts.exports if not OURS.fullmatch(name)] == []
    checker_only = [n for n in facts.exports if n.startswith("jfm_software_")]
    assert checker_only == [], "the checker's controls are in a packaged library"
    assert [name for name in facts.needed if not SYSTEM.fullmatch(name)] == []
    assert max(facts.glibc) <= (2, 17)
    content = path.read_bytes()
    for folder in (build.ROOT, Path.home(), build.default_cache().folder):
        assert f"{folder}/".encode() not in content


def test_packaged_library(library: Path) -> None:
    machine = TARGET.machine
    check(library, machine.upper())


@pytest.mark.slow
def test_aarch64_library(tmp_path: Path) -> None:
    """Cross-built and looked at; nothing here can run it. One kernel stands for all."""
    path = build.build(
        target="linux-aarch64",
        only=["attention_delta"],
        output=tmp_path / TARGET.library,
    )
    check(path, "AARCH64")


def test_aarch64_has_its_own_fiber_switch(tmp_path: Path) -> None:
    """Seen in the object: the library hides it and carries no symbol table."""
    request = build.Request(
        kernel_dir=build.KERNEL_DIR,
        only=None,
        head_dims=None,
        flavour="fast",
        target=build.TARGETS["linux-aarch64"],
        cache=build.default_cache(),
    )
    source = build.ROOT / "plugin" / "device" / "software" / "fiber.cc"
    path = build.compile_cpp(request, source, tmp_path)
    assert "jfm_fiber_switch" in defined_symbols(path)


# What a file compiled for some instruction set may give to others: its table.
ISA_TABLES = {
    "arithmetic_avx2": "jfm::kAvx2Arithmetic",
    "kernels_avx2": "jfm::cpu::kAvx2Kernels",
    "kernels_avx512": "jfm::cpu::kAvx512Kernels",
    "kernels_avx512bf16": "jfm::cpu::kAvx512Bf16Kernels",
}
X86_64 = build.TARGETS["linux-x86_64"]
ISA_SOURCES = [
    path
    for path in build.cpp_sources(X86_64)
    if path.stem.endswith(tuple(X86_64.isa_flags))
]


def test_files_with_an_instruction_set() -> None:
    assert {path.stem for path in ISA_SOURCES} == ISA_TABLES.keys()


@pytest.mark.parametrize("source", ISA_SOURCES, ids=lambda path: path.stem)
def test_instruction_sets_stay_in_their_file(source: Path) -> None:
    """Else the linker may take a function of theirs for the whole program.

    Of an inline function or a template that several files compile, it keeps any one.
    """
    cache = build.default_cache()
    request = build.Request(build.KERNEL_DIR, None, None, "fast", X86_64, cache)
    path = build.compile_cpp(request, source, build.generated_headers(cache))
    binary = lief.ELF.parse(str(path))
    assert binary is not None
    visible = [
        symbol.demangled_name
        for symbol in binary.symbols
        if symbol.shndx != 0 and symbol.binding != lief.ELF.Symbol.BINDING.LOCAL
    ]
    assert visible == [ISA_TABLES[source.stem]]
    groups = [section for section in binary.sections if section.name == ".group"]
    assert groups == [], "sections of which the linker keeps one copy"
    startup = [s.name for s in binary.sections if ".init_array" in str(s.name)]
    assert startup == [], "code that runs on every CPU when the library is loaded"


@pytest.mark.slow
def test_aarch64_library_with_all_kernels(tmp_path: Path) -> None:
    path = build.build(target="linux-aarch64", output=tmp_path / TARGET.library)
    check(path, "AARCH64")
