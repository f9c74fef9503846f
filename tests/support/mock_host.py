"""The mock host: a PJRT plugin for tests that answers as jax-metal does, strictly."""

from __future__ import annotations

from pathlib import Path

from jax_flash_metal import hosts
from plugin import build
from tests.support.shared_library import compile_library

SOURCE = build.ROOT / "tests" / "plugin" / "pjrt" / "mock_host" / "mock_host.cc"


def library() -> Path:
    """The mock's shared library, built unless that was done before."""
    return compile_library(SOURCE.read_text(), flags=build.CXX_FLAGS)


def settings(backend: str = "") -> dict[str, str]:
    """The environment in which platform flash_metal runs over the mock.

    Args:
      backend: name of the known host that the mock executes through; default: the
        first that is installed.
    """
    rows = [row for row in hosts.KNOWN_HOSTS if backend in ("", row.name)]
    installed = [path for row in rows if (path := hosts._installed_library(row))]
    return {
        "JAX_PLATFORMS": "flash_metal,cpu",
        "JAX_FLASH_METAL_HOST": str(library()),
        "JAX_FLASH_METAL_HOST_BUFFERS": "copy",
        "JFM_MOCK_HOST_BACKEND": str(installed[0]),
    }
