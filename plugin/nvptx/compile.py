"""Metal kernels to LLVM IR, PTX and cubins, by the clang in ziglang and NVIDIA's ptxas.

The steps up to C++ for OpenCL are those of the software device
(plugin/device/software/frontend); gpu_shim.h takes the place of its msl_shim.h.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from plugin import build
from plugin.device.software import frontend
from plugin.device.software.frontend.compile import FOLDER as FRONTEND
from plugin.device.software.frontend.compile import MACROS, METAL_HEADERS
from plugin.kernel_sources import KERNEL_DIR, BuildError

FOLDER = Path(__file__).resolve().parent
SHIM = FOLDER / "gpu_shim.h"
ARCHITECTURE = "sm_90"  # of the GPU that the kernels have run on
NUM_FUNCTION_CONSTANTS = 32  # places of gpu_shim.h's table

_TARGET = (
    *("-target", "nvptx64-nvidia-cuda"),
    *("-Xclang", "-target-cpu", "-Xclang", ARCHITECTURE),
    *("-Xclang", "-target-feature", "-Xclang", "+ptx80"),
)
# Addresses in threadgroup memory have 32 bits, as registers do. For estimates: those in
# constant memory then have 32 bits as well.
_SHORT_POINTERS = ("-Xclang", "-fcuda-short-ptr", "-mllvm", "--nvptx-short-ptr")
_LANGUAGE = (
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"),
    "-Xclang",
    "-cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64,"
    "+__opencl_c_generic_address_space",
    # A product and a sum are one instruction on a GPU, Apple's included.
    *("-cl-single-precision-constant", "-ffp-contract=fast"),
    # Functions are convergent unless seen not to be: a barrier must not be copied into
    # both ways that lead to it.
    *("-I", str(FRONTEND), "-include", str(SHIM)),
    *("-Wno-unknown-attributes", "-Wno-unused-value", "-Wno-pass-failed"),
    *("-O3", "-gline-directives-only"),
)


def translate(
    unit: build.KernelUnit, kernel_dir: Path, cache: build.Cache
) -> frontend.Translation:
    """One unit as C++ for OpenCL. Unlike the software device's, loops are unrolled."""
    source = cache.text(unit.text(), ".metal")
    text = build.run_zig(
        [
            *("clang", "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++"),
            *("-imacros", str(MACROS), "-I", str(METAL_HEADERS)),
            *("-I", str(kernel_dir), str(source)),
        ]
    )
    for path, name in (
        (source, f"{unit.name}.metal"),
        (kernel_dir, KERNEL_DIR.name),
        (build.ROOT, "."),
    ):
        text = text.replace(f'"{path}', f'"{name}')
    translation = frontend.translate(text, unit.name)
    if translation.errors:
        raise BuildError("\n".join(map(str, translation.errors)))
    return translation


def with_entries(translation: frontend.Translation) -> str:
    """The unit's text with an entry point per kernel, under the kernel's host name."""
    text = translation.text.replace(
        'extern "C" void msl_kernel_',
        "static inline __attribute__((flatten)) void msl_kernel_",
    )
    entries = [
        f"JFM_GPU_ENTRY({kernel.host_name}, {kernel.symbol})\n"
        for kernel in translation.kernels
    ]
    return text + "".join(entries)


def to_ir(
    text: str,
    cache: build.Cache,
    *,
    estimate: Mapping[int, int] | None = None,
) -> str:
    """C++ for OpenCL to optimised LLVM IR, as text.

    Args:
      estimate: Values of function constants by index, for IR that is looked at and
        never runs; None: for a GPU.
    """
    flags = [*_TARGET, *_LANGUAGE]
    if estimate is not None:
        table = (str(estimate.get(i, 0)) for i in range(NUM_FUNCTION_CONSTANTS))
        values = f"JFM_FUNCTION_CONSTANT_VALUES={','.join(table)}"
        flags += [*_SHORT_POINTERS, "-DJFM_GPU_ESTIMATE", f"-D{values}"]
    key = build.digest(
        build.zig_version(),
        [flag.replace(str(build.ROOT), ".") for flag in flags],
        text,
        build.content_of([SHIM, *sorted(FRONTEND.glob("*.h"))]),
    )

    def compile_to(new: Path) -> None:
        source = cache.text(text, ".clcpp")
        command = ["clang", *flags, "-emit-llvm", "-S", str(source), "-o", str(new)]
        build.run_zig(command, cwd=build.ROOT)

    return cache.get(key, ".ll", compile_to).read_text()


_THREADGROUP_VARIABLE = re.compile(
    r"(%[\w.]+) = (?:tail )?call (?:noundef )?ptr addrspace\(3\) "
    r"@__msl_threadgroup_memory\(i32 (?:noundef )?(\d+), i64 (?:noundef )?(\d+), .*"
)
_FUNCTION = re.compile(r"^define [^@]*@(\w+)\(", re.MULTILINE)


def place_threadgroup_variables(ir: str) -> tuple[str, dict[str, int]]:
    """The calls that ask for threadgroup memory become arrays of the kernel.

    Returns:
      The IR, and the bytes of threadgroup memory of each kernel.
    """
    arrays: dict[tuple[str, str], int] = {}
    lines = []
    kernel = ""
    for line in ir.splitlines():
        if match := _FUNCTION.match(line):
            kernel = match[1]
        if match := _THREADGROUP_VARIABLE.search(line):
            result, variable, size = match.groups()
            arrays[kernel, variable] = int(size)
            array = f"@threadgroup_{kernel}_{variable}"
            line = f"  {result} = getelementptr i8, ptr addrspace(3) {array}, i32 0"
        lines.append(line)
    declarations = [
        f"@threadgroup_{kernel}_{variable} = internal addrspace(3) global "
        f"[{size} x i8] undef, align 16"
        for (kernel, variable), size in arrays.items()
    ]
    sizes = dict.fromkeys(_FUNCTION.findall(ir), 0)
    for (kernel, _), size in arrays.items():
        sizes[kernel] += -(-size // 16) * 16
    return "\n".join([*lines, *declarations, ""]), sizes


def constants_in_device_memory(ir: str) -> str:
    """Metal's constant buffers are device memory, not NVIDIA's bank of constants."""
    return ir.replace("addrspace(4)", "addrspace(1)")


def to_ptx(ir: str, cache: build.Cache, *, estimate: bool = False) -> str:
    """LLVM IR to PTX, both as text."""
    flags = [*_TARGET, "-O3", "-Wno-override-module", "-x", "ir"]
    if estimate:
        # Strength reduction gives every address of a loop a register to count in:
        # NVIDIA GPUs have twice as many.
        flags = [*_SHORT_POINTERS, "-mllvm", "-disable-lsr", *flags]
    key = build.digest(build.zig_version(), flags, ir)

    def compile_to(new: Path) -> None:
        source = cache.text(ir, ".ll")
        build.run_zig(["clang", *flags, "-S", str(source), "-o", str(new)])

    return cache.get(key, ".ptx", compile_to).read_text()


_ENTRY = re.compile(
    r"^(?:\.visible )?\.entry (\w+)\(.*?^\)[^\n]*(?=\n)(.*?)^\}\n",
    re.MULTILINE | re.DOTALL,
)


def split_entries(ptx: str, num_threads: Mapping[str, int]) -> dict[str, str]:
    """A module per kernel, to be assembled side by side.

    Each says how many threads a threadgroup has, for which registers must be enough.
    """

    def only(kernel: str) -> str:
        def keep_or_drop(match: re.Match[str]) -> str:
            if match[1] != kernel:
                return ""
            start, body = match.start(2) - match.start(), match[2]
            limit = f"\n.maxntid {num_threads[kernel]}, 1, 1"
            return match[0][:start] + limit + body + "}\n"

        return _ENTRY.sub(keep_or_drop, ptx)

    return {match[1]: only(match[1]) for match in _ENTRY.finditer(ptx)}


def ptxas_version(ptxas: Path) -> str:
    """What the assembler says of itself: a part of the cache's keys."""
    return subprocess.run(
        [ptxas, "--version"], capture_output=True, text=True, check=True
    ).stdout


def assemble(ptx: Path, ptxas: Path | str, cubin: Path) -> str:
    """PTX to machine code, with line numbers; what ptxas says of registers."""
    done = subprocess.run(
        [
            ptxas,
            f"-arch={ARCHITECTURE}",
            "--generate-line-info",
            "-v",
            ptx,
            "-o",
            cubin,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"{done.stderr.strip()}\nfailed: ptxas {ptx}")
    return done.stderr


_FACTS = re.compile(
    r"(\d+) bytes spill stores.*?Used (\d+) registers(?:.*?(\d+) bytes smem)?",
    re.DOTALL,
)


def cubin_facts(log: str) -> dict[str, int]:
    """Registers, spilled bytes and threadgroup memory, from what ptxas says."""
    match = _FACTS.search(log)
    if match is None:
        raise BuildError(f"ptxas said nothing of registers: {log!r}")
    return {
        "registers": int(match[2]),
        "spilled_bytes": int(match[1]),
        "threadgroup_bytes": int(match[3] or 0),
    }
