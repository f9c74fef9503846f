"""Programs with our kernels through `jax.export`: to write one down and to run it.

    exported = jax.export.export(
        jax.jit(f), disabled_checks=jax_flash_metal.export.DISABLED_CHECKS
    )(x)
    data = exported.serialize(vjp_order=1)

    # In another process.
    jax_flash_metal.export.register_kernels()
    jax.export.deserialize(data).call(x)

Programs that take the reference (implementation="xla") need neither. On platform cpu a
program takes the native CPU kernels unless it says so.
"""

from __future__ import annotations

import jax.export

from jax_flash_metal import platforms, tunings
from jax_flash_metal.lowering import TARGETS

__all__ = ["DISABLED_CHECKS", "register_kernels"]

# For jax.export.export: our custom calls. Their names carry the version of what they
# take, so a later release that takes something else refuses an old program by name.
DISABLED_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS.values()
)


def register_kernels() -> None:
    """Lets this process run programs that were exported with our kernels.

    A process that traced a call of ours has done so already. The kernels are not proven
    here, as they are before a call of ours is compiled; `python -m jax_flash_metal
    doctor` does that. What `autotune` has stored is used.

    Raises:
      LibraryError: The native library is missing or of another release.
    """
    platforms.ensure_registered()
    tunings.load()
