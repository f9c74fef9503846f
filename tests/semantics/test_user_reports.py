"""Inputs from public bug reports that need more than the kernels' own features.

Named after the report. What the kernels alone must do is in tests/kernels.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_flash_metal import dot_product_attention, flash_attention
from tests.semantics.attention_cases import normal
from tests.support import reference_f64
from tests.support.closeness import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def qkv(rng, batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, dtype=np.float32):
    return (
        normal(rng, batch, q_len, num_heads, head_dim, dtype=dtype),
        normal(rng, batch, kv_len, num_kv_heads, head_dim, dtype=dtype),
        normal(rng, batch, kv_len, num_kv_heads, head_dim, dtype=dtype),
    )


def value_and_gradients(attend, *operands):
    out, pullback = jax.vjp(attend, *operands)
    cotangent = np.random.default_rng(18).standard_normal(out.shape)
    return out, pullback(jnp.asarray(cotangent, out.dtype)), cotangent


def test_jax_23349(rng):
    """Padding lengths equal the explicit mask."""
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114], np.int32)
    operands = qkv(rng, 8, 128, 128, 16, 16, 8, BF16)
    mask = (np.arange(128) < lengths[:, None])[:, None, None, :]
    np.testing.assert_array_equal(
        flash_attention(*operands, key_value_seq_lengths=lengths),
        flash_attention(*operands, mask=mask),
    )


def test_jax_32300(rng):
    """Right windows of two sizes, without a mask."""
    operands = qkv(rng, 1, 48, 80, 8, 8, 16, BF16)
    outs = [
        dot_product_attention(*operands, local_window_size=(0, size - 1))
        for size in (1, 32)
    ]
    assert (np.asarray(outs[0]) != np.asarray(outs[1])).any()
    for out, size in zip(outs, (1, 32)):
        want = reference_f64.attention(*operands, sliding_window=(0, size - 1))
        assert_close("out", out, want.out, "bfloat16")


def test_jax_39576(rng):
    """A left window without causality, in both passes."""
    operands = qkv(rng, 2, 70, 70, 2, 2, 16)
    out, gradients, cotangent = value_and_gradients(
        functools.partial(flash_attention, sliding_window=(9, 0)), *operands
    )
    want = reference_f64.attention(*operands, sliding_window=(9, 0))
    wanted = reference_f64.attention_gradients(
        *operands, cotangent, sliding_window=(9, 0)
    )
    assert_close("out", out, want.out, "float32")
    for name, got, expected in zip(("dquery", "dkey", "dvalue"), gradients, wanted):
        assert_close(name, got, expected, "float32")


def test_jax_28974(rng):
    """A (B, 1, 1, S) mask alone."""
    operands = qkv(rng, 4, 32, 32, 16, 16, 8)
    mask = rng.random((4, 1, 1, 32)) < 0.5
    want = reference_f64.attention(*operands, mask=mask).out
    assert_close("out", dot_product_attention(*operands, mask=mask), want, "float32")


def test_jax_32242(rng):
    """bfloat16 operands, float32 bias: the bias gradient is float32 and finite."""
    operands = qkv(rng, 8, 32, 32, 4, 4, 16, BF16)
    bias = normal(rng, 1, 4, 32, 32)
    _, gradients, _ = value_and_gradients(flash_attention, *operands, bias)
    assert gradients[3].dtype == jnp.float32 and gradients[3].shape == bias.shape
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)


@pytest.mark.parametrize("implementation", [None, "metal"])
def test_jax_38495(rng, implementation):
    """The Jacobian: a mapped pullback with residuals that are not mapped."""
    query, key, value = qkv(rng, 2, 4, 4, 16, 16, 32, np.float16)
    attend = functools.partial(flash_attention, implementation=implementation)
    jacobian = jax.jit(jax.jacrev(lambda q: attend(q, key, value)[:, :2, :3, :4]))
    plain = jax.jacrev(
        lambda q: flash_attention(q, key, value, implementation="xla")[:, :2, :3, :4]
    )
    got, want = jacobian(query), plain(query)
    assert got.shape == (2, 2, 3, 4, 2, 4, 16, 32)
    assert_close("dquery", got, np.asarray(want), "float16")


def test_jax_36702(rng):
    """vmap of the gradient with a mapped bias."""
    query, key, value = qkv(rng, 5, 24, 24, 2, 2, 8)
    bias = normal(rng, 5, 1, 24, 24)

    def f(implementation):
        def loss(query, key, value, bias):
            out = flash_attention(
                query, key, value, bias, implementation=implementation
            )
            return jnp.sum(out**2)

        return jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3)))

    for got, want in zip(
        f(None)(query, key, value, bias), f("xla")(query, key, value, bias)
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_jax_40128(rng):
    """The sink gradient in bfloat16 is summed in float32 before the cast."""
    operands = qkv(rng, 2, 300, 40, 4, 2, 8, BF16)
    sinks = normal(rng, 4, dtype=BF16)

    def attend(query, key, value, sinks):
        return flash_attention(query, key, value, sinks=sinks)

    _, gradients, cotangent = value_and_gradients(attend, *operands, sinks)
    wanted = reference_f64.attention_gradients(*operands, cotangent, sinks=sinks)
    assert gradients[3].dtype == BF16
    np.testing.assert_allclose(
        np.asarray(gradients[3], np.float64), wanted.dsinks, rtol=2e-2, atol=5e-2
    )


def test_jax_flash_attn2_1(rng):
    """Zero cotangents give zero gradients, with a bias of the smallest float16 too."""
    operands = qkv(rng, 2, 16, 16, 4, 4, 8, np.float16)
    bias = np.full((1, 4, 16, 16), np.finfo(np.float16).min, np.float16)
    bias[..., ::3] = 0
    out, pullback = jax.vjp(flash_attention, *operands, bias)
    assert_close(
        "out", out, reference_f64.attention(*operands, bias=bias).out, "float16"
    )
    for gradient in pullback(jnp.zeros_like(out)):
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_maxtext_4478(rng, implementation):
    """Packed sequences equal the separate ones, in both passes."""
    lengths = (7, 19, 11)
    ids = np.repeat(np.arange(3), lengths).astype(np.int32)[None]
    operands = qkv(rng, 1, 37, 37, 6, 3, 8)
    attend = functools.partial(
        flash_attention, is_causal=True, implementation=implementation
    )
    out, gradients, cotangent = value_and_gradients(
        functools.partial(attend, segment_ids=(ids, ids)), *operands
    )
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        one, pullback = jax.vjp(attend, *(x[:, rows] for x in operands))
        ones = pullback(jnp.asarray(cotangent[:, rows], one.dtype))
        np.testing.assert_allclose(out[:, rows], one, rtol=1e-5, atol=1e-5)
        for got, want in zip(gradients, ones):
            np.testing.assert_allclose(got[:, rows], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [8, 2])
def test_jax_mps_0_11_1(rng, num_heads, is_causal):
    """A (1, 1, T, T) mask where T equals or differs from the number of heads."""
    operands = qkv(rng, 3, 8, 8, num_heads, num_heads, 4)
    mask = rng.random((1, 1, 8, 8)) < 0.7
    options = {"mask": mask, "is_causal": is_causal}
    out, gradients, cotangent = value_and_gradients(
        functools.partial(flash_attention, **options), *operands
    )
    want = reference_f64.attention(*operands, **options)
    wanted = reference_f64.attention_gradients(*operands, cotangent, **options)
    assert_close("out", out, want.out, "float32")
    for name, got, expected in zip(("dquery", "dkey", "dvalue"), gradients, wanted):
        assert_close(name, got, expected, "float32")


def test_mlx_2096(rng):
    """One query, an additive mask of shape (8, 1, 1)."""
    operands = qkv(rng, 1, 1, 1, 8, 8, 64)
    out = flash_attention(*operands, normal(rng, 8, 1, 1))
    np.testing.assert_allclose(out, operands[2], rtol=1e-6)


def test_mlx_3452(rng):
    """With sinks the last row of 34 equals that row alone."""
    query, key, value = qkv(rng, 1, 34, 34, 4, 2, 16)
    sinks = normal(rng, 4)
    attend = functools.partial(flash_attention, sinks=sinks, is_causal=True)
    whole = attend(query, key, value)
    last = attend(query[:, -1:], key, value, q_offset=33)
    np.testing.assert_allclose(whole[:, -1:], last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (1, 1, 2, 4)])
def test_pytorch_156707(rng, shape):
    """A mask that hides everything."""
    operands = qkv(rng, 1, 2, 4, 1, 1, 8)
    attend = functools.partial(flash_attention, mask=np.zeros(shape, bool))
    out, gradients, _ = value_and_gradients(attend, *operands)
    assert all((np.asarray(x) == 0).all() for x in (out, *gradients))


def test_dao_ailab_443(rng):
    """Packed, causal, one key per sequence: dquery is finite."""
    query_ids = np.repeat(np.arange(3), (76, 34, 146)).astype(np.int32)[None]
    key_ids = np.arange(3, dtype=np.int32)[None]
    query, key, value = qkv(rng, 1, 256, 3, 2, 2, 32, np.float16)
    attend = functools.partial(
        flash_attention, is_causal=True, segment_ids=(query_ids, key_ids)
    )
    _, gradients, _ = value_and_gradients(attend, query, key, value)
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)


def test_dao_ailab_2421(rng):
    """A sequence without queries gives zero dk and dv, not NaN."""
    lengths = np.array([0, 9], np.int32)
    attend = functools.partial(flash_attention, query_seq_lengths=lengths)
    _, gradients, _ = value_and_gradients(attend, *qkv(rng, 2, 12, 13, 4, 2, 8))
    for gradient in gradients:
        assert (np.asarray(gradient[0]) == 0).all()
        assert np.isfinite(np.asarray(gradient[1])).all()
