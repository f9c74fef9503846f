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


def test_the_tests_that_it_leaves_out_are_there():
    left_out = re.findall(r"--deselect=([\w/.]+)::(\w+)$", WORKFLOW.read_text(), re.M)
    assert WORKFLOW.read_text().count("--deselect") == len(left_out) > 0
    for path, name in left_out:
        assert f"\ndef {name}(" in (ROOT / path).read_text()


def test_the_contract_on_flash_metal_is_that_of_the_makefile():
    (chosen,) = re.findall(r'^  -k (".*")$', (ROOT / "Makefile").read_text(), re.M)
    step = macos_steps()["The contract, on platform flash_metal"]
    assert f" -k {chosen} " in step


def macos_steps():
    """Name and text of the steps of the job for Macs."""
    job = WORKFLOW.read_text().partition("\n  macos:\n")[2]
    steps = [step for step in re.split(r"\n      - ", job) if step.startswith("name: ")]
    return {step.splitlines()[0].removeprefix("name: "): step for step in steps}


def test_each_check_on_a_mac_runs_whatever_the_others_found():
    steps = macos_steps()
    checks = list(steps)[list(steps).index("Doctor") :]
    assert {"Doctor", "Kernels", "Keep the report"} <= set(checks)
    for name in checks:
        assert "\n        if: ${{ !cancelled() }}\n" in steps[name], name


def test_only_a_mac_of_ones_own_fails_the_workflow():
    """The GPU of GitHub's runners may be too old for the kernels."""
    job = WORKFLOW.read_text().partition("\n  macos:\n")[2].partition("steps:")[0]
    assert "runs-on: ${{ vars.MACOS_RUNNER || 'macos-15' }}" in job
    assert "continue-on-error: ${{ !vars.MACOS_RUNNER }}" in job
