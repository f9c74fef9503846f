"""Apple's interfaces as others publish them: wheels from PyPI, pinned, not committed.

They are downloaded once into the build's cache. Without them there is no oracle, so a
failed download is an error, with what to do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from plugin import build


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A file on PyPI, and what of it is unpacked."""

    project: str
    version: str
    sha256: str
    members: tuple[str, ...]  # the beginnings of their names


WHEELS = {
    # metal-cpp, Apple's C++ headers for Metal (Apache-2.0), is in MLX's wheel. Its own
    # library shows which functions of the system a program for Metal binds to.
    "metal-cpp": Wheel(
        "mlx-metal",
        "0.32.4",
        "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947",
        ("mlx/include/metal_cpp/", "mlx/lib/libmlx.dylib"),
    ),
    # MLX's kernels as Apple's compiler made them, and the headers they are made of.
    "mlx-kernels": Wheel(
        "mlx-metal",
        "0.32.4",
        "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947",
        ("mlx/lib/mlx.metallib", "mlx/include/mlx/backend/metal/kernels/"),
    ),
    # Metadata that was made from Apple's SDK, and protocols as Apple's compiler encodes
    # them (MIT).
    "pyobjc-metal": Wheel(
        "pyobjc-framework-Metal",
        "12.2.2",
        "fb0421195ded2a02a83c94dbc1bf815b4a879c51804c43bcaf4680a6dc1b4aa2",
        ("Metal/_",),
    ),
    "pyobjc-core": Wheel(
        "pyobjc-core",
        "12.2.2",
        "122e6ad302a2abf5d4d4adb0156db751600ddf2768441696cba17b31323085e7",
        ("objc/_objc.",),
    ),
    # Binds to the functions of IOKit that we call as well.
    "psutil": Wheel(
        "psutil",
        "7.2.2",
        "1a7b04c10f32cc88ab39cbf606e117fd74721c831c98a27dc04578deb0c16979",
        ("psutil/_psutil_osx.",),
    ),
    "pyobjc-foundation": Wheel(
        "pyobjc-framework-Cocoa",
        "12.2.2",
        "e106f395531e67694376b0f1184612cbeea3ec8b9bf56b55ef41d026171d2a2d",
        ("Foundation/_",),
    ),
}


class Unavailable(Exception):
    """A wheel cannot be had, or is not the one that was asked for."""


class Unreachable(Unavailable):
    """A wheel could not be downloaded."""


def folder_of(name: str) -> Path:
    """The folder with the members of the wheel; downloads it if it is not there."""
    wheel = WHEELS[name]
    cache = build.default_cache()
    key = build.digest("oracle", *dataclasses.astuple(wheel))
    return cache.get(key, "", lambda new: _fetch(wheel, new))


def _fetch(wheel: Wheel, folder: Path) -> None:
    download = folder.with_name("download")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--disable-pip-version-check", "--only-binary=:all:", "--no-cache-dir"),
        *("--platform", "macosx_14_0_arm64", "--python-version", "3.12"),
        *("--dest", str(download), f"{wheel.project}=={wheel.version}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unreachable(
            f"{wheel.project} {wheel.version} is needed to check plugin/device, "
            "and pip could not download it (is PyPI reachable?):\n"
            f"{done.stderr.strip()}"
        )
    (path,) = download.iterdir()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise Unavailable(f"{path.name}: expected sha256 {wheel.sha256}, got {found}.")
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.startswith(wheel.members):
                archive.extract(member, folder)
    shutil.rmtree(download)
