"""Settings of every test: JAX on the CPU by default, our own warnings are errors."""

import os

import pytest

from jax_flash_metal import hosts

# Before jax is imported. Platform flash_metal exists where there is a host plugin for
# it; tests/plugin/pjrt/conftest.py says so where there is none.
try:
    hosts.find()
    os.environ.setdefault("JAX_PLATFORMS", "cpu,flash_metal")
except hosts.HostError:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before NumPy is: BLAS threads of every worker would fight for the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["tests.support.variant_coverage"]


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:::jax_flash_metal")


@pytest.fixture
def x64():
    """The test runs with 64-bit types."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
