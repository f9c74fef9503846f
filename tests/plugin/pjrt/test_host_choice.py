"""Which host plugin is taken: the table of jax_flash_metal/hosts.py, as on a Mac."""

from __future__ import annotations

import re
import struct
import sys
import types
from pathlib import Path

import pytest

from jax_flash_metal import hosts
from plugin import build
from tests.support.processes import output_of

MAC_HOSTS = [row for row in hosts.KNOWN_HOSTS if row.system == "darwin"]
# The start of a Mach-O library for arm64.
LIBRARY = struct.pack("<IIII", 0xFEEDFACF, 0x0100000C, 0, 6)


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """A Mac with a new system; gives a function that installs hosts there."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(hosts.platform, "machine", lambda: "arm64")
    with_kernel(monkeypatch, "26.1.0")
    monkeypatch.delenv(hosts.HOST_SETTING, raising=False)
    places = {}
    monkeypatch.setattr(hosts, "_installed_library", lambda row: places.get(row.name))

    def install(*names: str) -> None:
        for name in names:
            places[name] = tmp_path / name
            places[name].write_bytes(LIBRARY)

    return install


def with_kernel(monkeypatch, release: str) -> None:
    """The version of macOS's kernel; what Python says of macOS is wrong on new ones."""
    monkeypatch.setattr(
        hosts.os, "uname", lambda: types.SimpleNamespace(release=release)
    )
    old_sdk = ("16.0", ("", "", ""), "arm64")
    monkeypatch.setattr(hosts.platform, "mac_ver", lambda: old_sdk)


def with_versions(monkeypatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise hosts.importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(hosts.importlib.metadata, "version", version)


ALL = ("jax-mps", "metaljax", "jax-graft", "jax-metal")


@pytest.mark.parametrize(
    "jax, installed, expected",
    [
        # Through us jax-metal fits what it does not fit by itself.
        ("0.4.34", ALL, "jax-metal"),
        ("0.10.2", ALL, "jax-metal"),
        ("0.12.0.dev20261001", ALL, "jax-metal"),
        ("0.10.2", ALL[:3], "jax-graft"),
        ("0.11.2", ALL[:3], "jax-graft"),
        ("0.11.2", ALL[:2], "metaljax"),
        ("0.11.0", ALL[:1], "jax-mps"),
    ],
)
def test_order_of_preference(mac, monkeypatch, jax, installed, expected):
    with_versions(monkeypatch, jax=jax)
    mac(*installed)
    assert hosts.find().name == expected


def test_only_hosts_that_fit(mac, monkeypatch):
    with_versions(monkeypatch, jax="0.9.1")
    mac("jax-graft", "metaljax", "jax-mps")
    with pytest.raises(hosts.HostError) as error:
        hosts.find()
    assert str(error.value) == (
        "platform flash_metal runs over a host plugin, and none that is installed fits "
        "jax 0.9.1 here (jax-graft needs jax>=0.10; metaljax needs jax>=0.11,<0.12; "
        "jax-mps needs jax>=0.11,<0.12): pip install 'jax-flash-metal[metal]' installs "
        "one; JAX_FLASH_METAL_HOST can name the library of any PJRT plugin."
    )
    # An explicit setting beats that.
    monkeypatch.setenv(hosts.HOST_SETTING, "jax-mps")
    assert hosts.find().name == "jax-mps"


def test_the_system_must_be_new_enough(mac, monkeypatch):
    with_kernel(monkeypatch, "23.5.0")
    with_versions(monkeypatch, jax="0.11.2")
    mac("jax-graft")
    with pytest.raises(hosts.HostError, match="jax-graft needs macOS 26"):
        hosts.find()
    mac("jax-mps")
    assert hosts.find().name == "jax-mps"


@pytest.mark.parametrize(
    "kernel, version",
    [
        ("22.6.0", (13, 6)),
        ("23.0.0", (14, 0)),
        ("23.4.0", (14, 4)),
        ("24.6.0", (15, 6)),
        ("25.0.0", (26, 0)),
        ("25.1.0", (26, 1)),
        ("26.2.0", (27, 2)),
    ],
)
def test_version_of_macos(mac, monkeypatch, kernel, version):
    with_kernel(monkeypatch, kernel)
    assert hosts.macos_version() == version


def test_no_macos():
    assert sys.platform == "darwin" or hosts.macos_version() == ()


def test_the_hosts_that_fit(mac, monkeypatch):
    """In order, whatever the setting names."""
    with_versions(monkeypatch, jax="0.10.2")
    monkeypatch.setenv(hosts.HOST_SETTING, "jax-mps")
    mac("jax-mps", "jax-graft", "jax-metal")
    assert [host.name for host in hosts.fitting()] == ["jax-metal", "jax-graft"]


def test_a_path_in_the_home_of_nobody(mac, monkeypatch):
    monkeypatch.setenv(hosts.HOST_SETTING, "~no-such-user/plugin.dylib")
    with pytest.raises(hosts.HostError, match="is neither a file nor a known host"):
        hosts.find()


def test_none_installed_on_a_mac(mac, monkeypatch):
    with_versions(monkeypatch, jax="0.10.2")
    with pytest.raises(hosts.HostError, match=r"none is installed: .*\[metal\]'"):
        hosts.find()


def test_options_of_the_clients():
    options = {row.name: row.options for row in MAC_HOSTS}
    # One Metal buffer per array; every other host decides for itself.
    assert options.pop("jax-graft")["allocator"] == "platform"
    assert not any(options.values())


def test_the_extra_brings_the_first_of_them():
    project = (build.ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^metal = \["(.*)"\]$', project, re.MULTILINE) == [
        "jax-metal==0.1.1; sys_platform == 'darwin' and platform_machine == 'arm64'"
    ]
    assert MAC_HOSTS[0].name == "jax-metal"


# -- jax-metal's own registration ------------------------------------------------------


@pytest.fixture
def unnamed(monkeypatch):
    """No platform is named."""
    monkeypatch.setattr(hosts, "_named_platforms", lambda: "")


def test_conflict(monkeypatch, unnamed):
    with_versions(monkeypatch, jax="0.10.2", jax_metal="0.1.1")
    sentence = hosts.jax_metal_conflict()
    assert "jax-metal 0.1.1 registers the platform METAL, which stops jax 0.10.2" in (
        sentence
    )
    assert "JAX_PLATFORMS=flash_metal,cpu" in sentence


def test_two_platforms(monkeypatch, unnamed):
    """Before jax 0.5.1 METAL starts."""
    with_versions(monkeypatch, jax="0.5.0", jax_metal="0.1.1")
    sentence = hosts.jax_metal_conflict()
    assert "METAL, which is started beside flash_metal, and is JAX's default where" in (
        sentence
    )
    assert "JAX_PLATFORMS=flash_metal,cpu" in sentence


@pytest.mark.parametrize("versions", [{"jax": "0.10.2"}, {"jax_metal": "0.1.1"}])
def test_no_conflict(monkeypatch, unnamed, versions):
    with_versions(monkeypatch, **versions)
    assert hosts.jax_metal_conflict() is None


@pytest.mark.parametrize(
    "settings, prelude, is_conflict",
    [
        ({}, "", True),
        ({}, "import jax", True),
        ({"JAX_PLATFORMS": "flash_metal,cpu"}, "", False),
        ({}, "import jax; jax.config.update('jax_platforms', 'cpu')", False),
    ],
)
def test_conflict_is_found_without_an_import(
    tmp_path: Path, settings, prelude, is_conflict
):
    metadata = tmp_path / "jax_metal-0.1.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: jax-metal\nVersion: 0.1.1\n")
    program = f"""
    import sys
    sys.path.append({str(tmp_path)!r})
    {prelude}
    from jax_flash_metal import hosts
    print(hosts.jax_metal_conflict() is not None)
    """
    assert output_of(program, **settings) == str(is_conflict)
