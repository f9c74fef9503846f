"""The plugin as on a Mac: Apple's layer over the fake Metal, behind a mock jax-metal.

The arrays of that host are objects of the fake.
"""

from __future__ import annotations

from pathlib import Path

from plugin import build
from tests.support import fake_metal, mock_host


def library() -> Path:
    """The product's library with Apple's layer, built unless that was done before."""
    folder = build.default_cache().folder / "apple"
    return build.build(device="apple", output=folder / "libjax_flash_metal.so")


def settings() -> dict[str, str]:
    """The environment for it; the program must start with prelude()."""
    return {
        **mock_host.settings(kind="jax-metal"),
        fake_metal.VARIABLE: str(fake_metal.library()),
    }


def prelude() -> str:
    """The first lines of a program: `fake` and `mock` are the two to talk to."""
    return f"""
import pathlib
from jax_flash_metal import platforms
platforms.LIBRARY = pathlib.Path({str(library())!r})
from tests.support.fake_metal import FakeMetal
from tests.support.mock_host import Control
fake = FakeMetal(pathlib.Path({str(fake_metal.library())!r}))
mock = Control()
"""
