"""Whether every line of plugin/device/apple runs in the driver `apple`.

Measured with g++ and its gcov; zig's compiler has no run time for it. What only macOS
compiles (the names of its libraries) is not counted, for it is not compiled here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plugin import build
from plugin.kernel_sources import BuildError
from tests.sanitize.drivers import (
    DRIVERS,
    PLUGIN,
    Compiler,
    Failed,
    compile_driver,
    execute,
)

MEASURED = PLUGIN / "device" / "apple"


def check(pool: ThreadPoolExecutor) -> bool:
    """Prints the figure and the lines that did not run; whether there are none."""
    path = shutil.which("g++")
    if path is None or shutil.which("gcov") is None:
        print(
            "error: coverage needs g++ and gcov of the system (Debian: apt install g++)"
        )
        return False
    version = subprocess.check_output([path, "--version"], text=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            counts = measure(Compiler(path, version, None), Path(folder), pool)
    except (Failed, BuildError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}")
        return False
    missed = [place for place, count in sorted(counts.items()) if count == 0]
    for file, line in missed:
        text = (build.ROOT / file).read_text().splitlines()[line - 1]
        print(f"{file}:{line}: never ran: {text.strip()}")
    ran, files = len(counts) - len(missed), len({file for file, _ in counts})
    name = MEASURED.relative_to(build.ROOT)
    print(f"{name}: {ran} of {len(counts)} lines in {files} files ran")
    return bool(counts) and not missed


def measure(
    compiler: Compiler, folder: Path, pool: ThreadPoolExecutor
) -> dict[tuple[str, int], int]:
    """How often each line ran that has code, by file and number."""
    driver = next(driver for driver in DRIVERS if driver.name == "apple")
    objects: list[Path] = []

    def compile_own(source: Path, includes: list[Path], flags: list[str]) -> Path:
        # Not through the cache: the counts are written beside the object. Code for
        # unwinding, which nothing here asks for, would count as lines that never run.
        own_flags = [*flags, "--coverage", "-O0", "-fno-exceptions"]
        output = folder / f"{source.stem}.o"
        compiler.compile_to(output, source, includes, own_flags)
        objects.append(output)
        return output

    parts = compile_driver(driver, compiler, pool, compile_own)
    program = compiler.link(
        build.Cache(folder), "_apple", parts.objects, [*parts.link_flags, "--coverage"]
    )
    program.chmod(0o755)
    for arguments in driver.runs:
        execute(program, (*parts.arguments, *arguments))

    counts: dict[tuple[str, int], int] = {}
    for path in objects:
        command = ["gcov", "--json-format", "--stdout", str(path)]
        report = subprocess.check_output(
            command, cwd=build.ROOT, text=True, stderr=subprocess.DEVNULL
        )
        for file in json.loads(report)["files"]:
            if not (build.ROOT / file["file"]).is_relative_to(MEASURED):
                continue
            # A header is in several objects, and a template in one several times.
            for line in file["lines"]:
                place = (file["file"], line["line_number"])
                counts[place] = counts.get(place, 0) + line["count"]
    return counts
