"""dot_product_attention against jax.nn's XLA path, where the two mean the same."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import dot_product_attention
from tests.semantics import attention_cases as cases
from tests.semantics.attention_cases import B, N, S, T
from tests.support import versions
from tests.support.closeness import assert_close

THEIRS = inspect.signature(jax.nn.dot_product_attention).parameters

CASES = {
    "plain": lambda rng: {},
    "scale": lambda rng: {"scale": 0.3},
    "causal": lambda rng: {"is_causal": True},
    "bias-mask": lambda rng: {
        "bias": cases.normal(rng, 1, N, T, S),
        "mask": cases.random_mask(rng, B, 1, 1, S),
    },
    # With a mask, because old versions of jax.nn ignore a window alone (jax #32300).
    "window": lambda rng: {
        "local_window_size": (3, 5),
        "mask": np.ones((1, 1, T, S), bool),
    },
    "window-int": lambda rng: {"local_window_size": 4, "is_causal": True},
    "lengths": lambda rng: {
        "query_seq_lengths": jnp.array([21, 37], jnp.int32),
        "key_value_seq_lengths": jnp.array([53, 17], jnp.int32),
    },
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_case(case, dtype):
    rng = np.random.default_rng(5)
    query, key, value = cases.qkv(rng, cases.DTYPES[dtype], value_head_dim=cases.H)
    options = CASES[case](rng)
    if any(name not in THEIRS for name in options):
        versions.skip(f"jax.nn of jax {jax.__version__} has no {list(options)}")
    ours = dot_product_attention(query, key, value, **options)
    theirs = jax.nn.dot_product_attention(
        *map(jnp.asarray, (query, key, value)), **options
    )
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert_close("out", ours, np.asarray(theirs), dtype)


@pytest.mark.parametrize("batched", [True, False])
def test_residual(batched):
    rng = np.random.default_rng(5)
    qkv = cases.qkv(rng, np.float32, value_head_dim=cases.H)
    if not batched:
        qkv = tuple(x[0] for x in qkv)
    out, residual = dot_product_attention(*qkv, is_causal=True, return_residual=True)
    assert residual.shape == qkv[0].shape[:-1]
    if "return_residual" in THEIRS:
        theirs = jax.nn.dot_product_attention(
            *qkv, is_causal=True, return_residual=True
        )
        assert_close("out", out, np.asarray(theirs[0]), "float32")
        assert_close("logsumexp", residual, np.asarray(theirs[1]), "float32")


def test_residual_dtype_and_gradient():
    qkv = cases.qkv(np.random.default_rng(5), cases.DTYPES["bfloat16"])
    _, residual = dot_product_attention(*qkv, return_residual=True)
    assert residual.dtype == jnp.bfloat16
    gradient = jax.grad(
        lambda query: (
            dot_product_attention(query, *qkv[1:], return_residual=True)[1]
            .astype(jnp.float32)
            .sum()
        )
    )(qkv[0])
    assert (np.asarray(gradient) != 0).any()
