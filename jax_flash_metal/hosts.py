"""Finds the host plugin that platform flash_metal runs over, and looks at its file.

Loads and imports nothing: the native library loads the host (plugin/pjrt/host.cc).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

# Path of a host's library, or the name of a host of the table below.
HOST_SETTING = "JAX_FLASH_METAL_HOST"
# How the kernels reach the host's buffers: see BUFFERS.
BUFFERS_SETTING = "JAX_FLASH_METAL_HOST_BUFFERS"
# auto: by the host's identity. address: a buffer's pointer is an address of this
# process. copy: through copies, which every host can do.
BUFFERS = ("auto", "address", "copy")


class HostError(RuntimeError):
    """There is no host, or it cannot run here; a sentence that says what to do."""


@dataclasses.dataclass(frozen=True)
class KnownHost:
    """A PJRT plugin from PyPI.

    Attributes:
      name: Of the package on PyPI.
      system: As in sys.platform.
      machine: x86_64 or arm64.
      module: The Python package that has the library. It is not imported.
      library: The library's path inside the package.
      options: What its PJRT client is created with.
    """

    name: str
    system: str
    machine: str
    module: str
    library: str
    options: Mapping[str, int | str]


# The first one that is installed is taken. Another host is another row.
_ONE_CPU: Mapping[str, int | str] = {"cpu_device_count": 1}
KNOWN_HOSTS = (
    KnownHost(
        "lammps-jax-pjrt-cpu",
        "linux",
        "x86_64",
        "lammps_jax_pjrt_cpu",
        "pjrt_c_api_cpu_plugin.so",
        _ONE_CPU,
    ),
    KnownHost(
        "fastatomstruct-xla-cpu",
        "linux",
        "x86_64",
        "fastatomstruct_xla_cpu",
        "libpjrt_cpu.so",
        _ONE_CPU,
    ),
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A host's library, and what its PJRT client is created with."""

    name: str
    path: Path
    options: Mapping[str, int | str]


def find() -> Host:
    """The host that the setting names, else the first known one that is installed.

    Raises:
      HostError: There is none, or its file cannot be a plugin for this machine.
    """
    setting = os.environ.get(HOST_SETTING, "")
    host = _named(setting) if setting else _first_installed()
    check_library(host.path)
    return host


def buffers() -> str:
    """The setting that says how the kernels reach the host's buffers.

    Raises:
      HostError: It has a value that it cannot have.
    """
    value = os.environ.get(BUFFERS_SETTING, "") or BUFFERS[0]
    if value not in BUFFERS:
        raise HostError(
            f"{BUFFERS_SETTING} must be one of {', '.join(BUFFERS)}, but is {value!r}."
        )
    return value


def _named(setting: str) -> Host:
    for known in KNOWN_HOSTS:
        if setting == known.name:
            path = _installed_library(known)
            if path is None:
                raise HostError(
                    f"{HOST_SETTING} names the host plugin {setting}, which is not "
                    f"installed: pip install {setting}."
                )
            return Host(known.name, path, known.options)
    path = Path(setting).expanduser().absolute()
    if not path.exists():
        names = ", ".join(known.name for known in KNOWN_HOSTS)
        raise HostError(
            f"{HOST_SETTING} is {setting!r}, which is neither a file nor a known host "
            f"plugin; it must be the path of a PJRT plugin's library or one of {names}."
        )
    # A known host's library keeps its options wherever it lies.
    options = next(
        (k.options for k in KNOWN_HOSTS if Path(k.library).name == path.name), {}
    )
    return Host(str(path), path, options)


def _first_installed() -> Host:
    machine = _canonical_machine(platform.machine())
    here = [k for k in KNOWN_HOSTS if (k.system, k.machine) == (sys.platform, machine)]
    for known in here:
        path = _installed_library(known)
        if path is not None:
            return Host(known.name, path, known.options)
    advice = (
        "pip install 'jax-flash-metal[software]' installs one"
        if here
        else f"none is known for {sys.platform} on {machine}"
    )
    raise HostError(
        "platform flash_metal runs over a host plugin, and none is installed: "
        f"{advice}; {HOST_SETTING} can name the library of any PJRT plugin."
    )


def _installed_library(known: KnownHost) -> Path | None:
    """Where the host's library is, or should be; None when it is not installed."""
    try:
        spec = importlib.util.find_spec(known.module)
    except (ImportError, ValueError):  # a parent is missing, or a broken module
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), known.library)


# -- Looking at a library's file -------------------------------------------------------

# What the system's loader says about a library for another machine names neither
# machine, so this is read from the file's header first.
_ELF_MACHINES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv"}
_ELF_SHARED = 3
_MACHO_CPUS = {0x01000007: "x86_64", 0x0100000C: "arm64", 7: "x86", 12: "arm"}
_MACHO_LIBRARIES = (6, 8)  # MH_DYLIB, MH_BUNDLE
_SYSTEM_NAMES = {"linux": "Linux", "darwin": "macOS"}


def check_library(path: Path) -> None:
    """Whether the file is a shared library for this machine; only reads its header.

    Raises:
      HostError: It is not.
    """
    name = f"the host plugin's library {path}"
    try:
        with path.open("rb") as file:
            found = _read_header(file)
    except OSError as error:
        raise HostError(
            f"{name} cannot be read ({error.strerror}): reinstall the host plugin, or "
            f"let {HOST_SETTING} name another."
        ) from error
    if found is None:
        raise HostError(
            f"{name} is not a shared library: {HOST_SETTING} must name the .so or "
            ".dylib of a PJRT plugin."
        )
    system, machines = found
    machine = _canonical_machine(platform.machine())
    if system != sys.platform or machine not in map(_canonical_machine, machines):
        raise HostError(
            f"{name} is for {_SYSTEM_NAMES[system]} on {' and '.join(machines)}, but "
            f"this process runs on {_SYSTEM_NAMES.get(sys.platform, sys.platform)} on "
            f"{machine}: install the host plugin for this machine, or let "
            f"{HOST_SETTING} name another."
        )


def _canonical_machine(name: str) -> str:
    name = name.lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(name, name)


def _read_header(file: BinaryIO) -> tuple[str, list[str]] | None:
    """The system and machines of a shared library, None for any other file."""
    head = file.read(4096)
    try:
        if head[:4] == b"\x7fELF":
            order = "<" if head[5] == 1 else ">"
            kind, machine = struct.unpack_from(f"{order}HH", head, 16)
            names = [_ELF_MACHINES.get(machine, f"machine {machine}")]
            return ("linux", names) if kind == _ELF_SHARED else None
        (magic,) = struct.unpack_from(">I", head)
        if magic in (0xCAFEBABE, 0xCAFEBABF):  # several machines in one file
            size = 20 if magic == 0xCAFEBABE else 32
            (count,) = struct.unpack_from(">I", head, 4)
            cpus = [
                struct.unpack_from(">I", head, 8 + size * i)[0]
                for i in range(min(count, 16))
            ]
            # A Java class has the same magic, and its version where the count is.
            return ("darwin", _cpu_names(cpus)) if count <= 16 else None
        if magic in (0xCFFAEDFE, 0xCEFAEDFE):
            cpu, _, kind = struct.unpack_from("<III", head, 4)
            return ("darwin", _cpu_names([cpu])) if kind in _MACHO_LIBRARIES else None
    except (struct.error, IndexError):  # a header that is cut off
        pass
    return None


def _cpu_names(cpus: list[int]) -> list[str]:
    return [_MACHO_CPUS.get(cpu, f"CPU type {cpu}") for cpu in cpus]
