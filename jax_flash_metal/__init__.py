"""FlashAttention for JAX as Metal kernels, with a software Metal device elsewhere.

The public names. Importing this package loads no native library and no Flax;
the library is loaded when a program with our custom calls is lowered.
"""

from jax_flash_metal._version import __version__
from jax_flash_metal.api import (
    dot_product_attention,
    explain,
    flash_attention,
    is_supported,
    merge_partials,
)
from jax_flash_metal.config import SegmentIds
from jax_flash_metal.support import Explanation

__all__ = [
    "Explanation",
    "SegmentIds",
    "__version__",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "is_supported",
    "merge_partials",
]
