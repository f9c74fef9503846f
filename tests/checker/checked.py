"""The checker build of the library, driven from tests.

`judge` is the judgement that all tests of this folder share: a run is clean only if
the checker reports nothing *and* every result agrees with float64, from memory that was
filled with NaN before.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plugin import build
from tests.support import kernel_check, native, reference_f64
from tests.support.cases import DIFFERENTIABLE, Case
from tests.support.forced import Forced

PASSES = ("forward", "backward", "gradient")
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
        self.library = native.load(path)  # with the types of its functions
        self._forced: Forced | None = None

    @contextlib.contextmanager
    def forced(self, **choices: Any) -> Iterator[None]:
        """Calls take a form, family or rows meanwhile: those of support/forced.py."""
        self._forced = Forced(**choices, library=self.library)
        try:
            yield
        finally:
            self._forced = None

    def run_forward(self, *operands, **options):
        if self._forced:
            return self._forced.run_forward(*operands, **options)
        return native.run_forward(*operands, **options, library=self.library)

    def run_backward(self, *operands, **options):
        if self._forced:
            return self._forced.run_backward(*operands, **options)
        return native.run_backward(*operands, **options, library=self.library)

    def run_gradient(self, *operands, **options):
        if self._forced:
            return self._forced.run_gradient(*operands, **options)
        return native.run_gradient(*operands, **options, library=self.library)

    def set_lane_order(self, order: int, seed: int) -> None:
        self.library.jfm_software_set_lane_order(order, seed)

    def clear(self) -> None:
        """Forgets reports, counts and barriers."""
        self.library.jfm_software_clear()

    def reports(self) -> list[Report]:
        lines = self._text("jfm_software_reports").splitlines()
        return [Report(*line.split("\t", maxsplit=4)) for line in lines]

    def threadgroup_bytes(self) -> dict[str, int]:
        """The largest threadgroup memory of each kernel that ran since clear()."""
        used: dict[str, int] = {}
        for row in self.counts():
            size, kernel = row["threadgroup_memory_bytes"], row["kernel"]
            used[kernel] = max(size, used.get(kernel, 0))
        return used

    def products(self) -> dict[str, int]:
        """The 8x8 matrix products of each kernel that ran since clear()."""
        products: dict[str, int] = defaultdict(int)
        for row in self.counts():
            products[row["kernel"]] += row["products"]
        return dict(products)

    def counts(self) -> list[dict[str, Any]]:
        """What each dispatch since clear() did, in order."""
        return [*map(json.loads, self._text("jfm_software_counts").splitlines())]

    def barriers(self) -> list[dict[str, Any]]:
        """The barriers in the source of each kernel that ran since clear()."""
        return [*map(json.loads, self._text("jfm_software_barriers").splitlines())]

    def _text(self, function: str) -> str:
        call = getattr(self.library, function)
        call.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        call.restype = ctypes.c_size_t
        buffer = ctypes.create_string_buffer(call(None, 0) + 1)
        call(buffer, len(buffer))
        return buffer.value.decode()


class _Partly:
    """Some passes of a library, and float64 in the place of the others."""

    def __init__(
        self, library: CheckedLibrary, passes: Sequence[str], case: Case
    ) -> None:
        self._library, self._passes, self._case = library, passes, case

    def run_forward(self, *operands, **options):
        if "forward" in self._passes:
            return self._library.run_forward(*operands, **options)
        out, logsumexp = reference_f64.attention(*operands, **options)
        return out.astype(self._case.np_dtype), logsumexp.astype(np.float32)

    def run_backward(self, *operands, **options):
        if "backward" in self._passes:
            return self._library.run_backward(*operands, **options)
        return [
            getattr(self._gradients(operands, options), name).astype(
                self._case.np_dtype
            )
            for name in kernel_check.BACKWARD
        ]

    def run_gradient(self, of, *operands, **options):
        if "gradient" in self._passes:
            return self._library.run_gradient(of, *operands, **options)
        name = next(name for name, operand in DIFFERENTIABLE.items() if operand == of)
        gradient = getattr(self._gradients(operands, options), name)
        return gradient.astype(kernel_check.dtype_of(name, self._case))

    @staticmethod
    def _gradients(operands, options):
        query, key, value, _, _, dout, dlogsumexp = operands
        return reference_f64.attention_gradients(
            query, key, value, dout, dlogsumexp, **options
        )


class Finding(NamedTuple):
    """`what`: the kind of a checker report, "numbers", or "error" (of the device)."""

    what: str
    details: str


def judge(
    library: CheckedLibrary,
    case: Case,
    lane_order: tuple[int, int],
    passes: Sequence[str] = PASSES,
) -> list[Finding]:
    """Everything wrong with the passes of a case in one lane order."""
    library.set_lane_order(*lane_order)
    library.clear()
    where = f"{case.id}, lane order {lane_order}"
    implementation = _Partly(library, passes, case)
    found = []
    try:
        if "forward" in passes:
            kernel_check.check_forward(implementation, case)
        if {"backward", "gradient"} & set(passes):
            kernel_check.check_backward(implementation, case)
    except native.NativeError as error:
        found.append(Finding("error", f"{where}: {error}"))
    except AssertionError as error:
        found.append(Finding("numbers", f"{where}: {error}"))
    found += [Finding(r.kind, f"{where}: {r}") for r in library.reports()]
    return found


@functools.cache
def library_of(
    kernel_dir: Path = build.KERNEL_DIR, kernels: Sequence[str] | None = None
) -> CheckedLibrary:
    """Builds (or finds in the cache) the checker library of a folder of kernels.

    kernels: names of those to put into the library of a copy; None = all.
    """
    if kernel_dir == build.KERNEL_DIR:
        output = build.CHECKER_LIBRARY
        # One test process builds, the others find the result in the cache.
        with open(Path(tempfile.gettempdir()) / "jfm_checker_build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build.build(flavour="checker", output=output)
    else:
        output = kernel_dir / "checker.so"
        build.build(
            kernel_dir=kernel_dir, only=kernels, flavour="checker", output=output
        )
    return CheckedLibrary(output)
