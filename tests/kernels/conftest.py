"""Both implementations of the kernels; what holds for one holds for the other."""

from pathlib import Path

import pytest

from jax_flash_metal.config import BACKENDS
from tests.support import native

_FOLDER = Path(__file__).parent
_FIXTURES = ("backend", "isa")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Its name: the software Metal device, or the CPU kernels."""
    return request.param


@pytest.fixture
def kernels(backend):
    """Its functions."""
    return native.cpu if backend == "cpu" else native


@pytest.fixture
def isa(request):
    """An instruction set, which the CPU kernels use; every one that this CPU has."""
    native.cpu.set_cpu_isa(request.param)
    yield request.param
    native.cpu.set_cpu_isa()


@pytest.fixture
def set_threads():
    """Sets the number of threads; after the test it is the default again."""
    yield native.set_threads
    native.set_threads(0)


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", native.cpu.cpu_isas(), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """One process has all ids of a test: a case is judged once (kernel_check.py)."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.path.parent != _FOLDER or not hasattr(item, "callspec"):
            continue
        for name in _FIXTURES:
            if name in item.callspec.params:
                group = item.name.replace(item.callspec.params[name], "")
                item.add_marker(pytest.mark.xdist_group(group))
