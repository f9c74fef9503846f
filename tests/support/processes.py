"""Python programs in processes of their own, as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(
    program: str,
    *,
    python: str = sys.executable,
    timeout: float = 120,
    **settings: str | None,
) -> subprocess.CompletedProcess[str]:
    """Runs the program without this process's JAX settings, and with `settings`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TF_", "PJRT_"))
        or name in ("JAX_FLASH_METAL_BUILD_CACHE", "JAX_FLASH_METAL_CACHE")
    }
    environment |= {k: v for k, v in settings.items() if v is not None}
    return subprocess.run(
        [python, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=ROOT,
        env=environment,
    )


def output_of(program: str, **settings: str | None) -> str:
    """What the program prints; it must succeed, and say nothing on stderr."""
    done = run_python(program, **settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()
