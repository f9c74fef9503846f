"""JAX transformations of a call with every operand and option at once.

Over the kernels, and "fallback": the same primitives and derivative rules, lowered to
the reference. Judged by the reference, which JAX itself transforms
(implementation="xla").
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import flash_attention
from jax_flash_metal.config import BACKENDS

B, T, S, N, K, H, V = 2, 5, 7, 4, 2, 6, 3
FLOATS = ("query", "key", "value", "bias", "sinks", "alibi_slopes")


def operands(*batch, seed=0):
    """One of every kind; all rows but some of the last batch element's see keys."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((*batch, *shape)), jnp.float32)

    def integers(low, high, *shape):
        return jnp.asarray(rng.integers(low, high, (*batch, *shape)), jnp.int32)

    return {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, V),
        "bias": normal(1, N, 1, S),
        "mask": jnp.asarray(rng.random((*batch, B, 1, T, S)) < 0.8),
        "q_offset": integers(1, 4),
        "q_ids": integers(0, 2, B, T),
        "kv_ids": integers(0, 2, B, S),
        "query_seq_lengths": integers(T - 2, T + 1, B),
        "key_value_seq_lengths": integers(S - 2, S + 1, B),
        "sinks": normal(N),
        "alibi_slopes": 0.3 * normal(N),
        "dropout_key": jnp.asarray(rng.integers(0, 2**32, (*batch, 2)), jnp.uint32),
    }


NAMES = tuple(operands())


def attend(implementation, x):
    x = dict(x)
    return flash_attention(
        segment_ids=(x.pop("q_ids"), x.pop("kv_ids")),
        is_causal=True,
        sliding_window=(5, None),
        logits_soft_cap=3.0,
        dropout_rate=0.2,
        return_logsumexp=True,
        implementation=implementation,
        **x,
    )


def loss(implementation, *, has_aux=False):
    """Of the differentiable operands and the others; not linear in its results."""

    def f(floats, others):
        out, logsumexp = attend(implementation, floats | others)
        seen = jnp.isfinite(logsumexp)
        total = jnp.sum(jnp.where(seen, jnp.cos(jnp.where(seen, logsumexp, 0)), 0))
        total += jnp.sum(jnp.sin(out))
        return (total, (out, logsumexp)) if has_aux else total

    return f


def split(x):
    return (
        {name: a for name, a in x.items() if name in FLOATS},
        {name: a for name, a in x.items() if name not in FLOATS},
    )


@functools.cache
def value_and_gradients(implementation):
    """(out, logsumexp) and the gradients of the loss."""

    def f(x):
        value_and_grad = jax.value_and_grad(
            loss(implementation, has_aux=True), has_aux=True
        )
        (_, results), gradients = value_and_grad(*split(x))
        return results, gradients

    return jax.jit(f)


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert a.shape == e.shape and a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


kernels = pytest.mark.parametrize("implementation", BACKENDS)
every = pytest.mark.parametrize(
    "implementation", [*BACKENDS, "fallback"], indirect=True
)
every_but_slowly = pytest.mark.parametrize(
    "implementation",
    [*BACKENDS, pytest.param("fallback", marks=pytest.mark.slow)],
    indirect=True,
)

# Of every two operands one is mapped and the other not, and both are, in some of these:
# each operand is mapped in four of the six, no two in the same four.
FOURS = list(itertools.combinations(range(6), 4))
SUBSETS = [
    [name for name, rows in zip(NAMES, FOURS) if row in rows] for row in range(6)
]


def check_vmap(implementation, mapped):
    many, one = operands(3, seed=1), operands()
    x = {name: (many if name in mapped else one)[name] for name in NAMES}
    axes = ({name: 0 if name in mapped else None for name in NAMES},)
    ours = jax.jit(jax.vmap(value_and_gradients(implementation), axes))(x)
    each = [
        value_and_gradients("xla")(
            {name: a[i] if name in mapped else a for name, a in x.items()}
        )
        for i in range(3)
    ]
    assert_close(ours, jax.tree.map(lambda *parts: jnp.stack(parts), *each))


@pytest.mark.parametrize("mapped", SUBSETS, ids=range(6))
@pytest.mark.parametrize("implementation", BACKENDS)
def test_vmap_over_subsets(mapped, implementation):
    check_vmap(implementation, mapped)


@pytest.mark.slow
@every
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_one_operand(name, implementation):
    check_vmap(implementation, [name])


@pytest.mark.parametrize("implementation", ["fallback"], indirect=True)
def test_vmap_over_one_operand_on_the_fallback(implementation):
    check_vmap(implementation, ["dropout_key"])


@every_but_slowly
def test_gradient_of_a_vmap_sums_over_shared_operands(implementation):
    shared, other = operands(), operands(3, seed=1)
    mapped = {name: other[name] for name in ("query", "bias", "q_offset")}

    def total(implementation):
        def f(shared, mapped):
            def one(mapped):
                return loss(implementation)(*split({**shared, **mapped}))

            return jnp.sum(jax.vmap(one)(mapped))

        def g(shared, mapped):
            floats, others = split(shared)
            return jax.grad(lambda floats: f({**floats, **others}, mapped))(floats)

        return jax.jit(g)

    ours = total(implementation)(shared, mapped)
    assert_close(ours, total("xla")(shared, mapped))


@every_but_slowly
def test_jacobian(implementation):
    """vmap of the pullback: residuals stay shared, cotangents are mapped."""

    def jacobian(implementation):
        def f(floats, others):
            out, logsumexp = attend(implementation, floats | others)
            return out[0, :2, ::3, 0], logsumexp[0, 1, :2]

        return jax.jit(jax.jacrev(f))

    arguments = split(operands())
    assert_close(jacobian(implementation)(*arguments), jacobian("xla")(*arguments))


@pytest.mark.parametrize(
    "implementation",
    ["metal", *(pytest.param(i, marks=pytest.mark.slow) for i in ("cpu", "fallback"))],
    indirect=True,
)
@pytest.mark.parametrize(
    "order", [2, pytest.param(3, marks=pytest.mark.slow)], ids=["second", "third"]
)
def test_reverse_mode_of_any_order(implementation, order):
    floats, others = split(operands())

    def derivative(implementation):
        f = loss(implementation)
        for seed in range(order - 1):
            direction, _ = split(operands(seed=seed + 2))

            def f(floats, others, f=f, direction=direction):
                slopes = jax.grad(f)(floats, others)
                return sum(jnp.vdot(slopes[n], direction[n]) for n in FLOATS)

        return jax.jit(jax.grad(f))

    theirs = derivative("xla")(floats, others)
    size = max(float(jnp.abs(x).max()) for x in theirs.values())
    ours = derivative(implementation)(floats, others)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * size)


def test_forward_mode_of_the_reference():
    """hessian is forward over reverse, jacrev of grad is reverse twice."""
    floats, others = split(operands())

    def of_sinks(implementation):
        return lambda sinks: loss(implementation)({**floats, "sinks": sinks}, others)

    forward = jax.jit(jax.hessian(of_sinks("xla")))(floats["sinks"])
    reverse = jax.jit(jax.jacrev(jax.grad(of_sinks("metal"))))(floats["sinks"])
    assert_close(forward, reverse, rtol=1e-3, atol=1e-4)


def test_directional_derivative_of_the_reference():
    floats, others = split(operands())
    f = functools.partial(loss("xla"), others=others)
    _, tangent = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(floats)
    _, slopes = value_and_gradients("metal")(floats | others)
    expected = sum(jnp.vdot(slopes[name], floats[name]) for name in FLOATS)
    np.testing.assert_allclose(tangent, expected, rtol=1e-4)


def test_forward_mode_of_the_kernels_raises():
    floats, others = split(operands())
    with pytest.raises(TypeError, match=r"forward-mode|custom_vjp"):
        jax.jvp(functools.partial(loss("metal"), others=others), *[(floats,)] * 2)


def test_operands_that_have_no_gradient():
    """Of integers and booleans JAX wants zeros of its type float0."""
    floats, others = split(operands())
    _, pullback = jax.vjp(loss("metal"), floats, others)
    _, gradients = pullback(jnp.float32(1))
    for name, gradient in gradients.items():
        assert gradient.shape == others[name].shape, name
        assert gradient.dtype == jax.dtypes.float0, name


# The axis of each operand that becomes empty.
EMPTY = {
    "batch": dict.fromkeys(
        (
            *("query", "key", "value", "mask", "q_ids", "kv_ids"),
            *("query_seq_lengths", "key_value_seq_lengths"),
        ),
        0,
    ),
    "queries": {"query": 1, "mask": 2, "q_ids": 1},
    "keys": {"key": 1, "value": 1, "bias": 3, "mask": 3, "kv_ids": 1},
}


@pytest.mark.parametrize(
    ("implementation", "empty"),
    [*((b, e) for b in BACKENDS for e in EMPTY), ("xla", "batch")],
)
def test_nothing_to_do(implementation, empty):
    """Whatever is not empty itself is 0."""
    x = operands()
    for name, axis in EMPTY[empty].items():
        x[name] = jax.lax.slice_in_dim(x[name], 0, 0, axis=axis)
    gradient = jax.grad(loss(implementation, has_aux=True), has_aux=True)
    gradients, (out, logsumexp) = gradient(*split(x))
    assert out.shape[:3] == x["query"].shape[:3]
    assert (np.asarray(out) == 0).all() and np.isneginf(np.asarray(logsumexp)).all()
    for name, a in gradients.items():
        assert a.shape == x[name].shape
        assert (np.asarray(a) == 0).all()


@kernels
def test_scan_over_steps_of_decoding(implementation):
    """Traced offset and lengths; a cache of static size that fills up."""
    x = operands()
    query = jnp.concatenate([x["query"]] * 2, axis=1)[:, :S]
    options = {"is_causal": True, "sinks": x["sinks"]}
    options["implementation"] = implementation
    whole = flash_attention(query, x["key"], x["value"], **options)

    def step(caches, position):
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(
                cache,
                jax.lax.dynamic_slice_in_dim(x[name], position, 1, 1),
                position,
                1,
            )
            for name, cache in caches.items()
        )
        out = flash_attention(
            jax.lax.dynamic_slice_in_dim(query, position, 1, 1),
            *(key, value),
            q_offset=position,
            key_value_seq_lengths=jnp.full(B, position + 1, jnp.int32),
            **options,
        )
        return {"key": key, "value": value}, out[:, 0]

    empty = {name: jnp.full_like(x[name], jnp.nan) for name in ("key", "value")}
    _, outs = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(S)))(empty)
    np.testing.assert_allclose(jnp.moveaxis(outs, 0, 1), whole, rtol=1e-4, atol=1e-5)


@kernels
def test_control_flow_and_remat(implementation):
    floats, others = split(operands())
    names = ("flash_attention_out", "flash_attention_logsumexp")
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def f(implementation):
        def block(query, flag):
            x = {**floats, **others, "query": query}
            out = jax.lax.cond(
                flag,
                lambda: attend(implementation, x)[0],
                lambda: attend(implementation, {**x, "key": -x["key"]})[0],
            )
            return query + jnp.concatenate([out, out], -1)

        def g(query):
            block_of = jax.checkpoint(block, policy=policy)
            query, _ = jax.lax.scan(
                lambda q, flag: (block_of(q, flag), None), query, jnp.arange(3) % 2 == 0
            )
            return jnp.sum(query**2)

        return jax.jit(jax.value_and_grad(g))

    ours, theirs = f(implementation)(floats["query"]), f("xla")(floats["query"])
    assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_eager_and_disable_jit():
    floats, others = split(operands())
    compiled = jax.jit(jax.grad(loss("metal")))(floats, others)
    assert_close(jax.grad(loss("metal"))(floats, others), compiled)
    with jax.disable_jit():
        assert_close(jax.grad(loss("metal"))(floats, others), compiled)


@kernels
def test_debug_nans_accepts_rows_without_keys(implementation):
    floats, others = split(operands())
    others["query_seq_lengths"] = jnp.array([0, 2], jnp.int32)
    with jax.debug_nans(True):
        gradients = jax.grad(loss(implementation))(floats, others)
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients.values())
    assert (np.asarray(gradients["query"][0]) == 0).all()
