"""Every way to install the package ends with kernels that run."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin import build
from tests.packaging.conftest import check_installed, make_wheel, pip, run

pytestmark = pytest.mark.xdist_group("packaging")

TARGET = build.TARGETS[build.host_target()]


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in (
        f"_native/{TARGET.library}",
        "metal_kernels/variants.toml",
        "metal_kernels/attention_params.h",
        "metal_kernels/attention_forward.metal",
        "py.typed",
    ):
        assert f"jax_flash_metal/{name}" in names
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"jax_flash_metal"} or tops == {
        "jax_flash_metal",
        wheel.name.split("-")[0],
    }
    assert not [name for name in names if "checker" in name]


def test_wheel_has_the_entry_point_of_jax(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        text = archive.read(name).decode()
    assert text.split() == [
        "[jax_plugins]",
        *("flash_metal", "=", "jax_flash_metal.pjrt"),
    ]


def test_wheel_tag(wheel: Path) -> None:
    tag = f"py3-none-{TARGET.wheel_platform}"
    assert wheel.name == f"jax_flash_metal-{build.version()}-{tag}.whl"


def test_wheel_runs_outside_the_tree(
    wheel: Path, fresh_python: Path, tmp_path: Path
) -> None:
    pip("--python", fresh_python, "install", "--no-deps", wheel, cwd=tmp_path)
    check_installed(fresh_python, tmp_path / "env", tmp_path)


def test_a_platform_without_a_library_gets_a_pure_wheel(
    tmp_path: Path, copy_tree: Callable[[Path], Path]
) -> None:
    tree = copy_tree(tmp_path / "tree")
    wheel = make_wheel(tmp_path, tree, JAX_FLASH_METAL_TARGET="win32-x86_64")
    assert wheel.name == f"jax_flash_metal-{build.version()}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_native" in name]


def test_editable_install_finds_the_library_in_the_tree(
    fresh_python: Path, tmp_path: Path, copy_tree: Callable[[Path], Path]
) -> None:
    tree = copy_tree(tmp_path / "tree")
    options = ("--no-deps", "--no-build-isolation")
    pip("--python", fresh_python, "install", *options, "-e", tree, cwd=tmp_path)
    assert (tree / build.in_tree_library(TARGET).relative_to(build.ROOT)).exists()
    check_installed(fresh_python, tree, tmp_path)


@pytest.mark.slow
def test_install_from_the_tree_with_build_isolation(
    fresh_python: Path, tmp_path: Path, copy_tree: Callable[[Path], Path]
) -> None:
    tree = copy_tree(tmp_path / "tree")
    pip("--python", fresh_python, "install", "--no-deps", tree, cwd=tmp_path)
    check_installed(fresh_python, tmp_path / "env", tmp_path)


@pytest.mark.slow
def test_source_distribution_holds_all_that_the_build_needs(
    fresh_python: Path, tmp_path: Path, copy_tree: Callable[[Path], Path]
) -> None:
    tree = copy_tree(tmp_path / "tree")
    options = ("--sdist", "--no-isolation", "--outdir", tmp_path)
    run(sys.executable, "-m", "build", *options, tree, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    options = ("--no-deps", "--no-build-isolation")
    pip("--python", fresh_python, "install", *options, archive, cwd=tmp_path)
    check_installed(fresh_python, tmp_path / "env", tmp_path)
