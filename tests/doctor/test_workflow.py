"""The workflow for others: what it calls is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def test_what_it_makes_is_in_the_makefile():
    targets = set(re.findall(r"run: make ([\w-]+)$", WORKFLOW.read_text(), re.M))
    assert {"test", "wheels"} <= targets
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets <= rules


def test_the_tests_that_it_runs_are_there():
    paths = set(re.findall(r"tests/[\w/.]+", WORKFLOW.read_text()))
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_the_extras_that_it_installs_are_there():
    (extras,) = re.findall(r'"\$wheel\[([\w,]+)\]"', WORKFLOW.read_text())
    text = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", text, re.M)
