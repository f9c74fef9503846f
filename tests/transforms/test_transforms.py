"""JAX transformations of flash_attention, each against the plain reference.

Over the kernels. That the derivative and batching rules of the primitives are right
where they are lowered to the reference, too, test_features.py shows, most of it by slow
tests.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import flash_attention
from jax_flash_metal.config import BACKENDS

B, T, S, N, K, H, V = 2, 11, 13, 6, 3, 16, 8


@pytest.fixture(params=BACKENDS)
def attend(request):
    return functools.partial(
        flash_attention,
        is_causal=True,
        q_offset=S - T,
        implementation=request.param,
    )


plain = functools.partial(
    flash_attention, is_causal=True, q_offset=S - T, implementation="xla"
)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def qkv(*batch):
    return (
        normal(1, *batch, T, N, H),
        normal(2, *batch, S, K, H),
        normal(3, *batch, S, K, V),
    )


def loss(attend):
    """Uses out and logsumexp, not linearly."""

    def f(query, key, value):
        out, logsumexp = attend(query, key, value, return_logsumexp=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(logsumexp))

    return f


def gradient(attend):
    return jax.grad(loss(attend), argnums=(0, 1, 2))


def assert_close(actual, expected, rtol=1e-4, atol=1e-4):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert [x.shape for x in actual] == [x.shape for x in expected]
    for a, e in zip(actual, expected):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def test_jit_and_gradient(attend):
    operands = qkv(B)
    eager = gradient(attend)(*operands)
    assert_close(eager, gradient(plain)(*operands))
    jitted = jax.jit(gradient(attend))(*operands)
    assert_close(jitted, eager)


def test_value_and_gradient_of_logsumexp_alone(attend):
    def f(attend):
        def g(*operands):
            _, logsumexp = attend(*operands, return_logsumexp=True)
            return jnp.sum(logsumexp**2)

        return jax.jit(jax.value_and_grad(g, argnums=(0, 1, 2)))

    assert_close(f(attend)(*qkv(B)), f(plain)(*qkv(B)))


def directional(f, order):
    """The derivative of `order` along a fixed direction, by reverse mode alone."""
    for seed in range(order):
        direction = tuple(
            normal(10 + 3 * seed + i, *x.shape) for i, x in enumerate(qkv(1))
        )

        def f(*operands, f=f, direction=direction):
            slopes = jax.grad(f, argnums=(0, 1, 2))(*operands)
            return sum(jnp.vdot(s, d) for s, d in zip(slopes, direction))

    return f


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradient_of_gradient(attend, order):
    operands = qkv(1)
    ours = jax.jit(gradient_of(directional(loss(attend), order)))(*operands)
    theirs = jax.jit(gradient_of(directional(loss(plain), order)))(*operands)
    scale = max(float(jnp.abs(x).max()) for x in theirs)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * scale)


def gradient_of(f):
    return jax.grad(f, argnums=(0, 1, 2))


SUBSETS = [
    "".join(axes) for n in (1, 2, 3) for axes in itertools.combinations("qkv", n)
]


# Two are enough for every run: test_features.py maps any two operands of all.
@pytest.mark.parametrize(
    "mapped",
    [
        s if s in ("k", "qv") else pytest.param(s, marks=pytest.mark.slow)
        for s in SUBSETS
    ],
)
def test_vmap_over_any_operands(attend, mapped):
    size = 4
    in_axes = tuple(0 if name in mapped else None for name in ("q", "k", "v"))
    shared, many = qkv(B), qkv(size, B)
    operands = [m if axis == 0 else s for axis, m, s in zip(in_axes, many, shared)]

    def each(f):
        results = [
            f(*(x if axis is None else x[i] for x, axis in zip(operands, in_axes)))
            for i in range(size)
        ]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *results)

    forward = functools.partial(plain, return_logsumexp=True)
    mapped_forward = jax.vmap(functools.partial(attend, return_logsumexp=True), in_axes)
    assert_close(jax.jit(mapped_forward)(*operands), each(forward))
    # Gradients per element, and of the sum (where shared operands get the sum).
    mapped_gradient = jax.jit(jax.vmap(gradient(attend), in_axes))
    assert_close(mapped_gradient(*operands), each(gradient(plain)))

    def total(attend):
        return lambda *operands: jnp.sum(jax.vmap(loss(attend), in_axes)(*operands))

    assert_close(
        jax.jit(gradient_of(total(attend)))(*operands),
        jax.jit(gradient_of(total(plain)))(*operands),
    )


def test_nested_vmaps(attend):
    query, key, value = normal(1, 5, B, 4, T, N, H), normal(2, B, S, 4, K, H), qkv(B)[2]

    def nested(attend):
        inner = jax.vmap(gradient(attend), (1, 2, None))
        return jax.jit(jax.vmap(inner, (0, None, None)))

    # An axis that is neither first nor the same for both.
    assert_close(nested(attend)(query, key, value), nested(plain)(query, key, value))


def test_jacobian(attend):
    query, key, value = (x[0] for x in qkv(1))

    def jacobian(attend):
        return jax.jit(jax.jacrev(lambda q: attend(q, key, value)[:2, :2]))

    assert_close(jacobian(attend)(query), jacobian(plain)(query))


def test_vmap_of_the_pullback(attend):
    """Residuals stay shared, cotangents are mapped."""
    operands = qkv(B)
    cotangents = normal(9, 7, B, T, N, V)

    def pullbacks(attend):
        _, pullback = jax.vjp(attend, *operands)
        return jax.vmap(pullback)(cotangents)

    assert_close(pullbacks(attend), pullbacks(plain))


def test_vmap_of_gradient_of_gradient(attend):
    operands = qkv(3, 1)

    def f(attend):
        second = gradient_of(directional(loss(attend), 1))
        return jax.jit(jax.vmap(second, (0, None, 0)))

    arguments = (operands[0], operands[1][0], operands[2])
    assert_close(f(attend)(*arguments), f(plain)(*arguments), rtol=1e-3, atol=1e-3)


def test_scan_over_layers(attend):
    query, key, _ = qkv(B)
    weights = normal(4, 5, H, H)

    def f(attend):
        def layer(x, weight):
            return x + attend(x @ weight, key, key), None

        return jax.jit(
            jax.grad(lambda x, w: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2))
        )

    assert_close(
        f(attend)(query, weights), f(plain)(query, weights), rtol=1e-3, atol=1e-2
    )


def test_control_flow(attend):
    query, key, value = qkv(B)

    def f(attend):
        def body(state):
            i, x = state
            return i + 1, attend(x, key, jnp.concatenate([value, value], -1))

        def g(flag, x):
            _, x = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))
            return jax.lax.cond(
                flag, lambda x: attend(x, key, value), lambda x: x[..., :V], x
            )

        return jax.jit(g)

    for flag in (True, False):
        assert_close(f(attend)(flag, query), f(plain)(flag, query))


@pytest.mark.parametrize("policy", ["everything", "names", "nothing"])
def test_remat(attend, policy):
    policies = jax.checkpoint_policies
    chosen = {
        "everything": policies.everything_saveable,
        "nothing": policies.nothing_saveable,
        "names": policies.save_only_these_names(
            "flash_attention_out", "flash_attention_logsumexp"
        ),
    }[policy]

    def f(attend):
        return jax.jit(gradient_of(jax.checkpoint(loss(attend), policy=chosen)))

    assert_close(f(attend)(*qkv(B)), f(plain)(*qkv(B)))


def test_donation(attend):
    query, key, value = qkv(B)
    value = jnp.concatenate([value, value], -1)  # out has the shape of query
    want = plain(query, key, value)
    out = jax.jit(attend, donate_argnums=0)(query, key, value)
    assert_close(out, want)
    assert query.is_deleted()


def test_forward_mode_needs_the_reference(attend):
    operands = qkv(B)
    with pytest.raises(TypeError, match=r"forward-mode|custom_vjp"):
        jax.jvp(attend, operands, operands)
    tangent = jax.jvp(plain, operands, operands)[1]
    (numerator,) = jax.vjp(lambda t: plain(*[(1 + t) * x for x in operands]), 0.0)[1](
        jnp.ones_like(tangent)
    )
    np.testing.assert_allclose(tangent.sum(), numerator, rtol=1e-4)


def test_gradient_of_one_operand(attend):
    operands = qkv(B)
    for argnum in range(3):
        ours = jax.jit(jax.grad(loss(attend), argnum))(*operands)
        assert_close(ours, jax.grad(loss(plain), argnum)(*operands))


def test_transposed_and_sliced_inputs(attend):
    query, key, value = qkv(B)
    transposed = jnp.swapaxes(query, 1, 2)  # [B, N, T, H]
    longer = jnp.concatenate([key, key + 1e30], axis=1)

    def f(attend):
        def g(transposed, longer, value):
            return attend(jnp.swapaxes(transposed, 1, 2), longer[:, :S], value)

        return jax.jit(g)

    operands = (transposed, longer, value)
    assert_close(f(attend)(*operands), f(plain)(*operands))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_dtypes(attend, dtype):
    operands = [x.astype(dtype) for x in qkv(B)]
    ours, theirs = gradient(attend)(*operands), gradient(plain)(*operands)
    assert all(x.dtype == dtype for x in ours)
    to32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    assert_close(to32(ours), to32(theirs), rtol=5e-2, atol=5e-2)
