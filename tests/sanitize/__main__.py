"""Builds and runs the drivers in this folder under the sanitizers.

zig links no sanitizer runtimes, so this needs a g++ or clang++ of the system that has
them; the Metal kernels still come from zig's compiler. Leaks count as errors.

    python -m tests.sanitize [--sanitizer address|undefined|thread] [--driver NAME]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib

from plugin import build
from plugin.device.software import frontend

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
}


class Failed(Exception):
    """A driver did not build or run well; the message says why."""


@dataclasses.dataclass(frozen=True)
class Driver:
    """A program: its own source, and the parts of the plugin and of the tests in it."""

    name: str
    folders: tuple[str, ...]  # of plugin/; their sources, not those of folders in them
    extra: tuple[Path, ...] = ()
    kernels: bool = False
    host: bool = False  # its first argument is the library of tiny_host.cc
    runs: tuple[tuple[str, ...], ...] = ((),)  # arguments

    def sources(self, target: build.Target) -> list[Path]:
        """Every C++ file."""
        wanted = {PLUGIN / folder for folder in self.folders}
        plugin = [p for p in build.cpp_sources(target) if p.parent in wanted]
        return [*plugin, *self.extra, FOLDER / f"{self.name}.cc"]


HANDLERS = tuple(sorted((TESTS / "plugin" / "pjrt" / "handlers").glob("*.cc")))
DEVICE = ("attention", "c_api", "device", "device/software", "ffi")
DRIVERS = (
    Driver("custom_calls", ("pjrt/custom_call",), HANDLERS),
    Driver("attention", (*DEVICE, "pjrt/custom_call"), kernels=True),
    Driver(
        "pjrt",
        ("pjrt", "pjrt/custom_call"),
        HANDLERS,
        host=True,
        runs=(("address",), ("copy",), ("copy", "old")),
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
    """A C++ compiler of the system, with one sanitizer."""

    path: str
    version: str
    sanitizer: str

    def flags(self) -> list[str]:
        """The same for every file."""
        return [*FLAGS, f"-fsanitize={self.sanitizer}"]

    def compile(self, cache: build.Cache, source: Path, includes: list[Path]) -> Path:
        """One file to an object, unless that was done before."""
        target = build.TARGETS[build.host_target()]
        suffix = next((s for s in target.isa_flags if source.stem.endswith(s)), None)
        flags = [*self.flags(), *_isa_flags(target.isa_flags.get(suffix or "", ()))]
        files = build.included_files(source, [*includes, HEADERS])
        key = build.digest(self.version, flags, build.content_of(files))

        def compile_to(new: Path) -> None:
            folders = [f"-I{folder}" for folder in includes]
            headers = ["-isystem", str(HEADERS)]
            name = os.path.relpath(source, build.ROOT)
            _run([self.path, *flags, *folders, *headers, "-c", name, "-o", str(new)])

        return cache.get(key, ".o", compile_to)


def _isa_flags(flags: Iterable[str]) -> list[str]:
    # zig spells the x86-64 levels in its own way.
    return [flag.replace("-mcpu=x86_64_v", "-march=x86-64-v") for flag in flags]


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
                _execute(program, ())
            except Failed:
                continue
            for mistake in PLANTED[sanitizer]:
                if not _finds(program, mistake):
                    raise Failed(f"{path}: {sanitizer} sanitizer misses a {mistake}")
        return compiler
    return None


def _execute(program: Path, arguments: Iterable[str]) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    _run([str(program), *arguments], env=environment, timeout=900)


def _finds(program: Path, mistake: str) -> bool:
    try:
        _execute(program, (mistake,))
    except Failed as failure:
        return mistake in str(failure)
    return False


def kernel_objects(request: build.Request, pool: ThreadPoolExecutor) -> list[Path]:
    """The kernels' objects by zig, and the source of their table."""
    units = build.kernel_units(request.variants())
    compiled = list(pool.map(lambda unit: build.compile_unit(request, unit), units))
    table = frontend.registry([translation for translation, _ in compiled])
    return [*(path for _, path in compiled), request.cache.text(table, ".cc")]


def run_driver(driver: Driver, compiler: Compiler, pool: ThreadPoolExecutor) -> None:
    """Builds one driver, unless it is there, and runs it."""
    cache = build.default_cache()
    target = build.TARGETS[build.host_target()]
    request = build.Request(
        kernel_dir=build.KERNEL_DIR,
        only=None,
        head_dims=frozenset((32, 256)),  # 256: the backward pass's delta kernel
        flavour="fast",
        target=target,
        cache=cache,
    )
    rows = build.load_variants(build.KERNEL_DIR)
    table = "".join(row.table_line() for row in rows)
    includes = [build.ROOT, cache.text(table, "/variants.inc").parent]

    def compile_all(sources: Iterable[Path]) -> list[Path]:
        return list(pool.map(lambda p: compiler.compile(cache, p, includes), sources))

    def link(name: str, objects: list[Path], *flags: str) -> Path:
        command = [compiler.path, *compiler.flags(), *flags, *map(str, objects)]
        key = build.digest(compiler.version, command)
        return cache.get(
            key, name, lambda new: _run([*command, "-ldl", "-o", str(new)])
        )

    objects: list[Path] = []
    sources = driver.sources(target)
    if driver.kernels:
        *objects, registry = kernel_objects(request, pool)
        sources.append(registry)
    program = link(f"_{driver.name}", objects + compile_all(sources))
    program.chmod(0o755)
    host: tuple[str, ...] = ()
    if driver.host:
        host_objects = compile_all([FOLDER / "tiny_host.cc"])
        host = (str(link("_tiny_host.so", host_objects, "-shared")),)
    for arguments in driver.runs:
        _execute(program, (*host, *arguments))


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="tests.sanitize", description=__doc__)
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append")
    names = [driver.name for driver in DRIVERS]
    parser.add_argument("--driver", choices=names, action="append")
    arguments = parser.parse_args()
    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for sanitizer in arguments.sanitizer or SANITIZERS:
            try:
                compiler = find_compiler(sanitizer)
            except Failed as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            if compiler is None:
                print(
                    f"error: no C++ compiler with {sanitizer} sanitizer: this needs a "
                    "g++ or clang++ of the system and its sanitizer runtimes (Debian: "
                    "apt install g++), since zig links none. CXX names another one.",
                    file=sys.stderr,
                )
                failed = True
                continue
            for driver in DRIVERS:
                if arguments.driver and driver.name not in arguments.driver:
                    continue
                start = time.monotonic()
                try:
                    run_driver(driver, compiler, pool)
                except (Failed, build.BuildError, subprocess.TimeoutExpired) as error:
                    print(f"{sanitizer} {driver.name}: FAILED\n{error}", flush=True)
                    failed = True
                    continue
                seconds = time.monotonic() - start
                print(f"{sanitizer} {driver.name}: good ({seconds:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
