"""Virtual environments for the Makefile: makes them, fills them, tests in them.

    environments.py install             fill the environment whose Python runs this
    environments.py corners [ARG ...]   pytest ARG ... in every corner of JAX versions
    environments.py run NAME ARG ...    the Python of the corner NAME with ARG ...

A stamp file says what an environment was filled with, so that a second call costs
nothing. Needs a bare Python >= 3.10 only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORNERS = {  # name: (Python, pins); the oldest that works, the usual, the newest
    "oldest": ("3.11", ("jax==0.4.34", "jaxlib==0.4.34", "flax==0.9.0")),
    "current": ("3.11", ("jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8")),
    "newest": ("3.13", ("jax", "flax")),
}
HOSTS = ROOT / "tools" / "hosts.txt"
# Nothing in these depends on the version of JAX; the main environment runs them.
INDEPENDENT_OF_JAX = ("tests/checker", "tests/kernels", "tests/packaging")


def requirements() -> list[str]:
    """What pyproject.toml asks for: to build, to run, to test and for the examples."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        pip(sys.executable, "tomli>=2")
        import tomli as tomllib
    text = (ROOT / "pyproject.toml").read_text()
    settings = tomllib.loads(text)
    project = settings["project"]
    extras = project["optional-dependencies"]
    return [
        *settings["build-system"]["requires"],
        *project["dependencies"],
        *extras["test"],
        *extras["examples"],
    ]


def pip(python: str, *arguments: str) -> None:
    """Runs `pip install`, which says nothing but errors."""
    options = ("-qq", "--disable-pip-version-check", "--no-input", "--prefer-binary")
    command = [python, "-m", "pip", "install", *options, *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def install(python: str, pins: Sequence[str] = ()) -> None:
    """Installs all requirements, then the project, editable; builds its library."""
    stamp = Path(python).parent.parent / "jax-flash-metal.stamp"
    project = (ROOT / "pyproject.toml").read_bytes() + HOSTS.read_bytes()
    wanted = hashlib.sha256(project + repr((str(ROOT), pins)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing into {stamp.parent.name}: takes some minutes", flush=True)
    pip(python, *requirements(), *pins)
    pip(python, "--no-deps", "--require-hashes", "-r", str(HOSTS))
    pip(python, "--no-build-isolation", "--no-deps", "-e", ".")
    stamp.write_text(wanted)


def find_interpreter(version: str) -> str | None:
    """A working Python of this version: on PATH, or one that pyenv has installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))),
    ]
    for candidate in filter(None, candidates):
        # pyenv's shims are on PATH even for versions that they then refuse to run.
        probe = [candidate, "-c", "import ensurepip, venv"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def set_up_corner(name: str) -> str | None:
    """The corner's Python, everything installed; None without a base interpreter."""
    version, pins = CORNERS[name]
    interpreter = find_interpreter(version)
    if interpreter is None:
        return None
    folder = ROOT / ".venvs" / name
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    install(python, pins)
    return python


def run_corner(name: str, pytest_arguments: Sequence[str]) -> str:
    """Sets one corner up and tests in it: "passed", "FAILED" or "not run: why"."""
    python = set_up_corner(name)
    if python is None:
        return f"not run: no Python {CORNERS[name][0]} found"
    ignored = [f"--ignore={path}" for path in INDEPENDENT_OF_JAX]
    on_flash_metal = {**os.environ, "JAX_PLATFORMS": "flash_metal,cpu"}
    passed = True
    for what, environment in (
        (ignored, None),
        (["@tests/contract.txt"], on_flash_metal),
    ):
        tests = [python, "-m", "pytest", *what, *pytest_arguments]
        done = subprocess.run(tests, cwd=ROOT, env=environment, check=False)
        passed = passed and done.returncode == 0
    return "passed" if passed else "FAILED"


def run_in_corner(name: str, arguments: Sequence[str]) -> int:
    """Runs the corner's Python: its exit status."""
    python = set_up_corner(name)
    if python is None:
        print(f"error: no Python {CORNERS[name][0]} found", file=sys.stderr)
        return 1
    return subprocess.run([python, *arguments], cwd=ROOT, check=False).returncode


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("install", "corners", "run"))
    arguments, rest = parser.parse_known_args()
    try:
        if arguments.command == "install":
            install(sys.executable)
            return 0
        if arguments.command == "run":
            return run_in_corner(rest[0], rest[1:])
        results = {}
        for name, (version, pins) in CORNERS.items():
            print(f"== corner {name}: Python {version}, {' '.join(pins)}", flush=True)
            results[name] = run_corner(name, rest)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, result in results.items():
        print(f"corner {name}: {result}")
    return 1 if "FAILED" in results.values() else 0


if __name__ == "__main__":
    sys.exit(main())
