"""The command line: `python -m jax_flash_metal doctor`, `… bench` and `… counts`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_flash_metal import bench, counts, doctor
from jax_flash_metal._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash_metal",
        description="FlashAttention for JAX: tests an installation, measures, counts.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, bench, counts):
        command.add_command(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # with the options of the command, which parse_args() would not list
        named: argparse.ArgumentParser = commands.choices[options.command]
        named.error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
