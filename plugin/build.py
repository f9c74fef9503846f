"""Native build: Metal kernels and C++ to one shared library, by the clang in ziglang.

Every step is content-addressed: a result lives in the cache under the hash of all it
was made from, so a rebuild runs only what changed and switching back costs nothing.
Used by the Makefile, the packaging hook and the tests; knows nothing of wheels or JAX.

    python -m plugin.build [--flavour fast|checker] [--target NAME] [--output F]
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

from plugin import kernel_sources
from plugin.device.software import frontend
from plugin.kernel_sources import KERNEL_DIR, BuildError, Variant, load_variants

ROOT = Path(__file__).resolve().parent.parent
CHECKER_LIBRARY = ROOT / "build" / "libjax_flash_metal_checker.so"
EXPORTS = ROOT / "plugin" / "exports.map"

FLAVOURS = ("fast", "checker")
DEVICES = ("software", "apple")  # folders of plugin/device; a library has one of them
CXX_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffunction-sections"),
    # Results must not depend on whether the compiler fuses a multiply and an add.
    "-ffp-contract=off",
)
# -s: no debug lines, so no paths of the machine that built it.
LINK_FLAGS = ("-shared", "-s")
LINUX_LINK_FLAGS = (
    *("-lpthread", "-Wl,--gc-sections", f"-Wl,--version-script={EXPORTS}"),
    # A symbol that nothing defines is an error of the link, not of the first call.
    *("-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now"),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform that a library is built for. glibc 2.17 is manylinux_2_17's."""

    zig_triple: str
    wheel_platform: str
    # Files whose names end so are compiled with these flags, and only on this target.
    isa_flags: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    device: str = "software"  # among DEVICES
    library: str = "libjax_flash_metal.so"
    cxx_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = LINUX_LINK_FLAGS

    @property
    def machine(self) -> str:
        return self.zig_triple.split("-")[0]


TARGETS = {
    "linux-x86_64": Target(
        "x86_64-linux-gnu.2.17",
        "manylinux_2_17_x86_64",
        {
            "_avx2": ("-mavx2", "-mfma", "-mf16c"),
            "_avx512": ("-mcpu=x86_64_v4",),
            "_avx512bf16": ("-mcpu=x86_64_v4+avx512bf16",),
        },
    ),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
    "macos-arm64": Target(
        "aarch64-macos.14.0",
        "macosx_14_0_arm64",
        device="apple",
        library="libjax_flash_metal.dylib",
        # zig's linker takes no list of exports: what must not be seen is hidden by the
        # compiler, libc++'s operators new and delete by device/apple/new_delete.cc.
        cxx_flags=("-fvisibility-global-new-delete=force-hidden",),
        link_flags=("-Wl,-install_name,@rpath/libjax_flash_metal.dylib",),
    ),
}
_ISA_SUFFIXES = {suffix for target in TARGETS.values() for suffix in target.isa_flags}


def host_target() -> str:
    """The name of this machine's target; not every such name is in TARGETS."""
    machine = platform.machine().lower()
    if sys.platform == "darwin":
        return f"macos-{machine}"
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return f"{sys.platform}-{machine}"


def in_tree_library(target: Target) -> Path:
    """Where the Python package looks for the library in a source tree."""
    return ROOT / "jax_flash_metal" / "_native" / target.library


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
                try:
                    os.replace(new, path)
                except OSError:
                    if not path.is_dir():  # a folder that another process has made
                        raise
        return path

    def text(self, content: str, suffix: str, key: str | None = None) -> Path:
        """A file with this text, under `key` or else the hash of the text."""
        key = key or digest(content)
        return self.get(key, suffix, lambda new: _write(new, content))


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
    device = ROOT / "plugin" / "device"
    others = [device / name for name in DEVICES if name != target.device]
    return [
        path
        for path in sorted((ROOT / "plugin").glob("**/*.cc"))
        if ((suffix := _isa_suffix(path)) is None or suffix in target.isa_flags)
        and not any(path.is_relative_to(folder) for folder in others)
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


def generated_headers(cache: Cache, kernel_dir: Path = KERNEL_DIR) -> Path:
    """A folder, for the include path, of the headers that kernel_sources.py makes."""
    files = kernel_sources.headers(kernel_dir)
    key = digest(*(part for item in files.items() for part in item))
    paths = [cache.text(text, f"/{name}", key) for name, text in files.items()]
    return paths[0].parent


def _definitions(request: Request, source: Path) -> list[str]:
    """What a file may ask for besides its target."""
    if source.is_relative_to(ROOT / "plugin" / "cpu"):
        return []  # nothing: the slowest files to compile are the same in every library
    return [
        f'-DJFM_VERSION="{version()}"',
        *(["-DJFM_DEVICE_APPLE"] if request.target.device == "apple" else []),
        *(["-DJFM_CHECKER", "-g"] if request.flavour == "checker" else []),
    ]


def compile_cpp(request: Request, source: Path, generated: Path) -> Path:
    """One C++ file to an object. `generated`: the folder of generated_headers()."""
    include_dirs = [ROOT, generated]
    suffix = _isa_suffix(source)
    flags = [
        *("-target", request.target.zig_triple),
        *CXX_FLAGS,
        *request.target.cxx_flags,
        *request.target.isa_flags.get(suffix or "", ()),
        *_definitions(request, source),
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
    target = request.target
    flags = ["-target", target.zig_triple, *LINK_FLAGS, *target.link_flags]
    key = digest(zig_version(), flags, EXPORTS.read_text(), map(str, objects))

    def link_to(new: Path) -> None:
        names = [str(path) for path in objects]
        run_zig(["c++", *flags, *names, "-o", str(new)], cwd=ROOT)

    # Under its own name: the linker writes that into the signature of a dylib.
    library = request.cache.get(key, f"/{target.library}", link_to)
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
    device: str | None = None,
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
      device: another of DEVICES than the target's, for tests: "apple" on Linux is the
        library that runs over a fake Objective-C runtime. `output` must be given then.
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
    chosen = TARGETS[name]
    if device not in (None, chosen.device):
        if device not in DEVICES or output is None:
            raise BuildError(
                f"device must be one of {DEVICES}, and output be given for another "
                f"than the target's; got device={device!r}, output={output}."
            )
        chosen = dataclasses.replace(chosen, device=device)
    if flavour == "checker" and chosen.device != "software":
        raise BuildError("the checker is a part of the software device alone.")
    request = Request(
        kernel_dir=Path(kernel_dir).resolve(),
        only=None if only is None else frozenset(only),
        head_dims=None if head_dims is None else frozenset(head_dims),
        flavour=flavour,
        target=chosen,
        cache=cache or default_cache(),
    )
    if output is None:
        output = in_tree_library(chosen) if flavour == "fast" else CHECKER_LIBRARY
    # The planner sees the whole table whatever `only` says: its object stays cached.
    generated = generated_headers(request.cache, request.kernel_dir)
    # A device that compiles at run time has the sources instead, all of them.
    units = kernel_units(request.variants()) if chosen.device == "software" else []

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [pool.submit(compile_unit, request, unit) for unit in units]
        sources = [
            pool.submit(compile_cpp, request, source, generated)
            for source in cpp_sources(chosen)
        ]
        compiled = [future.result() for future in kernels]
        objects = [future.result() for future in sources]
    if chosen.device == "software":
        table = frontend.registry([translation for translation, _ in compiled])
        table_source = request.cache.text(table, ".cc")
        objects.append(compile_cpp(request, table_source, generated))
    return link(request, [path for _, path in compiled] + objects, output)


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="plugin.build", description=__doc__)
    parser.add_argument("--flavour", choices=FLAVOURS, default="fast")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--device", choices=DEVICES)
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
