"""The mock host: a PJRT plugin for tests that answers as a Metal host does."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

from jax_flash_metal import hosts
from plugin import build
from tests.support.shared_library import compile_library

SOURCE = build.ROOT / "tests" / "plugin" / "pjrt" / "mock_host" / "mock_host.cc"


def library() -> Path:
    """The mock's shared library, built unless that was done before."""
    return compile_library(SOURCE.read_text(), flags=build.CXX_FLAGS)


def settings(
    backend: str = "", kind: str = "jax-metal", buffers: str = "auto"
) -> dict[str, str]:
    """The environment in which platform flash_metal runs over the mock.

    Args:
      backend: name of the known host that the mock executes through; default: the
        first that is installed.
      kind: which host it is like: a row of mock_host.cc.
      buffers: how handlers reach its memory.
    """
    rows = [row for row in hosts.KNOWN_HOSTS if backend in ("", row.name)]
    installed = [path for row in rows if (path := hosts._installed_library(row))]
    return {
        "JAX_PLATFORMS": "flash_metal,cpu",
        "JAX_FLASH_METAL_HOST": str(library()),
        "JAX_FLASH_METAL_HOST_BUFFERS": buffers,
        "JFM_MOCK_HOST_BACKEND": str(installed[0]),
        "JFM_MOCK_HOST_KIND": kind,
    }


class Control:
    """The running mock of this process, to be told what to do wrong."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library()))
        self._library.mock_host_calls.restype = ctypes.c_int64

    def fault(self, fault: str, *, skip: int = 0, count: int = 1) -> None:
        """Arms "Slot:answer", see mock_host/control.h."""
        assert self._library.mock_host_fault(fault.encode(), skip, count), fault

    def wait_for_faults(self, seconds: float = 5) -> None:
        """Until all that are armed have happened; no longer than that."""
        end = time.monotonic() + seconds
        while self._library.mock_host_pending_faults() and time.monotonic() < end:
            time.sleep(0.01)

    def clear_faults(self) -> None:
        """Disarms what has not happened."""
        self._library.mock_host_clear_faults()

    def calls(self, slot: str) -> int:
        """How often it was called."""
        count: int = self._library.mock_host_calls(slot.encode())
        assert count >= 0, slot
        return count

    def set_delay_ms(self, delay: int) -> None:
        """From now on events are ready so much later than they could be."""
        self._library.mock_host_set_delay_ms(delay)

    def broken_rules(self) -> str:
        """Rules that the plugin broke, one a line."""
        text = ctypes.create_string_buffer(1 << 12)
        self._library.mock_host_broken_rules(text, ctypes.c_size_t(len(text)))
        return text.value.decode()
