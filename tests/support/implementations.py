"""Implementations by the names that test ids have: those of the argument, and one more.

"fallback" is a default call where the kernels cannot serve it: our primitives and
derivative rules, lowered to the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jax_flash_metal import checks, lowering

FALLBACK = "fallback"


@contextlib.contextmanager
def chosen(name: str) -> Iterator[str]:
    """What to pass as `implementation`, as long as the context lasts."""
    if name != FALLBACK:
        yield name
        return
    check, take = checks.implementation, lowering.takes_kernels

    def accept(x: Any) -> Any:
        return x if x == FALLBACK else check(x)

    def refuse(config: Any, platform: str) -> Any:
        return None if config.implementation == FALLBACK else take(config, platform)

    # A value of its own: JAX keeps no program of it for calls of another.
    with (
        mock.patch.object(checks, "implementation", accept),
        mock.patch.object(lowering, "takes_kernels", refuse),
    ):
        yield FALLBACK
