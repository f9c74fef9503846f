"""Kernel, or the reason why not: the one decision about what a call runs.

What kernels exist says the variant table (variant_table.py); which of them work on this
machine says their proof (kernel_proof.py).
"""

from __future__ import annotations

import dataclasses

from jax_flash_metal.config import (
    DIFFERENTIABLE_OPTIONS,
    OPTIONAL_OPERANDS,
    AttentionConfig,
    AttentionOperands,
)
from jax_flash_metal.lowering import KERNEL_PLATFORMS, has_features
from jax_flash_metal.variant_table import max_head_dims


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, and why.

    Attributes:
      implementation: "metal" (the kernels), "xla" (the reference), "flax" (Flax's own
        function, only from `jax_flash_metal.flax.explain`) or "unsupported" (the call
        demands kernels that do not exist; it raises NotImplementedError).
      reason: A sentence.
    """

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


def unfused_reason(operands: AttentionOperands) -> str | None:
    """Why no kernel covers the call, as a clause, or None if the kernels do."""
    dtype = operands.query.dtype.name
    limits = max_head_dims()
    if dtype not in limits:
        return f"there is no kernel for {dtype}, only for {', '.join(sorted(limits))}"
    head_dim = max(operands.query.shape[-1], operands.value.shape[-1])
    if head_dim > limits[dtype]:
        return (
            f"head_dim {head_dim} is above {limits[dtype]}, "
            f"the largest that the {dtype} kernels take"
        )
    return None


def demand_kernels(reason: str) -> NotImplementedError:
    """The error of a call that forces kernels which do not exist."""
    limits = max_head_dims()
    kernels = ", ".join(f"{d} up to head_dim {n}" for d, n in sorted(limits.items()))
    return NotImplementedError(
        f"implementation='metal' cannot run this call: {reason}. The kernels take "
        f"{kernels}; implementation=None or 'xla' runs everything else."
    )


def explain(
    operands: AttentionOperands, config: AttentionConfig, platform: str
) -> Explanation:
    """What a call takes on `platform`."""
    if config.implementation == "xla":
        return Explanation("xla", "implementation='xla' asks for the reference.")
    reason = unfused_reason(operands)
    forced = config.implementation == "metal"
    if reason is not None:
        return Explanation("unsupported" if forced else "xla", f"{reason}.")
    row = KERNEL_PLATFORMS.get(platform)
    if row is None:
        reason = f"platform {platform!r} has no Metal kernels."
        return Explanation("unsupported" if forced else "xla", reason)
    if not forced and not row.by_default:
        return Explanation(
            "xla",
            f"on platform {platform!r} the kernels run on {row.device}, "
            f"{row.unless_asked}; implementation='metal' takes it.",
        )
    forward, backward = _objections(operands, config)
    if forward is not None:
        return Explanation("unsupported" if forced else "xla", f"{forward}.")
    reason = f"the kernels run on {row.device}."
    if backward is not None:
        fate = "is unsupported" if forced else "takes the reference"
        reason += f" The gradient {fate}: {backward}."
    return Explanation("metal", reason)


def _objections(
    operands: AttentionOperands, config: AttentionConfig
) -> tuple[str | None, str | None]:
    """Why the kernels of forward and derivative must not be used on this machine."""
    # Here and not at import: they load the native library.
    from jax_flash_metal import kernel_proof, platforms
    from jax_flash_metal.attention_library import CallShape

    shape = CallShape.of(*operands[:3])
    names = [n for n in OPTIONAL_OPERANDS if getattr(operands, n) is not None]
    features = has_features(config, names)
    passes = ["backward"]
    if any(name in names for name in DIFFERENTIABLE_OPTIONS):
        passes.append("gradient")
    try:
        forward = kernel_proof.objection(shape, "forward", features)
        backward = (kernel_proof.objection(shape, p, features) for p in passes)
        return forward, next(filter(None, backward), None)
    except platforms.LibraryError as error:
        return str(error).rstrip("."), None
