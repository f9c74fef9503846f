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
    Backend,
    Implementation,
)
from jax_flash_metal.lowering import KERNEL_PLATFORMS, has_features, takes_kernels
from jax_flash_metal.variant_table import max_head_dims


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, and why.

    Attributes:
      implementation: "metal" or "cpu" (those kernels), "xla" (the reference), "flax"
        (Flax's own function, only from `jax_flash_metal.flax.explain`) or "unsupported"
        (the call demands kernels that do not exist or must not be used; it raises
        NotImplementedError, or platforms.LibraryError without the native library).
      reason: A sentence.
      kernels: The Metal kernels' rows of the variant table, and the form of the
        backward pass; empty for everything else.
      origin: Where that comes from: "measured …" (jax_flash_metal.autotune),
        "modelled …" (the table's rows for the GPU's family, docs/model.md) or
        "default …" (the table's for an unknown family).
    """

    implementation: str
    reason: str
    kernels: str = ""
    origin: str = ""

    def __str__(self) -> str:
        text = f"{self.implementation}: {self.reason}"
        if self.kernels:
            text += f" Rows: {self.kernels} ({self.origin})."
        return text


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


def demand_kernels(reason: str, implementation: Implementation) -> NotImplementedError:
    """The error of a call that forces kernels which do not exist."""
    limits = max_head_dims()
    kernels = ", ".join(f"{d} up to head_dim {n}" for d, n in sorted(limits.items()))
    return NotImplementedError(
        f"implementation={implementation!r} cannot run this call: {reason}. The "
        f"kernels take {kernels}; implementation=None or 'xla' runs everything else."
    )


def explain(
    operands: AttentionOperands, config: AttentionConfig, platform: str
) -> Explanation:
    """What a call takes on `platform`; see api.explain for what it cannot know."""
    if config.implementation == "xla":
        return Explanation("xla", "implementation='xla' asks for the reference.")
    forced = config.implementation is not None
    otherwise = "unsupported" if forced else "xla"
    reason = unfused_reason(operands)
    if reason is not None:
        return Explanation(otherwise, f"{reason}.")
    try:
        backend = takes_kernels(config, platform)
    except NotImplementedError:
        backend = None
    if backend is None:
        names = {"metal": "Metal kernels", "cpu": "native CPU kernels"}
        missing = names.get(config.implementation or "", "kernels of ours")
        return Explanation(otherwise, f"platform {platform!r} has no {missing}.")
    forward, backward = _objections(backend, operands, config)
    if forward is not None:
        return Explanation(otherwise, f"{forward}.")
    if backend == "metal":
        from jax_flash_metal import tunings

        unfused = {
            which: tunings.unfused_reason(config, operands._asdict(), platform, which)
            for which in ("forward", "backward")
        }
        if unfused["forward"] is not None:
            return Explanation("xla", f"{unfused['forward']}.")
        backward = backward or unfused["backward"]
    who = "the kernels"
    if backend == "cpu":
        from jax_flash_metal import kernel_proof

        who = f"the native CPU kernels ({kernel_proof.family(backend)})"
    reason = f"{who} run on {KERNEL_PLATFORMS[platform][backend]}."
    if backward is not None:
        fate = "is unsupported" if forced else "takes the reference"
        reason += f" The gradient {fate}: {backward}."
    if backend == "metal":
        return Explanation(backend, reason, *tunings.describe_call(config, operands))
    return Explanation(backend, reason)


def _objections(
    backend: Backend, operands: AttentionOperands, config: AttentionConfig
) -> tuple[str | None, str | None]:
    """Why the kernels of forward and derivative must not be used on this machine."""
    # Here and not at import: they load the native library.
    from jax_flash_metal import kernel_proof, platforms
    from jax_flash_metal.attention_library import CallShape, shape_problem

    names = [n for n in OPTIONAL_OPERANDS if getattr(operands, n) is not None]
    features = has_features(config, names)
    passes = ["backward"]
    if any(name in names for name in DIFFERENTIABLE_OPTIONS):
        passes.append("gradient")
    try:
        if backend == "metal":  # in the order of lowering.py
            from jax_flash_metal import tunings

            for which in ("forward", "backward"):
                problem = tunings.prove_rows(
                    config, operands._asdict(), which, has_features=features
                )
        else:
            problem = shape_problem(CallShape.of(*operands[:3]), backend=backend)
        forward = kernel_proof.objection(backend, problem, "forward", features)
        backward = (
            kernel_proof.objection(backend, problem, p, features) for p in passes
        )
        return forward, next(filter(None, backward), None)
    except platforms.LibraryError as error:
        return error.clause, None
