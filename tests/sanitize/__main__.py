"""Builds and runs the drivers in this folder under the sanitizers.

zig links no sanitizer runtimes, so this needs a g++ or clang++ of the system that has
them; the Metal kernels still come from zig's compiler. Leaks count as errors.

    python -m tests.sanitize [--sanitizer address|undefined|thread] [--driver NAME]
    python -m tests.sanitize --coverage
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from plugin.kernel_sources import BuildError
from tests.sanitize import coverage
from tests.sanitize.drivers import (
    DRIVERS,
    SANITIZERS,
    Failed,
    find_compiler,
    run_driver,
)


def sanitize(sanitizers: list[str], names: list[str], pool: ThreadPoolExecutor) -> bool:
    """Every driver under every sanitizer; whether all is good."""
    good = True
    for sanitizer in sanitizers:
        try:
            compiler = find_compiler(sanitizer)
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return False
        if compiler is None:
            print(
                f"error: no C++ compiler with {sanitizer} sanitizer: this needs a "
                "g++ or clang++ of the system and its sanitizer runtimes (Debian: "
                "apt install g++), since zig links none. CXX names another one.",
                file=sys.stderr,
            )
            good = False
            continue
        for driver in DRIVERS:
            if driver.name not in names:
                continue
            start = time.monotonic()
            try:
                run_driver(driver, compiler, pool)
            except (Failed, BuildError, subprocess.TimeoutExpired) as error:
                print(f"{sanitizer} {driver.name}: FAILED\n{error}", flush=True)
                good = False
                continue
            seconds = time.monotonic() - start
            print(f"{sanitizer} {driver.name}: good ({seconds:.0f} s)", flush=True)
    return good


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="tests.sanitize", description=__doc__)
    names = [driver.name for driver in DRIVERS]
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append")
    parser.add_argument("--driver", choices=names, action="append")
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="instead: every line of plugin/device/apple must run in the driver apple",
    )
    arguments = parser.parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if arguments.coverage:
            return int(not coverage.check(pool))
        return int(
            not sanitize(
                arguments.sanitizer or list(SANITIZERS), arguments.driver or names, pool
            )
        )


if __name__ == "__main__":
    sys.exit(main())
