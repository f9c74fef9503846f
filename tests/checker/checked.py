"""The checker build of the library, driven from tests.

`judge` is the judgement that all tests of this folder share: a run is clean only if
the checker reports nothing *and* every result agrees with float64, from memory that was
filled with NaN before.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

from plugin import build
from tests.support import kernel_check, native
from tests.support.cases import Case

# (order, seed) of jfm_software_set_lane_order: forward, reverse, random.
LANE_ORDERS = ((0, 0), (1, 0), (2, 1))


class Report(NamedTuple):
    """A line of jfm_software_reports()."""

    kind: str
    kernel: str
    where: str
    offset: str
    details: str


class CheckedLibrary:
    """A checker build as an implementation for kernel_check, with its reports."""

    def __init__(self, path: Path) -> None:
        self._library = native.load(path)

    def run_forward(self, *operands, **options):
        return native.run_forward(*operands, **options, library=self._library)

    def run_backward(self, *operands, **options):
        return native.run_backward(*operands, **options, library=self._library)

    def set_lane_order(self, order: int, seed: int) -> None:
        self._library.jfm_software_set_lane_order(order, seed)

    def clear(self) -> None:
        """Forgets reports and statistics."""
        self._library.jfm_software_clear()

    def reports(self) -> list[Report]:
        lines = self._text("jfm_software_reports").splitlines()
        return [Report(*line.split("\t", maxsplit=4)) for line in lines]

    def threadgroup_bytes(self) -> dict[str, int]:
        """The largest threadgroup memory of each kernel that ran since clear()."""
        rows = self._text("jfm_software_statistics").splitlines()
        fields = [row.split("\t") for row in rows]
        return {kernel: int(num_bytes) for kernel, _, _, num_bytes, *_ in fields}

    def _text(self, function: str) -> str:
        call = getattr(self._library, function)
        call.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        call.restype = ctypes.c_size_t
        buffer = ctypes.create_string_buffer(call(None, 0) + 1)
        call(buffer, len(buffer))
        return buffer.value.decode()


class Finding(NamedTuple):
    """`what`: the kind of a checker report, "numbers", or "error" (of the device)."""

    what: str
    details: str


def judge(
    library: CheckedLibrary, case: Case, lane_order: tuple[int, int]
) -> list[Finding]:
    """Everything wrong with a case, forward and backward, in one lane order."""
    library.set_lane_order(*lane_order)
    library.clear()
    where = f"{case.id}, lane order {lane_order}"
    found = []
    try:
        kernel_check.check(library, case)
    except native.NativeError as error:
        found.append(Finding("error", f"{where}: {error}"))
    except AssertionError as error:
        found.append(Finding("numbers", f"{where}: {error}"))
    found += [Finding(r.kind, f"{where}: {r}") for r in library.reports()]
    return found


@functools.cache
def library_of(kernel_dir: Path = build.KERNEL_DIR) -> CheckedLibrary:
    """Builds (or finds in the cache) the checker library of a folder of kernels."""
    if kernel_dir == build.KERNEL_DIR:
        output = build.CHECKER_LIBRARY
        # One test process builds, the others find the result in the cache.
        with open(Path(tempfile.gettempdir()) / "jfm_checker_build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build.build(flavour="checker", output=output)
    else:
        output = kernel_dir / "checker.so"
        build.build(kernel_dir=kernel_dir, flavour="checker", output=output)
    return CheckedLibrary(output)
