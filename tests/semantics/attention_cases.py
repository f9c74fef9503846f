"""Named calls that touch every rule of the contract, with random inputs for them.

Sizes are pairwise distinct, so that a swap of two axes or head counts is seen.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

B, T, S, N, K, H, V = 2, 37, 53, 6, 3, 64, 40
KEY = np.array([17, 2**31 + 5], np.uint32)  # the data of a dropout key

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def qkv(rng, dtype, *, num_kv_heads=K, value_head_dim=V, q_len=T, kv_len=S):
    return (
        normal(rng, B, q_len, N, H, dtype=dtype),
        normal(rng, B, kv_len, num_kv_heads, H, dtype=dtype),
        normal(rng, B, kv_len, num_kv_heads, value_head_dim, dtype=dtype),
    )


def random_mask(rng, *shape):
    """Every row sees at least its first key."""
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    return mask


def packed_ids(rng, length):
    return np.sort(rng.integers(0, 4, (B, length)), axis=-1).astype(np.int32)


def some_hidden_bias(rng, *shape):
    bias = normal(rng, *shape)
    bias[..., 1::5] = -np.inf
    return bias


# Options of flash_attention, from a random generator.
ALL = {
    "plain": lambda rng: {},
    "scale": lambda rng: {"scale": 0.31},
    "causal": lambda rng: {"is_causal": True},
    "causal-bottom-right": lambda rng: {"is_causal": True, "q_offset": S - T},
    "causal-negative-offset": lambda rng: {"is_causal": True, "q_offset": -9},
    "mask": lambda rng: {"mask": random_mask(rng, B, N, T, S)},
    "mask-2d": lambda rng: {"mask": random_mask(rng, T, S)},
    "mask-keys": lambda rng: {"mask": random_mask(rng, B, 1, 1, S)},
    "mask-rows-causal": lambda rng: {
        "mask": rng.random((B, 1, T, 1)) < 0.7,
        "is_causal": True,
    },
    "bias": lambda rng: {"bias": normal(rng, B, N, T, S)},
    "bias-over-batch": lambda rng: {"bias": normal(rng, 1, N, T, S)},
    "bias-over-heads": lambda rng: {"bias": normal(rng, B, 1, T, S)},
    "bias-2d": lambda rng: {"bias": normal(rng, T, S)},
    "bias-keys-hidden": lambda rng: {"bias": some_hidden_bias(rng, B, 1, 1, S)},
    "window": lambda rng: {"sliding_window": (5, 3)},
    "window-int-causal": lambda rng: {"sliding_window": 4, "is_causal": True},
    "window-left": lambda rng: {"sliding_window": (7, None)},
    "window-right-offset": lambda rng: {"sliding_window": (None, 2), "q_offset": 4},
    "softcap": lambda rng: {"logits_soft_cap": 1.5},
    "softcap-bias-mask": lambda rng: {
        "logits_soft_cap": 2.0,
        "bias": some_hidden_bias(rng, 1, N, 1, S),
        "mask": random_mask(rng, 1, 1, T, S),
    },
    "segments": lambda rng: {"segment_ids": (packed_ids(rng, T), packed_ids(rng, S))},
    "lengths": lambda rng: {
        "query_seq_lengths": np.array([21, 37], np.int32),
        "key_value_seq_lengths": np.array([53, 17], np.int32),
    },
    "sinks": lambda rng: {"sinks": normal(rng, N)},
    "sinks-and-rows-without-keys": lambda rng: {
        "sinks": normal(rng, N),
        "mask": rng.random((B, 1, T, 1)) < 0.7,
    },
    "traced-offset": lambda rng: {
        "is_causal": True,
        "q_offset": jnp.int32(S - T),
        "sliding_window": (20, None),
    },
    "dropout": lambda rng: {"dropout_rate": 0.3, "dropout_key": KEY},
    "dropout-causal-bias": lambda rng: {
        "dropout_rate": 0.6,
        "dropout_key": KEY,
        "is_causal": True,
        "q_offset": 3,
        "bias": normal(rng, 1, N, T, 1),
    },
    "alibi-causal": lambda rng: {
        "alibi_slopes": (2.0 ** -np.arange(1, N + 1)).astype(np.float32),
        "is_causal": True,
        "q_offset": S - T,
    },
    "everything": lambda rng: {
        "scale": 0.2,
        "bias": some_hidden_bias(rng, 1, N, T, S),
        "mask": random_mask(rng, B, 1, T, S),
        "is_causal": True,
        "q_offset": 11,
        "sliding_window": (30, 3),
        "logits_soft_cap": 3.0,
        "segment_ids": (np.zeros((B, T), np.int32), packed_ids(rng, S) // 3),
        "key_value_seq_lengths": np.array([40, 53], np.int32),
        "alibi_slopes": normal(rng, N) * 0.1,
        "sinks": normal(rng, N),
        "dropout_rate": 0.2,
        "dropout_key": KEY,
    },
}
DIFFERENTIABLE = ("bias", "sinks", "alibi_slopes")
