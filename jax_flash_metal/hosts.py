"""Finds the host plugin that platform flash_metal runs over, and looks at its file.

Loads and imports nothing: the native library loads the host (plugin/pjrt/host.cc).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
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


# JAX_PLATFORMS of a process that is about one of the platforms.
JAX_PLATFORMS = {"cpu": "cpu", "flash_metal": "flash_metal,cpu"}


class HostError(RuntimeError):
    """There is no host, or it cannot run here; a sentence that says what to do."""


Option = int | float | bool | str | list[int]
Version = tuple[int, ...]
OLDEST_JAX: Version = (0, 4, 34)  # as in pyproject.toml


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
      jax: The versions of jax that it fits when it runs behind flash_metal: from the
        first on, and below the second if there is one.
      system_version: The oldest system that it can be loaded on.
    """

    name: str
    system: str
    machine: str
    module: str
    library: str
    options: Mapping[str, Option]
    jax: tuple[Version, Version | None] = (OLDEST_JAX, None)
    system_version: Version = ()

    def misfit(self, jax: Version, system_version: Version) -> str | None:
        """Why it does not fit here, or None."""
        first, end = self.jax
        if not (first <= jax and (end is None or jax < end)):
            below = f",<{_dotted(end)}" if end else ""
            return f"{self.name} needs jax>={_dotted(first)}{below}"
        if system_version and system_version < self.system_version:
            return f"{self.name} needs macOS {_dotted(self.system_version)}"
        return None


# The first one that is installed and fits is taken: the order of preference. Another
# host is another row. None of those for macOS has been run behind flash_metal: what is
# said of them is what their binaries and packages say.
_ONE_CPU: Mapping[str, Option] = {"cpu_device_count": 1}
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
    # Written to so that nothing is copied in either direction. By itself it fits jax up
    # to 0.5.0: it knows no memory spaces, and reads StableHLO up to 0.19.4. Here every
    # program is rewritten to that, and memories are ours (plugin/pjrt/old_host.cc): so
    # any jax that this package works with. Whether it starts on every newer macOS is in
    # doubt (jax issue 34109); doctor tries the others then.
    KnownHost(
        "jax-metal",
        "darwin",
        "arm64",
        "jax_plugins.metal_plugin",
        "pjrt_plugin_metal_14.dylib",
        {},
        system_version=(14, 4),
    ),
    # Written to so that nothing is copied either. The options are those of
    # jax_graft/__init__.py: "platform" is to give every array a Metal buffer of its
    # own. The package's lower bound.
    KnownHost(
        "jax-graft",
        "darwin",
        "arm64",
        "metal_pjrt_core",
        "pjrt_c_api_mtl_plugin.dylib",
        {
            "platform_name": "METAL",
            "allocator": "platform",
            "preallocate": False,
            "memory_fraction": 1.0,
            "visible_devices": [0],
            "should_stage_host_to_device_transfers": False,
        },
        jax=((0, 10), None),
        system_version=(26,),
    ),
    # Results of our kernels are copied once. The package's own bounds; its library says
    # macOS 27, its wheel 14.
    KnownHost(
        "metaljax",
        "darwin",
        "arm64",
        "metaljax",
        "lib/libmetal_pjrt_native.dylib",
        {},
        jax=((0, 11), (0, 12)),
        system_version=(27,),
    ),
    # Everything is copied. The package's own bounds.
    KnownHost(
        "jax-mps",
        "darwin",
        "arm64",
        "jax_plugins.mps",
        "lib/libpjrt_plugin_mps.dylib",
        {},
        jax=((0, 11), (0, 12)),
        system_version=(14,),
    ),
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A host's library, and what its PJRT client is created with."""

    name: str
    path: Path
    options: Mapping[str, Option]


def macos_version() -> Version:
    """Major and minor version of this macOS, by that of its kernel; () elsewhere.

    platform.mac_ver() says 16.0 for macOS 26 to a Python that was built with an older
    SDK. The kernel's major version is 24 for macOS 15, 25 for macOS 26; one more each
    year, before and since. The minor versions agree.
    """
    if sys.platform != "darwin":
        return ()
    kernel = version_numbers(os.uname().release)
    first = kernel[0] - 9 if kernel[0] < 25 else kernel[0] + 1
    return (first, *kernel[1:2])


def find() -> Host:
    """The host that the setting names, else the first known one that is installed and
    fits the installed jax.

    Raises:
      HostError: There is none, or its file cannot be a plugin for this machine.
    """
    setting = os.environ.get(HOST_SETTING, "")
    host = _named(setting) if setting else _first_installed()
    check_library(host.path)
    return host


def fitting() -> list[Host]:
    """The known hosts that are installed and fit here, in the order of preference."""
    return [
        Host(known.name, path, known.options)
        for known, path, misfit in _installed()
        if misfit is None
    ]


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
    for known in _hosts_here():
        if setting == known.name:
            path = _installed_library(known)
            if path is None:
                raise HostError(
                    f"{HOST_SETTING} names the host plugin {setting}, which is not "
                    f"installed: pip install {setting}."
                )
            return Host(known.name, path, known.options)
    path = Path(os.path.expanduser(setting)).absolute()
    if not path.exists():
        names = ", ".join(known.name for known in _hosts_here() or KNOWN_HOSTS)
        raise HostError(
            f"{HOST_SETTING} is {setting!r}, which is neither a file nor a known host "
            f"plugin; it must be the path of a PJRT plugin's library or one of {names}."
        )
    # A known host's library keeps its options wherever it lies.
    options = next(
        (k.options for k in KNOWN_HOSTS if Path(k.library).name == path.name), {}
    )
    return Host(str(path), path, options)


def _hosts_here() -> list[KnownHost]:
    here = (sys.platform, _canonical_machine(platform.machine()))
    return [known for known in KNOWN_HOSTS if (known.system, known.machine) == here]


def _installed() -> list[tuple[KnownHost, Path, str | None]]:
    """The known hosts that are installed, where, and why they do not fit here."""
    jax = version_numbers(importlib.metadata.version("jax"))
    paths = [(known, _installed_library(known)) for known in _hosts_here()]
    return [
        (known, path, known.misfit(jax, macos_version()))
        for known, path in paths
        if path is not None
    ]


def _first_installed() -> Host:
    fits = fitting()
    if fits:
        return fits[0]
    here = _hosts_here()
    misfits = [misfit for *_, misfit in _installed() if misfit is not None]
    jax = importlib.metadata.version("jax")
    extra = "metal" if sys.platform == "darwin" else "software"
    advice = (
        f"pip install 'jax-flash-metal[{extra}]' installs one"
        if here
        else f"none is known for {sys.platform} on "
        f"{_canonical_machine(platform.machine())}"
    )
    found = (
        f"none that is installed fits jax {jax} here ({'; '.join(misfits)})"
        if misfits
        else "none is installed"
    )
    raise HostError(
        f"platform flash_metal runs over a host plugin, and {found}: "
        f"{advice}; {HOST_SETTING} can name the library of any PJRT plugin."
    )


def version_numbers(text: str) -> Version:
    """The numbers that a version starts with; 0.12.0.dev1 counts as its release."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def jax_metal_conflict() -> str | None:
    """What jax-metal's own registration does here, and what to do; None: nothing.

    Being installed, jax-metal registers its platform METAL with JAX. When no platform
    is named, JAX starts every platform that is registered, and from 0.5.1 on it asks
    for memory spaces, which METAL does not have: users report an error that ends it.
    Behind flash_metal memories are ours, so the platforms must be named. Imports
    nothing.
    """
    try:
        jax_metal = importlib.metadata.version("jax-metal")
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return None
    if _named_platforms():
        return None
    effect = (
        f"which stops jax {jax} when no platform is named (default_memory_space is not "
        "supported)"
        if version_numbers(jax) >= (0, 5, 1)
        else "which is started beside flash_metal, and is JAX's default where "
        "flash_metal does not start"
    )
    return (
        f"jax-metal {jax_metal} registers the platform METAL, {effect}: set "
        "JAX_PLATFORMS=flash_metal,cpu, or "
        'jax.config.update("jax_platforms", "flash_metal,cpu") before JAX is used.'
    )


def _named_platforms() -> str:
    jax = sys.modules.get("jax")  # its configuration, if there is one yet
    if jax is not None:
        return str(getattr(jax.config, "jax_platforms", None) or "")
    return os.environ.get("JAX_PLATFORMS", "")


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
