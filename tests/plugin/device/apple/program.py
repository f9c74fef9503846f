"""The driver of this folder, by the build's compiler.

device/apple, the fake Objective-C runtime and the software device are in one program;
tests/sanitize makes the same with the system's compiler.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plugin import build
from plugin.device.software import frontend
from plugin.kernel_sources import KERNEL_DIR
from tests.support import fake_metal

FOLDER = Path(__file__).parent
PLUGIN = build.ROOT / "plugin"
APPLE = PLUGIN / "device" / "apple"


@dataclasses.dataclass(frozen=True)
class Change:
    """A mistake to plant: this text of a file in plugin/device/apple, and another."""

    file: str
    old: str
    new: str

    def apply(self) -> str:
        """The whole file."""
        text = (APPLE / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.file} has not one {self.old!r}"
        return text.replace(self.old, self.new)


def driver(change: Change | None = None) -> Path:
    """The program, unless it is in the cache."""
    # The machine has few cores, and test processes start together.
    with open(Path(tempfile.gettempdir()) / "jfm_apple_build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _driver(change)


def no_classes() -> Path:
    """The library that is the driver's first argument."""
    request = _request()
    objects = [_compile(request, FOLDER / "no_classes.cc", [build.ROOT])]
    return _link(request, objects, "-shared", ".so")


def _driver(change: Change | None) -> Path:
    request = _request()
    generated = build.generated_headers(request.cache)
    own = _changed_folder(request.cache, change) if change else APPLE
    includes = [own.parents[2], build.ROOT, generated]
    changing = [*own.glob("*.cc"), FOLDER / "driver.cc"]
    changing.append(PLUGIN / "device" / "default_device.cc")
    wanted = [PLUGIN / "attention", PLUGIN / "device" / "software"]
    others = [
        *(p for p in build.cpp_sources(request.target) if p.parent in wanted),
        *fake_metal.sources(),
        fake_metal.kernel_table(),
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        units = [
            pool.submit(build.compile_unit, request, unit)
            for unit in build.kernel_units(request.variants())
        ]
        compiled = [
            *(pool.submit(_compile, request, p, includes) for p in sorted(changing)),
            *(pool.submit(build.compile_cpp, request, p, generated) for p in others),
        ]
        kernels = [unit.result() for unit in units]
        objects = [future.result() for future in compiled]
    table = frontend.registry([translation for translation, _ in kernels])
    registry = request.cache.text(table, ".cc")
    objects.append(build.compile_cpp(request, registry, generated))
    objects += [path for _, path in kernels]
    # -rdynamic: dlsym() then finds the fake runtime in the program.
    return _link(request, objects, "-rdynamic", "_driver")


def _request() -> build.Request:
    return build.Request(
        kernel_dir=KERNEL_DIR,
        only=None,
        head_dims=frozenset((32, 64, 256)),  # those of the driver's cases
        flavour="fast",
        target=build.TARGETS[build.host_target()],
        cache=build.default_cache(),
    )


def _changed_folder(cache: build.Cache, change: Change) -> Path:
    """All of device/apple with the change, at the end of a tree of its own."""
    texts = {p.name: p.read_text() for p in sorted(APPLE.iterdir()) if p.is_file()}
    texts[change.file] = change.apply()
    key = build.digest(*(part for item in texts.items() for part in item))
    paths = [
        cache.text(text, f"/plugin/device/apple/{name}", key)
        for name, text in texts.items()
    ]
    return paths[0].parent


def _compile(request: build.Request, source: Path, includes: Sequence[Path]) -> Path:
    """One file as in a build with device="apple", but with these include folders."""
    flags = ["-target", request.target.zig_triple, *build.CXX_FLAGS]
    flags.append("-DJFM_DEVICE_APPLE")
    files = build.content_of(build.included_files(source, includes))
    key = build.digest(build.zig_version(), flags, files)
    folders = [f"-I{folder}" for folder in includes]

    def compile_to(new: Path) -> None:
        build.run_zig(["c++", *flags, *folders, "-c", str(source), "-o", str(new)])

    return request.cache.get(key, ".o", compile_to)


def _link(
    request: build.Request, objects: Sequence[Path], flag: str, suffix: str
) -> Path:
    flags = ["-target", request.target.zig_triple, flag, "-lpthread", "-ldl"]
    names = [str(path) for path in objects]
    key = build.digest(build.zig_version(), flags, names)

    def link_to(new: Path) -> None:
        build.run_zig(["c++", *flags, *names, "-o", str(new)])

    path = request.cache.get(key, suffix, link_to)
    path.chmod(0o755)
    return path
