"""Every wrong call and the exact sentence it gets."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash_metal

B, T, S, N, K, H = 2, 37, 53, 6, 3, 64


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def call(**changes):
    arguments = {
        "query": zeros(B, T, N, H),
        "key": zeros(B, S, K, H),
        "value": zeros(B, S, K, H),
    }
    return jax_flash_metal.flash_attention(**{**arguments, **changes})


WRONG_CALLS = {
    "query_not_array": (
        {"query": None},
        TypeError,
        "query must be an array, but got NoneType.",
    ),
    "key_list": (
        {"key": [[1.0]]},
        TypeError,
        "key must be an array, but got list.",
    ),
    "query_rank_2": (
        {"query": zeros(T, H)},
        ValueError,
        "query must have shape (batch, q_len, num_heads, head_dim) or (q_len, "
        "num_heads, head_dim), but got query.shape=(37, 64).",
    ),
    "query_rank_5": (
        {"query": zeros(1, B, T, N, H)},
        ValueError,
        "query must have shape (batch, q_len, num_heads, head_dim) or (q_len, "
        "num_heads, head_dim), but got query.shape=(1, 2, 37, 6, 64).",
    ),
    "rank_differs": (
        {"key": zeros(S, K, H)},
        ValueError,
        "query and key must have the same rank, but got query.shape=(2, 37, 6, 64) "
        "and key.shape=(53, 3, 64).",
    ),
    "batch_key": (
        {"key": zeros(1, S, K, H)},
        ValueError,
        "query and key must have the same batch size, but got query.shape="
        "(2, 37, 6, 64) and key.shape=(1, 53, 3, 64).",
    ),
    "batch_value": (
        {"value": zeros(5, S, K, H)},
        ValueError,
        "query and value must have the same batch size, but got query.shape="
        "(2, 37, 6, 64) and value.shape=(5, 53, 3, 64).",
    ),
    "kv_len": (
        {"value": zeros(B, 54, K, H)},
        ValueError,
        "key and value must have the same kv_len, but got key.shape=(2, 53, 3, 64) "
        "and value.shape=(2, 54, 3, 64).",
    ),
    "kv_heads": (
        {"value": zeros(B, S, 6, H)},
        ValueError,
        "key and value must have the same num_kv_heads, but got key.shape="
        "(2, 53, 3, 64) and value.shape=(2, 53, 6, 64).",
    ),
    "head_dim": (
        {"key": zeros(B, S, K, 32)},
        ValueError,
        "query and key must have the same head_dim, but got query.shape="
        "(2, 37, 6, 64) and key.shape=(2, 53, 3, 32).",
    ),
    "layout_swapped": (
        {"query": zeros(B, N, T, H)},
        ValueError,
        "num_heads must be a multiple of num_kv_heads, but got query.shape="
        "(2, 6, 37, 64) and key.shape=(2, 53, 3, 64).",
    ),
    "no_heads": (
        {"query": zeros(B, T, 0, H)},
        ValueError,
        "num_heads must be at least 1, but got query.shape=(2, 37, 0, 64).",
    ),
    "no_kv_heads": (
        {"key": zeros(B, S, 0, H), "value": zeros(B, S, 0, H)},
        ValueError,
        "num_kv_heads must be at least 1, but got key.shape=(2, 53, 0, 64).",
    ),
    "no_head_dim": (
        {"query": zeros(B, T, N, 0), "key": zeros(B, S, K, 0)},
        ValueError,
        "head_dim must be at least 1, but got query.shape=(2, 37, 6, 0).",
    ),
    "no_value_head_dim": (
        {"value": zeros(B, S, K, 0)},
        ValueError,
        "value_head_dim must be at least 1, but got value.shape=(2, 53, 3, 0).",
    ),
    "dtype": (
        {"query": zeros(B, T, N, H, dtype=jnp.int32)},
        ValueError,
        "query must have one of the dtypes float32, float16, bfloat16, float64, but "
        "got query.dtype=int32.",
    ),
    "dtype_mixed": (
        {"value": zeros(B, S, K, H, dtype=jnp.bfloat16)},
        ValueError,
        "query, key and value must have the same dtype, but got query.dtype=float32, "
        "key.dtype=float32 and value.dtype=bfloat16.",
    ),
    "bias_shape": (
        {"bias": zeros(B, N, S, T)},
        ValueError,
        "bias must be broadcastable to (batch, num_heads, q_len, kv_len)="
        "(2, 6, 37, 53), but got bias.shape=(2, 6, 53, 37).",
    ),
    "bias_dtype": (
        {"bias": zeros(T, S, dtype=jnp.int32)},
        ValueError,
        "bias must have a floating dtype, but got bias.dtype=int32.",
    ),
    "bias_bool": (
        {"bias": zeros(T, S, dtype=bool)},
        ValueError,
        "bias must have a floating dtype, but got bias.dtype=bool.",
    ),
    "bias_numpy_int": (
        {"bias": np.zeros((T, S), np.int8)},
        ValueError,
        "bias must have a floating dtype, but got bias.dtype=int8.",
    ),
    "bias_batch": (
        {"bias": zeros(5, N, T, S)},
        ValueError,
        "bias must be broadcastable to (batch, num_heads, q_len, kv_len)="
        "(2, 6, 37, 53), but got bias.shape=(5, 6, 37, 53).",
    ),
    "bias_kind": (
        {"bias": 0.5},
        TypeError,
        "bias must be an array, but got float.",
    ),
    "mask_heads": (
        {"mask": zeros(B, K, T, S, dtype=bool)},
        ValueError,
        "mask must be broadcastable to (batch, num_heads, q_len, kv_len)="
        "(2, 6, 37, 53), but got mask.shape=(2, 3, 37, 53).",
    ),
    "mask_rank_5": (
        {"mask": zeros(1, B, N, T, S, dtype=bool)},
        ValueError,
        "mask must be broadcastable to (batch, num_heads, q_len, kv_len)="
        "(2, 6, 37, 53), but got mask.shape=(1, 2, 6, 37, 53).",
    ),
    "mask_dtype": (
        {"mask": zeros(T, S)},
        ValueError,
        "mask must have dtype bool (True = attend), but got mask.dtype=float32; pass "
        "an additive mask as bias.",
    ),
    "mask_half": (
        {"mask": zeros(T, S, dtype=jnp.bfloat16)},
        ValueError,
        "mask must have dtype bool (True = attend), but got mask.dtype=bfloat16; pass "
        "an additive mask as bias.",
    ),
    "mask_int": (
        {"mask": zeros(T, S, dtype=jnp.int32)},
        ValueError,
        "mask must have dtype bool (True = attend), but got mask.dtype=int32; pass an "
        "additive mask as bias.",
    ),
    "mask_rows_and_columns": (
        {"mask": zeros(S, T, dtype=bool)},
        ValueError,
        "mask must be broadcastable to (batch, num_heads, q_len, kv_len)="
        "(2, 6, 37, 53), but got mask.shape=(53, 37).",
    ),
    "mask_kind": (
        {"mask": True},
        TypeError,
        "mask must be an array, but got bool.",
    ),
    "scale_kind": (
        {"scale": "0.5"},
        TypeError,
        "scale must be a Python number (it is compiled into the program), but got str.",
    ),
    "scale_array": (
        {"scale": np.ones(2)},
        TypeError,
        "scale must be a Python number, but got ndarray.",
    ),
    "scale_nan": (
        {"scale": float("nan")},
        ValueError,
        "scale must be finite, but got scale=nan.",
    ),
    "scale_beyond_float32": (
        {"scale": 1e39},
        ValueError,
        "scale must be within the range of float32, but got scale=1e+39.",
    ),
    "scale_beyond_float64": (
        {"scale": 10**400},
        ValueError,
        "scale must be finite, but got scale=inf.",
    ),
    "scale_numpy_bool": (
        {"scale": np.True_},
        TypeError,
        "scale must be a Python number (it is compiled into the program), but got "
        f"{type(np.True_).__name__}.",
    ),
    "is_causal_kind": (
        {"is_causal": 1},
        TypeError,
        "is_causal must be a bool (it is compiled into the program), but got int.",
    ),
    "q_offset_without_causal": (
        {"q_offset": 16},
        ValueError,
        "q_offset needs is_causal=True, sliding_window or alibi_slopes (without them "
        "it has no effect), but got q_offset=16.",
    ),
    "q_offset_kind": (
        {"is_causal": True, "q_offset": 1.5},
        TypeError,
        "q_offset must be an int or an integer scalar array, but got float.",
    ),
    "q_offset_vector": (
        {"is_causal": True, "q_offset": jnp.arange(2)},
        ValueError,
        "q_offset must be an int or an integer scalar array, but got "
        "q_offset.shape=(2,) and q_offset.dtype=int32.",
    ),
    "q_offset_float_array": (
        {"is_causal": True, "q_offset": zeros()},
        ValueError,
        "q_offset must be an int or an integer scalar array, but got "
        "q_offset.shape=() and q_offset.dtype=float32.",
    ),
    "q_offset_bool": (
        {"is_causal": True, "q_offset": True},
        TypeError,
        "q_offset must be an int or an integer scalar array, but got bool.",
    ),
    "q_offset_array_without_causal": (
        {"q_offset": zeros(dtype=jnp.int32)},
        ValueError,
        "q_offset needs is_causal=True, sliding_window or alibi_slopes (without them "
        "it has no effect), but got q_offset=0.",
    ),
    "q_offset_range": (
        {"is_causal": True, "q_offset": 2**31},
        ValueError,
        "q_offset must lie in [-2**30, 2**30], but got q_offset=2147483648.",
    ),
    "window_kind": (
        {"sliding_window": (1, 2, 3)},
        TypeError,
        "sliding_window must be an int or a pair (left, right) of ints or None, but "
        "got (1, 2, 3).",
    ),
    "window_negative": (
        {"sliding_window": (3, -1)},
        ValueError,
        "sliding_window must not be negative, but got (3, -1).",
    ),
    "window_float": (
        {"sliding_window": (1.5, 2)},
        TypeError,
        "sliding_window must be an int or a pair (left, right) of ints or None, but "
        "got (1.5, 2).",
    ),
    "window_bool": (
        {"sliding_window": True},
        TypeError,
        "sliding_window must be an int or a pair (left, right) of ints or None, but "
        "got True.",
    ),
    "window_negative_int": (
        {"sliding_window": -3},
        ValueError,
        "sliding_window must not be negative, but got -3.",
    ),
    "softcap_negative": (
        {"logits_soft_cap": -30.0},
        ValueError,
        "logits_soft_cap must lie in [1e-30, 1e30], but got logits_soft_cap=-30.0.",
    ),
    "softcap_zero_in_float32": (
        {"logits_soft_cap": 1e-60},
        ValueError,
        "logits_soft_cap must lie in [1e-30, 1e30], but got logits_soft_cap=1e-60.",
    ),
    "softcap_infinite": (
        {"logits_soft_cap": float("inf")},
        ValueError,
        "logits_soft_cap must lie in [1e-30, 1e30], but got logits_soft_cap=inf.",
    ),
    "softcap_kind": (
        {"logits_soft_cap": "30"},
        TypeError,
        "logits_soft_cap must be a Python number (it is compiled into the program), "
        "but got str.",
    ),
    "softcap_zero": (
        {"logits_soft_cap": 0.0},
        ValueError,
        "logits_soft_cap must lie in [1e-30, 1e30], but got logits_soft_cap=0.0.",
    ),
    "segment_ids_kind": (
        {"segment_ids": zeros(B, T, dtype=jnp.int32)},
        TypeError,
        "segment_ids must be a pair (q ids, kv ids) of arrays, but got ArrayImpl.",
    ),
    "segment_ids_of_queries_only": (
        {"segment_ids": (zeros(B, T, dtype=jnp.int32), None)},
        TypeError,
        "segment_ids must be a pair (q ids, kv ids) of arrays, but got no kv ids.",
    ),
    "segment_ids_of_keys_only": (
        {"segment_ids": (None, zeros(B, S, dtype=jnp.int32))},
        TypeError,
        "segment_ids must be a pair (q ids, kv ids) of arrays, but got no q ids.",
    ),
    "segment_ids_one": (
        {"segment_ids": (zeros(B, T, dtype=jnp.int32),)},
        TypeError,
        "segment_ids must be a pair (q ids, kv ids) of arrays, but got 1 of them.",
    ),
    "segment_ids_dtype": (
        {"segment_ids": (zeros(B, T), zeros(B, S))},
        ValueError,
        "segment_ids.q must be int32 of shape (batch, q_len)=(2, 37), but got "
        "segment_ids.q.shape=(2, 37) and segment_ids.q.dtype=float32.",
    ),
    "segment_ids_shape": (
        {
            "segment_ids": (
                zeros(B, T, dtype=jnp.int32),
                zeros(B, T, dtype=jnp.int32),
            )
        },
        ValueError,
        "segment_ids.kv must be int32 of shape (batch, kv_len)=(2, 53), but got "
        "segment_ids.kv.shape=(2, 37) and segment_ids.kv.dtype=int32.",
    ),
    "query_seq_lengths_shape": (
        {"query_seq_lengths": zeros(N, dtype=jnp.int32)},
        ValueError,
        "query_seq_lengths must be int32 of shape (batch,)=(2,), but got "
        "query_seq_lengths.shape=(6,) and query_seq_lengths.dtype=int32.",
    ),
    "key_value_seq_lengths_dtype": (
        {"key_value_seq_lengths": zeros(B)},
        ValueError,
        "key_value_seq_lengths must be int32 of shape (batch,)=(2,), but got "
        "key_value_seq_lengths.shape=(2,) and key_value_seq_lengths.dtype=float32.",
    ),
    "key_value_seq_lengths_shape": (
        {"key_value_seq_lengths": zeros(B, 1, dtype=jnp.int32)},
        ValueError,
        "key_value_seq_lengths must be int32 of shape (batch,)=(2,), but got "
        "key_value_seq_lengths.shape=(2, 1) and key_value_seq_lengths.dtype=int32.",
    ),
    "query_seq_lengths_int16": (
        {"query_seq_lengths": zeros(B, dtype=jnp.int16)},
        ValueError,
        "query_seq_lengths must be int32 of shape (batch,)=(2,), but got "
        "query_seq_lengths.shape=(2,) and query_seq_lengths.dtype=int16.",
    ),
    "query_seq_lengths_kind": (
        {"query_seq_lengths": [3, 4]},
        TypeError,
        "query_seq_lengths must be an array, but got list.",
    ),
    "sinks_dtype": (
        {"sinks": zeros(N, dtype=jnp.int32)},
        ValueError,
        "sinks must be floating of shape (num_heads,)=(6,), but got sinks.shape=(6,) "
        "and sinks.dtype=int32.",
    ),
    "sinks_scalar": (
        {"sinks": 0.0},
        TypeError,
        "sinks must be an array, but got float.",
    ),
    "alibi_shape": (
        {"alibi_slopes": zeros(B, N)},
        ValueError,
        "alibi_slopes must be floating of shape (num_heads,)=(6,), but got "
        "alibi_slopes.shape=(2, 6) and alibi_slopes.dtype=float32.",
    ),
    "sinks_shape": (
        {"sinks": zeros(K)},
        ValueError,
        "sinks must be floating of shape (num_heads,)=(6,), but got sinks.shape=(3,) "
        "and sinks.dtype=float32.",
    ),
    "alibi_dtype": (
        {"alibi_slopes": zeros(N, dtype=jnp.int32)},
        ValueError,
        "alibi_slopes must be floating of shape (num_heads,)=(6,), but got "
        "alibi_slopes.shape=(6,) and alibi_slopes.dtype=int32.",
    ),
    "dropout_rate": (
        {"dropout_rate": 1.0},
        ValueError,
        "dropout_rate must lie in [0, 1), but got 1.0.",
    ),
    "dropout_without_key": (
        {"dropout_rate": 0.25},
        ValueError,
        "dropout_rate=0.25 needs a dropout_key, but got dropout_key=None.",
    ),
    "dropout_rate_negative": (
        {"dropout_rate": -0.1},
        ValueError,
        "dropout_rate must lie in [0, 1), but got -0.1.",
    ),
    "dropout_rate_nan": (
        {"dropout_rate": float("nan")},
        ValueError,
        "dropout_rate must lie in [0, 1), but got nan.",
    ),
    "dropout_rate_kind": (
        {"dropout_rate": None},
        TypeError,
        "dropout_rate must be a Python number (it is compiled into the program), but "
        "got NoneType.",
    ),
    "dropout_key_int": (
        {"dropout_rate": 0.25, "dropout_key": 0},
        TypeError,
        "dropout_key must be an array, but got int.",
    ),
    "dropout_key_dtype": (
        {"dropout_rate": 0.25, "dropout_key": zeros(2, dtype=jnp.int32)},
        ValueError,
        "dropout_key must be one key (jax.random.key) or its uint32 data, but got "
        "dropout_key.shape=(2,) and dropout_key.dtype=int32.",
    ),
    "dropout_typed_keys": (
        {"dropout_rate": 0.25, "dropout_key": jax.random.split(jax.random.key(0), 3)},
        ValueError,
        "dropout_key must be one key (jax.random.key) or its uint32 data, but got "
        "dropout_key.shape=(3,) and dropout_key.dtype=key<fry>.",
    ),
    "dropout_keys": (
        {"dropout_rate": 0.25, "dropout_key": zeros(3, 2, dtype=jnp.uint32)},
        ValueError,
        "dropout_key must be one key (jax.random.key) or its uint32 data, but got "
        "dropout_key.shape=(3, 2) and dropout_key.dtype=uint32.",
    ),
    "return_logsumexp_kind": (
        {"return_logsumexp": "yes"},
        TypeError,
        "return_logsumexp must be a bool (it is compiled into the program), but got "
        "str.",
    ),
    "implementation": (
        {"implementation": "cudnn"},
        ValueError,
        "implementation must be None, 'metal', 'cpu' or 'xla', but got 'cudnn'.",
    ),
}


@pytest.mark.parametrize(
    ("changes", "error", "sentence"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys()
)
def test_wrong_call(changes, error, sentence):
    with pytest.raises(error) as raised:
        call(**changes)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("changes", "error", "sentence"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys()
)
def test_explain_raises_the_same(changes, error, sentence):
    arguments = {
        "query": jax.ShapeDtypeStruct((B, T, N, H), jnp.float32),
        "key": jax.ShapeDtypeStruct((B, S, K, H), jnp.float32),
        "value": jax.ShapeDtypeStruct((B, S, K, H), jnp.float32),
    }
    with pytest.raises(error, match=re.escape(sentence.rsplit("but got", 1)[0])):
        jax_flash_metal.explain(**{**arguments, **changes})


TRACED = {
    "scale": (0.5, "scale must be a Python number (it is compiled into the program), "),
    "logits_soft_cap": (3.0, "logits_soft_cap must be a Python number (it is compiled"),
    "dropout_rate": (0.5, "dropout_rate must be a Python number (it is compiled into "),
    "is_causal": (True, "is_causal must be a bool (it is compiled into the program), "),
    "return_logsumexp": (True, "return_logsumexp must be a bool (it is compiled into "),
    "sliding_window": (3, "sliding_window must be an int or a pair (left, right) of "),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_static_argument(name):
    value, start = TRACED[name]
    with pytest.raises(TypeError, match="^" + re.escape(start)):
        jax.eval_shape(lambda x: call(**{name: x}), value)


@pytest.mark.parametrize("sinks", [zeros(K), zeros(1, N)])
def test_sinks_of_merge_partials(sinks):
    with pytest.raises(ValueError) as raised:
        jax_flash_metal.merge_partials(
            [zeros(B, T, N, H)], [zeros(B, N, T)], sinks=sinks
        )
    assert str(raised.value) == (
        "sinks must be floating of shape (num_heads,)=(6,), but got "
        f"sinks.shape={sinks.shape} and sinks.dtype=float32."
    )


def test_local_window_size_is_named():
    x = zeros(B, T, N, H)
    with pytest.raises(ValueError) as raised:
        jax_flash_metal.dot_product_attention(x, x, x, local_window_size=-1)
    assert str(raised.value) == "local_window_size must not be negative, but got -1."


def test_merge_partials():
    out, lse = zeros(B, T, N, H), zeros(B, N, T)
    with pytest.raises(ValueError) as raised:
        jax_flash_metal.merge_partials([], [], None)
    assert str(raised.value) == (
        "outs and logsumexps must have the same number of parts, at least 1, but got "
        "0 and 0."
    )
    with pytest.raises(ValueError) as raised:
        jax_flash_metal.merge_partials([out, out], [lse, lse[:, :, 1:]])
    assert str(raised.value) == (
        "outs and logsumexps must have the shapes (*batch, q_len, num_heads, head_dim) "
        "and (*batch, num_heads, q_len), the same for all parts, but got "
        "[(2, 37, 6, 64), (2, 37, 6, 64)] and [(2, 6, 37), (2, 6, 36)]."
    )
