"""The exact clang arguments of the front end, and the kernel table. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from plugin.device.software.frontend.rewrite import Translation

FOLDER = Path(__file__).resolve().parent
SHIM = FOLDER / "msl_shim.h"
MACROS = FOLDER / "msl_macros.h"
# Empty files under the names of Metal's own headers; the shim has what they declare.
METAL_HEADERS = FOLDER / "include"

MACHINES = ("x86_64", "aarch64")
FLAVOURS = ("fast", "checker")


def sources() -> list[Path]:
    """Every file that a translation depends on beside the kernels: for cache keys."""
    return sorted(
        path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )


def preprocess_command(
    source: Path, include_dirs: Sequence[Path] = (), defines: Sequence[str] = ()
) -> list[str]:
    """Arguments for `zig`: expands macros and includes of `source` to stdout.

    `JFM_UNROLL` is defined away: register arrays live in memory here anyway, and full
    unrolling would make the build several times longer.
    """
    return [
        *("clang", "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++"),
        *("-imacros", str(MACROS), "-I", str(METAL_HEADERS)),
        *("-DJFM_UNROLL=", *(f"-D{define}" for define in defines)),
        *(argument for folder in include_dirs for argument in ("-I", str(folder))),
        str(source),
    ]


def compile_flags(flavour: str, machine: str) -> list[str]:
    """Flags for `zig clang` that turn `Translation.text` into an object."""
    flags = [
        *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"),
        *("-target", f"{machine}-linux-gnu", "-fPIC", "-fvisibility=hidden"),
        "-Xclang",
        # The generic address space is on by default for x86-64 only.
        "-cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64,"
        "+__opencl_c_generic_address_space",
        *("-cl-single-precision-constant", "-ffp-contract=off"),
        # Function constants can then be read once, before a loop. The calls that must
        # stay where they are say so in msl_abi.h.
        "-fno-convergent-functions",
        *("-include", str(SHIM)),
        *("-Wno-unknown-attributes", "-Wno-unused-value"),
        # The lanes' stacks have 64 KB (fiber.cc) and no guard pages.
        *("-Wframe-larger-than=32768", "-Werror=frame-larger-than"),
        # A copy of a block would be another place for the barrier in it
        # (threadgroup.cc). clang makes them before it has seen what an inlined function
        # calls, and at the end.
        *("-mllvm", "-simplifycfg-max-small-block-size=0"),
        *("-mllvm", "-tail-dup-placement=false", "-mllvm", "-disable-tail-duplicate"),
    ]
    if flavour == "checker":
        flags += ["-DJFM_CHECKER", "-O1", "-g", "-fsanitize=thread"]
        for option in (
            "-tsan-instrument-func-entry-exit=0",
            # By default a read is left out if a write to the same place follows; it may
            # be a read of what was never written.
            "-tsan-instrument-read-before-write",
        ):
            flags += ["-mllvm", option]
    else:
        flags += ["-O2"]
    return flags


def compile_command(
    flavour: str, machine: str, source: Path, output: Path
) -> list[str]:
    """Arguments for `zig`: compiles a translated file to an object."""
    flags = compile_flags(flavour, machine)
    return ["clang", *flags, "-c", str(source), "-o", str(output)]


def registry(translations: Iterable[Translation]) -> str:
    """C++ source of the table that plugin/device/software/kernel_abi.h declares."""
    kernels = [kernel for unit in translations for kernel in unit.kernels]
    return "\n".join(
        [
            '#include "plugin/device/software/kernel_abi.h"',
            "",
            *(f'extern "C" void {k.symbol}(const MslThread*);' for k in kernels),
            "",
            "namespace jfm {",
            "const SoftwareKernel kSoftwareKernels[] = {",
            *(f'    {{"{k.host_name}", &{k.symbol}}},' for k in kernels),
            "};",
            f"const size_t kNumSoftwareKernels = {len(kernels)};",
            "}  // namespace jfm",
            "",
        ]
    )
