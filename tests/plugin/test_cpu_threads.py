"""The CPU kernels inside JAX's programs: on its thread pool, beside its operations.

A handler that waits for a task that it gave the pool stops for ever once as many of
them run as the pool has threads; so each program is a process of its own, with a limit.
"""

from __future__ import annotations

import os

import pytest

from tests.support.processes import run_python

HAS_MASK = hasattr(os, "sched_getaffinity")
NUM_CPUS = len(os.sched_getaffinity(0)) if HAS_MASK else os.cpu_count() or 1

pytestmark = pytest.mark.skipif(not HAS_MASK, reason="no affinity mask here")

TIME_LIMIT = 240  # seconds; they take a few

START = """
import os, sys
num_cpus = {num_cpus}
cpus = sorted(os.sched_getaffinity(0))[:num_cpus]
os.sched_setaffinity(0, cpus)

import hashlib
import jax, jax.numpy as jnp, numpy as np
from jax_flash_metal import flash_attention

def attend(query, key, value, **options):
    return flash_attention(query, key, value, implementation="cpu", **options)

def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)

def digest(tree):
    state = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        state.update(np.asarray(x).tobytes())
    return state.hexdigest()
"""

# Independent calls, which XLA may run at the same time, each with work for all threads.
MANY = """
count = {count}
operands = [numbers(i, 1, 160, 4, 32) for i in range(count)]

def one(x):
    loss = lambda x: (attend(x, x, x, is_causal=True) ** 2).sum()
    return jax.value_and_grad(loss)(x)

program = jax.jit(lambda operands: [one(x) for x in operands])
first = digest(program(operands))
for _ in range(5):
    assert digest(program(operands)) == first
alone = jax.jit(one)
assert digest([alone(x) for x in operands]) == first
print(first)
"""

# Beside a product that itself is spread over the pool, and around others.
BESIDE = """
x, a = numbers(0, 2, 300, 4, 64), numbers(1, 1500, 1500)

def attention(x):
    return attend(x, x, x, is_causal=True)

def program(x, a):
    y = a
    for _ in range(4):
        y = jnp.tanh(y @ a / 1500)
    outs = [attention(x * scale) for scale in (1.0, 2.0, 3.0)]
    return outs, y, outs[0].reshape(600, 256) @ y[:256, :256]

outs, y, _ = jax.jit(program)(x, a)
expected = [jax.jit(attention)(x * scale) for scale in (1.0, 2.0, 3.0)]
assert digest(outs) == digest(expected)
print("good")
"""

# Every kind of kernel, in sizes that are cut into many blocks. No sums but theirs: the
# bits of XLA's own depend on the number of threads.
BITS = """
def results(dtype, q_len, kv_len, **options):
    query = numbers(1, 2, q_len, 6, 64).astype(dtype)
    key, value = (numbers(i, 2, kv_len, 2, 64).astype(dtype) for i in (2, 3))
    bias, slopes = numbers(4, 1, 6, q_len, kv_len), np.abs(numbers(5, 6))
    options = dict(is_causal=True, q_offset=kv_len - q_len) | options

    def attention(query, key, value, bias, sinks, slopes):
        return attend(
            query, key, value, bias=bias, sinks=sinks, alibi_slopes=slopes,
            return_logsumexp=True, **options,
        )

    @jax.jit
    def run(*operands):
        results, pull_back = jax.vjp(attention, *operands)
        return results, pull_back(results)

    return run(query, key, value, bias, numbers(6, 6), slopes)

for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    for lengths in ((300, 300), (129, 515), (1, 1000), (7, 1025)):
        print(digest(results(dtype, *lengths)))
    print(digest(results(dtype, 200, 200, sliding_window=(70, 0), logits_soft_cap=9.0)))
"""


# Another thread is in the kernels at every fork, and may hold any of their locks.
FORK = """
import signal, threading, warnings
from jax_flash_metal.attention_library import AttentionLibrary
from jax_flash_metal.platforms import load_library

warnings.simplefilter("ignore")  # Python and JAX warn of forking with threads
library = AttentionLibrary(load_library(), backend="cpu")
x = numbers(0, 2, 130, 4, 32)
expected = digest(library.run_forward(x, x, x, is_causal=True))
done = threading.Event()

def work():
    while not done.is_set():
        library.run_forward(x, x, x)

thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = digest(library.run_forward(x, x, x, is_causal=True)) == expected
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
done.set()
thread.join()
print("good")
"""


def run(program: str, *, num_cpus: int | None = None, **numbers: int) -> str:
    text = START.replace("{num_cpus}", str(num_cpus))
    for name, number in numbers.items():
        program = program.replace(f"{{{name}}}", str(number))
    done = run_python(text + program, timeout=TIME_LIMIT, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("count", [24, 64])
def test_many_calls_in_one_program(count: int) -> None:
    run(MANY, count=count)


def test_many_calls_on_one_cpu() -> None:
    assert run(MANY, num_cpus=1, count=24) == run(MANY, count=24)


@pytest.mark.parametrize("num_cpus", [1, None])
def test_beside_other_operations(num_cpus: int | None) -> None:
    assert run(BESIDE, num_cpus=num_cpus) == "good"


@pytest.mark.parametrize("num_cpus", [1, None])
def test_a_forked_process(num_cpus: int | None) -> None:
    assert run(FORK, num_cpus=num_cpus) == "good"


@pytest.mark.skipif(NUM_CPUS < 2, reason="there is one CPU here")
def test_the_same_bits_with_one_and_two_threads() -> None:
    one, two = (run(BITS, num_cpus=number) for number in (1, 2))
    assert len(one.splitlines()) == 15
    assert one == two
