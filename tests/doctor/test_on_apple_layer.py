"""doctor over the layer for Apple's Metal, as it runs on Linux: over the fake Metal.

What a Mac's user would read when something there is wrong.
"""

import json

import pytest

from plugin import build
from tests.checker.planted import copy_of_kernels
from tests.support import fake_metal, mock_host
from tests.support.package_copy import PackageCopy

pytestmark = pytest.mark.xdist_group("doctor")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(kernels, library, fake) of a small table of variants."""
    folder = tmp_path_factory.mktemp("small")
    kernels = copy_of_kernels(folder)
    library = build.build(
        kernel_dir=kernels, device="apple", output=folder / "library.so"
    )
    return kernels, library, fake_metal.library(kernels)


@pytest.fixture
def copy(small, tmp_path):
    kernels, library, fake = small
    copy = PackageCopy(tmp_path / "site", kernels=kernels, library=library)
    copy.settings = {
        **mock_host.settings(kind="jax-metal"),
        fake_metal.VARIABLE: str(fake),
        "JAX_PLATFORMS": "",
    }
    return copy


def run(copy, *, code, prepare=""):
    """doctor --json, after these lines of Python that talk to the fake Metal."""
    copy.edit(
        "doctor_checks",
        'events.progress("opening the device")',
        f'fake = __import__("ctypes").CDLL(os.environ["{fake_metal.VARIABLE}"])\n'
        f"    {prepare}\n"
        '    events.progress("opening the device")',
    )
    done = copy.run(
        *("-m", "jax_flash_metal", "doctor", "--json", "--time-budget", "0"),
        **copy.settings,
    )
    assert done.returncode == code, done.stdout + done.stderr
    content = json.loads(done.stdout)
    return {check["name"]: check for check in content["checks"]}


def test_all_is_well(copy):
    checks = run(copy, code=0)
    assert checks["device"]["facts"]["device"] == "apple"
    assert checks["device"]["message"].startswith("Apple M3 Fake, Apple9, ")
    assert ", 16.0 GiB; macOS" in checks["device"]["message"]
    assert checks["self-test"]["status"] == "ok"
    assert checks["hand-over"]["status"] == "ok"
    assert checks["hand-over"]["facts"]["host"]["handover"] == "native"
    assert checks["training"]["facts"]["platform"] == "flash_metal"
    assert checks["training"]["status"] == "ok"


def test_no_metal_device(copy):
    checks = run(copy, code=1, prepare='fake.fake_metal_set_fact(b"has_device", 0)')
    assert checks["device"]["status"] == "fail"
    assert "no Metal device" in checks["device"]["message"]


@pytest.mark.slow
def test_an_old_gpu(copy):
    prepare = 'fake.fake_metal_set_fact(b"family", __import__("ctypes").c_int64(1006))'
    checks = run(copy, code=1, prepare=prepare)
    assert checks["device"]["status"] == "fail"
    assert "Apple7" in checks["device"]["message"]


@pytest.mark.slow
def test_kernels_that_do_not_compile(copy):
    """Apple's compiler rejects two of them: their names and its log are there."""
    prepare = (
        'fake.fake_metal_fail(b"newLibraryWithSource:options:error:", 3, 2, 0, '
        'b"program_source:7:1: error: unknown type name bfloat")'
    )
    checks = run(copy, code=1, prepare=prepare)
    self_test = checks["self-test"]
    assert self_test["status"] == "fail"
    assert "unknown type name bfloat" in self_test["message"]
    failed = [row for row in self_test["rows"] if row["failure"]]
    for row in failed:
        assert f"the Metal compiler rejects {row['name']}: " in row["failure"]
    assert 1 <= len(failed) <= 2


def test_a_gpu_that_hangs(copy):
    """A pass of the self-test times out, twice; the rest goes on."""
    prepare = 'fake.fake_metal_fail(b"commit", 5, 2, 3, b"Caused GPU Timeout Error")'
    checks = run(copy, code=1, prepare=prepare)
    self_test = checks["self-test"]
    assert "Caused GPU Timeout Error" in self_test["message"]
    # Those of one pass, at most, are under suspicion.
    assert sum(row["failure"] is None for row in self_test["rows"]) >= 4
    # Which programs do not hold against the kernels.
    proofs = list((copy.folder / "cache" / "proofs").iterdir())
    assert len(proofs) == 2  # of the Metal kernels and of the CPU's
    assert all("Timeout" not in file.read_text() for file in proofs)


@pytest.mark.slow
def test_a_gpu_that_hangs_once(copy):
    """As when another program's fault ends all that runs on the GPU."""
    prepare = 'fake.fake_metal_fail(b"commit", 5, 1, 3, b"Caused GPU Timeout Error")'
    assert run(copy, code=0, prepare=prepare)["self-test"]["status"] == "ok"
