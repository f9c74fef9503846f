"""Pytest plugin: at the end of a whole run, every row of the variant table has run.

Every worker reports the kernels that its calls of native.py have run; the controller
joins them. A run of selected tests is not judged.
"""

import sys
from pathlib import Path

import pytest

from tests.support import native

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "metal_kernels" / "variants.toml"
KERNEL_TESTS = ROOT / "tests" / "kernels"
_WORKER_KEY = "used_kernels"
_used: set[str] = set()
_missing: list[str] = []


def host_name(row: dict, dtype: str) -> str:
    """The name under which a row and dtype is instantiated."""
    columns = row.get("block_d", row["head_dim"])
    return (
        f"{row['kernel']}_{dtype}_d{row['head_dim']}"
        f"_q{row['block_q']}_k{row['block_kv']}_b{columns}_s{row['num_simdgroups']}"
        f"{'_device' * (row.get('loads') == 'device')}"
        f"{'_paired' * (row.get('roles') == 2)}"
    )


def rows() -> list[dict]:
    return tomllib.loads(TABLE.read_text())["variant"]


def all_kernels() -> set[str]:
    return {host_name(row, dtype) for row in rows() for dtype in row["dtypes"]}


def pytest_sessionfinish(session):
    _used.update(native.used_kernels)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_WORKER_KEY] = sorted(_used)
    elif session.exitstatus == pytest.ExitCode.OK and _is_whole_run(session.config):
        _missing.extend(sorted(all_kernels() - _used))
        if _missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _used.update(getattr(node, "workeroutput", {}).get(_WORKER_KEY, ()))


def pytest_terminal_summary(terminalreporter):
    if _missing:
        terminalreporter.section("variants that no test has run", red=True)
        for name in _missing:
            terminalreporter.write_line(name)


def _is_whole_run(config) -> bool:
    options = config.option
    selected = (
        options.keyword
        or options.markexpr not in ("", "not slow")
        or options.deselect
        or options.ignore
        or options.collectonly
        or getattr(options, "lf", False)
    )
    folders = [Path(config.invocation_params.dir, arg).resolve() for arg in config.args]
    return not selected and any(
        folder == KERNEL_TESTS or folder in KERNEL_TESTS.parents for folder in folders
    )
