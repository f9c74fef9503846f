"""Code for the primitives: a custom call to the kernels, or the reference.

The one table of platforms that have our custom calls is here, and the names and
attributes that the handlers (plugin/ffi) decode: version 1 of the wire format.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash_metal import reference
from jax_flash_metal._jax_compat import ffi, lowering_platforms, mlir
from jax_flash_metal.config import AttentionConfig

FORWARD_TARGET = "jax_flash_metal_forward_v1"
BACKWARD_TARGET = "jax_flash_metal_backward_v1"
WIRE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class KernelPlatform:
    """A JAX platform whose runtime has our custom calls.

    Attributes:
      device: What runs the kernels there, for messages.
      by_default: Whether a call that names no implementation takes the kernels.
      unless_asked: Why it does not, as a clause.
    """

    device: str
    by_default: bool
    unless_asked: str = ""


if sys.platform == "darwin":
    _DEVICE = "Apple's GPU"
    _UNLESS_ASKED = "which platform 'flash_metal' takes by default"
else:
    _DEVICE = "the software Metal device"
    _UNLESS_ASKED = "which is for development"

# Another platform with our handlers is another row.
KERNEL_PLATFORMS: dict[str, KernelPlatform] = {
    "cpu": KernelPlatform(_DEVICE, by_default=False, unless_asked=_UNLESS_ASKED),
    # Ours, see pjrt.py: the user asked for it by name.
    "flash_metal": KernelPlatform(
        f"{_DEVICE}, everything around them on the host plugin", by_default=True
    ),
}


def attributes(config: AttentionConfig) -> dict[str, Any]:
    """The custom call's attributes: exactly these names and types."""
    return {
        "version": np.int64(WIRE_VERSION),
        "scale": np.float32(config.scale),
        "is_causal": config.is_causal,
        "q_offset": np.int64(config.q_offset),
    }


def takes_kernels(config: AttentionConfig, platform: str) -> bool:
    """Whether the program for `platform` calls the kernels or the reference.

    Raises:
      NotImplementedError: The kernels are demanded where there are none.
    """
    row = KERNEL_PLATFORMS.get(platform)
    if config.implementation == "metal" and row is None:
        raise NotImplementedError(
            "implementation='metal' needs one of the platforms "
            f"{sorted(KERNEL_PLATFORMS)}, but this program is compiled for "
            f"{platform!r}; implementation=None or 'xla' runs everywhere."
        )
    if config.implementation is None:
        return row is not None and row.by_default
    return config.implementation == "metal"


def register(forward: Any, backward: Any) -> None:
    """Registers the lowerings of the two primitives on every platform."""
    rules = (
        (forward, FORWARD_TARGET, reference.plain_attention),
        (backward, BACKWARD_TARGET, reference.plain_attention_backward),
    )
    for primitive, target, fallback in rules:
        # JAX takes no rules for platforms that it does not know yet, and ours is known
        # only once a backend was started: the general rule serves it. The one for cpu
        # is its own, so that a program lowered for several platforms at once
        # (jax.export) has the custom call there and the reference elsewhere.
        for platform in (None, "cpu"):
            rule = functools.partial(_lower, target, fallback, platform)
            mlir.register_lowering(primitive, rule, platform=platform)


def _lower(
    target: str,
    fallback: Callable[..., Sequence[jax.Array]],
    platform: str | None,
    ctx: Any,
    *operands: Any,
    config: AttentionConfig,
) -> Any:
    """`platform` None: whatever the program is lowered for."""
    if platform is None:
        platform = "/".join(lowering_platforms(ctx))
    if takes_kernels(config, platform) and _are_proven(target, ctx.avals_in, config):
        # Here and not at import: `import jax_flash_metal` must stay light.
        from jax_flash_metal.platforms import ensure_registered

        ensure_registered()
        return ffi.ffi_lowering(target)(ctx, *operands, **attributes(config))
    lower = mlir.lower_fun(fallback, multiple_results=True)
    return lower(ctx, *operands, config=config)


def _are_proven(target: str, avals: Sequence[Any], config: AttentionConfig) -> bool:
    """Whether the kernels of the call compute the right numbers on this machine.

    Warns if not.

    Raises:
      NotImplementedError: They do not, and are demanded.
    """
    from jax_flash_metal import kernel_proof
    from jax_flash_metal.attention_library import CallShape

    shape = CallShape.of(*avals[:3])
    reason = kernel_proof.objection(shape, backward=target == BACKWARD_TARGET)
    if reason is None:
        return True
    if config.implementation == "metal":
        raise NotImplementedError(
            f"implementation='metal' cannot run this call: {reason}. "
            f"{kernel_proof.WHAT_TO_DO} implementation=None or 'xla' runs everywhere."
        )
    kernel_proof.warn(reason)
    return False
