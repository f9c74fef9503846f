"""Programs of JAX, cut at their custom calls, compute what they compute whole.

With the number of segments, where the dependencies fix it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.partition_programs import run_and_compare

SIZE = 4
X = np.linspace(-1, 1, 2 * 5 * SIZE, dtype=np.float32).reshape(2, 5, SIZE)


def weights(num_layers):
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        name: jax.random.normal(key, (num_layers, SIZE, SIZE)) * 0.3
        for name, key in zip("qkvoud", keys)
    }


def layer(ops, w, x):
    def attend(w, x):
        return ops.attention(x @ w["q"], x @ w["k"], x @ w["v"]) @ w["o"]

    x = x + jax.jit(attend)(w, x)
    return x + jax.nn.relu(x @ w["u"]) @ w["d"]


def at(w, i):
    return jax.tree.map(lambda a: a[i], w)


def plain(ops, w, x):
    return layer(ops, at(w, 1), layer(ops, at(w, 0), x))


def checkpointed(ops, w, x):
    for i in range(2):
        x = jax.checkpoint(lambda w, x: layer(ops, w, x))(at(w, i), x)
    return x


def scanned(ops, w, x):
    return jax.lax.scan(lambda x, w: (layer(ops, w, x), None), x, w)[0]


def scanned_checkpointed(ops, w, x):
    body = jax.checkpoint(lambda x, w: (layer(ops, w, x), None))
    return jax.lax.scan(body, x, w)[0]


def conditional(ops, w, x):
    for i in range(2):
        w_i = at(w, i)
        x = jax.lax.cond(
            x.sum() > 0,
            lambda x, w_i=w_i: layer(ops, w_i, x),
            lambda x, w_i=w_i: x * 2 + layer(ops, w_i, -x),
            x,
        )
    return x


def looped(ops, w, x):
    bound = jnp.int32(2)
    return jax.lax.fori_loop(0, bound, lambda i, x: layer(ops, at(w, i), x), x)


def training_step(network):
    def step(ops, w, x, y):
        def loss(w):
            return ((network(ops, w, x) - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(w)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)

    return step


@pytest.mark.parametrize(
    ("network", "num_segments", "num_runs", "num_calls"),
    [
        (plain, 5, 5, 4),
        (checkpointed, 7, 7, 6),
        # scan: before, between and after the loops one segment each; per loop one for
        # the condition (both are equal: 1 compiled) and two in the body.
        (scanned, 8, 17, 4),
        (scanned_checkpointed, 9, 19, 6),
    ],
)
def test_training_step(network, num_segments, num_runs, num_calls):
    plan, executor = run_and_compare(
        training_step(network), weights(2), X, np.ones_like(X), donate_argnums=0
    )
    assert len(plan.segments) == num_segments
    assert executor.num_segment_runs == num_runs
    assert len(executor.call_log) == num_calls


def test_training_step_with_branches():
    plan, executor = run_and_compare(
        training_step(conditional), weights(2), X, np.ones_like(X), donate_argnums=0
    )
    # Per layer and direction: the branches differ; each has one segment before and one
    # after its call. Which are equal depends on how this jax writes them.
    branches = [s for b in plan.blocks for s in b.steps if s.blocks]
    assert len(branches) == 4
    assert len(plan.segments) <= 3 + 4 * 2 * 2
    assert executor.num_segment_runs <= 3 + 4 * 2 + 1
    assert len(executor.call_log) == 4


def test_loop_forward():
    plan, executor = run_and_compare(looped, weights(2), X)
    assert (len(plan.segments), executor.num_segment_runs) == (4, 8)
    assert len(executor.call_log) == 2


def test_loop_of_zero_iterations():
    def program(ops, n, x):
        return jax.lax.fori_loop(0, n, lambda i, x: ops.affine(x) + i, x)

    for n in (0, 3):
        _, executor = run_and_compare(program, jnp.int32(n), X)
        assert len(executor.call_log) == n


def test_call_in_the_condition_of_a_loop():
    def program(ops, x, limit):
        def condition(carry):
            return ops.affine(carry[1]).sum() < limit

        def body(carry):
            return carry[0] + 1, carry[1] * 1.5 + 1

        return jax.lax.while_loop(condition, body, (0, x))

    run_and_compare(program, X, jnp.float32(200.0))


def test_loops_in_loops():
    def program(ops, x):
        def inner(i, carry):
            x, total = carry
            x = jnp.sin(ops.affine(x, 0.5)) + i
            return x, total + x.sum()

        def outer(carry, row):
            x, total = jax.lax.fori_loop(0, 2, inner, carry)
            return (x + row, total), ops.affine(row)

        return jax.lax.scan(outer, (x[0], 0.0), x)

    _, executor = run_and_compare(program, X)
    assert len(executor.call_log) == 2 * 2 + 2


def test_switch_inside_of_a_scan():
    def program(ops, x, which):
        branches = [
            lambda x: ops.affine(x),
            lambda x: jnp.cos(x),  # no call in it, still one of the plan's blocks
            lambda x: ops.pair(x, jnp.ones_like(x))[1] + 2,
            lambda x: jnp.zeros_like(x),
        ]
        body = lambda x, i: (jax.lax.switch(i, branches, x), x.max())  # noqa: E731
        return jax.lax.scan(body, x, which)

    run_and_compare(program, X, np.array([0, 1, 2, 3, 7, -1], np.int32))


def test_gradient_through_branches_and_loops():
    def program(ops, x, flags):
        def body(x, flag):
            return jax.lax.cond(flag, lambda x: ops.affine(x, 0.5), jnp.sin, x), None

        return jax.grad(lambda x: (jax.lax.scan(body, x, flags)[0] ** 2).sum())(x)

    run_and_compare(program, X, np.array([True, False, True]))


def test_nested_and_repeated_functions():
    def program(ops, x):
        inner = jax.jit(lambda x: ops.affine(x) * 2)
        middle = jax.jit(lambda x: inner(inner(x)) + jnp.where(x > 0, x, 0))
        return middle(middle(x)) + jnp.where(x > 1, x, 0)

    _, executor = run_and_compare(program, X)
    assert len(executor.call_log) == 4


def test_batched_and_sequential_vmap():
    def program(ops, q, k, v):
        @jax.custom_batching.custom_vmap
        def sequential(x):
            return ops.affine(x)

        @sequential.def_vmap
        def _(axis_size, in_batched, x):
            return jax.lax.map(lambda x: ops.affine(x), x), True

        @jax.custom_batching.custom_vmap
        def batched(q, k, v):
            return ops.attention(q[None], k[None], v[None])[0]

        @batched.def_vmap
        def _(axis_size, in_batched, q, k, v):
            return ops.attention(q, k, v), True

        return jax.vmap(lambda q, k, v: sequential(batched(q, k, v)))(q, k, v)

    _, executor = run_and_compare(program, X, X + 1, X * 2)
    assert executor.call_log == ["test_attention"] + 2 * ["test_affine"]


def test_sort_scatter_convolution_and_random_numbers_between_calls():
    def program(ops, x, key):
        x = ops.affine(x)
        noise = jax.random.normal(key, x.shape)
        x = jnp.sort(x + noise, axis=1)
        x = x.at[0, jnp.array([1, 3])].add(2.0)
        x = ops.affine(x)
        kernel = jnp.ones((3, SIZE, SIZE)) / 7
        x = jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.cumsum(x, axis=1), jnp.argmax(ops.affine(x), axis=-1)

    run_and_compare(program, X, jax.random.PRNGKey(3))


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "int8", "uint32", "int32", "float32"]
)
def test_types(dtype):
    def program(ops, x, y):
        total, product = ops.pair(x, y)
        return total, jnp.flip(product, 0), ops.pair(product, total)

    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    run_and_compare(program, x, x + jnp.ones((), dtype))


def test_complex_and_bool_between_calls():
    def program(ops, x):
        z = jax.lax.complex(x, x + 1) * (2 + 1j)
        mask = x > 0
        y = ops.affine(x)
        return jnp.where(mask, y, jnp.real(z)), z, jnp.logical_not(mask)

    run_and_compare(program, X)


def test_outputs_that_are_inputs_duplicates_or_constants():
    def program(ops, x, y):
        z = ops.affine(x)
        return y, z, z, x, jnp.zeros((3, 2)), jnp.float32(3), y

    plan, _ = run_and_compare(program, X, X + 1, keep_unused=True)
    main = plan.blocks[0]
    assert main.outputs[0] == main.outputs[6] == main.inputs[1]
    assert main.outputs[1] == main.outputs[2]
    assert main.outputs[3] == main.inputs[0]


@pytest.mark.filterwarnings("ignore:Some donated buffers:UserWarning")
def test_arrays_of_no_elements():
    def program(ops, x, empty):
        a, b = ops.pair(empty, empty)
        return ops.affine(x) + a.sum(), jnp.concatenate([a, b], axis=1) * 2

    run_and_compare(program, X, np.zeros((0, 3), np.float32), donate_argnums=1)


def test_one_call_and_nothing_else():
    plan, _ = run_and_compare(lambda ops, x: ops.affine(x), X)
    assert plan.segments == []
    assert len(plan.blocks[0].steps) == 1
