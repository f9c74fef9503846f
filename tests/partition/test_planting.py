"""Programs cut at random places compute what they compute whole.

The planted calls return their operand, so nothing but partitioning can go wrong.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import stablehlo
from tests.support import plan_executor
from tests.support.partition_programs import assert_close
from tests.support.plant import TARGET, identity, plant

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
KEY = np.array([0, 7], np.uint32)


def scans(x):
    def body(carry, row):
        carry = jnp.tanh(carry + row) * 2
        return carry, (carry.sum(), jnp.flip(row))

    return jax.lax.scan(body, x[0], x, reverse=True)


def gradient_of_scan(x):
    def loss(x):
        body = lambda c, row: (jnp.sin(c) * row + c, c.mean())  # noqa: E731
        carry, means = jax.lax.scan(jax.checkpoint(body), x[0], x)
        return carry.sum() + (means**2).sum()

    return jax.value_and_grad(loss)(x)


def branches(x):
    y = jax.lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: jnp.cos(x) + 1, x)
    which = jnp.int32(x[0, 0] + 4)
    return jax.lax.switch(which, [jnp.exp, jnp.abs, lambda x: jnp.zeros_like(x)], y)


def whiles(x):
    def condition(carry):
        return jnp.logical_and(carry[0] < 5, jnp.any(carry[1] < 30))

    def body(carry):
        i, x = carry
        return i + 1, jax.lax.fori_loop(0, i, lambda j, x: x * 1.1 + j, x + 1)

    return jax.lax.while_loop(condition, body, (0, x))


def sorts_and_gathers(x):
    order = jnp.argsort(x, axis=1)
    taken = jnp.take_along_axis(x, order, axis=1)
    values, indices = jax.lax.top_k(x, 3)
    scattered = jnp.zeros((4, 6)).at[jnp.arange(4), indices[:, 0]].set(values[:, 0])
    return taken, scattered, x[jnp.array([0, 3, 1])], jnp.unique(x, size=5)


def reductions(x):
    windows = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 2), "VALID")
    return (
        x.max(0),
        jnp.argmin(x, 1),
        jnp.cumsum(x, 1),
        jnp.prod(x + 3),
        jax.nn.logsumexp(x, axis=0),
        jnp.any(x > 1, axis=1),
        windows,
    )


def random_numbers(key):
    a, b = jax.random.split(key)
    normal = jax.random.normal(a, (5,))
    return normal, jax.random.permutation(b, 7), jax.random.bernoulli(b, 0.3, (4,))


def convolutions(x):
    def loss(kernel):
        image = x.reshape(1, 4, 6, 1)
        y = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (jax.nn.gelu(y) ** 2).mean()

    return jax.value_and_grad(loss)(jnp.ones((3, 3, 1, 2)) * 0.1)


def linear_algebra(x):
    matrix = x @ x.T + jnp.eye(4) * 3
    lower = jnp.linalg.cholesky(matrix)
    solved = jax.scipy.linalg.solve_triangular(lower, x, lower=True)
    return solved, jnp.fft.rfft(x, axis=1).real, jnp.einsum("ij,kj->ik", x, x)


def types(x):
    half = x.astype(jnp.bfloat16)
    small = (x * 10).astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    z = x + 1j * jnp.flip(x)
    return half * 2, small // 3, bits >> 3, jnp.abs(z), z * z, x.astype(jnp.float16)


def nested_functions(x):
    inner = jax.jit(lambda x: jnp.where(x > 0, jax.nn.softplus(x), x / 3))
    middle = jax.jit(lambda x: inner(inner(x)) + jax.scipy.special.erf(x))
    return middle(middle(x)), jax.vmap(middle)(x)


def empty_and_scalar(x):
    nothing = x[:0]
    return jnp.concatenate([nothing, nothing], 1), nothing.sum(), x[1, 2] + 1, x


CASES = [
    *((scans, X), (gradient_of_scan, X), (branches, X), (whiles, X)),
    *((sorts_and_gathers, X), (reductions, X), (random_numbers, KEY)),
    *((convolutions, X), (linear_algebra, X), (types, X), (nested_functions, X)),
    (empty_and_scalar, X),
]


def check(program, argument, choices):
    """`choices`: pairs of a seed and the probability of a cut."""
    lowered = jax.jit(program, donate_argnums=0).lower(argument)
    code = stablehlo.serialize(lowered.compiler_ir("stablehlo"), None)
    whole = plan_executor.compile_module(code)
    expected = plan_executor.execute(whole, [argument])
    compiled = {}
    for seed, probability in choices:
        module, version = stablehlo.parse(code)
        if not plant(module, random.Random(seed), probability):
            assert probability < 1
            continue
        cut = stablehlo.serialize(module, version)
        plan = plan_executor.plan(cut, {TARGET})
        executor = plan_executor.PlanExecutor(plan, {TARGET: identity}, compiled)
        # Compilers round differently over other stretches of a program.
        assert_close(executor.run(argument), expected, rtol=1e-4, atol=1e-5)


# jax says so where no result has the argument's shape.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers:UserWarning")

every_program = pytest.mark.parametrize(
    ("program", "argument"), CASES, ids=[program.__name__ for program, _ in CASES]
)


@every_program
def test_cut_programs_compute_the_same(program, argument):
    check(program, argument, [(1, 0.15), (2, 1.0)])


@pytest.mark.slow
@every_program
@pytest.mark.parametrize("seed", range(10, 16))
def test_cut_at_many_other_places(program, argument, seed):
    check(program, argument, [(seed, seed % 5 / 5 + 0.05)])
