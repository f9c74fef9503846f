"""Shapes and dtypes of the primitives, with shared batch dimensions."""

import jax
import jax.numpy as jnp
import pytest

from jax_flash_metal import primitives
from jax_flash_metal.config import AttentionConfig

T, S, N, K, H, V = 37, 53, 6, 3, 64, 40
CONFIG = AttentionConfig(scale=0.125)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("query_batch", "key_batch", "value_batch", "full"),
    [
        ((), (), (), ()),
        ((2,), (2,), (2,), (2,)),
        ((5, 2), (1, 2), (5, 1), (5, 2)),
        ((1, 2), (1, 2), (7, 1), (7, 2)),
        ((1, 0), (4, 1), (1, 1), (4, 0)),
    ],
)
def test_full_batch(query_batch, key_batch, value_batch, full):
    query = struct(*query_batch, T, N, H)
    key = struct(*key_batch, S, K, H)
    value = struct(*value_batch, S, K, V)
    out, logsumexp = jax.eval_shape(
        lambda *a: primitives.attention_forward(*a, config=CONFIG), query, key, value
    )
    assert (out.shape, out.dtype) == ((*full, T, N, V), jnp.bfloat16)
    assert (logsumexp.shape, logsumexp.dtype) == ((*full, N, T), jnp.float32)

    gradients = jax.eval_shape(
        lambda *a: primitives.attention_backward(*a, config=CONFIG),
        *(query, key, value, out, logsumexp, out, logsumexp),
    )
    shapes = [(*full, T, N, H), (*full, S, K, H), (*full, S, K, V)]
    assert [g.shape for g in gradients] == shapes
    assert all(g.dtype == jnp.bfloat16 for g in gradients)


def test_only_the_cotangent_is_batched():
    ones = (1,)
    query, key = struct(*ones, T, N, H), struct(*ones, S, K, H)
    value, out = struct(*ones, S, K, V), struct(*ones, T, N, V)
    logsumexp = struct(*ones, N, T, dtype=jnp.float32)
    dout = struct(8, T, N, V)
    gradients = jax.eval_shape(
        lambda *a: primitives.attention_backward(*a, config=CONFIG),
        *(query, key, value, out, logsumexp, dout, logsumexp),
    )
    assert [g.shape[0] for g in gradients] == [8, 8, 8]


def test_batches_that_do_not_agree():
    with pytest.raises(ValueError, match="shape mismatch"):
        primitives.full_batch((2,), (3,))
