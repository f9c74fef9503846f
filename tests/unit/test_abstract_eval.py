"""Shapes and dtypes of the primitives, with shared batch dimensions."""

import jax
import jax.numpy as jnp
import pytest

from jax_flash_metal import config, primitives
from jax_flash_metal.config import AttentionConfig, AttentionOperands

T, S, N, K, H, V = 37, 53, 6, 3, 64, 40
SIZES = dict(zip("TSNKHVW", (T, S, N, K, H, V, 2)))
CONFIG = AttentionConfig(scale=0.125)
DTYPES = {
    "mask": jnp.bool_,
    "sinks": jnp.float32,
    "alibi_slopes": jnp.float32,
    "dropout_key": jnp.uint32,
    "logsumexp": jnp.float32,
    "dlogsumexp": jnp.float32,
    **dict.fromkeys(("query", "key", "value", "bias", "out", "dout"), jnp.bfloat16),
}


def struct(name, batch):
    shape = (*batch, *(SIZES[dim] for dim in config.DIMS[name]))
    return jax.ShapeDtypeStruct(shape, DTYPES.get(name, jnp.int32))


def operands_of(**batches):
    return AttentionOperands(**{n: struct(n, batch) for n, batch in batches.items()})


def residuals_of(batch):
    return [struct(n, batch) for n in ("out", "logsumexp", "dout", "dlogsumexp")]


def forward(operands):
    return jax.eval_shape(
        lambda o: primitives.attention_forward(o, config=CONFIG), operands
    )


def backward(operands, residuals):
    return jax.eval_shape(
        lambda o, *r: primitives.attention_backward(o, *r, config=CONFIG),
        *(operands, *residuals),
    )


def gradient(of, operands, residuals):
    return jax.eval_shape(
        lambda o, *r: primitives.operand_gradient(of, o, *r, config=CONFIG),
        *(operands, *residuals),
    )


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
    operands = operands_of(query=query_batch, key=key_batch, value=value_batch)
    out, logsumexp = forward(operands)
    assert (out.shape, out.dtype) == ((*full, T, N, V), jnp.bfloat16)
    assert (logsumexp.shape, logsumexp.dtype) == ((*full, N, T), jnp.float32)

    gradients = backward(operands, (out, logsumexp, out, logsumexp))
    shapes = [(*full, T, N, H), (*full, S, K, H), (*full, S, K, V)]
    assert [g.shape for g in gradients] == shapes
    assert all(g.dtype == jnp.bfloat16 for g in gradients)


def test_only_the_cotangent_is_batched():
    operands = operands_of(query=(1,), key=(1,), value=(1,))
    residuals = residuals_of((1,))
    residuals[2] = struct("dout", (8,))
    assert [g.shape[0] for g in backward(operands, residuals)] == [8, 8, 8]


@pytest.mark.parametrize("name", config.OPTIONAL_OPERANDS)
def test_any_operand_may_have_the_batch(name):
    operands = operands_of(query=(1, 2), key=(1, 2), value=(1, 2), **{name: (5, 1)})
    out, logsumexp = forward(operands)
    assert out.shape == (5, 2, T, N, V) and logsumexp.shape == (5, 2, N, T)
    gradients = backward(operands, residuals_of((1, 2)))
    assert [g.shape[:2] for g in gradients] == [(5, 2)] * 3


@pytest.mark.parametrize("of", config.DIFFERENTIABLE_OPTIONS)
def test_gradient_has_the_shape_and_dtype_of_its_operand(of):
    operands = operands_of(query=(5, 2), key=(5, 2), value=(5, 2), **{of: (1, 2)})
    operand = getattr(operands, of)
    result = gradient(of, operands, residuals_of((5, 2)))
    assert (result.shape, result.dtype) == (operand.shape, operand.dtype)


@pytest.mark.parametrize("of", config.DIFFERENTIABLE_OPTIONS)
def test_vmap_of_the_gradient_is_full_in_its_dimension_alone(of):
    operands = operands_of(query=(2,), key=(2,), value=(2,), **{of: (1,)})
    residuals = residuals_of((2,))
    residuals[2] = struct("dout", (8, 2))
    result = jax.eval_shape(
        jax.vmap(
            lambda o, *r: primitives.operand_gradient(of, o, *r, config=CONFIG),
            (None, None, None, 0, None),
        ),
        *(operands, *residuals),
    )
    assert result.shape == (8, *getattr(operands, of).shape)


def test_batches_that_do_not_agree():
    with pytest.raises(ValueError, match="shape mismatch"):
        forward(operands_of(query=(2,), key=(3,), value=(2,)))
    with pytest.raises(ValueError, match="same number of batch dimensions"):
        forward(operands_of(query=(2,), key=(2,), value=(2,), q_offset=()))
