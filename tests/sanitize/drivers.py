"""The drivers of this folder and how they are built: by a compiler of the system, with
the Metal kernels by zig's. Run by __main__.py and coverage.py."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib

from plugin import build
from plugin.device.software import frontend
from plugin.kernel_sources import KERNEL_DIR
from tests.support import fake_metal

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
HEADERS = Path(jaxlib.__file__).parent / "include"
PLUGIN = build.ROOT / "plugin"
SANITIZERS = ("address", "undefined", "thread")
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-fPIC", "-pthread"),
    *("-fno-sanitize-recover=all", "-Wall", "-Wextra", "-ffp-contract=off"),
    f'-DJFM_VERSION="{build.version()}"',
)
ENVIRONMENT = {
    # Handlers ask for more memory than there is, and must be told so.
    "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:"
    "detect_stack_use_after_return=0:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Worker threads are detached and never end: the process may exit between the start
    # of one and its detaching, which counted as a leaked thread once in a dozen runs.
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:"
    "allocator_may_return_null=1:report_thread_leaks=0",
    # The fake Objective-C runtime is a part of the programs that need one.
    "JFM_FAKE_METAL_LIBRARY": "",
}


class Failed(Exception):
    """A driver did not build or run well; the message says why."""


@dataclasses.dataclass(frozen=True)
class Driver:
    """A program: its own source, and the parts of the plugin and of the tests in it."""

    name: str
    main: Path
    folders: tuple[str, ...]  # of plugin/; their sources, not those of folders in them
    extra: tuple[Path, ...] = ()
    kernels: bool = False
    # Apple's device, over the fake runtime in the same program, which for its part has
    # the software device run the kernels.
    apple: bool = False
    library: Path | None = None  # made from this source, it is the first argument
    runs: tuple[tuple[str, ...], ...] = ((),)  # arguments

    def sources(self) -> list[Path]:
        """Every C++ file."""
        wanted = {PLUGIN / folder for folder in self.folders}
        target = build.TARGETS[build.host_target()]
        targets = [target]
        extra = [*self.extra, self.main]
        if self.apple:
            wanted |= {PLUGIN / "device" / "apple", PLUGIN / "device" / "software"}
            targets.append(dataclasses.replace(target, device="apple"))
            extra += fake_metal.sources()
        plugin = {p: None for t in targets for p in build.cpp_sources(t)}
        return [*(p for p in plugin if p.parent in wanted), *extra]


HANDLERS = tuple(sorted((TESTS / "plugin" / "pjrt" / "handlers").glob("*.cc")))
APPLE = TESTS / "plugin" / "device" / "apple"
LAYERS = ("attention", "backends", "c_api", "cpu", "device", "ffi")
# What cannot share a process with the rest, or with each other.
APPLE_ALONE = (
    "IsTheDefaultDevice",
    "NamesNoLibrary",
    "NamesNoFile",
    "LacksFunctions",
    "LacksClasses",
)
DRIVERS = (
    Driver("custom_calls", FOLDER / "custom_calls.cc", ("pjrt/custom_call",), HANDLERS),
    Driver(
        "cpu",
        FOLDER / "cpu.cc",
        ("attention", "cpu", "device", "device/software"),
        kernels=True,
    ),
    Driver(
        "attention",
        FOLDER / "attention.cc",
        (*LAYERS, "device/software", "pjrt/custom_call"),
        kernels=True,
    ),
    Driver(
        "attention_on_apple",
        FOLDER / "attention.cc",
        (*LAYERS, "pjrt/custom_call"),
        kernels=True,
        apple=True,
    ),
    Driver(
        "apple",
        APPLE / "driver.cc",
        ("attention", "device"),
        kernels=True,
        apple=True,
        library=APPLE / "no_classes.cc",
        runs=((), *((name,) for name in APPLE_ALONE)),
    ),
    Driver(
        "pjrt",
        FOLDER / "pjrt.cc",
        ("device", "device/software", "pjrt", "pjrt/custom_call", "pjrt/hosts"),
        HANDLERS,
        kernels=True,
        library=FOLDER / "tiny_host.cc",
        runs=(("address",), ("copy",), ("copy", "old")),
    ),
    # The host's arrays are Metal's objects, and so are our results.
    Driver(
        "pjrt_on_apple",
        FOLDER / "pjrt.cc",
        ("device", "pjrt", "pjrt/custom_call", "pjrt/hosts"),
        HANDLERS,
        kernels=True,
        apple=True,
        library=FOLDER / "tiny_host.cc",
        runs=(("auto", "metal"),),
    ),
)
# What the driver planted.cc does wrong, by its argument, and what must be said then.
PLANTED = {
    "address": ("heap-buffer-overflow", "LeakSanitizer"),
    "undefined": ("signed integer overflow",),
    "thread": ("data race",),
}


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A C++ compiler of the system, with one sanitizer or none."""

    path: str
    version: str
    sanitizer: str | None

    def flags(self) -> list[str]:
        """The same for every file."""
        return [*FLAGS, *([f"-fsanitize={self.sanitizer}"] if self.sanitizer else [])]

    def compile_to(
        self, output: Path, source: Path, includes: list[Path], flags: list[str]
    ) -> None:
        """One file to an object; `flags` besides those of every file."""
        folders = [f"-I{folder}" for folder in includes]
        headers = ["-isystem", str(HEADERS)]
        name = os.path.relpath(source, build.ROOT)
        command = [self.path, *self.flags(), *flags, *folders, *headers]
        _run([*command, "-c", name, "-o", str(output)])

    def compile(
        self, cache: build.Cache, source: Path, includes: list[Path], flags: list[str]
    ) -> Path:
        """The same, unless that was done before."""
        target = build.TARGETS[build.host_target()]
        suffix = next((s for s in target.isa_flags if source.stem.endswith(s)), None)
        flags = [*flags, *_isa_flags(target.isa_flags.get(suffix or "", ()))]
        files = build.included_files(source, [*includes, HEADERS])
        key = build.digest(
            self.version, [*self.flags(), *flags], build.content_of(files)
        )
        return cache.get(
            key, ".o", lambda new: self.compile_to(new, source, includes, flags)
        )

    def link(
        self, cache: build.Cache, name: str, objects: list[Path], flags: list[str]
    ) -> Path:
        """Objects to a program or library, unless that was done before."""
        command = [self.path, *self.flags(), *flags, *map(str, objects)]
        key = build.digest(self.version, command)
        return cache.get(
            key, name, lambda new: _run([*command, "-ldl", "-o", str(new)])
        )


def _isa_flags(flags: Iterable[str]) -> list[str]:
    # zig spells the x86-64 levels, and what is added to them, in its own way.
    own: list[str] = []
    for flag in flags:
        level, *features = flag.split("+")
        own.append(level.replace("-mcpu=x86_64_v", "-march=x86-64-v"))
        own += [f"-m{feature}" for feature in features]
    return own


def _run(command: Sequence[str], **options: object) -> None:
    done = subprocess.run(  # type: ignore[call-overload]
        command, cwd=build.ROOT, capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        raise Failed(
            f"{' '.join(command)}\nexit status {done.returncode}\n"
            f"{done.stdout}{done.stderr}"
        )


def find_compiler(sanitizer: str) -> Compiler | None:
    """The first compiler that links and runs a program with this sanitizer."""
    for name in filter(None, (os.environ.get("CXX"), "clang++", "g++")):
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.check_output([path, "--version"], text=True)
        compiler = Compiler(path, version, sanitizer)
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "planted")
            source = str(FOLDER / "planted.cc")
            flags = [*compiler.flags(), f"-I{build.ROOT}", source, "-o", str(program)]
            try:
                _run([path, *flags])
                execute(program, ())
            except Failed:
                continue
            for mistake in PLANTED[sanitizer]:
                if not _finds(program, mistake):
                    raise Failed(f"{path}: {sanitizer} sanitizer misses a {mistake}")
        return compiler
    return None


def execute(program: Path, arguments: Iterable[str]) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    _run([str(program), *arguments], env=environment, timeout=900)


def _finds(program: Path, mistake: str) -> bool:
    try:
        execute(program, (mistake,))
    except Failed as failure:
        return mistake in str(failure)
    return False


def kernel_objects(request: build.Request, pool: ThreadPoolExecutor) -> list[Path]:
    """The kernels' objects by zig, and the source of their table."""
    units = build.kernel_units(request.variants())
    compiled = list(pool.map(lambda unit: build.compile_unit(request, unit), units))
    table = frontend.registry([translation for translation, _ in compiled])
    return [*(path for _, path in compiled), request.cache.text(table, ".cc")]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a driver is linked from and started with."""

    objects: list[Path]
    link_flags: list[str]
    arguments: tuple[str, ...]  # before those of each run


def compile_driver(
    driver: Driver,
    compiler: Compiler,
    pool: ThreadPoolExecutor,
    compile_own: Callable[[Path, list[Path], list[str]], Path] | None = None,
) -> Parts:
    """Compiles what has changed.

    Args:
      compile_own: compiles the sources of device/apple, as Compiler.compile() would.
    """
    cache = build.default_cache()
    includes = [build.ROOT, build.generated_headers(cache)]
    flags = ["-DJFM_DEVICE_APPLE"] if driver.apple else []

    def compile_one(source: Path) -> Path:
        if compile_own and source.parent == PLUGIN / "device" / "apple":
            return compile_own(source, includes, flags)
        # The CPU kernels, which take long, are the same beside any device.
        own = [] if source.parent == PLUGIN / "cpu" else flags
        return compiler.compile(cache, source, includes, own)

    sources = driver.sources()
    objects: list[Path] = []
    if driver.kernels:
        request = build.Request(
            kernel_dir=KERNEL_DIR,
            only=None,
            head_dims=frozenset((32, 64, 256)),  # some kernels begin at 64 or 256
            flavour="fast",
            target=build.TARGETS[build.host_target()],
            cache=cache,
        )
        *objects, registry = kernel_objects(request, pool)
        sources.append(registry)
    if driver.apple:
        sources.append(fake_metal.kernel_table())
    objects += pool.map(compile_one, sources)
    arguments: tuple[str, ...] = ()
    if driver.library:
        name = f"_{driver.library.stem}.so"
        library = [compile_one(driver.library)]
        arguments = (str(compiler.link(cache, name, library, ["-shared"])),)
    # -rdynamic: dlsym() then finds the fake runtime in the program.
    return Parts(objects, ["-rdynamic"] if driver.apple else [], arguments)


def run_driver(driver: Driver, compiler: Compiler, pool: ThreadPoolExecutor) -> None:
    """Builds one driver, unless it is there, and runs it."""
    parts = compile_driver(driver, compiler, pool)
    program = compiler.link(
        build.default_cache(), f"_{driver.name}", parts.objects, parts.link_flags
    )
    program.chmod(0o755)
    for arguments in driver.runs:
        execute(program, (*parts.arguments, *arguments))
