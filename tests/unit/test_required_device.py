"""Where JAX_FLASH_METAL_REQUIRE_DEVICE is set, as on a Mac, a skipped test fails.

Unless the installed versions are the reason (tests/support/versions.py).
"""

import os
import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

TESTS = """
import pytest
from tests.support import versions

def test_passes(): pass

def test_needs_another_version(): versions.skip("jax is older")

def test_skips(): pytest.skip("no device")

@pytest.mark.skipif(True, reason="no device")
def test_is_skipped(): pass

@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


@pytest.mark.parametrize(
    ("setting", "summary"),
    [
        ("", "1 passed, 3 skipped, 1 xfailed"),
        ("0", "1 passed, 3 skipped, 1 xfailed"),
        ("1", "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error"),
    ],
)
def test_skips(tmp_path, setting, summary):
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.conftest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "JAX_FLASH_METAL_REQUIRE_DEVICE": setting},
    )
    last = re.sub(r" in .*", "", done.stdout.strip().splitlines()[-1])
    assert last == summary, done.stdout
    assert done.returncode == (1 if setting == "1" else 0)
    assert setting != "1" or "no device" in done.stdout
