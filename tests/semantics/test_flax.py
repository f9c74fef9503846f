"""flax.dot_product_attention as attention_fn of linen and nnx modules."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jax_flash_metal import api
from jax_flash_metal.flax import dot_product_attention, explain

B, T, N, D = 2, 11, 6, 48
attention_metal = functools.partial(dot_product_attention, implementation="metal")


def inputs(*batch, length=T):
    x = np.random.default_rng(1).standard_normal((*batch, length, D))
    return jnp.asarray(x, jnp.float32)


def linen_pair(attention_fn, **options):
    ours = linen.MultiHeadDotProductAttention(
        num_heads=N, attention_fn=attention_fn, **options
    )
    theirs = linen.MultiHeadDotProductAttention(num_heads=N, **options)
    return ours, theirs


def close(actual, expected, tolerance=1e-4):
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected))
    for a, e in leaves:
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("attention_fn", [dot_product_attention, attention_metal])
def test_linen_values_and_gradients(attention_fn):
    ours, theirs = linen_pair(attention_fn)
    x = inputs(B)
    variables = theirs.init(jax.random.key(0), x)

    def loss(module):
        return lambda variables: jnp.sum(module.apply(variables, x) ** 2)

    close(ours.apply(variables, x), theirs.apply(variables, x))
    close(jax.jit(jax.grad(loss(ours)))(variables), jax.grad(loss(theirs))(variables))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_])
@pytest.mark.parametrize("batch", [(), (B,), (3, B)])
def test_linen_mask(batch, dtype):
    """Float masks are linen's default."""
    ours, theirs = linen_pair(attention_metal)
    x = inputs(*batch)
    mask = linen.make_causal_mask(jnp.ones((*batch, T)), dtype=dtype)
    variables = theirs.init(jax.random.key(0), x)
    close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=mask))


def test_linen_causal_without_a_mask():
    causal = functools.partial(attention_metal, is_causal=True)
    ours, theirs = linen_pair(causal)
    x = inputs(B)
    mask = linen.make_causal_mask(jnp.ones((B, T)))
    variables = theirs.init(jax.random.key(0), x)
    close(ours.apply(variables, x), theirs.apply(variables, x, mask=mask))


def test_linen_decode():
    """The cache comes with a mask that hides what is not filled yet."""
    ours, theirs = linen_pair(attention_metal, decode=True)
    x = inputs(B)
    variables = theirs.init(jax.random.key(0), x)
    states = [variables["cache"], variables["cache"]]
    for step in range(3):
        results = []
        for i, module in enumerate((ours, theirs)):
            out, changed = module.apply(
                {"params": variables["params"], "cache": states[i]},
                x[:, step : step + 1],
                mutable=["cache"],
            )
            states[i] = changed["cache"]
            results.append(out)
        close(*results)


def test_linen_sow_weights_takes_flax():
    ours, theirs = linen_pair(dot_product_attention)
    x = inputs(B)
    variables = theirs.init(jax.random.key(0), x)
    api.log_fallback.cache_clear()
    results = [
        module.apply(variables, x, sow_weights=True, mutable=["intermediates"])
        for module in (ours, theirs)
    ]
    close(*results)
    assert jax.tree.leaves(results[0][1])


def test_linen_dropout():
    x = inputs(B)
    for broadcast in (True, False):
        module = linen.MultiHeadDotProductAttention(
            num_heads=N,
            attention_fn=attention_metal,
            dropout_rate=0.4,
            broadcast_dropout=broadcast,
        )
        variables = module.init(jax.random.key(0), x, deterministic=True)

        def apply(seed, module=module, variables=variables, **options):
            rngs = {"dropout": jax.random.key(seed)}
            return module.apply(variables, x, rngs=rngs, **options)

        one = apply(1, deterministic=False)
        close(one, apply(1, deterministic=False), tolerance=0)
        assert not np.allclose(one, apply(2, deterministic=False))
        assert not np.allclose(one, apply(1, deterministic=True))


def test_broadcast_dropout_uses_one_set_of_bits():
    length = 17
    zeros = jnp.zeros((B, T, N, 8)), jnp.zeros((B, length, N, 8))
    one_hot = jnp.broadcast_to(jnp.eye(length)[:, None], (B, length, N, length))
    out = attention_metal(
        *(*zeros, one_hot), dropout_rate=0.4, dropout_rng=jax.random.key(0)
    )
    kept = np.asarray(out) > 0
    assert (kept == kept[:1, :, :1]).all() and kept.any() and not kept.all()


@pytest.mark.parametrize("attention_fn", [dot_product_attention, attention_metal])
def test_nnx_values_and_gradients(attention_fn):
    def module(**options):
        return nnx.MultiHeadAttention(
            num_heads=N,
            in_features=D,
            decode=False,
            rngs=nnx.Rngs(0),
            **options,
        )

    ours, theirs = module(attention_fn=attention_fn), module()
    x = inputs(B)

    def loss(module):
        return jnp.sum(module(x) ** 2)

    close(ours(x), theirs(x))
    close(nnx.grad(loss)(ours), nnx.grad(loss)(theirs))


def test_nnx_mask_and_sow_weights():
    ours = nnx.MultiHeadAttention(
        num_heads=N,
        in_features=D,
        decode=False,
        attention_fn=attention_metal,
        rngs=nnx.Rngs(0),
    )
    theirs = nnx.MultiHeadAttention(
        num_heads=N, in_features=D, decode=False, rngs=nnx.Rngs(0)
    )
    x = inputs(B)
    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    close(ours(x, mask=mask), theirs(x, mask=mask))
    ours.attention_fn = dot_product_attention
    close(ours(x, sow_weights=True), theirs(x, sow_weights=True))


def test_nnx_dropout():
    x = inputs(B)

    def apply(seed, rate=0.4, **options):
        module = nnx.MultiHeadAttention(
            num_heads=N,
            in_features=D,
            decode=False,
            attention_fn=attention_metal,
            dropout_rate=rate,
            rngs=nnx.Rngs(0, dropout=seed),
        )
        return module(x, **options)

    one = apply(1, deterministic=False)
    close(one, apply(1, deterministic=False), tolerance=0)
    assert not np.allclose(one, apply(2, deterministic=False))
    close(apply(1, deterministic=True), apply(2, rate=0.0, deterministic=False))


def test_grouped_heads_and_several_batch_dimensions():
    rng = np.random.default_rng(2)
    query, key, value = (
        jnp.asarray(rng.standard_normal((3, B, length, heads, 16)), jnp.float32)
        for length, heads in ((T, N), (13, 2), (13, 2))
    )
    bias = jnp.asarray(rng.standard_normal((3, 1, 1, T, 13)), jnp.float32)
    mask = jnp.asarray(rng.random((1, B, N, T, 13)) < 0.7)

    def loss(bias, *rest):
        return jnp.sum(attention_metal(*rest[:3], bias, rest[3]) ** 2)

    out = attention_metal(query, key, value, bias, mask)
    gradient = jax.grad(loss)(bias, query, key, value, mask)
    for i in range(3):
        one = (query[i], key[i], value[i])
        close(out[i], dot_product_attention(*one, bias[i], mask[0]))
        close(gradient[i], jax.grad(loss)(bias[i], *one, mask[0]))


REASONS = {
    "module": (
        {"module": object()},
        "sow_weights asks for the attention weights, which are never formed",
    ),
    "einsum": (
        {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
        "qk_attn_weights_einsum replaces the matrix products",
    ),
    "dtype": (
        {"dtype": jnp.int32},
        "dtype int32 is none of float32, float16, bfloat16",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_explain_and_forced(name):
    options, reason = REASONS[name]
    x = jax.ShapeDtypeStruct((B, T, N, 16), jnp.float32)
    assert str(explain(x, x, x, **options)) == f"flax: {reason}."
    forced = explain(x, x, x, **options, implementation="metal")
    assert str(forced) == f"unsupported: {reason}."
    x = jnp.zeros(x.shape)
    with pytest.raises(NotImplementedError) as raised:
        attention_metal(x, x, x, **options)
    assert str(raised.value) == (
        f"implementation='metal' cannot run this call: {reason}; implementation=None "
        "takes Flax's own function."
    )


def test_explain_of_a_call_that_is_ours():
    x = jax.ShapeDtypeStruct((3, B, T, N, 16), jnp.float32)
    mask = jax.ShapeDtypeStruct((3, 1, 1, T, T), jnp.float32)
    assert explain(x, x, x, mask=mask, implementation="metal").implementation == "metal"
    assert explain(x, x, x, mask=mask, platform="cpu").implementation == "cpu"
    x = jax.ShapeDtypeStruct((3, B, T, N, 300), jnp.float32)
    assert "head_dim 300 is above 256" in explain(x, x, x, mask=mask).reason


def test_dropout_without_a_key_is_named_as_flax_names_it():
    x = jnp.zeros((B, T, N, 16))
    with pytest.raises(ValueError) as raised:
        dot_product_attention(x, x, x, dropout_rate=0.5)
    assert str(raised.value) == (
        "dropout_rate=0.5 needs a dropout_rng unless deterministic=True, but got "
        "dropout_rng=None."
    )
    dot_product_attention(x, x, x, dropout_rate=0.5, deterministic=True)


def test_custom_einsum_takes_flax(caplog):
    api.log_fallback.cache_clear()
    x = jnp.asarray(np.random.default_rng(3).standard_normal((B, T, N, 16)))
    einsums = REASONS["einsum"][0]
    with caplog.at_level(logging.INFO, logger="jax_flash_metal"):
        out = dot_product_attention(x, x, x, **einsums, is_causal=True)
    assert "flax.dot_product_attention takes Flax's own: qk_attn" in caplog.text
    close(out, dot_product_attention(x, x, x, is_causal=True))


def test_dropout_bits_differ_over_every_batch_dimension():
    x = jnp.ones((2, 3, 8, 2, 4))
    out = dot_product_attention(
        x,
        x,
        x,
        dropout_rng=jax.random.key(0),
        dropout_rate=0.5,
        broadcast_dropout=False,
    )
    kept = np.asarray(out).reshape(6, -1)
    assert len({row.tobytes() for row in kept}) == 6
