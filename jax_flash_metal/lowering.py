"""Code for the primitives: a custom call to the kernels, or the reference.

The one table of platforms that have our custom calls is here, and the names and
attributes that the handlers (plugin/ffi) decode: version 3 of the wire format.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    BACKENDS,
    DIFFERENTIABLE_OPTIONS,
    OPTIONAL_OPERANDS,
    AttentionConfig,
    AttentionOperands,
    Backend,
    operand_names,
)

FORWARD_TARGET = "jax_flash_metal_forward_v3"
BACKWARD_TARGET = "jax_flash_metal_backward_v3"
GRADIENT_TARGET = "jax_flash_metal_gradient_v3"
WIRE_VERSION = 3
TARGETS = {
    "forward": FORWARD_TARGET,
    "backward": BACKWARD_TARGET,
    "gradient": GRADIENT_TARGET,
}


_METAL_DEVICE = (
    "Apple's GPU" if sys.platform == "darwin" else "the software Metal device"
)

# The JAX platforms whose runtimes have our custom calls: which kernels each has, first
# those that a call takes which names no implementation, and what runs them, for
# messages. Another platform with our handlers is another row.
KERNEL_PLATFORMS: dict[str, Mapping[Backend, str]] = {
    "cpu": {"cpu": "this machine's cores", "metal": _METAL_DEVICE},
    # Ours, see pjrt.py: the user asked for it by name.
    "flash_metal": {
        "metal": f"{_METAL_DEVICE}, everything around them on the host plugin"
    },
}


def attributes(
    backend: Backend,
    config: AttentionConfig,
    names: tuple[str, ...],
    of: str | None = None,
) -> dict[str, Any]:
    """The custom call's attributes: exactly these names and types.

    Args:
      backend: Which kernels it takes.
      config: Of the call.
      names: Of the optional operands that the call has.
      of: The operand whose gradient it computes; None for the other passes.
    """
    left, right = config.sliding_window or (None, None)
    result = {
        "version": np.int64(WIRE_VERSION),
        "backend": np.int64(BACKENDS.index(backend)),
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


def takes_kernels(config: AttentionConfig, *platforms: str) -> Backend | None:
    """Which kernels the program for a platform calls; None: it takes the reference.

    So does one piece of program that is for several platforms: it cannot have the
    kernels of each.

    Raises:
      NotImplementedError: Kernels are demanded where there are none of them.
    """
    is_one = len(platforms) == 1
    kernels = KERNEL_PLATFORMS.get(platforms[0], {}) if is_one else {}
    wanted = config.implementation
    if wanted is None:
        return next(iter(kernels), None)
    if wanted == "xla":
        return None
    if wanted not in kernels:
        places = [repr(name) for name, row in KERNEL_PLATFORMS.items() if wanted in row]
        raise NotImplementedError(
            f"implementation={wanted!r} needs platform {' or '.join(places)}, but this "
            f"program is compiled for {'/'.join(platforms)!r}; implementation=None or "
            "'xla' runs everywhere."
        )
    return wanted


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
    platforms = lowering_platforms(ctx) if platform is None else (platform,)
    backend = takes_kernels(config, *platforms)
    if (
        backend is not None
        and not _falls_back(backend, which, ctx, config, names)
        and not (
            backend == "metal" and _is_unfused(which, ctx, config, names, platforms[0])
        )
    ):
        # Here and not at import: `import jax_flash_metal` must stay light.
        from jax_flash_metal.platforms import ensure_registered

        ensure_registered()
        if backend == "metal":  # the others wait for no thread
            refuse_in_forked_process()
            note_kernel_program()
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
        return rule(ctx, *operands, **attributes(backend, config, names, of))
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


def _is_unfused(
    which: str,
    ctx: Any,
    config: AttentionConfig,
    names: tuple[str, ...],
    platform: str,
) -> bool:
    """Whether the reference was measured to be faster for such calls here."""
    from jax_flash_metal import tunings

    if num_partitions(ctx) > 1:
        return False  # asked again, for the part of one device
    operands = _operands_of(ctx, names)
    return tunings.unfused_reason(config, operands, platform, which) is not None


def _operands_of(ctx: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(operand_names(names, has_residuals=False), ctx.avals_in))


class _Objection(NamedTuple):
    """Why a call must not take the kernels, as a clause, and what the user can do."""

    reason: str
    advice: str


def _falls_back(
    backend: Backend,
    which: str,
    ctx: Any,
    config: AttentionConfig,
    names: tuple[str, ...],
) -> bool:
    """Whether the call takes the reference, for the kernels cannot serve it here.

    Warns if so.

    Raises:
      NotImplementedError: The kernels are demanded.
      platforms.LibraryError: They are, and there is no library.
    """
    from jax_flash_metal import kernel_proof

    objection = _objection(backend, which, ctx, config, names)
    if objection is None:
        return False
    if config.implementation is not None:
        raise NotImplementedError(
            f"implementation={config.implementation!r} cannot run this call: "
            f"{objection.reason}. {objection.advice} implementation=None or 'xla' runs "
            "everywhere."
        )
    kernel_proof.warn(*objection)
    return True


def _objection(
    backend: Backend,
    which: str,
    ctx: Any,
    config: AttentionConfig,
    names: tuple[str, ...],
) -> _Objection | None:
    from jax_flash_metal import kernel_proof, platforms, tunings
    from jax_flash_metal.attention_library import CallShape, shape_problem

    features = has_features(config, names)
    try:
        if num_partitions(ctx) > 1:
            # The part of one device, which has a class of its own and other kernels,
            # is lowered by the same rule, and may take the reference alone.
            reason = kernel_proof.missing_device(backend)
        else:
            if backend == "metal":  # what was measured is proven before what runs
                problem = tunings.prove_rows(
                    config, _operands_of(ctx, names), which, has_features=features
                )
            else:
                shape = CallShape.of(*ctx.avals_in[:3])
                problem = shape_problem(shape, backend=backend)
            reason = kernel_proof.objection(backend, problem, which, features)
    except platforms.LibraryError as error:
        if config.implementation is not None:
            raise
        return _Objection(error.clause, kernel_proof.WHAT_TO_DO)
    if reason is not None:
        return _Objection(reason, kernel_proof.WHAT_TO_DO)
    if is_lost_to_gspmd(ctx):  # it would end the process
        return _Objection(
            "inside a shard_map over some of the mesh's axes the kernels need JAX's "
            "partitioner Shardy",
            "Map over all axes or set jax_use_shardy_partitioner.",
        )
    return None


def has_features(config: AttentionConfig, names: Sequence[str]) -> bool:
    """Whether a call needs more of the kernels than plain attention; `names`: above."""
    return bool(
        names
        or config.sliding_window is not None
        or config.logits_soft_cap is not None
        or config.dropout_rate
    )
