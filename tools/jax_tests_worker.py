"""pytest plugin in the processes of jax_tests.py: the platform, which tests, outcomes.

JAX's tests must not notice it, so it says nothing. Outcomes go to a file at once, so
that a test that takes the process down is known.
"""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path

import pytest

TIMEOUT = 120  # seconds
RECORDS = Path(os.environ["JAX_TESTS_RECORDS"])
# pytest has not redirected it yet.
STDERR = os.fdopen(os.dup(2), "w")


def pytest_configure() -> None:
    from jax._src import test_util

    # Which tests skip themselves, and their tolerances: the host is a CPU.
    test_util.device_under_test = lambda: "cpu"
    mode = os.environ["JAX_TESTS_MODE"]
    if mode != "host":
        from jax_flash_metal import pjrt

        pjrt.start()  # also where the package is not installed
    if mode == "cut":
        from tests.support import identity_call

        identity_call.cut_every_program(
            probability=float(os.environ["JAX_TESTS_PROBABILITY"]),
            seed=int(os.environ["JAX_TESTS_SEED"]),
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = set(Path(os.environ["JAX_TESTS_WANTED"]).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid in wanted]


def _record(**fields: str) -> None:
    with RECORDS.open("a") as records:
        records.write(json.dumps(fields) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _record(event="start", test=nodeid)
    # Ends the process, with the stacks in its log. Nothing gentler ends a deadlock.
    faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=STDERR)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Three of each test; what is not "passed" in any of them is its outcome.
    if report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr or "")
        _record(
            event="outcome",
            test=report.nodeid,
            outcome=report.outcome,
            reason=reason[:2000],
        )


def pytest_runtest_logfinish(nodeid: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    _record(event="finish", test=nodeid)
