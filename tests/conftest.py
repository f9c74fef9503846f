"""Settings of every test: JAX on the CPU by default, our own warnings are errors."""

import os

import pytest

# Before jax is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu,flash_metal")
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
