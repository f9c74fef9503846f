"""Settings that users make globally do not break our own code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import flash_attention
from tests.semantics import attention_cases as cases
from tests.support.closeness import assert_close

SETTINGS = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_x64": True,
    "jax_debug_nans": True,
}
CALLS = [("everything", "metal"), ("everything", "cpu"), ("sinks", "xla")]


@pytest.fixture(params=SETTINGS)
def setting(request):
    before = getattr(jax.config, request.param)
    jax.config.update(request.param, SETTINGS[request.param])
    yield request.param
    jax.config.update(request.param, before)


@pytest.mark.parametrize(("case", "implementation"), CALLS)
def test_gradient(setting, case, implementation):
    rng = np.random.default_rng(7)
    operands = cases.qkv(rng, np.dtype(np.float32))
    options = cases.ALL[case](rng)

    differentiable = {n: options.pop(n) for n in cases.DIFFERENTIABLE if n in options}

    def loss(*operands):
        *qkv, differentiable = operands
        out, logsumexp = flash_attention(
            *qkv,
            **differentiable,
            **options,
            return_logsumexp=True,
            implementation=implementation,
        )
        assert out.dtype == logsumexp.dtype == jnp.float32
        return jnp.sum(out)

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*operands, differentiable)
    gradients = jax.tree.leaves(gradients)
    assert len(gradients) == 3 + len(differentiable)
    assert all(g.dtype == jnp.float32 for g in gradients)
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)


def test_disable_jit():
    rng = np.random.default_rng(7)
    operands = cases.qkv(rng, np.dtype(np.float32))

    def loss(*operands):
        out = flash_attention(*operands, is_causal=True, implementation="metal")
        return jnp.sum(out)

    expected = jax.grad(loss)(*operands)
    with jax.disable_jit():
        assert_close("dquery", jax.grad(loss)(*operands), expected, "float32")


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_debug_nans_finds_a_nan(wrap):
    query, key, value = cases.qkv(np.random.default_rng(7), np.dtype(np.float32))
    key[0, 0, 0, 0] = np.nan
    attend = wrap(lambda *a: flash_attention(*a, implementation="metal"))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        attend(query, key, value)
