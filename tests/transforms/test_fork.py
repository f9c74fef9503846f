"""A process that used the library forks: the child works or says why not."""

import os

import pytest

from jax_flash_metal.config import BACKENDS
from tests.support.processes import output_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

REFUSED = (
    "RuntimeError this process was forked from one that had used JAX, whose threads "
    "did not come along: it can neither compile nor run here; start worker processes "
    "before the first use of JAX, or by multiprocessing's 'spawn'."
)

START = """
import os, signal, warnings
import jax, jax.numpy as jnp, numpy as np
from jax_flash_metal import flash_attention
from jax_flash_metal.attention_library import AttentionLibrary
from jax_flash_metal.platforms import load_library

warnings.simplefilter("ignore")  # Python and JAX warn of forking with threads
x = np.random.default_rng(0).standard_normal((2, 200, 4, 32), np.float32)
sinks = np.ones(4, np.float32)

def attend(x, **options):
    return flash_attention(x, x, x, implementation="metal", **options)

def in_child(actions):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        print("status", status, flush=True)
        return
    signal.alarm(60)
    for name, act in actions.items():
        try:
            print(name, act(), flush=True)
        except Exception as error:
            print(name, type(error).__name__, error, flush=True)
    os._exit(0)
"""

AFTER = """
compiled = jax.jit(attend)
out = np.asarray(compiled(x))
library = AttentionLibrary(load_library())

def kernels():
    options = dict(scale=32 ** -0.5, is_causal=False, q_offset=0)
    return np.array_equal(library.run_forward(x, x, x, **options)[0], out)

assert kernels()
in_child({
    "kernels": kernels,
    "run": lambda: np.array_equal(compiled(x), out),
    "compile": lambda: jax.jit(lambda x: attend(x, is_causal=True))(x),
    "eager": lambda: attend(x, sinks=sinks),
})
print("parent", np.array_equal(compiled(x), out))
"""

# The native CPU kernels wait for no thread: what JAX can do in a child, they can.
CPU = """
import jax_flash_metal

compiled = jax.jit(lambda x: flash_attention(x, x, x))
out = np.asarray(compiled(x))
library = AttentionLibrary(load_library(), backend="cpu")
shapes = [jax.ShapeDtypeStruct((2, 200, 4, 32), jnp.float32)] * 3

def kernels():
    return np.allclose(library.run_forward(x, x, x)[0], out, atol=1e-6)

assert kernels()
in_child({
    "kernels": kernels,
    "explain": lambda: jax_flash_metal.explain(*shapes).implementation,
    "proof": lambda: jax_flash_metal.explain(*shapes, sinks=sinks).implementation,
    "trace": lambda: jax.eval_shape(flash_attention, *shapes).shape,
})
print("parent", np.array_equal(compiled(x), out))
"""

# JAX was used, the kernels were not.
JAX_ONLY = """
jnp.ones(3).block_until_ready()
in_child({"child": lambda: jax.jit(attend)(x).shape})
print("parent", jax.jit(attend)(x).shape)
"""

BEFORE = """
in_child({"child": lambda: jax.jit(attend)(x).shape})
print("parent", jax.jit(attend)(x).shape)
"""

# Another thread is in the kernels at every fork, and may hold any of their locks.
BUSY = """
import threading
library = AttentionLibrary(load_library(), backend={backend!r})
options = dict(scale=1.0, is_causal=True, q_offset=0)
out = library.run_forward(x, x, x, **options)[0]
done = threading.Event()

def work():
    while not done.is_set():
        library.run_forward(x, x, x, **options)

thread = threading.Thread(target=work)
thread.start()
run = lambda: np.array_equal(library.run_forward(x, x, x, **options)[0], out)
for _ in range(10):
    in_child({"child": run})
done.set()
thread.join()
"""


def outcomes(program):
    lines = output_of(START + program, JAX_PLATFORMS="cpu").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def test_after_the_first_use():
    assert outcomes(AFTER) == {
        "kernels": "True",
        "run": REFUSED,
        "compile": REFUSED,
        "eager": REFUSED,
        "status": "0",
        "parent": "True",
    }


def test_before_the_first_use():
    shape = "(2, 200, 4, 32)"
    assert outcomes(BEFORE) == {"child": shape, "status": "0", "parent": shape}


def test_after_jax_alone_was_used():
    shape = "(2, 200, 4, 32)"
    assert outcomes(JAX_ONLY) == {"child": REFUSED, "status": "0", "parent": shape}


def test_the_cpu_kernels_after_the_first_use():
    assert outcomes(CPU) == {
        "kernels": "True",
        "explain": "cpu",
        "proof": "cpu",
        "trace": "(2, 200, 4, 32)",
        "status": "0",
        "parent": "True",
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_while_kernels_run(backend):
    program = START + BUSY.replace("{backend!r}", repr(backend))
    lines = output_of(program, JAX_PLATFORMS="cpu").splitlines()
    assert lines == ["child True", "status 0"] * 10
