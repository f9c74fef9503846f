"""Programs with unusual results, profiles, compilations that do not come to an end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.plugin.pjrt import on_platform
from tests.plugin.pjrt.on_platform import put, scale
from tests.support.processes import run_python

pytestmark = pytest.mark.xdist_group("pjrt")

X = np.arange(6, dtype=np.float32).reshape(2, 3) + 1


@pytest.fixture(autouse=True)
def on_our_platform():
    with jax.default_device(on_platform.device()):
        yield


# -- Results ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("bool", "int4", "uint4", "int2", "bfloat16", "float8_e4m3fn"),
        *("float8_e8m0fnu", "float4_e2m1fn"),
    ],
)
def test_results_of_every_element_type(name):
    if not hasattr(jnp, name) and name != "bool":
        pytest.skip("this version of jax has no such type")
    small = np.array([[0, 1, 1], [1, 0, 1]]).astype(jnp.dtype(getattr(jnp, name, name)))
    try:
        expected = np.asarray(jax.jit(lambda a: a.T)(put(small)))
    except Exception as error:  # the host's own
        pytest.skip(str(error))
    run = jax.jit(lambda a, x: (a, a.T, scale(x)), donate_argnums=0)
    same, transposed, doubled = run(put(small), put(X))
    # As float32, because NumPy does not know that NaNs of the new types are equal.
    for got, wanted in ((same, small), (transposed, expected)):
        assert got.dtype == wanted.dtype
        got, wanted = (np.asarray(a).astype(np.float32) for a in (got, wanted))
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(doubled, X * 2)


def test_a_result_in_another_memory_is_refused():
    """Not put into the default memory nonetheless: jaxlib ends the process then."""
    default = on_platform.device().default_memory().kind
    kinds = [m.kind for m in on_platform.device().addressable_memories()]
    for kind in {*kinds} - {default}:
        sharding = jax.sharding.SingleDeviceSharding(
            on_platform.device(), memory_kind=kind
        )
        run = jax.jit(lambda x: scale(x) + 1, out_shardings=sharding)
        with pytest.raises(Exception, match=rf"memory kind {kind}|placement"):
            run(put(X))


def test_a_profile_can_be_recorded(tmp_path):
    run = jax.jit(lambda x: scale(x) + 1)
    with jax.profiler.trace(str(tmp_path)):
        np.testing.assert_array_equal(run(put(X)), X * 2 + 1)
    assert any(path.is_file() for path in tmp_path.rglob("*"))


# -- Ends ------------------------------------------------------------------------------

_INTERRUPTED = """
import os, signal, threading
# What starts a process in the background may have it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, numpy as np
from jax_flash_metal import partition
from tests.plugin.pjrt.on_platform import put, scale

original = partition.plan_program

def interrupted(*arguments):
    {interrupt}
    return original(*arguments)

lowered = jax.jit(lambda x: scale(x) + 1).lower(put(np.ones(3, np.float32)))
partition.plan_program = interrupted
try:
    lowered.compile()
except Exception as error:
    print("error:", error)
"""


def test_an_interrupt_of_the_partitioner_is_one():
    code = _INTERRUPTED.format(interrupt="raise KeyboardInterrupt")
    result = run_python(code, JAX_PLATFORMS="flash_metal,cpu")
    assert "KeyboardInterrupt" in result.stderr
    assert result.returncode in (1, -2), result


def test_the_process_can_end_while_a_program_is_partitioned():
    """JAX compiles on a thread and, where it does, lets Ctrl-C end the wait for it."""
    interrupt = """
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(400_000):
        str(_)
    import time; time.sleep(1)
    for _ in range(400_000):
        str(_)
"""
    code = _INTERRUPTED.format(interrupt=interrupt.strip())
    result = run_python(code, JAX_PLATFORMS="flash_metal,cpu")
    assert "Fatal" not in result.stderr
    assert "KeyboardInterrupt" in result.stderr
    assert result.returncode in (1, -2), result
