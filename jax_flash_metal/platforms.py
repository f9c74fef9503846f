"""The native library: finds it, loads it, registers its handlers with JAX.

Done when a program with our custom calls is first lowered, not on import. Knows the
library's C symbols and the folder of its caches; knows nothing of attention.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

from jax_flash_metal import _jax_compat
from jax_flash_metal._version import __version__
from jax_flash_metal.lowering import (
    BACKWARD_TARGET,
    FORWARD_TARGET,
    GRADIENT_TARGET,
    KERNEL_PLATFORMS,
)

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
LIBRARY = Path(__file__).parent / "_native" / f"libjax_flash_metal{_SUFFIX}"
# JFM_ABI_VERSION of plugin/c_api/c_api.h.
ABI_VERSION = 5


# Where compiled kernels and their proofs are kept between processes.
CACHE_SETTING = "JAX_FLASH_METAL_CACHE"


class LibraryError(RuntimeError):
    """The native library is missing, cannot be loaded, or is of another release."""

    @property
    def clause(self) -> str:
        """The message, without the full stop that it may end with."""
        return str(self).rstrip(".")


def load_library(path: Path | None = None) -> ctypes.CDLL:
    """Loads the native library and checks that it belongs to this package.

    Args:
      path: None: LIBRARY, as it is when this is called.

    Raises:
      LibraryError: It is missing, cannot be loaded, or is of another release.
    """
    path = path or LIBRARY
    if not path.is_file():
        raise LibraryError(
            f"the native library {path} is missing: this installation has no kernels. "
            "In a source tree run `make build`, otherwise reinstall jax-flash-metal; "
            "implementation='xla' needs no library."
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
    folder = cache_folder()
    if folder is not None:
        library.jfm_set_cache_folder(ctypes.c_char_p(os.fsencode(folder)))
    return library


def cache_folder() -> Path | None:
    """The folder of the setting, else of the system's caches; it need not exist.

    None where there is none: then nothing is kept between processes.
    """
    setting = os.environ.get(CACHE_SETTING, "")
    try:
        if setting:
            return Path(setting).expanduser().absolute()
        if sys.platform == "darwin":
            caches = Path.home() / "Library" / "Caches"
        else:
            named = os.environ.get("XDG_CACHE_HOME", "")
            caches = Path(named) if named else Path.home() / ".cache"
    except RuntimeError:  # nobody's home, or that of a user who is not there
        return None
    return caches.absolute() / "jax-flash-metal"


@functools.cache
def ensure_registered() -> None:
    """Registers our custom calls with JAX; only the first call does anything.

    Raises:
      LibraryError: There is no library to register.
    """
    library = load_library()
    for target in (FORWARD_TARGET, BACKWARD_TARGET, GRADIENT_TARGET):
        handler = _jax_compat.ffi.pycapsule(getattr(library, target))
        for platform in KERNEL_PLATFORMS:
            _jax_compat.ffi.register_ffi_target(target, handler, platform=platform)
