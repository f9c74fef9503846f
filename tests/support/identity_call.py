"""Cuts every program of platform flash_metal at random places, in this process.

Identity custom calls (plant.py) are put into each program that JAX compiles for the
platform, so it is partitioned, and should compute what it computes whole.
"""

from __future__ import annotations

import ctypes
import random
import zlib

from jax_flash_metal import pjrt, stablehlo
from jax_flash_metal._jax_compat import ffi
from tests.support import plant
from tests.support.shared_library import compile_library

_HANDLER = r"""
#include <cstring>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Identity(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  if (x.size_bytes() != y->size_bytes())
    return ffi::Error::InvalidArgument("operand and result differ in size");
  if (x.size_bytes() != 0)
    std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    identity, Identity, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


def cut_every_program(probability: float = 0.2, seed: int = 0) -> None:
    """From now on. The places depend on the program and the seed, on nothing else."""
    flags = ("-std=c++17", f"-I{ffi.include_dir()}", "-Wno-everything")
    library = ctypes.CDLL(str(compile_library(_HANDLER, flags=flags)))
    ffi.register_ffi_target(
        plant.TARGET, ffi.pycapsule(library.identity), platform=pjrt.PLATFORM
    )

    def cut(program: bytes) -> bytes | None:
        module, version = stablehlo.parse(program)
        # The text has no locations, which are paths of this machine.
        places = random.Random(zlib.crc32(str(module).encode()) + seed)
        if not plant.plant(module, places, probability):
            return None
        return stablehlo.serialize(module, version)

    pjrt.set_program_transform(cut)
