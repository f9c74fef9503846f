"""Settings of every test: JAX on the CPU by default, our own warnings are errors."""

import os
from pathlib import Path

import pytest

from jax_flash_metal import hosts
from tests.support import versions

# Before jax is imported. Platform flash_metal exists where there is a host plugin for
# it; tests/plugin/pjrt/conftest.py says so where there is none.
try:
    hosts.find()
    os.environ.setdefault("JAX_PLATFORMS", "cpu,flash_metal")
except hosts.HostError:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The proofs of the tree's kernels are kept, but not where a user's are.
os.environ.setdefault(
    "JAX_FLASH_METAL_CACHE", str(Path(__file__).parents[1] / "build" / "test_cache")
)
# Before NumPy is: BLAS threads of every worker would fight for the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Where a device must be there, as on a Mac that runs the tests: a skip is an error, but
# for those of tests/support/versions.py.
REQUIRE_DEVICE = os.environ.get("JAX_FLASH_METAL_REQUIRE_DEVICE", "") not in ("", "0")

pytest_plugins = ["tests.support.variant_coverage"]


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:::jax_flash_metal")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if REQUIRE_DEVICE and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
        if not reason.startswith(f"Skipped: {versions.PREFIX}"):
            report.outcome = "failed"
            report.longrepr = (
                f"JAX_FLASH_METAL_REQUIRE_DEVICE forbids {report.longrepr}"
            )
    return report


@pytest.fixture
def implementation(request):
    """Of tests that are parametrised by tests/support/implementations.py's names."""
    from tests.support import implementations

    with implementations.chosen(request.param) as value:
        yield value


@pytest.fixture
def x64():
    """The test runs with 64-bit types."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
