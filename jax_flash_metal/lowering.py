"""Code for the primitives: a custom call to the kernels, or the reference.

The one table of platforms that have our custom calls is here, and the names and
attributes that the handlers (plugin/ffi) decode: version 2 of the wire format.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash_metal import reference, sharding
from jax_flash_metal._jax_compat import (
    ffi,
    is_lost_to_gspmd,
    lowering_platforms,
    mlir,
    note_kernel_program,
    num_partitions,
    refuse_in_forked_process,
)
from jax_flash_metal.config import (
    DIFFERENTIABLE_OPTIONS,
    OPTIONAL_OPERANDS,
    AttentionConfig,
    AttentionOperands,
    operand_names,
)

FORWARD_TARGET = "jax_flash_metal_forward_v2"
BACKWARD_TARGET = "jax_flash_metal_backward_v2"
GRADIENT_TARGET = "jax_flash_metal_gradient_v2"
WIRE_VERSION = 2
TARGETS = {
    "forward": FORWARD_TARGET,
    "backward": BACKWARD_TARGET,
    "gradient": GRADIENT_TARGET,
}


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


def attributes(
    config: AttentionConfig, names: tuple[str, ...], of: str | None = None
) -> dict[str, Any]:
    """The custom call's attributes: exactly these names and types.

    Args:
      config: Of the call.
      names: Of the optional operands that the call has.
      of: The operand whose gradient it computes; None for the other passes.
    """
    left, right = config.sliding_window or (None, None)
    result = {
        "version": np.int64(WIRE_VERSION),
        "operands": np.int64(sum(1 << OPTIONAL_OPERANDS.index(n) for n in names)),
        "scale": np.float32(config.scale),
        "is_causal": config.is_causal,
        "q_offset": np.int64(config.q_offset),
        "window_left": np.int64(_NO_LIMIT if left is None else left),
        "window_right": np.int64(_NO_LIMIT if right is None else right),
        "logits_soft_cap": np.float32(config.logits_soft_cap or 0),
        "dropout_rate": np.float64(config.dropout_rate),
    }
    if of is not None:
        result["gradient_of"] = np.int64(DIFFERENTIABLE_OPTIONS.index(of))
    return result


_NO_LIMIT = -1


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


def register(**primitives: Any) -> None:
    """Registers the lowerings of the primitives, by pass, on every platform."""
    for which, primitive in primitives.items():
        # JAX takes no rules for platforms that it does not know yet, and ours is known
        # only once a backend was started: the general rule serves it. The one for cpu
        # is its own, so that a program lowered for several platforms at once
        # (jax.export) has the custom call there and the reference elsewhere.
        for platform in (None, "cpu"):
            rule = functools.partial(_lower, which, platform, primitive)
            mlir.register_lowering(primitive, rule, platform=platform)


def _lower(
    which: str,
    platform: str | None,
    primitive: Any,
    ctx: Any,
    *operands: Any,
    config: AttentionConfig,
    names: tuple[str, ...],
    **gradient: Any,
) -> Any:
    """`platform` None: whatever the program is lowered for."""
    if platform is None:
        platform = "/".join(lowering_platforms(ctx))
    if takes_kernels(config, platform) and _are_proven(
        which, ctx.avals_in, config, names
    ):
        # Here and not at import: `import jax_flash_metal` must stay light.
        from jax_flash_metal.platforms import ensure_registered

        ensure_registered()
        refuse_in_forked_process()
        note_kernel_program()
        _refuse_what_gspmd_cannot(ctx)
        of = gradient.get("of")
        if num_partitions(ctx) > 1:
            # The same primitive again, for the part of one device.
            call = functools.partial(
                primitive.bind, config=config, names=names, **gradient
            )
            return sharding.lower(
                ctx,
                call,
                operands,
                operand_names(names, has_residuals=which != "forward"),
                result_names(which, of),
            )
        rule = ffi.ffi_lowering(TARGETS[which])
        return rule(ctx, *operands, **attributes(config, names, of))
    lower = mlir.lower_fun(_REFERENCE[which], multiple_results=True)
    return lower(ctx, *operands, config=config, names=names, **gradient)


def result_names(which: str, of: str | None = None) -> tuple[str, ...]:
    """The results of a pass in order, by their names in DIMS."""
    if of is not None:
        return (of,)
    if which == "forward":
        return ("out", "logsumexp")
    return ("dquery", "dkey", "dvalue")


def _forward(
    *arrays: jax.Array, config: AttentionConfig, names: tuple[str, ...]
) -> Sequence[jax.Array]:
    operands, _ = _unpack(arrays, names)
    return reference.attention(operands, config)


def _backward(
    *arrays: jax.Array, config: AttentionConfig, names: tuple[str, ...]
) -> Sequence[jax.Array]:
    operands, (out, logsumexp, dout, dlogsumexp) = _unpack(arrays, names)
    return reference.attention_backward(
        operands, out, logsumexp, dout, dlogsumexp, config
    )


def _gradient(
    *arrays: jax.Array,
    config: AttentionConfig,
    names: tuple[str, ...],
    of: str,
    num_mapped: int,
) -> Sequence[jax.Array]:
    operands, (out, logsumexp, dout, dlogsumexp) = _unpack(arrays, names)
    gradient = reference.operand_gradient(
        of, operands, out, logsumexp, dout, dlogsumexp, config, num_mapped
    )
    return [gradient]


# What the primitives mean, with their operands and parameters.
_REFERENCE: dict[str, Callable[..., Sequence[jax.Array]]] = {
    "forward": _forward,
    "backward": _backward,
    "gradient": _gradient,
}


def _unpack(
    arrays: Sequence[Any], names: tuple[str, ...]
) -> tuple[AttentionOperands, Any]:
    """The operands of a primitive as a record, and the residuals behind them."""
    end = 3 + len(names)
    named = dict(zip(operand_names(names, has_residuals=False), arrays[:end]))
    return AttentionOperands(**named), arrays[end:]


def _are_proven(
    which: str,
    avals: Sequence[Any],
    config: AttentionConfig,
    names: tuple[str, ...],
) -> bool:
    """Whether the kernels of the call compute the right numbers on this machine.

    Warns if not.

    Raises:
      NotImplementedError: They do not, and are demanded.
    """
    from jax_flash_metal import kernel_proof
    from jax_flash_metal.attention_library import CallShape

    shape = CallShape.of(*avals[:3])
    reason = kernel_proof.objection(shape, which, has_features(config, names))
    if reason is None:
        return True
    if config.implementation == "metal":
        raise NotImplementedError(
            f"implementation='metal' cannot run this call: {reason}. "
            f"{kernel_proof.WHAT_TO_DO} implementation=None or 'xla' runs everywhere."
        )
    kernel_proof.warn(reason)
    return False


def _refuse_what_gspmd_cannot(ctx: Any) -> None:
    """Platforms with several devices take the kernels only where they are demanded.

    Raises:
      NotImplementedError: JAX's partitioner would end the process.
    """
    if is_lost_to_gspmd(ctx):
        raise NotImplementedError(
            "implementation='metal' cannot run this call: inside a shard_map over some "
            "of the mesh's axes it needs JAX's partitioner Shardy. Map over all axes "
            "or set jax_use_shardy_partitioner; implementation=None or 'xla' runs "
            "everywhere."
        )


def has_features(config: AttentionConfig, names: Sequence[str]) -> bool:
    """Whether a call needs more of the kernels than plain attention; `names`: above."""
    return bool(
        names
        or config.sliding_window is not None
        or config.logits_soft_cap is not None
        or config.dropout_rate
    )
