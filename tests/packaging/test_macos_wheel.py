"""The wheel for macOS, made on Linux: its content, and what pip makes of it."""

from __future__ import annotations

import base64
import csv
import email
import email.message
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from plugin import build
from tests.packaging.conftest import pip

pytestmark = pytest.mark.xdist_group("packaging")

TARGET = build.TARGETS["macos-arm64"]


def contents(wheel: Path) -> dict[str, bytes]:
    """Its files; the folder with metadata as dist-info, whatever the version."""
    info = f"jax_flash_metal-{build.version()}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        return {
            name.replace(info, "dist-info/"): archive.read(name)
            for name in archive.namelist()
        }


def metadata(wheel: Path, name: str) -> email.message.Message:
    return email.message_from_bytes(contents(wheel)[f"dist-info/{name}"])


def test_it_differs_from_the_wheel_for_linux_in_the_library_alone(
    wheel: Path, macos_wheel: Path
) -> None:
    here, there = contents(wheel), contents(macos_wheel)
    native = "jax_flash_metal/_native/"
    linux = build.TARGETS[build.host_target()]
    assert set(here) - set(there) == {native + linux.library}
    assert set(there) - set(here) == {native + TARGET.library}
    same = set(here) & set(there) - {"dist-info/WHEEL", "dist-info/RECORD"}
    assert [name for name in same if here[name] != there[name]] == []


def test_it_has_the_inspected_library(macos_wheel: Path, dylib: Path) -> None:
    library = contents(macos_wheel)[f"jax_flash_metal/_native/{TARGET.library}"]
    assert library == dylib.read_bytes()


def test_it_has_the_kernels_and_their_table(macos_wheel: Path) -> None:
    files = contents(macos_wheel)
    for path in build.KERNEL_DIR.iterdir():
        assert files[f"jax_flash_metal/metal_kernels/{path.name}"] == path.read_bytes()


def test_its_tag(macos_wheel: Path) -> None:
    tag = "py3-none-macosx_14_0_arm64"
    assert macos_wheel.name == f"jax_flash_metal-{build.version()}-{tag}.whl"
    facts = metadata(macos_wheel, "WHEEL")
    assert facts.get_all("Tag") == [tag]
    assert facts["Root-Is-Purelib"] == "false"


def test_pip_takes_it_for_macos_14_and_newer(macos_wheel: Path, tmp_path: Path) -> None:
    """With the platform named, pip unpacks it here as it would there."""

    def install(platform: str) -> Path:
        target = tmp_path / platform
        options = ("--no-deps", "--only-binary=:all:", "--python-version", "3.12")
        where = ("--platform", platform, "--target", target)
        pip("install", *options, *where, macos_wheel, cwd=tmp_path)
        return target / "jax_flash_metal" / "_native" / TARGET.library

    assert install("macosx_14_0_arm64").exists()
    assert install("macosx_26_0_arm64").exists()
    for platform in ("macosx_13_0_arm64", "macosx_14_0_x86_64"):
        with pytest.raises(AssertionError, match="not a supported wheel"):
            install(platform)


def test_its_dependencies(macos_wheel: Path) -> None:
    """The host plugin comes with an extra, on Apple silicon alone."""
    facts = metadata(macos_wheel, "METADATA")
    requirements = facts.get_all("Requires-Dist") or []
    (jax_metal,) = (r for r in requirements if r.startswith("jax-metal"))
    requirement, marker = jax_metal.split(";")
    assert requirement.strip() == "jax-metal==0.1.1"
    for part in (
        "sys_platform == 'darwin'",
        "platform_machine == 'arm64'",
        "extra == 'metal'",
    ):
        assert part in marker
    always = {r for r in requirements if "extra ==" not in r}
    assert not [r for r in always if "metal" in r]


def test_its_entry_point(macos_wheel: Path) -> None:
    text = contents(macos_wheel)["dist-info/entry_points.txt"].decode()
    assert "[jax_plugins]\nflash_metal = jax_flash_metal.pjrt\n" in text


def test_its_record_fits(macos_wheel: Path) -> None:
    with zipfile.ZipFile(macos_wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(name).decode())))
        assert {row[0] for row in rows} == set(archive.namelist())
        for path, digest, size in rows:
            if path == name:
                continue
            content = archive.read(path)
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            assert digest == "sha256=" + hashed.decode().rstrip("=")
            assert int(size) == len(content)
