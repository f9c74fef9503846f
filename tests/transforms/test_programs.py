"""What is in the lowered and the compiled program: custom calls, and nothing big.

37 and 53 are primes, so a tensor with an element per (query, key) pair is one whose
size 37 * 53 divides.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jax_flash_metal import flash_attention

B, T, S, N, K, H, V = 2, 37, 53, 6, 3, 64, 40
FORWARD, BACKWARD, GRADIENT = (
    f"jax_flash_metal_{which}_v3" for which in ("forward", "backward", "gradient")
)

attend = functools.partial(flash_attention, is_causal=True, implementation="metal")


def loss(query, key, value):
    return jnp.sum(jnp.sin(attend(query, key, value)))


gradient = jax.grad(loss, argnums=(0, 1, 2))


def structs(q_batch, k_batch, v_batch):
    shapes = ((*q_batch, T, N, H), (*k_batch, S, K, H), (*v_batch, S, K, V))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def texts(function, operands):
    """StableHLO, and optimised HLO."""
    lowered = jax.jit(function).lower(*operands)
    return {"lowered": lowered.as_text(), "compiled": lowered.compile().as_text()}


def shapes(text):
    """Of every tensor type: tensor<2x37xf32> in StableHLO, f32[2,37] in HLO."""
    for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]", text):
        yield tuple(int(d) for d in dims.split("x")[:-1])
    for dims in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text):
        yield tuple(int(d) for d in dims.split(","))


def assert_small(text):
    found = list(shapes(text))
    assert (B, T, N, H) in [shape[-4:] for shape in found]
    for shape in found:
        assert math.prod(shape) % (T * S) or not math.prod(shape), shape


def test_shapes_reads_both_notations():
    text = "%0 = stablehlo.add : tensor<2x37x53xbf16>, tensor<f32> x f32[6,37]{1,0}"
    assert list(shapes(text)) == [(2, 37, 53), (6, 37)]


def test_the_reference_has_the_big_tensor():
    def plain(*operands):
        return jnp.sum(flash_attention(*operands, implementation="xla"))

    for text in texts(jax.grad(plain), structs((B,), (B,), (B,))).values():
        with pytest.raises(AssertionError):
            assert_small(text)


def test_gradient_step():
    for text in texts(gradient, structs((B,), (B,), (B,))).values():
        assert text.count(FORWARD) == 1
        assert text.count(BACKWARD) == 1
        assert GRADIENT not in text
        assert_small(text)


# Features with no array of q_len * kv_len elements in any pass.
FEATURES = {
    "q_offset": jnp.int32(3),
    "sliding_window": (9, None),
    "logits_soft_cap": 3.0,
    "segment_ids": (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32)),
    "query_seq_lengths": jnp.full(B, T, jnp.int32),
    "key_value_seq_lengths": jnp.full(B, S, jnp.int32),
    "mask": jnp.ones((B, 1, 1, S), bool),
    "dropout_rate": 0.2,
    "dropout_key": jax.random.PRNGKey(0),
}


def test_features_need_no_big_array():
    def with_features(differentiable, *qkv):
        return jnp.sum(attend(*qkv, **FEATURES, **differentiable))

    differentiable = {
        "bias": jax.ShapeDtypeStruct((1, N, T, 1), jnp.bfloat16),
        "sinks": jax.ShapeDtypeStruct((N,), jnp.float32),
        "alibi_slopes": jax.ShapeDtypeStruct((N,), jnp.float32),
    }
    step = jax.grad(with_features, argnums=(0, 1, 2, 3))
    operands = (differentiable, *structs((B,), (B,), (B,)))
    for text in texts(step, operands).values():
        assert text.count(FORWARD) == text.count(BACKWARD) == 1
        assert text.count(GRADIENT) == 3
        assert_small(text)


@pytest.mark.parametrize(
    ("argnums", "backward_calls", "gradient_calls"),
    [(0, 1, 0), (3, 0, 1), (4, 0, 1), ((2, 3), 1, 1), ((3, 4), 0, 2)],
    ids=["query", "bias", "sinks", "value-bias", "bias-sinks"],
)
def test_no_call_for_a_gradient_that_nobody_asks_for(
    argnums, backward_calls, gradient_calls
):
    """A constant bias costs nothing, nor do query, key and value that are constant."""

    def with_bias(query, key, value, bias, sinks):
        return jnp.sum(attend(query, key, value, bias, sinks=sinks))

    operands = [
        *structs((B,), (B,), (B,)),
        jax.ShapeDtypeStruct((1, N, 1, S), jnp.float32),
        jax.ShapeDtypeStruct((N,), jnp.float32),
    ]
    text = texts(jax.grad(with_bias, argnums), operands)["compiled"]
    assert text.count(f'"{FORWARD}"') == 1
    assert text.count(f'"{BACKWARD}"') == backward_calls
    assert text.count(f'"{GRADIENT}"') == gradient_calls


@pytest.mark.parametrize(
    ("policy", "forward_calls"),
    [
        (jax.checkpoint_policies.nothing_saveable, 2),
        (
            jax.checkpoint_policies.save_only_these_names(
                "flash_attention_out", "flash_attention_logsumexp"
            ),
            1,
        ),
    ],
    ids=["nothing", "names"],
)
def test_remat_by_name_does_not_repeat_the_forward(policy, forward_calls):
    def f(query, key, value):
        # Something before and after, so that there is something else to recompute.
        return loss(jnp.sin(query), jnp.sin(key), jnp.sin(value))

    step = jax.value_and_grad(jax.checkpoint(f, policy=policy), (0, 1, 2))
    text = texts(step, structs((B,), (B,), (B,)))["lowered"]
    assert text.count(FORWARD) == forward_calls
    assert text.count(BACKWARD) == 1


VMAPS = {
    "query": ((0, None, None), ((5, B), (B,), (B,))),
    "key-value": ((None, 0, 0), ((B,), (5, B), (5, B))),
    "query-value": ((0, None, 0), ((5, B), (B,), (5, B))),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_copies_no_shared_operand(name):
    in_axes, batches = VMAPS[name]
    operands = structs(*batches)
    for kind, text in texts(jax.vmap(gradient, in_axes), operands).items():
        assert text.count(FORWARD) == 1
        assert text.count(BACKWARD) == 1
        assert_small(text)
        if kind == "compiled":
            continue
        full = {(5, B, *operand.shape[-3:]) for operand in operands}
        for line in text.splitlines():
            if "broadcast_in_dim" in line:
                result = list(shapes(line.rsplit("->", 1)[-1]))
                assert not full & set(result), line
        call = next(line for line in text.splitlines() if FORWARD in line)
        types = list(shapes(call.rsplit(": (", 1)[1].split("->")[0]))
        assert types == [
            (1 if axis is None else 5, B, *operand.shape[-3:])
            for axis, operand in zip(in_axes, operands)
        ]


def test_vmap_copies_no_mask_and_no_bias():
    """Nor repeats what has size 1 in a dimension of the scores."""

    def f(query, key, value, mask, bias):
        return attend(query, key, value, bias, mask)

    operands = [
        *structs((5, B), (B,), (B,)),
        jax.ShapeDtypeStruct((B, 1, 1, S), jnp.bool_),
        jax.ShapeDtypeStruct((1, N, T, 1), jnp.bfloat16),
    ]
    mapped = jax.vmap(f, (0, None, None, None, None))
    text = texts(mapped, operands)["lowered"]
    call = next(line for line in text.splitlines() if FORWARD in line)
    types = list(shapes(call.rsplit(": (", 1)[1].split("->")[0]))
    # Operands in the order of the wire.
    assert types[3:] == [(1, 1, N, T, 1), (1, B, 1, 1, S)]


def test_unmapped_call_under_vmap_is_not_batched():
    def f(scale, query, key, value):
        return scale * attend(query, key, value)

    operands = [jax.ShapeDtypeStruct((9,), jnp.float32), *structs((B,), (B,), (B,))]
    text = texts(jax.vmap(f, (0, None, None, None)), operands)["lowered"]
    call = next(line for line in text.splitlines() if FORWARD in line)
    assert "9x" not in call.rsplit(": (", 1)[1]


def lowered_for(platform, attend):
    """The program for a platform that need not be started."""
    traced = jax.jit(attend).trace(*structs((B,), (B,), (B,)))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "backend"), [("cpu", 1), ("flash_metal", 0)])
def test_default_has_a_custom_call(platform, backend):
    text = lowered_for(platform, flash_attention)
    assert text.count(FORWARD) == 1
    assert f"backend = {backend} : i64" in text


def test_the_native_kernels_are_not_on_flash_metal():
    with pytest.raises(NotImplementedError, match="needs platform 'cpu', but this"):
        lowered_for(
            "flash_metal", functools.partial(flash_attention, implementation="cpu")
        )
