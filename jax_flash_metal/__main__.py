"""The command line: `python -m jax_flash_metal doctor`, `… bench` and `… counts`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_flash_metal import bench, counts, doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash_metal",
        description="FlashAttention for JAX: tests an installation, measures, counts.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, bench, counts):
        command.add_command(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
