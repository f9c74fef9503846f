"""Programs on platform flash_metal in the tests' own process, with handlers to call."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import platforms
from jax_flash_metal._jax_compat import ffi
from tests.plugin.pjrt import custom_calls
from tests.support.ffi_call import bind

TARGETS = ("Scale", "Fail", "Throw", "Async", "Scratch", "Pool", "SumAll", "Nothing")


def device() -> Any:
    return jax.devices("flash_metal")[0]


def put(value: Any) -> jax.Array:
    return jax.device_put(jnp.asarray(value), device())


@functools.cache
def register_handlers() -> None:
    """Third-party handlers of tests/plugin/pjrt/handlers, as `test_<name>`."""
    device()  # the platform must be there for errors of the registration to reach us
    for name in TARGETS:
        handler = ffi.pycapsule(getattr(custom_calls.handlers(), name))
        ffi.register_ffi_target(f"test_{name}", handler, platform="flash_metal")


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def scale(x: jax.Array, factor: float = 2.0) -> jax.Array:
    """x * factor, by a custom call."""
    register_handlers()
    return bind("test_Scale", [like(x)], x, factor=np.float32(factor))[0]


def statistics() -> dict[str, int]:
    text = ctypes.create_string_buffer(1 << 12)
    platforms.load_library().jfm_pjrt_statistics(text, len(text))
    lines = text.value.decode().splitlines()
    return {key: int(value) for key, value in (line.split("=") for line in lines)}
