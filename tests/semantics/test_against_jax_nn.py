"""dot_product_attention against jax.nn's XLA path, where the two mean the same."""

import functools
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
    "everything": lambda rng: {
        "scale": 0.2,
        "bias": cases.normal(rng, B, 1, T, S),
        "mask": cases.random_mask(rng, 1, N, T, S),
        "is_causal": True,
        "local_window_size": (30, 0),
        "key_value_seq_lengths": jnp.array([53, 17], jnp.int32),
    },
}
IMPLEMENTATIONS = ["xla", "metal", "cpu"]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_case(case, dtype):
    rng = np.random.default_rng(5)
    query, key, value = cases.qkv(rng, cases.DTYPES[dtype], value_head_dim=cases.H)
    options = CASES[case](rng)
    if any(name not in THEIRS for name in options):
        versions.skip(f"jax.nn of jax {jax.__version__} has no {list(options)}")
    theirs = jax.nn.dot_product_attention(
        *map(jnp.asarray, (query, key, value)), **options
    )
    for implementation in IMPLEMENTATIONS:
        ours = dot_product_attention(
            query, key, value, **options, implementation=implementation
        )
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert_close("out", ours, np.asarray(theirs), dtype)


def test_without_batch_dimension():
    rng = np.random.default_rng(5)
    qkv = [x[0] for x in cases.qkv(rng, np.float32, value_head_dim=cases.H)]
    options = {
        "bias": cases.normal(rng, N, T, S),
        "mask": cases.random_mask(rng, 1, T, S),
        "key_value_seq_lengths": jnp.array([17], jnp.int32),
    }
    versions_differ = jax.__version_info__ < (0, 4, 36)
    for implementation in IMPLEMENTATIONS:
        ours = dot_product_attention(*qkv, **options, implementation=implementation)
        assert ours.shape == (T, N, cases.H)
        if not versions_differ:
            theirs = jax.nn.dot_product_attention(*map(jnp.asarray, qkv), **options)
            assert_close("out", ours, np.asarray(theirs), "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_documented_differences(implementation):
    """Rows without keys, hidden NaN, another value_head_dim."""
    rng = np.random.default_rng(5)
    query, key, value = (jnp.asarray(x) for x in cases.qkv(rng, np.float32))
    mask = np.ones((B, 1, T, S), bool)
    mask[:, :, 3] = False
    mask[..., 40:] = False
    out, residual = dot_product_attention(
        *(query, key, value.at[:, 40:].set(jnp.nan)),
        mask=mask,
        return_residual=True,
        implementation=implementation,
    )
    assert out.shape == (B, T, N, cases.V)
    assert (np.asarray(out[:, 3]) == 0).all() and np.isfinite(np.asarray(out)).all()
    assert np.isneginf(np.asarray(residual[:, 3])).all()
    theirs = jax.nn.dot_product_attention(query, key, key, mask=mask)
    assert (np.asarray(theirs[:, 3]) != 0).all()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_residual(implementation, batched):
    rng = np.random.default_rng(5)
    qkv = cases.qkv(rng, np.float32, value_head_dim=cases.H)
    if not batched:
        qkv = tuple(x[0] for x in qkv)
    out, residual = dot_product_attention(
        *qkv, is_causal=True, return_residual=True, implementation=implementation
    )
    assert residual.shape == qkv[0].shape[:-1]
    if "return_residual" in THEIRS:
        theirs = jax.nn.dot_product_attention(
            *qkv, is_causal=True, return_residual=True
        )
        assert_close("out", out, np.asarray(theirs[0]), "float32")
        assert_close("logsumexp", residual, np.asarray(theirs[1]), "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_residual_dtype_and_gradient(implementation):
    qkv = cases.qkv(np.random.default_rng(5), cases.DTYPES["bfloat16"])
    attend = functools.partial(
        dot_product_attention, return_residual=True, implementation=implementation
    )
    _, residual = attend(*qkv)
    assert residual.dtype == jnp.bfloat16
    gradient = jax.grad(
        lambda query: attend(query, *qkv[1:])[1].astype(jnp.float32).sum()
    )(qkv[0])
    assert (np.asarray(gradient) != 0).any()
