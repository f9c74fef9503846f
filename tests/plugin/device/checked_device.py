"""A device that checks: the checker build of a file of kernels, and what it found."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.plugin.device.library import KERNELS, TestDevice


class CheckedDevice(TestDevice):
    """The checker's findings and counts, beside what TestDevice does."""

    def __init__(self, kernels: Path = KERNELS) -> None:
        super().__init__("checker", kernels)
        for name in ("reports", "counts", "barriers"):
            function = getattr(self.library, f"jfm_software_{name}")
            function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
            function.restype = ctypes.c_size_t
        self.library.jfm_software_mark_uninitialized.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
        )

    def set_lane_order(self, order: int, seed: int) -> None:
        self.library.jfm_software_set_lane_order(order, seed)

    def mark_uninitialized(self, array: np.ndarray) -> None:
        self.library.jfm_software_mark_uninitialized(array.ctypes.data, array.nbytes)

    def clear(self) -> None:
        self.library.jfm_software_clear()

    def reports(self) -> list[list[str]]:
        """The fields of each finding."""
        return [line.split("\t") for line in self._lines("reports")]

    def kinds(self) -> set[str]:
        """The kinds of the findings."""
        return {kind for kind, *_ in self.reports()}

    def counts(self) -> list[dict[str, Any]]:
        """What each dispatch did, in order."""
        return [*map(json.loads, self._lines("counts"))]

    def barriers(self) -> list[dict[str, Any]]:
        """The barriers in the source of each kernel that ran."""
        return [*map(json.loads, self._lines("barriers"))]

    def _lines(self, name: str) -> list[str]:
        call = getattr(self.library, f"jfm_software_{name}")
        text = ctypes.create_string_buffer(call(None, 0) + 1)
        call(text, len(text))
        return text.value.decode().splitlines()
