"""Copies of the package with something changed, each run in a process of its own.

What a user has who installed a broken build; nothing in the package knows of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_flash_metal import platforms
from plugin import build
from tests.checker.planted import Bug, copy_of_kernels


def broken_kernels(folder: Path, bugs: Sequence[Bug]) -> tuple[Path, Path]:
    """(kernels, library) of a small table of variants with the bugs in it.

    The form of its backward pass is that of the whole table.
    """
    kernels = copy_of_kernels(folder, form="B")
    for bug in bugs:
        bug.plant(kernels)
    library = folder / platforms.LIBRARY.name
    build.build(kernel_dir=kernels, output=library)
    return kernels, library


class PackageCopy:
    """The package in a folder, with this library and table of variants.

    Args:
      folder: For the copy, and for all that its processes write.
      kernels: The folder of the kernels; None: the tree's.
      library: None: the copy has none.
    """

    def __init__(
        self, folder: Path, *, kernels: Path | None, library: Path | None
    ) -> None:
        self.folder = folder
        self.package = folder / "jax_flash_metal"
        ignored = shutil.ignore_patterns("_native", "__pycache__")
        shutil.copytree(build.ROOT / "jax_flash_metal", self.package, ignore=ignored)
        shutil.copytree(kernels or build.KERNEL_DIR, self.package / "metal_kernels")
        if library is not None:
            native = self.package / "_native"
            native.mkdir()
            shutil.copy2(library, native / platforms.LIBRARY.name)

    def edit(self, module: str, old: str, new: str) -> None:
        """Replaces a text that is in a module once."""
        path = self.package / f"{module}.py"
        text = path.read_text()
        assert text.count(old) == 1, f"{module}: {text.count(old)} x {old!r}"
        path.write_text(text.replace(old, new))

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, in the folder; JAX's settings are `settings`."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_"))
        }
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=self.folder,
            env={
                **kept,
                "PYTHONPATH": str(self.folder),
                "JAX_FLASH_METAL_CACHE": str(self.folder / "cache"),
                **settings,
            },
        )
