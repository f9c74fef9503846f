"""out, logsumexp and every gradient against the float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import flash_attention
from jax_flash_metal.config import BACKENDS
from tests.semantics import attention_cases as cases
from tests.support import reference_f64
from tests.support.closeness import assert_close

IMPLEMENTATIONS = ("xla", "fallback", "cpu", "metal")

# In the narrow dtypes only what rounds differently; float32 runs every case.
NARROW = [
    *("plain", "causal", "bias-over-batch", "softcap-bias-mask", "sinks", "dropout"),
    "everything",
]
# Derivative rules and batch dimensions are those of "metal", formulas those of "xla".
FALLBACK = [
    "plain",
    "causal",
    "sinks-and-rows-without-keys",
    "traced-offset",
    "everything",
]


def runs():
    for case in cases.ALL:
        for name in IMPLEMENTATIONS:
            for dtype in cases.DTYPES:
                wanted = name != "fallback" or case in FALLBACK
                if dtype != "float32":
                    wanted = name in BACKENDS and case in NARROW
                if wanted:
                    yield pytest.param(case, name, dtype, id=f"{case}-{name}-{dtype}")


@pytest.mark.parametrize(
    ("case", "implementation", "dtype"), list(runs()), indirect=["implementation"]
)
def test_case(case, implementation, dtype):
    rng = np.random.default_rng(7)
    query, key, value = cases.qkv(rng, cases.DTYPES[dtype])
    options = cases.ALL[case](rng)
    dout = cases.normal(rng, *query.shape[:-1], value.shape[-1], dtype=query.dtype)
    dlogsumexp = cases.normal(rng, cases.B, cases.N, cases.T)
    differentiable = {n: options[n] for n in cases.DIFFERENTIABLE if n in options}
    rest = {n: x for n, x in options.items() if n not in differentiable}

    def attend(query, key, value, differentiable):
        return flash_attention(
            query,
            key,
            value,
            **differentiable,
            **rest,
            return_logsumexp=True,
            implementation=implementation,
        )

    @jax.jit
    def results(query, key, value, differentiable, cotangents):
        primals, pullback = jax.vjp(attend, query, key, value, differentiable)
        return primals, pullback(cotangents)

    (out, logsumexp), (dquery, dkey, dvalue, dothers) = results(
        query, key, value, differentiable, (dout, dlogsumexp)
    )

    expected = reference_f64.attention(query, key, value, **options)
    wanted = reference_f64.attention_gradients(
        query, key, value, dout, dlogsumexp, **options
    )
    assert_close("out", out, expected.out, dtype)
    assert_close("logsumexp", logsumexp, expected.logsumexp, dtype)
    assert_close("dquery", dquery, wanted.dquery, dtype)
    assert_close("dkey", dkey, wanted.dkey, dtype)
    assert_close("dvalue", dvalue, wanted.dvalue, dtype)
    for name, gradient in dothers.items():
        name = {"alibi_slopes": "dslopes"}.get(name, f"d{name}")
        assert_close(name, gradient, getattr(wanted, name), dtype)


def test_float64(x64):
    """float64 inputs keep their precision, in both directions."""
    rng = np.random.default_rng(8)
    query, key, value = cases.qkv(rng, np.float64)
    dout = cases.normal(rng, *query.shape[:-1], value.shape[-1], dtype=np.float64)

    def attend(*qkv):
        return flash_attention(*qkv, is_causal=True, return_logsumexp=True)

    (out, logsumexp), pullback = jax.vjp(attend, query, key, value)
    gradients = pullback((jnp.asarray(dout), jnp.zeros_like(logsumexp)))
    expected = reference_f64.attention(query, key, value, is_causal=True)
    wanted = reference_f64.attention_gradients(query, key, value, dout, is_causal=True)
    assert out.dtype == logsumexp.dtype == jnp.float64
    np.testing.assert_allclose(out, expected.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(logsumexp, expected.logsumexp, rtol=1e-12)
    for got, want in zip(gradients, wanted[:3]):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)
