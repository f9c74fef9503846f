"""The rules of the contract that a comparison with a formula does not show."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import flash_attention
from tests.semantics import attention_cases as cases
from tests.semantics.attention_cases import B, H, K, N, S, T, V
from tests.support import reference_f64
from tests.support.closeness import assert_close

IMPLEMENTATIONS = ["xla", "metal", "cpu"]
all_implementations = pytest.mark.parametrize(
    "implementation", [*IMPLEMENTATIONS, "fallback"], indirect=True
)
kernels = pytest.mark.parametrize("implementation", ["metal", "cpu"])


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def forward_and_gradients(query, key, value, dout, **options):
    def attend(query, key, value):
        return flash_attention(query, key, value, return_logsumexp=True, **options)

    (out, logsumexp), pullback = jax.vjp(attend, query, key, value)
    gradients = pullback((jnp.asarray(dout), jnp.zeros_like(logsumexp)))
    return [np.asarray(x) for x in (out, logsumexp, *gradients)]


@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_before_the_first_key(rng, implementation, dtype):
    """Bottom-right causal with q_len > kv_len: the first rows see nothing."""
    query, key, value = cases.qkv(rng, dtype, q_len=S, kv_len=T)
    dout = cases.normal(rng, B, S, N, V, dtype=dtype)
    out, logsumexp, *gradients = forward_and_gradients(
        *(query, key, value, dout),
        is_causal=True,
        q_offset=T - S,
        implementation=implementation,
    )
    blind = S - T
    assert (out[:, :blind] == 0).all() and (out[:, blind:] != 0).any()
    assert np.isneginf(logsumexp[..., :blind]).all()
    assert np.isfinite(logsumexp[..., blind:]).all()
    assert (gradients[0][:, :blind] == 0).all()
    assert all(np.isfinite(g.astype(np.float32)).all() for g in gradients)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fully_masked_rows(rng, implementation, with_sinks):
    query, key, value = cases.qkv(rng, np.float32)
    mask = np.ones((B, 1, T, 1), bool)
    mask[1, 0, 5:9] = False
    sinks = cases.normal(rng, N)

    def attend(query, key, value, sinks):
        return flash_attention(
            *(query, key, value, None, mask),
            sinks=sinks if with_sinks else None,
            return_logsumexp=True,
            implementation=implementation,
        )

    (out, logsumexp), pullback = jax.vjp(attend, query, key, value, sinks)
    assert (out[1, 5:9] == 0).all()
    assert (np.asarray(logsumexp[1, :, 5:9]) == -np.inf).all()
    # A cotangent of those rows alone, even a non-finite one, gives no gradient at all.
    dout = np.zeros(out.shape, np.float32)
    dout[1, 5:9] = np.nan
    dlogsumexp = np.zeros(logsumexp.shape, np.float32)
    dlogsumexp[1, :, 5:9] = 1.0
    for gradient in pullback((jnp.asarray(dout), jnp.asarray(dlogsumexp))):
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@all_implementations
def test_hidden_non_finite_inputs_do_not_leak(rng, implementation, bad):
    """Causal: queries before 20 see no key from 20 on, and keep every bit."""
    query, key, value = cases.qkv(rng, np.float32)
    dout = cases.normal(rng, B, T, N, V)
    options = {"is_causal": True, "implementation": implementation}
    clean = forward_and_gradients(query, key, value, dout, **options)

    query, key, value, dout = (x.copy() for x in (query, key, value, dout))
    key[:, 20:, :, 3] = bad
    value[:, 21:, :, 5] = bad
    out, logsumexp, dquery, *_ = forward_and_gradients(
        query, key, value, dout, **options
    )
    np.testing.assert_array_equal(out[:, :20], clean[0][:, :20])
    np.testing.assert_array_equal(logsumexp[..., :20], clean[1][..., :20])
    np.testing.assert_array_equal(dquery[:, :20], clean[2][:, :20])
    if np.isnan(bad):  # a score of -inf is right for some queries
        assert np.isnan(out[:, 20:]).all(), "a row that sees a NaN must show it"


@all_implementations
def test_non_finite_queries_and_cotangents_reach_only_what_they_see(
    rng, implementation
):
    """Causal: keys from 20 on are hidden from queries before 20."""
    query, key, value = cases.qkv(rng, np.float32, q_len=S)
    dout = cases.normal(rng, B, S, N, V)
    options = {"is_causal": True, "implementation": implementation}
    clean = forward_and_gradients(query, key, value, dout, **options)

    query = query.copy()
    query[:, 3:20, :, 0] = np.nan
    if implementation != "xla":  # plain derivatives multiply cotangents by 0
        dout = dout.copy()
        dout[:, :20, :, 1] = np.inf
    *_, dquery, dkey, dvalue = forward_and_gradients(query, key, value, dout, **options)
    np.testing.assert_array_equal(dquery[:, 20:], clean[2][:, 20:])
    np.testing.assert_array_equal(dkey[:, 20:], clean[3][:, 20:])
    np.testing.assert_array_equal(dvalue[:, 20:], clean[4][:, 20:])
    assert np.isnan(dkey[:, 0]).all()


# Every way to hide the keys from 40 on from all queries.
HIDING = {
    "mask": {"mask": np.arange(S) < 40},
    "bias": {"bias": np.where(np.arange(S) < 40, 0, -np.inf).astype(np.float32)},
    "key_value_seq_lengths": {"key_value_seq_lengths": np.full(B, 40, np.int32)},
    "segment_ids": {
        "segment_ids": (
            np.zeros((B, T), np.int32),
            np.tile(np.arange(S) >= 40, (B, 1)).astype(np.int32),
        )
    },
    "sliding_window": {"sliding_window": (None, 39 - T + 1)},
}


@pytest.mark.parametrize("rule", HIDING)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_full_of_nan(rng, implementation, rule):
    """No bit of any result but the hidden ones changes, and those are 0."""
    query, key, value = cases.qkv(rng, np.float32)
    dout = cases.normal(rng, B, T, N, V)
    options = {**HIDING[rule], "implementation": implementation}
    if rule == "mask":
        options["bias"] = cases.normal(rng, 1, N, 1, S)
    clean = forward_and_gradients(query, key, value, dout, **options)
    key, value = key.copy(), value.copy()
    key[:, 40:], value[:, 40:] = np.nan, np.inf
    if rule == "mask":
        options["bias"] = options["bias"].copy()
        options["bias"][..., 40:] = np.nan
    poisoned = forward_and_gradients(query, key, value, dout, **options)
    for got, want in zip(poisoned, clean):
        np.testing.assert_array_equal(got, want)
    assert (poisoned[3][:, 40:] == 0).all() and (poisoned[4][:, 40:] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_in_an_operand_reaches_the_rows_that_see_it(rng, implementation):
    """A NaN of the bias, of a slope and of a sink."""
    query, key, value = cases.qkv(rng, np.float32)
    bias = np.zeros((1, N, T, S), np.float32)
    bias[0, 1, 4, 7] = np.nan
    sinks, slopes = np.zeros((2, N), np.float32)
    slopes[2], sinks[3] = np.nan, np.nan
    out, logsumexp, dquery, *_ = forward_and_gradients(
        *(query, key, value, cases.normal(rng, B, T, N, V)),
        bias=bias,
        sinks=sinks,
        alibi_slopes=slopes,
        implementation=implementation,
    )
    bad = np.zeros((B, T, N), bool)
    bad[:, 4, 1] = bad[:, :, 2] = bad[:, :, 3] = True
    for got in (out, dquery):
        np.testing.assert_array_equal(np.isnan(got).all(-1), bad)
        np.testing.assert_array_equal(np.isnan(got).any(-1), bad)
    np.testing.assert_array_equal(np.isnan(logsumexp), bad.swapaxes(1, 2))


@all_implementations
def test_no_keys(rng, implementation):
    query, key, value = cases.qkv(rng, np.float32, kv_len=0)
    dout = cases.normal(rng, B, T, N, V)
    out, logsumexp, *gradients = forward_and_gradients(
        query, key, value, dout, implementation=implementation
    )
    assert out.shape == (B, T, N, V) and (out == 0).all()
    assert np.isneginf(logsumexp).all()
    assert [g.shape for g in gradients] == [x.shape for x in (query, key, value)]
    assert (gradients[0] == 0).all()


@all_implementations
def test_no_queries(rng, implementation):
    query, key, value = cases.qkv(rng, np.float32, q_len=0)
    out, logsumexp, dquery, dkey, dvalue = forward_and_gradients(
        *(query, key, value, np.zeros((B, 0, N, V), np.float32)),
        implementation=implementation,
    )
    assert out.shape == (B, 0, N, V) and logsumexp.shape == (B, N, 0)
    assert dquery.shape == query.shape
    assert (dkey == 0).all() and (dvalue == 0).all()


@all_implementations
def test_without_batch_dimension(rng, implementation):
    query, key, value = cases.qkv(rng, np.float32)
    options = {"is_causal": True, "return_logsumexp": True}
    out, logsumexp = flash_attention(
        query, key, value, **options, implementation=implementation
    )
    out1, logsumexp1 = flash_attention(
        query[1], key[1], value[1], **options, implementation=implementation
    )
    assert out1.shape == (T, N, V) and logsumexp1.shape == (N, T)
    assert_close("out", out1, out[1], "float32")
    assert_close("logsumexp", logsumexp1, logsumexp[1], "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_batch_dimension_and_features(rng, implementation):
    query, key, value = (x[0] for x in cases.qkv(rng, np.float32))
    ids = cases.packed_ids(rng, T)[0], cases.packed_ids(rng, S)[0]
    lengths = np.int32(30)
    one = flash_attention(
        *(query, key, value),
        segment_ids=ids,
        key_value_seq_lengths=lengths,
        mask=cases.random_mask(rng, 1, S),
        implementation=implementation,
    )
    rng = np.random.default_rng(11)
    query, key, value = (x[:1] for x in cases.qkv(rng, np.float32))
    ids = cases.packed_ids(rng, T)[:1], cases.packed_ids(rng, S)[:1]
    batched = flash_attention(
        *(query, key, value),
        segment_ids=ids,
        key_value_seq_lengths=lengths[None],
        mask=cases.random_mask(rng, 1, S),
        implementation=implementation,
    )
    np.testing.assert_array_equal(one, batched[0])


@pytest.mark.parametrize(
    ("implementation", "offset"),
    [("xla", -9), ("metal", -9), ("metal", S - T), ("cpu", -9), ("cpu", S - T)],
)
def test_traced_q_offset(rng, implementation, offset):
    query, key, value = cases.qkv(rng, np.float32)

    def attend(offset):
        return flash_attention(
            *(query, key, value),
            is_causal=True,
            q_offset=offset,
            implementation=implementation,
        )

    assert_close("out", jax.jit(attend)(offset), attend(offset), "float32")
    each = jax.vmap(attend)(jnp.array([offset, offset + 1]))
    assert_close("out", each[0], attend(offset), "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_q_offset_far_away(rng, implementation):
    """Of any integer dtype: it neither wraps nor overflows."""
    query, key, value = cases.qkv(rng, np.float32)
    attend = functools.partial(
        flash_attention,
        *(query, key, value),
        return_logsumexp=True,
        implementation=implementation,
    )
    everything = attend()[1]
    for offset in (2**31 - 1, np.uint32(2**31 + 5), np.uint8(200)):
        _, logsumexp = attend(is_causal=True, q_offset=jnp.asarray(offset))
        assert_close("logsumexp", logsumexp, everything, "float32")
    for hidden in ({"is_causal": True}, {"sliding_window": (None, 0)}):
        _, logsumexp = attend(q_offset=jnp.int32(-(2**31)), **hidden)
        assert np.isneginf(logsumexp).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_window_edges(implementation):
    """Values are one-hot in the key index: out shows the visible keys."""
    length = 19
    query = np.zeros((1, length, N, H), np.float32)
    key = np.zeros((1, length, K, H), np.float32)
    value = np.eye(length, dtype=np.float32)[None, :, None].repeat(K, 2)
    i, j = np.ogrid[:length, :length]
    for window, visible in {
        (3, 2): (j >= i - 3) & (j <= i + 2),
        (0, 0): i == j,
        (0, length - 1): j >= i,
        (1, None): j >= i - 1,
        4: abs(i - j) <= 4,
    }.items():
        out = flash_attention(
            query, key, value, sliding_window=window, implementation=implementation
        )
        np.testing.assert_array_equal(np.asarray(out[0, :, 1]) > 0, visible)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_window_without_end(rng, implementation):
    """What int32 cannot hold, and what it can but not with a position added."""
    query, key, value = cases.qkv(rng, np.float32)
    outs = [
        flash_attention(
            *(query, key, value),
            sliding_window=(left, 3),
            q_offset=-9,
            implementation=implementation,
        )
        for left in (None, sys.maxsize, 2**31 - 1)
    ]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_group_mapping(rng):
    """Query head n uses key-value head n // (N // K)."""
    query, key, value = cases.qkv(rng, np.float32)
    grouped = flash_attention(query, key, value)
    key, value = (x.repeat(N // K, axis=2) for x in (key, value))
    assert_close("out", grouped, flash_attention(query, key, value), "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_finite_minimum_is_an_ordinary_bias(rng, implementation):
    query, key, value = cases.qkv(rng, np.float16)
    bias = np.full((1, 1, T, S), np.finfo(np.float16).min, np.float16)
    bias[..., 7] = 0
    out, logsumexp = flash_attention(
        *(query, key, value, bias),
        return_logsumexp=True,
        implementation=implementation,
    )
    assert np.isfinite(np.asarray(logsumexp)).all()
    # Key 7 takes everything.
    want = value[:, 7].repeat(N // K, axis=1)[:, None].repeat(T, axis=1)
    np.testing.assert_array_equal(np.asarray(out), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_finite_minimum_of_every_key(rng, implementation, dtype):
    """Where all keys have it, none is hidden: out is the mean of value.

    One of float64 must not become -inf in the float32 of the scores.
    """
    query, key, value = cases.qkv(rng, np.float32)
    bias = np.full((T, S), np.finfo(dtype).min)
    out, logsumexp = flash_attention(
        *(0 * query, key, value, bias),
        return_logsumexp=True,
        implementation=implementation,
    )
    assert np.isfinite(np.asarray(logsumexp)).all()
    want = value.repeat(N // K, axis=2).mean(1, keepdims=True).repeat(T, axis=1)
    assert_close("out", out, want, "float32")


LOWS = [-1e9, np.finfo(np.float32).min, -3.39e38, 1e30]


@pytest.mark.parametrize(
    ("implementation", "low", "with_sinks", "q_len"),
    [
        # The fallback has the formulas of "xla": one of its calls is in each run.
        pytest.param(
            *case,
            marks=[pytest.mark.slow] * (case[0] == "fallback" and i % 16 != 3),
        )
        for i, case in enumerate(
            itertools.product(
                [*IMPLEMENTATIONS, "fallback"], LOWS, [False, True], [T, 5]
            )
        )
    ],
    indirect=["implementation"],
)
def test_gradients_of_rows_of_huge_scores(rng, implementation, low, with_sinks, q_len):
    """The float32 logsumexp of such a row has lost log(sum).

    Query and key are small: at -1e9 a score of 1 is rounded away, and so it is here.
    """
    query, key, value = cases.qkv(rng, np.float32, q_len=q_len)
    key = 0.01 * key
    bias = cases.normal(rng, q_len, S)
    bias[::2] = low
    options = {}
    if with_sinks:
        sinks = np.where(np.arange(N) % 2, low, cases.normal(rng, N))
        options["sinks"] = sinks.astype(np.float32)
    dout = cases.normal(rng, B, q_len, N, V)

    def attend(query, key, value, bias, options):
        return flash_attention(
            query, key, value, bias, implementation=implementation, **options
        )

    _, pullback = jax.vjp(attend, query, key, value, bias, options)
    *gradients, of_options = pullback(jnp.asarray(dout))
    # In float64 the scores of a row would differ by q·k.
    seen = dict(zip(("query", "key", "value", "bias"), gradients)) | of_options
    expected = _gradients_with_rounded_scores(
        query, key, value, bias, dout, options.get("sinks")
    )
    for name, gradient in seen.items():
        assert_close(f"d{name}", gradient, expected[name], "float32")


@pytest.mark.parametrize(
    "implementation",
    [pytest.param("fallback", marks=pytest.mark.slow), "metal"],
    indirect=True,
)
def test_second_derivatives_of_rows_of_huge_scores(rng, implementation):
    """As those of the definition, which JAX differentiates itself."""
    query, key, value = (x[:1, :9] for x in cases.qkv(rng, np.float32))
    bias = cases.normal(rng, 9, 9)
    bias[::2] = np.finfo(np.float32).min

    def second(implementation):
        def total(*operands):
            out = flash_attention(*operands, implementation=implementation)
            return jnp.sin(out).sum()

        def of_gradients(*operands):
            gradients = jax.grad(total, (0, 1, 2, 3))(*operands)
            return sum(jnp.square(g).sum() for g in gradients)

        return jax.grad(of_gradients, (0, 1, 2, 3))(query, key, value, bias)

    for actual, expected in zip(second(implementation), second("xla")):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def _gradients_with_rounded_scores(query, key, value, bias, dout, sinks):
    """By hand in float64, but with scores rounded to float32."""
    groups = N // K
    q, k, v, do = (x.astype(np.float64) for x in (query, key, value, dout))
    all_k, all_v = (x.repeat(groups, axis=2) for x in (k, v))
    scale = H**-0.5
    x = scale * np.einsum("btnh,bsnh->bnts", q, all_k) + bias.astype(np.float64)
    x = x.astype(np.float32).astype(np.float64)
    largest = x.max(-1)
    if sinks is not None:
        sinks = sinks.astype(np.float64)[:, None]
        largest = np.maximum(largest, sinks)
    weights = np.exp(x - largest[..., None])
    sink_weights = 0 if sinks is None else np.exp(sinks - largest)
    total = weights.sum(-1) + sink_weights
    p = weights / total[..., None]
    dp = np.einsum("btnv,bsnv->bnts", do, all_v)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])

    def sum_groups(x):
        return x.reshape(*x.shape[:2], K, groups, -1).sum(3)

    return {
        "query": scale * np.einsum("bnts,bsnh->btnh", ds, all_k),
        "key": sum_groups(scale * np.einsum("bnts,btnh->bsnh", ds, q)),
        "value": sum_groups(np.einsum("bnts,btnv->bsnv", p, do)),
        "bias": ds.sum((0, 1)),
        "sinks": -(sink_weights / total * delta).sum((0, 2)),
    }


@kernels
def test_a_float64_bias_with_float32_operands(rng, x64, implementation):
    query, key, value = (jnp.asarray(x) for x in cases.qkv(rng, np.float32))
    bias = jnp.where(jnp.arange(S) < 9, np.finfo(np.float64).min, 0.5)
    attend = functools.partial(
        flash_attention, query, key, value, implementation=implementation
    )
    out, pullback = jax.vjp(attend, bias)
    assert_close("out", out, np.asarray(attend(mask=np.arange(S) >= 9)), "float32")
    (gradient,) = pullback(jnp.ones_like(out))
    assert gradient.dtype == jnp.float64 and gradient.shape == (S,)


@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [(B, N, T, S), (B, 1, T, S), (1, N, 1, S), (N, T, 1), (T, S)]
)
@kernels
def test_bias_gradient_has_its_shape_and_dtype(rng, shape, bias_dtype, implementation):
    """And is right, whatever dtype the bias has."""
    query, key, value = cases.qkv(rng, cases.DTYPES["bfloat16"])
    dtype = cases.DTYPES[bias_dtype]
    bias = cases.normal(rng, *shape, dtype=dtype)

    def attend(bias):
        return flash_attention(query, key, value, bias, implementation=implementation)

    out, pullback = jax.vjp(attend, bias)
    dout = cases.normal(rng, *out.shape, dtype=out.dtype)
    (gradient,) = pullback(jnp.asarray(dout))
    assert gradient.shape == shape and gradient.dtype == dtype
    aligned = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    wanted = reference_f64.attention_gradients(query, key, value, dout, bias=aligned)
    assert_close("dbias", gradient, wanted.dbias.reshape(shape), "bfloat16")


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_gradients_per_head_are_summed_in_float32(rng, name):
    """In bfloat16 a sum over 2 * 37 rows would lose its last digits on the way."""
    query, key, value = cases.qkv(rng, np.float32)
    operand = cases.normal(rng, N, dtype=cases.DTYPES["bfloat16"])

    def gradient(operand, implementation):
        def loss(operand):
            options = {name: operand, "implementation": implementation}
            return jnp.sum(flash_attention(query, key, value, **options))

        return np.asarray(jax.grad(loss)(operand))

    for implementation in IMPLEMENTATIONS:
        got = gradient(operand, implementation)
        want = gradient(operand.astype(np.float32), "xla")
        assert got.dtype == operand.dtype
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-4)


class TestDropout:
    RATE = 0.3

    def attend(self, rng, key, implementation=None, **options):
        query, k, value = cases.qkv(rng, np.float32)
        return flash_attention(
            *(query, k, value),
            dropout_rate=self.RATE,
            dropout_key=key,
            implementation=implementation,
            **options,
        )

    def kept(self, key, batch=B, q_len=T, kv_len=S, implementation="metal"):
        """Which elements are kept, [batch, N, q_len, kv_len]."""
        query = jnp.zeros((batch, q_len, N, H))
        k = jnp.zeros((batch, kv_len, N, H))
        value = jnp.broadcast_to(jnp.eye(kv_len)[:, None], (batch, kv_len, N, kv_len))
        out = flash_attention(
            *(query, k, value),
            dropout_rate=self.RATE,
            dropout_key=key,
            implementation=implementation,
        )
        return np.asarray(jnp.swapaxes(out, 1, 2))

    def test_rate_and_rescaling(self):
        weights = self.kept(jax.random.key(3))
        kept = weights > 0
        assert abs(kept.mean() - (1 - self.RATE)) < 5 * (0.21 / kept.size) ** 0.5
        np.testing.assert_allclose(weights[kept], 1 / (S * (1 - self.RATE)), rtol=1e-5)

    def test_a_bit_depends_only_on_key_and_indices(self):
        weights = self.kept(jax.random.key(3)) > 0
        fewer = self.kept(jax.random.key(3), batch=1, q_len=11, kv_len=30) > 0
        np.testing.assert_array_equal(weights[:1, :, :11, :30], fewer)
        assert (weights[0, 0] != weights[0, 1]).any()
        assert (weights[0, 0] != weights[1, 0]).any()
        assert (weights != (self.kept(jax.random.key(4)) > 0)).any()

    def test_kinds_of_keys(self, rng):
        typed = self.attend(np.random.default_rng(1), jax.random.key(5))
        raw = self.attend(np.random.default_rng(1), jax.random.PRNGKey(5))
        np.testing.assert_array_equal(typed, raw)
        self.attend(rng, jax.random.key(5, impl="rbg"))

    def test_implementations_and_jit_agree(self):
        key = jax.random.key(6)
        other = self.attend(np.random.default_rng(1), key, "xla")
        jitted = jax.jit(lambda key: self.attend(np.random.default_rng(1), key))(key)
        assert_close("out", jitted, other, "float32")
        kept = self.kept(key, implementation="xla") > 0
        for implementation in ("metal", "cpu"):
            one = self.attend(np.random.default_rng(1), key, implementation)
            assert_close("out", one, other, "float32")
            np.testing.assert_array_equal(
                self.kept(key, implementation=implementation) > 0, kept
            )

    def test_vmap_changes_no_bit(self):
        """Mapped operands, a mapped key, and both."""
        rng = np.random.default_rng(2)
        query, k, value = (
            np.stack([x, x + 1, x - 1]) for x in cases.qkv(rng, np.float32)
        )
        keys = jax.random.split(jax.random.key(7), 3)

        def attend(query, key):
            return flash_attention(
                *(query, k[0], value[0]),
                dropout_rate=self.RATE,
                dropout_key=key,
                implementation="metal",
            )

        for query_axis, key_axis in ((0, None), (None, 0), (0, 0)):
            q = query if query_axis == 0 else query[0]
            key = keys if key_axis == 0 else keys[0]
            each = [
                attend(query[i * (query_axis == 0)], keys[i * (key_axis == 0)])
                for i in range(3)
            ]
            mapped = jax.vmap(attend, (query_axis, key_axis))(q, key)
            np.testing.assert_array_equal(mapped, jnp.stack(each))

    def test_backward_uses_the_same_bits(self, rng):
        query, key, value = cases.qkv(rng, np.float32)

        def loss(implementation):
            def f(*qkv):
                out = flash_attention(
                    *qkv,
                    dropout_rate=self.RATE,
                    dropout_key=jax.random.key(8),
                    implementation=implementation,
                )
                return jnp.sum(jnp.sin(out))

            return jax.grad(f, argnums=(0, 1, 2))(query, key, value)

        for ours, plain in zip(loss("metal"), loss("xla")):
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)

    def test_threefry_known_answer(self):
        # The third test vector of the Random123 distribution for threefry2x32_R20.
        from jax_flash_metal.reference import threefry2x32

        arguments = (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3)
        words = threefry2x32(*(jnp.uint32(x) for x in arguments))
        assert [int(w) for w in words] == [0xC4923A9C, 0x483DF7A0]
