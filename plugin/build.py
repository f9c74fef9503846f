"""Native build: Metal kernels and C++ to one shared library, by the clang in ziglang.

Every step is content-addressed: a result lives in the cache under the hash of all it
was made from, so a rebuild runs only what changed and switching back costs nothing.
Used by the Makefile, the packaging hook and the tests; knows nothing of wheels or JAX.

    python -m plugin.build [--flavour fast|checker] [--target linux-x86_64] [--output F]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plugin.device.software import frontend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
KERNEL_DIR = ROOT / "metal_kernels"
LIBRARY_NAME = "libjax_flash_metal.so"
# Where the Python package looks for the library in a source tree.
IN_TREE_LIBRARY = ROOT / "jax_flash_metal" / "_native" / LIBRARY_NAME
CHECKER_LIBRARY = ROOT / "build" / "libjax_flash_metal_checker.so"
EXPORTS = ROOT / "plugin" / "exports.map"

FLAVOURS = ("fast", "checker")
DTYPES = {  # name in variants.toml: (MSL type, C++ enumerator)
    "float32": ("float", "Dtype::kFloat32"),
    "float16": ("half", "Dtype::kFloat16"),
    "bfloat16": ("bfloat", "Dtype::kBfloat16"),
}
CXX_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffunction-sections"),
    # Results must not depend on whether the compiler fuses a multiply and an add.
    "-ffp-contract=off",
)
LINK_FLAGS = (
    # -s: no symbol names or debug lines, so no paths of the machine that built it.
    *("-shared", "-s", "-lpthread", "-Wl,--gc-sections"),
    # A symbol that nothing defines is an error of the link, not of the first call.
    *("-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now"),
)


class BuildError(Exception):
    """The sources are wrong; the message names the file and the line."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform that a library is built for. glibc 2.17 is manylinux_2_17's."""

    zig_triple: str
    wheel_platform: str
    # Files whose names end so are compiled with these flags, and only on this target.
    isa_flags: dict[str, tuple[str, ...]]

    @property
    def machine(self) -> str:
        return self.zig_triple.split("-")[0]


TARGETS = {
    "linux-x86_64": Target(
        "x86_64-linux-gnu.2.17",
        "manylinux_2_17_x86_64",
        {"_avx2": ("-mavx2", "-mfma", "-mf16c"), "_avx512": ("-mcpu=x86_64_v4",)},
    ),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", {}),
}
_ISA_SUFFIXES = {suffix for target in TARGETS.values() for suffix in target.isa_flags}


def host_target() -> str:
    """The name of this machine's target; not every such name is in TARGETS."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    return f"{sys.platform}-{machine}"


# -- The variant table ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel instantiation: a row of variants.toml with one of its dtypes."""

    kernel: str
    source: str
    dtype: str
    head_dim: int
    block_q: int
    block_kv: int
    num_simdgroups: int

    @property
    def host_name(self) -> str:
        return (
            f"{self.kernel}_{self.dtype}_d{self.head_dim}"
            f"_q{self.block_q}_k{self.block_kv}_s{self.num_simdgroups}"
        )

    def table_line(self) -> str:
        """The row as C++, for the planner's table."""
        sizes = f"{self.head_dim}, {self.block_q}, {self.block_kv}"
        return (
            f'{{"{self.kernel}", {DTYPES[self.dtype][1]}, {sizes}, '
            f'{self.num_simdgroups}, "{self.host_name}"}},\n'
        )

    def instantiation(self) -> str:
        """The row as MSL: an explicit instantiation under its host name."""
        msl_type = DTYPES[self.dtype][0]
        instance = (
            f"{self.kernel}<{msl_type}, {self.head_dim}, {self.block_q}, "
            f"{self.block_kv}, {self.num_simdgroups}>"
        )
        return (
            f'template [[host_name("{self.host_name}")]] [[kernel]] '
            f"decltype({instance}) {instance};\n"
        )


_SIZES = ("head_dim", "block_q", "block_kv", "num_simdgroups")


def load_variants(kernel_dir: Path = KERNEL_DIR) -> list[Variant]:
    """Reads variants.toml; rows in table order, dtypes in the order of each row."""
    path = kernel_dir / "variants.toml"
    text = path.read_text()
    try:
        rows = tomllib.loads(text).get("variant", [])
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path}: {error}") from None
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith("[[variant]]")
    ]
    variants: list[Variant] = []
    seen: dict[str, int] = {}
    for row, line in zip(rows, lines):
        for variant in _parse_row(row, f"{path}:{line}"):
            first = seen.setdefault(variant.host_name, line)
            if first != line:
                raise BuildError(
                    f"{path}:{line}: {variant.host_name} is already in the table, "
                    f"at line {first}."
                )
            variants.append(variant)
    if not variants:
        raise BuildError(f"{path}: expected at least one [[variant]] row, got none.")
    return variants


def _parse_row(row: dict[str, Any], where: str) -> list[Variant]:
    unknown = set(row) - {"kernel", "source", "dtypes", *_SIZES}
    missing = {"kernel", "dtypes", *_SIZES} - set(row)
    if unknown or missing:
        raise BuildError(
            f"{where}: missing fields {sorted(missing)}, unknown fields "
            f"{sorted(unknown)}."
        )
    for name in _SIZES:
        if not isinstance(row[name], int) or row[name] < 1:
            raise BuildError(
                f"{where}: {name} must be a positive integer, got {row[name]!r}."
            )
    for dtype in row["dtypes"]:
        if dtype not in DTYPES:
            raise BuildError(
                f"{where}: dtypes must be among {list(DTYPES)}, got {dtype!r}."
            )
    sizes = {name: row[name] for name in _SIZES}
    source = row.get("source", row["kernel"])
    return [
        Variant(kernel=row["kernel"], source=source, dtype=dtype, **sizes)
        for dtype in row["dtypes"]
    ]


# -- The cache -----------------------------------------------------------------------


def digest(*parts: str | bytes | Iterable[str]) -> str:
    """A hash of the parts that also depends on where one part ends."""
    state = hashlib.sha256()
    for part in parts:
        if not isinstance(part, (str, bytes)):
            part = digest(*part)
        data = part.encode() if isinstance(part, str) else part
        state.update(b"%d:" % len(data) + data)
    return state.hexdigest()


class Cache:
    """Files under the hash of what they were made from. Safe for parallel builds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str, suffix: str, make: Callable[[Path], None]) -> Path:
        """The file for `key`; if it is not there, `make` writes it to a new path."""
        path = self.folder / key[:2] / (key[2:34] + suffix)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                new = Path(scratch) / path.name
                make(new)
                os.replace(new, path)
        return path

    def text(self, content: str, suffix: str) -> Path:
        """A file with this text."""
        return self.get(digest(content), suffix, lambda new: _write(new, content))


def _write(path: Path, content: str) -> None:
    path.write_text(content)


def default_cache() -> Cache:
    """build/cache, or the folder that JAX_FLASH_METAL_BUILD_CACHE names."""
    folder = os.environ.get("JAX_FLASH_METAL_BUILD_CACHE")
    return Cache(Path(folder).absolute() if folder else ROOT / "build" / "cache")


# -- The compiler --------------------------------------------------------------------


def zig_version() -> str:
    """The version of the ziglang package: a part of every cache key."""
    return importlib.metadata.version("ziglang")


def run_zig(arguments: Sequence[str], **options: Any) -> str:
    """Runs the zig of the ziglang package: its standard output, or BuildError."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("the package ziglang is not installed: pip install ziglang")
    # What `python -m ziglang` runs, without the cost of one more Python.
    zig = os.path.join(next(iter(spec.submodule_search_locations)), "zig")
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [zig, *arguments], capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        raise BuildError(f"{done.stderr.strip()}\nfailed: zig {' '.join(arguments)}")
    return done.stdout


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def included_files(source: Path, include_dirs: Sequence[Path]) -> list[Path]:
    """`source` and every project file that it includes, however indirectly.

    Conditions are not evaluated, so this may name a file too many; never one too few,
    as long as includes are written with a literal name.
    """
    found: dict[Path, None] = {}
    queue = [source]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_text()):
            for folder in (path.parent, *include_dirs):
                if (folder / name).is_file():
                    queue.append((folder / name).resolve())
                    break
    return list(found)


def content_of(paths: Iterable[Path]) -> list[str]:
    """Names relative to their folder and texts, for a cache key."""
    return [text for path in paths for text in (path.name, path.read_text())]


# -- C++ -----------------------------------------------------------------------------


def version() -> str:
    """The project's version, from the one place where it is written."""
    text = (ROOT / "jax_flash_metal" / "_version.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not match:
        raise BuildError("jax_flash_metal/_version.py: no __version__ line found.")
    return match[1]


def cpp_sources(target: Target) -> list[Path]:
    """Every C++ file of the plugin that belongs on `target`, in a fixed order."""
    return [
        path
        for path in sorted((ROOT / "plugin").glob("**/*.cc"))
        if (suffix := _isa_suffix(path)) is None or suffix in target.isa_flags
    ]


def _isa_suffix(path: Path) -> str | None:
    return next((s for s in _ISA_SUFFIXES if path.stem.endswith(s)), None)


@dataclasses.dataclass(frozen=True)
class Request:
    """What one call of build() asks for."""

    kernel_dir: Path
    only: frozenset[str] | None
    head_dims: frozenset[int] | None
    flavour: str
    target: Target
    cache: Cache

    def variants(self) -> list[Variant]:
        """The rows to instantiate."""
        rows = load_variants(self.kernel_dir)
        kernels = self.only or {row.kernel for row in rows}
        unknown = kernels - {row.kernel for row in rows}
        if unknown:
            raise BuildError(f"only= names no kernel of the table: {sorted(unknown)}")
        return [
            row
            for row in rows
            if row.kernel in kernels
            and (self.head_dims is None or row.head_dim in self.head_dims)
        ]


def compile_cpp(request: Request, source: Path, generated: Path) -> Path:
    """One C++ file to an object. `generated` holds variants.inc."""
    include_dirs = [ROOT, generated]
    suffix = _isa_suffix(source)
    flags = [
        *("-target", request.target.zig_triple),
        *CXX_FLAGS,
        *request.target.isa_flags.get(suffix or "", ()),
        f'-DJFM_VERSION="{version()}"',
        *(["-DJFM_CHECKER", "-g"] if request.flavour == "checker" else []),
    ]
    key = digest(zig_version(), flags, content_of(included_files(source, include_dirs)))

    def compile_to(new: Path) -> None:
        # Relative names and a prefix map keep this machine's paths out of the object.
        name = os.path.relpath(source, ROOT)
        includes = [f"-I{folder}" for folder in include_dirs]
        run_zig(
            [
                *("c++", *flags, *includes, f"-ffile-prefix-map={ROOT}=."),
                *("-c", name, "-o", str(new)),
            ],
            cwd=ROOT,
        )

    return request.cache.get(key, ".o", compile_to)


def link(request: Request, objects: Sequence[Path], output: Path) -> Path:
    """Objects to one shared library at `output`, unless that very one is there."""
    flags = ["-target", request.target.zig_triple, *LINK_FLAGS]
    key = digest(zig_version(), flags, EXPORTS.read_text(), map(str, objects))

    def link_to(new: Path) -> None:
        version_script = f"-Wl,--version-script={EXPORTS}"
        names = [str(path) for path in objects]
        run_zig(["c++", *flags, version_script, *names, "-o", str(new)], cwd=ROOT)

    library = request.cache.get(key, ".so", link_to)
    if not _same_file(library, output):
        output.parent.mkdir(parents=True, exist_ok=True)
        # A new file, not new bytes in the old one: a process may have that mapped.
        new = output.with_name(f".{output.name}.{os.getpid()}")
        shutil.copy2(library, new)
        os.replace(new, output)
    return output


def _same_file(a: Path, b: Path) -> bool:
    # copy2 keeps the time, and cached files never change: no need to read them.
    return b.exists() and [(s.st_size, s.st_mtime_ns) for s in (a.stat(),)] == [
        (s.st_size, s.st_mtime_ns) for s in (b.stat(),)
    ]


# -- Metal kernels -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelUnit:
    """One translation unit: the instantiations of one source for one head_dim."""

    source: str
    head_dim: int
    variants: tuple[Variant, ...]

    @property
    def name(self) -> str:
        return f"{self.source}_d{self.head_dim}"

    def text(self) -> str:
        rows = "".join(variant.instantiation() for variant in self.variants)
        return f'#include "{self.source}.metal"\n{rows}'


def kernel_units(variants: Iterable[Variant]) -> list[KernelUnit]:
    """The rows by source and head_dim, so that units compile side by side."""
    groups: dict[tuple[str, int], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.source, variant.head_dim), []).append(variant)
    return [KernelUnit(*group, tuple(rows)) for group, rows in groups.items()]


def translate_unit(request: Request, unit: KernelUnit) -> frontend.Translation:
    """Preprocesses and translates one unit, unless that was done before."""
    main_file = request.kernel_dir / f"{unit.source}.metal"
    if not main_file.is_file():
        raise BuildError(f"{main_file}: not found, but variants.toml names it.")
    key = digest(
        zig_version(),
        unit.name,
        unit.text(),
        content_of(included_files(main_file, [request.kernel_dir])),
        content_of(frontend.sources()),
    )

    def translate_to(new: Path) -> None:
        source = request.cache.text(unit.text(), ".metal")
        text = run_zig(frontend.preprocess_command(source, [request.kernel_dir]))
        # Diagnostics name files as in the source tree, wherever kernel_dir is; so the
        # same text is the same object.
        for path, name in (
            (source, f"{unit.name}.metal"),
            (request.kernel_dir, KERNEL_DIR.name),
            (ROOT, "."),
        ):
            text = text.replace(f'"{path}', f'"{name}')
        translation = frontend.translate(text, unit.name)
        if translation.errors:
            raise BuildError("\n".join(map(str, translation.errors)))
        new.write_text(json.dumps(dataclasses.asdict(translation)))

    fields = json.loads(request.cache.get(key, ".json", translate_to).read_text())
    return frontend.Translation(
        text=fields["text"],
        kernels=[frontend.KernelInfo(**kernel) for kernel in fields["kernels"]],
        constants=[frontend.FunctionConstant(**item) for item in fields["constants"]],
        functions=[],  # of use to the lint only, which translates for itself
        errors=[],
    )


def compile_unit(
    request: Request, unit: KernelUnit
) -> tuple[frontend.Translation, Path]:
    """One unit: the front end's translation and the object made from it."""
    translation = translate_unit(request, unit)
    machine = request.target.machine
    flags = frontend.compile_flags(request.flavour, machine)
    key = digest(
        zig_version(),
        # The flags name a header by its full path; its content is in the key as well.
        [flag.replace(str(ROOT), ".") for flag in flags],
        translation.text,
        content_of(path for path in frontend.sources() if path.suffix == ".h"),
    )

    def compile_to(new: Path) -> None:
        source = request.cache.text(translation.text, ".clcpp")
        run_zig(
            frontend.compile_command(request.flavour, machine, source, new), cwd=ROOT
        )

    return translation, request.cache.get(key, ".o", compile_to)


# -- All of it -----------------------------------------------------------------------


def build(
    *,
    kernel_dir: Path = KERNEL_DIR,
    only: Iterable[str] | None = None,
    head_dims: Iterable[int] | None = None,
    flavour: str = "fast",
    target: str | None = None,
    output: Path | None = None,
    cache: Cache | None = None,
) -> Path:
    """Builds one library and returns where it is.

    Args:
      kernel_dir: the Metal sources and variants.toml; tests pass a changed copy.
      only: names of the kernels to put in, None = all. The others are then unknown
        to the device, and asking for one is an error at run time.
      head_dims: only the rows with one of these head_dims, None = all.
      flavour: "fast", or "checker": instrumented, for the race checker, never packaged.
      target: a name in TARGETS, None = this machine.
      output: the library, None = the flavour's place in the source tree.
      cache: None = default_cache().

    Raises:
      BuildError: a source is wrong; the message has the compiler's file and line.
    """
    name = target or host_target()
    if name not in TARGETS:
        raise BuildError(f"no target {name!r}; there are {', '.join(TARGETS)}.")
    if flavour not in FLAVOURS:
        raise BuildError(f"flavour must be one of {FLAVOURS}, got {flavour!r}.")
    request = Request(
        kernel_dir=Path(kernel_dir).resolve(),
        only=None if only is None else frozenset(only),
        head_dims=None if head_dims is None else frozenset(head_dims),
        flavour=flavour,
        target=TARGETS[name],
        cache=cache or default_cache(),
    )
    output = output or (IN_TREE_LIBRARY if flavour == "fast" else CHECKER_LIBRARY)
    # The planner sees the whole table whatever `only` says: its object stays cached.
    table = "".join(row.table_line() for row in load_variants(request.kernel_dir))
    generated = request.cache.text(table, "/variants.inc").parent

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        units = [
            pool.submit(compile_unit, request, unit)
            for unit in kernel_units(request.variants())
        ]
        sources = [
            pool.submit(compile_cpp, request, source, generated)
            for source in cpp_sources(request.target)
        ]
        compiled = [future.result() for future in units]
        objects = [future.result() for future in sources]
    registry = frontend.registry([translation for translation, _ in compiled])
    registry_source = request.cache.text(registry, ".cc")
    objects.append(compile_cpp(request, registry_source, generated))
    return link(request, [path for _, path in compiled] + objects, output)


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="plugin.build", description=__doc__)
    parser.add_argument("--flavour", choices=FLAVOURS, default="fast")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    try:
        print(build(**vars(arguments)))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
