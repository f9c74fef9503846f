"""FlashAttention for JAX: Metal kernels for Apple's GPUs, native ones for CPUs.

The public names. Importing this package loads no native library and no Flax;
the library is loaded when a program with our custom calls is lowered.
"""

from typing import TYPE_CHECKING

from jax_flash_metal._version import __version__

__all__ = [
    "Explanation",
    "SegmentIds",
    "__version__",
    "autotune",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "is_supported",
    "merge_partials",
]

if TYPE_CHECKING:
    from jax_flash_metal.api import (
        dot_product_attention,
        explain,
        flash_attention,
        is_supported,
        merge_partials,
    )
    from jax_flash_metal.autotuner import autotune
    from jax_flash_metal.config import SegmentIds
    from jax_flash_metal.support import Explanation
else:
    # JAX imports this package in every process that starts a backend, for its plugin
    # (pjrt.py). That must cost nothing and cannot be allowed to fail, so the modules
    # that use JAX are imported when one of these names is first used.
    _MODULES = {
        "Explanation": "support",
        "SegmentIds": "config",
        "autotune": "autotuner",
        "dot_product_attention": "api",
        "explain": "api",
        "flash_attention": "api",
        "is_supported": "api",
        "merge_partials": "api",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_MODULES})
