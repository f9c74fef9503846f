"""JAX's own unit tests on platform flash_metal, compared with its host by itself.

    jax_tests.py [--source DIR|BARE_GIT|TAR_GZ] [--mode MODE ...] [TEST ...]

Runs the tests of tools/jax_tests.txt (or TEST ...) under the JAX of the Python that
runs this, in three modes:

    host          the host plugin as a platform of its own, without ours
    flash_metal   our platform over that host
    cut           the same, with every program cut at random places by identity custom
                  calls, so that partitioning meets real programs

and prints how many had which outcome, and the tests whose outcome is not the host's;
the exit status says whether there is one for which the list does not say why. The
tests are those of the JAX version in use; they are fetched, never kept here. A process
runs the tests of one file, so that one that crashes takes no others with it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "jax_tests.txt"
FOLDER = ROOT / "build" / "jax_tests"
ARCHIVE = "https://github.com/jax-ml/jax/archive/refs/tags/{tag}.tar.gz"
# What the tests of JAX need of its repository.
PARTS = ("tests", "conftest.py", "pyproject.toml")
MODES = ("host", "flash_metal", "cut")
COLUMNS = ("passed", "failed", "skipped", "crashed", "timeout", "missing")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one test. `kind`: one of COLUMNS."""

    kind: str
    reason: str = ""


# -- The tests -------------------------------------------------------------------------


def fetch(source: str | None) -> Path:
    """A folder with the tests of the JAX in use.

    Args:
      source: A checkout of JAX, a bare git repository or an archive of it; None:
        downloads the archive of the release.
    """
    import jax

    tag = f"jax-v{jax.__version__}"
    if source and Path(source, "tests").is_dir():
        return Path(source).resolve()
    folder = FOLDER / tag
    if all((folder / part).exists() for part in PARTS):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if source and Path(source).is_dir():
        _from_git(Path(source), tag, folder)
    else:
        _from_archive(Path(source) if source else _download(tag), folder)
    return folder


def _download(tag: str) -> Path:
    path = FOLDER / f"{tag}.tar.gz"
    if not path.exists():
        print(f"fetching {ARCHIVE.format(tag=tag)}", flush=True)
        urllib.request.urlretrieve(ARCHIVE.format(tag=tag), f"{path}.part")
        os.replace(f"{path}.part", path)
    return path


def _from_archive(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            # The archive has one folder with everything in it.
            member.name = member.name.partition("/")[2]
            if member.isfile() and member.name.split("/")[0] in PARTS:
                tar.extract(member, folder, filter="data")


def _from_git(repository: Path, tag: str, folder: Path) -> None:
    for part in PARTS:
        git = ["git", f"--git-dir={repository}"]
        if "." in part:
            text = subprocess.run(
                [*git, "show", f"{tag}:{part}"], check=True, capture_output=True
            ).stdout
            (folder / part).write_bytes(text)
        else:
            (folder / part).mkdir(exist_ok=True)
            # Of the folder, not of the tag: a partial copy may lack other files.
            with subprocess.Popen(
                [*git, "archive", f"{tag}:{part}"], stdout=subprocess.PIPE
            ) as archive:
                subprocess.run(
                    ["tar", "-x", "-C", str(folder / part)],
                    stdin=archive.stdout,
                    check=True,
                )


def read_list(path: Path) -> dict[str, str]:
    """Test ids, one a line, each with why its outcome is not the host's, or ""."""
    tests = {}
    for line in path.read_text().splitlines():
        test, _, comment = line.partition(" # differs: ")
        if test and not test.startswith("#"):
            tests[test.strip()] = comment
    return tests


# -- Running them ----------------------------------------------------------------------


def environment(mode: str, **files: Path) -> dict[str, str]:
    """Of a process that runs tests in this mode; the files are the worker's."""
    from jax_flash_metal import hosts

    host = hosts.find()
    settings = {f"JAX_TESTS_{name.upper()}": str(path) for name, path in files.items()}
    settings |= {
        "JAX_TESTS_MODE": mode,
        "JAX_FLASH_METAL_HOST": str(host.path),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tools"))),
        # How many cases there are of a generated test, and so their names.
        "JAX_NUM_GENERATED_CASES": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if mode == "host":
        plugin = FOLDER / "host.json"
        facts = {"library_path": str(host.path), "create_options": dict(host.options)}
        plugin.write_text(json.dumps(facts))
        settings["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"jax_tests_host:{plugin}"
        settings["JAX_PLATFORMS"] = "jax_tests_host,cpu"
    else:
        settings["JAX_PLATFORMS"] = "flash_metal,cpu"
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_"))
        or name.startswith("JAX_TESTS_")
        or name.endswith("_BUILD_CACHE")
    }
    return kept | settings


def run(mode: str, source: Path, tests: Iterable[str]) -> dict[str, Outcome]:
    """Runs the tests, a process for each file of them, in the files' order."""
    files: dict[str, list[str]] = collections.defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    outcomes: dict[str, Outcome] = {}
    for file, wanted in files.items():
        started = time.monotonic()
        remaining = wanted
        while remaining:
            found, is_complete = run_once(mode, source, file, remaining)
            outcomes |= found
            remaining = [test for test in remaining if test not in found]
            if is_complete:
                outcomes |= {test: Outcome("missing") for test in remaining}
                break
        kinds = collections.Counter(outcomes[test].kind for test in wanted)
        summary = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        seconds = time.monotonic() - started
        print(f"{mode:12} {file:42} {summary} in {seconds:.0f} s", flush=True)
    return outcomes


def run_once(
    mode: str, source: Path, file: str, tests: Sequence[str]
) -> tuple[dict[str, Outcome], bool]:
    """Runs tests of one file in one process: the outcomes, and whether it got through.

    If it did not, the last of the outcomes is that of the test which stopped it.
    """
    wanted = FOLDER / f"{mode}.wanted"
    records = FOLDER / f"{mode}.records"
    wanted.write_text("\n".join(tests))
    records.write_text("")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", file),
        *("-p", "jax_tests_worker", "-p", "no:cacheprovider", "-p", "no:xdist"),
    ]
    with (FOLDER / f"{mode}-{Path(file).stem}.log").open("a") as log:
        status = subprocess.run(
            command,
            cwd=source,
            env=environment(mode, wanted=wanted, records=records),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    outcomes: dict[str, Outcome] = {}
    running = None
    for record in map(json.loads, records.read_text().splitlines()):
        test = record["test"]
        if record["event"] == "start":
            running = test
        elif record["event"] == "finish":
            # A test that was interrupted says nothing, one that passed neither.
            outcomes.setdefault(test, Outcome("passed"))
            running = None
        else:
            outcomes[test] = Outcome(record["outcome"], record["reason"])
    if running is not None:
        kind = "timeout" if status == 1 else "crashed"  # by the worker's watchdog
        outcomes[running] = Outcome(kind, f"exit status {status}, see {FOLDER}")
    return outcomes, running is None


# -- Comparing -------------------------------------------------------------------------


def report(
    results: Mapping[str, Mapping[str, Outcome]], expected: Mapping[str, str]
) -> int:
    """Prints the table and the differences; how many of them are unexpected."""
    print(f"\n{'':12}" + "".join(f"{kind:>9}" for kind in COLUMNS))
    for mode, outcomes in results.items():
        kinds = collections.Counter(outcome.kind for outcome in outcomes.values())
        print(f"{mode:12}" + "".join(f"{kinds[kind]:9}" for kind in COLUMNS))
    unexpected = 0
    host = results.get("host", {})
    for mode, outcomes in results.items():
        tests = [test for test in host if outcomes[test].kind != host[test].kind]
        if mode != "host":
            print(f"\n{mode}: {len(host) - len(tests)} of {len(host)} as on the host")
        for test in tests:
            reason = expected.get(test, "")
            unexpected += not reason
            if not reason:
                lines = outcomes[test].reason.strip().splitlines() or [
                    "no reason given"
                ]
                reason = f"UNEXPECTED: {lines[0]}"
            print(f"  {test}\n    {host[test].kind} -> {outcomes[test].kind}: {reason}")
    return unexpected


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="default: downloaded for the JAX in use")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument(
        "--probability", default="0.2", help="of a cut after each value"
    )
    parser.add_argument("--seed", default="0", help="of the places of the cuts")
    parser.add_argument("tests", nargs="*", help=f"default: {LIST.relative_to(ROOT)}")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = fetch(arguments.source)
    listed = read_list(LIST)
    tests = arguments.tests or list(listed)
    modes = arguments.mode or MODES
    os.environ["JAX_TESTS_PROBABILITY"] = arguments.probability
    os.environ["JAX_TESTS_SEED"] = arguments.seed
    results = {mode: run(mode, source, tests) for mode in modes}
    return 1 if report(results, listed) else 0


if __name__ == "__main__":
    sys.exit(main())
