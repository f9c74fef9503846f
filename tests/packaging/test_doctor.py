"""An installed wheel passes its own tests: doctor, outside the tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jax_flash_metal.variant_table import variants
from tests.packaging.conftest import pip, run

pytestmark = pytest.mark.xdist_group("packaging")


@pytest.mark.slow
def test_doctor_passes(wheel: Path, fresh_python: Path, tmp_path: Path) -> None:
    pip("--python", fresh_python, "install", "--no-deps", wheel, cwd=tmp_path)
    report = tmp_path / "report.txt"
    command = ("-m", "jax_flash_metal", "doctor", "--time-budget", "1")
    # `run` demands exit status 0.
    run(fresh_python, *command, "--report", report, cwd=tmp_path)
    text = report.read_text()
    content = json.loads(text[text.index("{\n") :])
    checks = {check["name"]: check for check in content["checks"]}
    assert checks["packages"]["status"] == "ok", checks["packages"]["message"]
    package = checks["packages"]["facts"]["package"]
    assert package.replace("~", str(Path.home())).startswith(str(tmp_path / "env"))
    assert len(checks["self-test"]["rows"]) == len(variants())
