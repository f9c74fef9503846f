"""Kernel, or the reason why not: the one decision about what a call runs.

Reads what kernels exist from the variant table (metal_kernels/variants.toml), which the
kernels' instantiation and the native planner read too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from jax_flash_metal.config import AttentionConfig, AttentionOperands
from jax_flash_metal.lowering import KERNEL_PLATFORMS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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


# Operands and options that are valid but that no kernel takes yet.
_UNFUSED_OPERANDS = {
    "bias": "bias",
    "mask": "mask",
    "q_offset": "a traced q_offset",
    "q_segment_ids": "segment_ids",
    "query_seq_lengths": "query_seq_lengths",
    "key_value_seq_lengths": "key_value_seq_lengths",
    "sinks": "sinks",
    "alibi_slopes": "alibi_slopes",
}


def unfused_reason(operands: AttentionOperands, config: AttentionConfig) -> str | None:
    """Why no kernel covers the call, as a clause, or None if the kernels do."""
    features = [
        name
        for field, name in _UNFUSED_OPERANDS.items()
        if getattr(operands, field) is not None
    ]
    if config.sliding_window is not None:
        features.append("sliding_window")
    if config.logits_soft_cap is not None:
        features.append("logits_soft_cap")
    if config.dropout_rate:
        features.append("dropout")
    if features:
        return f"the kernels do not take {', '.join(features)} yet"
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
        f"{kernels}, with is_causal and a static q_offset; implementation=None or "
        "'xla' runs everything else."
    )


def explain(
    operands: AttentionOperands, config: AttentionConfig, platform: str
) -> Explanation:
    """What a call takes on `platform`."""
    if config.implementation == "xla":
        return Explanation("xla", "implementation='xla' asks for the reference.")
    reason = unfused_reason(operands, config)
    forced = config.implementation == "metal"
    if reason is not None:
        return Explanation("unsupported" if forced else "xla", f"{reason}.")
    row = KERNEL_PLATFORMS.get(platform)
    if row is None:
        reason = f"platform {platform!r} has no Metal kernels."
        return Explanation("unsupported" if forced else "xla", reason)
    if forced or row.by_default:
        return Explanation("metal", f"the kernels run on {row.device}.")
    return Explanation(
        "xla",
        f"on platform {platform!r} the kernels run on {row.device}, which is for "
        "development; implementation='metal' takes it.",
    )


@functools.cache
def max_head_dims() -> dict[str, int]:
    """Largest head_dim per dtype name that every kernel of the table covers."""
    limits: dict[str, dict[str, int]] = {}
    for row in _variant_table():
        for dtype in row["dtypes"]:
            kernels = limits.setdefault(dtype, {})
            kernels[row["kernel"]] = max(row["head_dim"], kernels.get(row["kernel"], 0))
    return {dtype: min(kernels.values()) for dtype, kernels in limits.items()}


def _variant_table() -> list[dict[str, Any]]:
    # In a wheel the kernels are inside the package, in a source tree beside it.
    package = Path(__file__).parent
    candidates = [p / "metal_kernels/variants.toml" for p in (package, package.parent)]
    for path in candidates:
        if path.is_file():
            variants: list[dict[str, Any]] = tomllib.loads(path.read_text())["variant"]
            return variants
    raise RuntimeError(
        "The table of kernel variants is missing: expected it at "
        f"{' or '.join(str(p) for p in candidates)}; reinstall jax-flash-metal."
    )
