"""Fixtures for the packaging tests: a wheel of this tree, fresh environments, a copy.

Everything shares the object cache of the tree, so little is compiled twice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from jax_flash_metal import hosts
from plugin import build

# In a fresh environment: the package found there, the kernels run, the result is right.
PROGRAM = """
import pathlib, sys
import jax
import jax.numpy as jnp
import jax_flash_metal

assert jax.default_backend() == sys.argv[2]
assert pathlib.Path(jax_flash_metal.__file__).is_relative_to(sys.argv[1])
query = jnp.sin(jnp.arange(2 * 5 * 4 * 16.0)).reshape(2, 5, 4, 16)
key = jnp.cos(jnp.arange(2 * 7 * 2 * 16.0)).reshape(2, 7, 2, 16)
out, expected = (
    jax_flash_metal.flash_attention(query, key, key + 1, implementation=implementation)
    for implementation in ("metal", "xla")
)
assert out.shape == query.shape
assert float(jnp.abs(out - expected).max()) < 1e-5
"""


try:
    HAS_HOST = bool(hosts.find())
except hosts.HostError:
    HAS_HOST = False


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command; its output becomes the failure's message."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """The test environment's pip, on the tree's object cache."""
    environment.setdefault(
        "JAX_FLASH_METAL_BUILD_CACHE", str(build.default_cache().folder)
    )
    options = ("-qq", "--disable-pip-version-check")
    return run(
        sys.executable, "-m", "pip", *options, *arguments, cwd=cwd, **environment
    )


def check_installed(python: Path, place: Path, cwd: Path) -> None:
    """Runs PROGRAM on the platforms that are here; the package must be in `place`."""
    for platform in ("cpu", "flash_metal") if HAS_HOST else ("cpu",):
        settings = {"JAX_PLATFORMS": f"{platform},cpu"}
        run(python, "-c", PROGRAM, place, platform, cwd=cwd, **settings)


def make_wheel(folder: Path, tree: Path = build.ROOT, **environment: str) -> Path:
    """A wheel of `tree`, in `folder`."""
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    pip("wheel", *options, tree, cwd=folder, **environment)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree for this machine."""
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def macos_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree for macOS."""
    folder = tmp_path_factory.mktemp("macos_wheel")
    return make_wheel(folder, JAX_FLASH_METAL_TARGET="macos-arm64")


@pytest.fixture(scope="session")
def dylib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library for macOS as it is packaged."""
    folder = tmp_path_factory.mktemp("macos")
    name = build.TARGETS["macos-arm64"].library
    return build.build(target="macos-arm64", output=folder / name)


@pytest.fixture(scope="session")
def library() -> Path:
    """The library as it is packaged."""
    return build.build()


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """A new environment that borrows the dependencies, but not this package."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", where, cwd=tmp_path).strip())
    # .pth files of the borrowed folder are not read: no editable install shows through.
    borrowed = sysconfig.get_path("purelib")
    (site_packages / "borrowed.pth").write_text(borrowed + "\n")
    return python


@pytest.fixture(scope="session")
def copy_tree() -> Callable[[Path], Path]:
    """Copies what is in the tree, less all that was made in it."""
    made = (".*venv*", ".git", "build", "dist", "_native", "__pycache__", ".*_cache")

    def copy(target: Path) -> Path:
        shutil.copytree(build.ROOT, target, ignore=shutil.ignore_patterns(*made))
        return target

    return copy
