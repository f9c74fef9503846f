"""Packaging hook: builds the native library and puts it into the wheel.

JAX_FLASH_METAL_TARGET chooses another platform than this machine's. Where there is no
device of ours (Windows, Intel Macs) the wheel is pure Python. The building is build.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected; `version` is "standard" or "editable"."""
        sys.path.insert(0, self.root)  # the tree that is built, not an installed one
        from plugin import build

        name = os.environ.get("JAX_FLASH_METAL_TARGET") or build.host_target()
        if name not in build.TARGETS:
            self.app.display_warning(
                f"jax-flash-metal: no native library for {name} (known: "
                f"{', '.join(build.TARGETS)}); the wheel has the Python part only."
            )
            return
        target = build.TARGETS[name]
        if version == "editable":
            build.build(target=name)
            return
        library = build.build(
            target=name, output=Path(self.root, "build", name, target.library)
        )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target.wheel_platform}"
        build_data["force_include"][str(library)] = (
            f"jax_flash_metal/_native/{target.library}"
        )
