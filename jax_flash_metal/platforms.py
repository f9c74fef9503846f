"""The native library: finds it, loads it, registers its handlers with JAX.

Done when a program with our custom calls is first lowered, not on import. Knows the
library's C symbols; knows nothing of attention.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from jax_flash_metal import _jax_compat
from jax_flash_metal._version import __version__
from jax_flash_metal.lowering import (
    BACKWARD_TARGET,
    FORWARD_TARGET,
    KERNEL_PLATFORMS,
)

LIBRARY = Path(__file__).parent / "_native" / "libjax_flash_metal.so"
# JFM_ABI_VERSION of plugin/c_api/c_api.h.
ABI_VERSION = 1


class LibraryError(RuntimeError):
    """The native library is missing, cannot be loaded, or is of another release."""


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Loads the native library and checks that it belongs to this package.

    Raises:
      LibraryError: It is missing, cannot be loaded, or is of another release.
    """
    if not path.is_file():
        raise LibraryError(
            f"the native library {path} is missing: this installation has no Metal "
            "kernels. In a source tree run `make build`, otherwise reinstall "
            "jax-flash-metal; implementation='xla' needs no library."
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"cannot load the native library: {error}") from error
    library.jfm_version.restype = ctypes.c_char_p
    version = library.jfm_version().decode()
    abi_version = library.jfm_abi_version()
    if (version, abi_version) != (__version__, ABI_VERSION):
        raise LibraryError(
            f"the native library {path} is version {version} with ABI {abi_version}, "
            f"but this package is version {__version__} with ABI {ABI_VERSION}: "
            "rebuild it (`make build`) or reinstall jax-flash-metal."
        )
    return library


@functools.cache
def ensure_registered() -> None:
    """Registers our custom calls with JAX; only the first call does anything.

    Raises:
      LibraryError: There is no library to register.
    """
    library = load_library()
    for target in (FORWARD_TARGET, BACKWARD_TARGET):
        handler = _jax_compat.ffi.pycapsule(getattr(library, target))
        for platform in KERNEL_PLATFORMS:
            _jax_compat.ffi.register_ffi_target(target, handler, platform=platform)
