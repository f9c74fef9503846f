"""MLX's kernels twice in one library: as Apple's compiler made them, and as ours does.

The wheel has the headers of the kernels but not the files that instantiate them; those
lines are here. So are the few places where our front end needs another text.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from plugin import build
from plugin.device.software import frontend
from tests.oracle import downloads
from tests.oracle.apple_compiler import air, metallib
from tests.plugin.device import library

FOLDER = Path(__file__).parent
# Headers in the place of MLX's and Apple's; each says why.
HEADERS = FOLDER / "headers"
LIBRARY_HEADER = FOLDER / "metal_library.h"
SHIM = "msl_shim.h"

# Which of the two made a kernel: the beginning of its name in the library.
APPLE, OURS = "apple:", "ours:"


# -- What is compared ----------------------------------------------------------------

# What our front end does not take, and what it gets instead.
_BUFFERS = {
    # Metal numbers buffers itself; of our kernels the front end wants it written.
    "const device T* in,": "const device T* in [[buffer(0)]],",
    "device T* out,": "device T* out [[buffer(1)]],",
    "constant int& axis_size,": "constant int& axis_size [[buffer(2)]],",
}
_INTEGRAL_CONSTANT = {
    "__is_empty(T)": "oracle_is_empty<T>",
    # clang's temporaries have no address space, so their methods may have none.
    "operator value_type() const thread": "operator value_type() const",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels of one of MLX's headers.

    kernels: their names in MLX's library, and the instantiations.
    edits: texts in the headers and what is put in their place; all must be there.
    """

    headers: tuple[str, ...]
    kernels: Mapping[str, str]
    edits: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def source(self) -> str:
        """A .metal file with the kernels."""
        return "\n".join(
            [
                *(
                    f'#include "mlx/backend/metal/kernels/{header}"'
                    for header in ("utils.h", *self.headers)
                ),
                *(
                    f'template [[host_name("{OURS}{name}")]] [[kernel]] '
                    f"decltype({function}) {function};"
                    for name, function in self.kernels.items()
                ),
                "",
            ]
        )


def _attention(
    dtype: str, head_dim: int, block_kv: int, columns: int = 1
) -> tuple[str, str]:
    """Name and instantiation; `columns`: simdgroups that share rows of scores."""
    element = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}[dtype]
    return (
        f"steel_attention_{dtype}_bq32_bk{block_kv}_bd{head_dim}_bv{head_dim}"
        f"_wm4_wn{columns}_mask{dtype}",
        f"attention<{element}, 32, {block_kv}, {head_dim}, {head_dim}, 4, {columns}, "
        f"{element}, float>",
    )


ATTENTION = Family(
    ("steel/attn/kernels/steel_attention.h",),
    dict(
        [
            _attention("float32", 64, 32),
            _attention("float16", 64, 32),
            _attention("bfloat16", 64, 32),
            _attention("float32", 128, 16),
            _attention("float16", 128, 16),
            # Operands of products in half and bfloat, sums in float.
            _attention("float16", 256, 32, columns=2),
            _attention("bfloat16", 256, 16, columns=2),
        ]
    ),
    _INTEGRAL_CONSTANT,
)
VECTOR_ATTENTION = Family(
    ("sdpa_vector.h",),
    {
        "sdpa_vector_float_64_64": "sdpa_vector<float, 64, 64>",
        "sdpa_vector_bfloat16_t_128_128": "sdpa_vector<bfloat, 128, 128>",
        "sdpa_vector_2pass_1_float16_t_96_64": "sdpa_vector_2pass_1<half, 96, 64>",
        "sdpa_vector_2pass_2_float16_t_64": "sdpa_vector_2pass_2<half, 64>",
    },
)
GATED_DELTA = Family(
    ("gated_delta_update.h",),
    {
        "gated_delta_fused_chunk_float16_t_128_128_16_32_8": (
            "gated_delta_fused_chunk<half, 128, 128, 16, 32, 8>"
        ),
    },
)
FAMILIES = [
    ATTENTION,
    VECTOR_ATTENTION,
    GATED_DELTA,
    Family(
        ("softmax.h",),
        {
            "block_softmax_float32": "softmax_single_row<float>",
            "block_softmax_float16": "softmax_single_row<half>",
            "looped_softmax_precise_bfloat16": "softmax_looped<bfloat, float>",
        },
        _BUFFERS,
    ),
    Family(
        ("logsumexp.h",),
        {
            "block_logsumexp_float32": "logsumexp<float>",
            "looped_logsumexp_float16": "logsumexp_looped<half>",
        },
        _BUFFERS,
    ),
    Family(
        ("atomic.h", "reduction/ops.h", "reduction/reduce_all.h"),
        {
            "all_reduce_maxfloat32": "all_reduce<float, float, Max<float>>",
            "all_reduce_minint32": "all_reduce<int, int, Min<int>>",
            "all_reduce_sumfloat16": "all_reduce<half, half, Sum<half>>",
            "all_reduce_andint32": "all_reduce<int, bool, And<bool>>",
        },
    ),
    Family(
        ("sdpa_blocked.h",),
        {
            "sdpa_blocked_scale_copy_bfloat16": "sdpa_blocked_scale_copy<bfloat>",
            "sdpa_blocked_causal_mask_float16": "sdpa_blocked_causal_mask<half>",
        },
    ),
]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A change on our side, in the text of a kernel or in msl_shim.h (`in_shim`)."""

    family: Family
    kernel: str
    old: str
    new: str
    in_shim: bool = False


# -- The two compilers ---------------------------------------------------------------


def wheel() -> Path:
    """The folder with MLX's headers and library; downloads them at the first call."""
    return downloads.folder_of("mlx-kernels")


@functools.cache
def apple_library() -> metallib.Metallib:
    """The library that Apple's compiler made."""
    return metallib.Metallib(wheel() / "mlx/lib/mlx.metallib")


def disassembled(name: str) -> str:
    """Apple's kernel as text, with the data layout of this machine."""
    bitcode = apple_library().bitcode(name)

    def write(new: Path) -> None:
        new.write_bytes(bitcode)

    path = build.default_cache().get(build.digest(bitcode), ".bc", write)
    return air.disassemble(path, build.TARGETS[build.host_target()].machine)


@functools.cache
def _preprocessed(source: str) -> str:
    main = build.default_cache().text(source, ".metal")
    return build.run_zig(
        frontend.preprocess_command(main, [HEADERS, wheel() / "mlx/include"])
    )


def _edited(text: str, edits: Iterable[tuple[str, str]]) -> str:
    for old, new in edits:
        assert old in text, f"there is no text {old!r}"
        text = text.replace(old, new)
    return text


_CONSTANT = re.compile(r"function_constant\((\d+)\)")


def constants_of(family: Family) -> dict[int, int]:
    """MLX's function constants: their indices, and those in the software device.

    The device has 32 of them, and MLX's go up to 303.
    """
    found = set(map(int, _CONSTANT.findall(_preprocessed(family.source()))))
    return {index: ours for ours, index in enumerate(sorted(found))}


def translate(
    family: Family, edits: Iterable[tuple[str, str]] = ()
) -> frontend.Translation:
    """Our front end's translation of a family."""
    constants = constants_of(family)
    text = _CONSTANT.sub(
        lambda match: f"function_constant({constants[int(match[1])]})",
        _edited(_preprocessed(family.source()), [*family.edits.items(), *edits]),
    )
    translation = frontend.translate(text, Path(family.headers[-1]).stem)
    assert not translation.errors, "\n".join(map(str, translation.errors))
    return translation


def _compile_ours(translation: frontend.Translation, shim: Path, machine: str) -> Path:
    cache = build.default_cache()
    source = cache.text(translation.text, ".clcpp")
    headers = [path for path in frontend.sources() if path.suffix == ".h"]
    own_shim = _shim()

    def command(output: Path) -> list[str]:
        arguments = frontend.compile_command("fast", machine, source, output)
        arguments[arguments.index(str(own_shim))] = str(shim)
        # For what a changed shim includes.
        return [*arguments, "-I", str(own_shim.parent), "-include", str(LIBRARY_HEADER)]

    key = build.digest(
        build.zig_version(),
        [Path(argument).name for argument in command(Path("out"))],
        translation.text,
        build.content_of([*headers, shim, LIBRARY_HEADER]),
    )
    return cache.get(key, ".o", lambda new: _run(command(new)))


def _compile_apples(family: Family, name: str, symbol: str, machine: str) -> Path:
    cache = build.default_cache()
    text = air.translate(disassembled(name), name, symbol, constants_of(family))
    source = cache.text(text, ".ll")
    key = build.digest(
        build.zig_version(), air.compile_command(machine, Path("in"), Path("out")), text
    )
    return cache.get(
        key, ".o", lambda new: _run(air.compile_command(machine, source, new))
    )


def _run(arguments: list[str]) -> None:
    build.run_zig(arguments)


# -- The library ---------------------------------------------------------------------


class OracleDevice(library.TestDevice):
    """The software device with kernels of both compilers, or ours with a mistake."""

    def __init__(self, output: Path, mistake: Mistake | None = None) -> None:
        if mistake is None:
            build_library(output)
        else:
            build_wrong(output, mistake)
        self.library = ctypes.CDLL(str(output))

    def run_kernel(self, maker: str, name: str, buffers, *, constants, **options):
        """run() for a kernel of APPLE or OURS; `constants` by MLX's indices."""
        family = next(family for family in FAMILIES if name in family.kernels)
        ours = constants_of(family)
        constants = {ours[index]: value for index, value in constants.items()}
        self.run(maker + name, buffers, constants=constants, **options)


def build_library(output: Path) -> Path:
    """Compiles both sides of all families with the device and its test driver."""
    machine = build.TARGETS[build.host_target()].machine
    translations, objects = [], []
    for family in FAMILIES:
        translation = translate(family)
        translations.append(translation)
        objects.append(_compile_ours(translation, _shim(), machine))
        for name in family.kernels:
            symbol = frontend.entry_symbol(APPLE + name)
            kernel = frontend.KernelInfo(APPLE + name, symbol, name, name)
            translations.append(frontend.Translation("", [kernel], [], []))
            objects.append(_compile_apples(family, name, symbol, machine))
    return _link(translations, objects, output)


def build_wrong(output: Path, mistake: Mistake) -> Path:
    """Compiles our side of one kernel with a mistake."""
    machine = build.TARGETS[build.host_target()].machine
    function = mistake.family.kernels[mistake.kernel]
    family = dataclasses.replace(mistake.family, kernels={mistake.kernel: function})
    edit, shim = [(mistake.old, mistake.new)], _shim()
    if mistake.in_shim:
        text = _edited(shim.read_text(), edit)
        shim = build.default_cache().text(text, f"/{SHIM}")
    translation = translate(family, [] if mistake.in_shim else edit)
    return _link([translation], [_compile_ours(translation, shim, machine)], output)


def _shim() -> Path:
    """Our front end's part of Metal's standard library."""
    return next(path for path in frontend.sources() if path.name == SHIM)


def _link(
    translations: list[frontend.Translation], kernels: list[Path], output: Path
) -> Path:
    request = build.Request(
        kernel_dir=FOLDER,
        only=None,
        head_dims=None,
        flavour="fast",
        target=build.TARGETS[build.host_target()],
        cache=build.default_cache(),
    )
    registry = request.cache.text(frontend.registry(translations), ".cc")
    device = [
        path
        for path in build.cpp_sources(request.target)
        if path.is_relative_to(build.ROOT / "plugin" / "device")
    ]
    sources = [*device, library.FOLDER / "driver.cc", air.RUNTIME, registry]
    objects = [build.compile_cpp(request, path, FOLDER) for path in sources]
    return build.link(request, [*kernels, *objects], output)
