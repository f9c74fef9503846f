"""The fake Objective-C runtime with the fake Metal: builds it, and talks to it.

The C++ is in tests/plugin/device/fake_metal; fake_metal.h there says what it does. A
program of C++ compiles `sources()` and `kernel_table()`, beside plugin/device/software
and the kernels, into itself instead of loading `library()`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plugin import build
from plugin.device.software import frontend

FOLDER = build.ROOT / "tests" / "plugin" / "device" / "fake_metal"
# Where the Apple layer looks for its libraries in builds that are not for macOS.
VARIABLE = "JFM_FAKE_METAL_LIBRARY"

_EXPORTS = """{
  global:
    objc_*; sel_*; _NSConcrete*; MTL*; IO*; fake_metal_*;
  local:
    *;
};
"""
_DATA_TYPES = {"bool": 53, "int": 29}  # MTLDataType
_SIZES = {
    **{"float": 4, "int": 4, "uint": 4, "half": 2, "bfloat": 2, "char": 1, "uchar": 1},
    **{"float2": 8, "uint2": 8},
}


# -- Building ------------------------------------------------------------------------


def sources() -> list[Path]:
    """The C++ files of the fake; kernel_table() belongs to them."""
    return sorted(FOLDER.glob("*.cc"))


def kernel_table(
    kernel_dir: Path = build.KERNEL_DIR, cache: build.Cache | None = None
) -> Path:
    """A C++ file: what Metal's compiler would know of every kernel."""
    return _kernel_table(_request(kernel_dir, cache))


def library(
    kernel_dir: Path = build.KERNEL_DIR, cache: build.Cache | None = None
) -> Path:
    """The fake as a shared library, with the software device and all kernels."""
    request = _request(kernel_dir, cache)
    generated = build.generated_headers(request.cache, request.kernel_dir)
    device = build.ROOT / "plugin" / "device" / "software"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        units = [pool.submit(build.compile_unit, *unit) for unit in _units(request)]
        files = [
            *(p for p in build.cpp_sources(request.target) if p.parent == device),
            *sources(),
            _kernel_table(request),
        ]
        compiled = [
            pool.submit(build.compile_cpp, request, path, generated) for path in files
        ]
        kernels = [unit.result() for unit in units]
        objects = [future.result() for future in compiled]
    registry = frontend.registry([translation for translation, _ in kernels])
    registry_source = request.cache.text(registry, ".cc")
    objects.append(build.compile_cpp(request, registry_source, generated))
    objects += [path for _, path in kernels]
    name = build.digest(build.zig_version(), _EXPORTS, map(str, objects))
    exports = request.cache.text(_EXPORTS, ".map")
    target = dataclasses.replace(
        request.target,
        link_flags=("-lpthread", f"-Wl,--version-script={exports}", "-Wl,-z,defs"),
    )
    output = request.cache.folder / "fake_metal" / f"{name[:32]}.so"
    return build.link(dataclasses.replace(request, target=target), objects, output)


def _request(kernel_dir: Path, cache: build.Cache | None) -> build.Request:
    target = build.TARGETS[build.host_target()]
    return build.Request(
        kernel_dir=Path(kernel_dir).resolve(),
        only=None,
        head_dims=None,
        flavour="fast",
        target=dataclasses.replace(target, device="software"),
        cache=cache or build.default_cache(),
    )


def _units(request: build.Request) -> list[tuple[build.Request, build.KernelUnit]]:
    """The project's kernels, and those of the fake's own tests."""
    own = dataclasses.replace(request, kernel_dir=FOLDER)
    return [
        *((request, unit) for unit in build.kernel_units(request.variants())),
        (own, build.KernelUnit("kernels", 0, ())),
    ]


def _kernel_table(request: build.Request) -> Path:
    units = _units(request)
    key = build.digest(
        build.zig_version(),
        Path(__file__).read_text(),
        [unit.text() for _, unit in units],
        build.content_of(sorted(request.kernel_dir.glob("*"))),
        build.content_of(sorted(FOLDER.glob("*.metal"))),
        build.content_of(frontend.sources()),
    )

    def make(new: Path) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            rows = [row for unit in pool.map(_unit_rows, *zip(*units)) for row in unit]
        new.write_text(_table(rows))

    return request.cache.get(key, ".cc", make)


def _table(rows: list[_Row]) -> str:
    lines = [
        '#include "metal_kernels/attention_params.h"',
        '#include "tests/plugin/device/fake_metal/kernel_table.h"',
        "",
        "namespace fake {",
    ]
    entries = []
    for i, row in enumerate(rows):
        lines += [
            f"static const KernelConstant constants_{i}[] = {{",
            *(f"    {{{constant}}}," for constant in row.constants),
            "};" if row.constants else "    {}};",
            f"static const KernelBuffer buffers_{i}[] = {{",
            *(f"    {{{buffer}}}," for buffer in row.buffers),
            "};" if row.buffers else "    {}};",
        ]
        entries.append(
            f'    {{"{row.host_name}", "{row.expression}", '
            f"constants_{i}, {len(row.constants)}, buffers_{i}, {len(row.buffers)}}},"
        )
    return "\n".join(
        [
            *lines,
            "const KernelFacts kKernelFacts[] = {",
            *entries,
            "};",
            f"const size_t kNumKernelFacts = {len(rows)};",
            "}  // namespace fake",
            "",
        ]
    )


@dataclasses.dataclass(frozen=True)
class _Row:
    """A kernel: fields of KernelFacts, as C++."""

    host_name: str
    expression: str
    constants: tuple[str, ...]
    buffers: tuple[str, ...]


def _unit_rows(request: build.Request, unit: build.KernelUnit) -> list[_Row]:
    # Not build.translate_unit(): what that keeps leaves the parameters out.
    source = request.cache.text(unit.text(), ".metal")
    text = build.run_zig(frontend.preprocess_command(source, [request.kernel_dir]))
    translation = frontend.translate(text, unit.name)
    if translation.errors:
        raise build.BuildError("\n".join(map(str, translation.errors)))
    constants = tuple(
        f'"{constant.name}", {constant.index}, {_DATA_TYPES[constant.type]}'
        for constant in translation.constants
    )
    indices = {constant.name: constant.index for constant in translation.constants}
    parameters = {f.name: f.parameters for f in translation.functions}
    rows = []
    for kernel in translation.kernels:
        expression = re.sub(r"\s", "", kernel.expression)
        first_argument = re.match(r"\w+<(\w+)", expression)
        element = first_argument[1] if first_argument else ""
        buffers = tuple(
            f'"{p.name}", {index[1]}, {_describe(p.type, element)}, '
            f"{indices[index[2]] if index[2] else -1}"
            for p in parameters[kernel.function]
            if (index := _BUFFER.fullmatch(p.attribute))
        )
        rows.append(_Row(kernel.host_name, expression, constants, buffers))
    return rows


# The attribute of an argument, and the constant without which it does not exist.
_BUFFER = re.compile(
    r"buffer\(\s*(\d+)\s*\)(?:\s*,\s*function_constant\(\s*(\w+)\s*\))?"
)


def _describe(parameter_type: str, element: str) -> str:
    """Alignment and least size in bytes, of what the parameter points or refers to."""
    pointee = re.sub(r"\b(device|constant|const)\b|[*&\s]", "", parameter_type)
    if pointee == "T":
        pointee = element
    if pointee == "typenameScoreGradient<T>::type":  # of attention_backward.h
        pointee = "float" if element == "half" else element
    is_reference = parameter_type.rstrip().endswith("&")
    if pointee in _SIZES:
        size = f"{_SIZES[pointee]}"
        alignment = size
    else:
        size, alignment = f"sizeof({pointee})", f"alignof({pointee})"
    return f"{alignment}, {size if is_reference else 0}"


# -- Talking -------------------------------------------------------------------------

_POINTER, _TEXT, _INT64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
_FUNCTIONS = {  # of fake_metal.h, without the prefix: result, arguments
    "new_buffer": (_POINTER, ctypes.c_size_t, ctypes.c_int),
    "buffer_bytes": (_POINTER, _POINTER),
    "buffer_length": (ctypes.c_size_t, _POINTER),
    "is_alive_buffer": (ctypes.c_int, _POINTER),
    "retain": (None, _POINTER),
    "release": (None, _POINTER),
    "references": (_INT64, _POINTER),
    "live_objects": (_INT64,),
    "live_text": (_TEXT,),
    "device_references": (_INT64,),
    "calls": (_INT64, _TEXT),
    "nil_calls": (_INT64, _TEXT),
    "compiled_pipelines": (_INT64,),
    "archived_pipelines": (_INT64,),
    "fail": (None, _TEXT, ctypes.c_int, ctypes.c_int, ctypes.c_int, _TEXT),
    "clear_failures": (None,),
    "set_abort": (None, ctypes.c_int),
    "faults": (_TEXT,),
    "clear_faults": (None,),
    "set_memory_limit": (None, ctypes.c_size_t),
    "set_fact": (None, _TEXT, _INT64),
    "set_text": (None, _TEXT, _TEXT),
    "reset": (None,),
    "hold": (None, ctypes.c_int),
    "drain": (None,),
}
# The modes of fake_metal_fail.
ERROR, NIL, RUN_ERROR, RUN_TIMEOUT = range(4)
RUN_OUT_OF_MEMORY, RUN_PAGE_FAULT, RUN_NO_ERROR, WARNING = range(4, 8)
RUN_REVOKED, EMPTY_ALIAS, FALSE_ALIAS, WRAPPED_DEVICE, OTHER_DEVICE = range(8, 13)


class FakeMetal:
    """fake_metal.h of a loaded library: `fake.live_objects()`. Texts are str."""

    def __init__(self, path: Path | None = None) -> None:
        self.library = ctypes.CDLL(str(path or library()))
        self._functions = {}
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = self.library[f"fake_metal_{name}"]
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def __getattr__(self, name: str):
        try:
            function = self._functions[name]
        except KeyError:
            raise AttributeError(f"fake_metal.h has no fake_metal_{name}") from None

        def call(*arguments):
            result = function(
                *(a.encode() if isinstance(a, str) else a for a in arguments)
            )
            return result.decode() if function.restype is _TEXT else result

        return call
