"""The arrays of a case: operands rounded to its dtype, and random cotangents."""

import zlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.support import tolerances


class Inputs(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    dlogsumexp: np.ndarray  # float32

    @property
    def operands(self):
        return self.query, self.key, self.value


def make_inputs(case, seed=None) -> Inputs:
    """N(0, 1) values, changed by the case's kind of inputs."""
    rng = np.random.default_rng(case.seed if seed is None else seed)
    arrays = {
        name: rng.standard_normal(case.shape(name))
        for name in ("query", "key", "value", "dout")
    }
    KINDS[case.inputs](arrays)
    dlogsumexp = rng.standard_normal((*case.batch, case.num_heads, case.q_len))
    return Inputs(
        **{name: x.astype(case.np_dtype) for name, x in arrays.items()},
        dlogsumexp=dlogsumexp.astype(np.float32),
    )


def make_features(case, seed=None) -> dict[str, np.ndarray]:
    """The arrays of the case's features, by their names in the C ABI.

    Each has a generator of its own: one feature more changes no other.
    """
    seed = case.seed if seed is None else seed
    arrays = {}
    for name in case.features:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        arrays[name] = _FEATURES[name](case, rng, case.shape(name))
    return arrays


def make_arguments(case, seed=None) -> dict[str, Any]:
    """All keyword arguments of the case: options and arrays."""
    return case.options | make_features(case, seed)


def _equal_keys(arrays):
    arrays["key"][...] = arrays["key"][..., :1, :, :]


def _zero_query(arrays):
    arrays["query"][...] = 0


def _identity(arrays):
    """Key j is the unit vector j, value j is j in every column: easy to read."""
    kv_len, _, head_dim = arrays["key"].shape[-3:]
    unit = np.eye(head_dim)[np.arange(kv_len) % head_dim]
    arrays["key"][...] = unit[:, None, :]
    arrays["value"][...] = (np.arange(kv_len) % 16)[:, None, None]


def _huge_scores(arrays):
    """Scores up to the end of float16's range with the default scale."""
    for name in ("query", "key"):
        arrays[name] = np.clip(arrays[name], -3, 3) * 80


def _one_large_key(arrays):
    """One key, in the last block, whose scores dwarf the others."""
    arrays["key"][..., -2, :, :] *= 30


KINDS = {
    "normal": lambda arrays: None,
    "equal-keys": _equal_keys,
    "zero-query": _zero_query,
    "identity": _identity,
    "one-large-key": _one_large_key,
    "huge-scores": _huge_scores,
}


def _normal_bias(rng, shape, dtype):
    return rng.standard_normal(shape)


def _some_hidden(rng, shape, dtype):
    """-inf here and there, over some keys, and in some heads over the last row."""
    bias = rng.standard_normal(shape)
    bias[(rng.random(shape) < 0.2) | _hidden_keys(rng, shape)] = -np.inf
    if shape[-2] > 1:
        hidden = rng.random((*shape[:-2], 1, 1)) < 0.5
        bias[..., -1:, :] = np.where(hidden, -np.inf, bias[..., -1:, :])
    return bias


def _some_lowest(rng, shape, dtype):
    """The lowest finite number: as good as hidden beside others, and yet a number."""
    bias = rng.standard_normal(shape)
    bias[rng.random(shape) < 0.3] = np.finfo(np.float16).min
    return bias


def _extremes(rng, shape, dtype):
    """The ends of the bias' own dtype, over whole rows too."""
    bias = rng.standard_normal(shape)
    limit = float(ml_dtypes.finfo(dtype).max)
    bias[rng.random(shape) < 0.2] = -limit
    bias[rng.random((*shape[:-1], 1)).repeat(shape[-1], axis=-1) < 0.2] = -limit
    bias[rng.random(shape) < 0.02] = limit
    return bias


def _huge_rows(rng, shape, dtype):
    """Rows all of whose elements are an end of the bias' own dtype; others ordinary."""
    limit = float(ml_dtypes.finfo(dtype).max)
    row = rng.random((*shape[:-1], 1))
    ends = np.where(row < 0.3, -limit, limit)
    return np.where((row < 0.3) | (row > 0.8), ends, rng.standard_normal(shape))


BIASES = {
    "huge-rows": _huge_rows,
    "normal": _normal_bias,
    "all-lowest": lambda rng, shape, dtype: np.full(shape, np.finfo(np.float16).min),
    "hidden": _some_hidden,
    "lowest": _some_lowest,
    "extremes": _extremes,
}


def _hidden_keys(rng, shape):
    """Some keys, but never all, for every head and query of a batch element."""
    *batch, _, _, columns = shape
    hidden = rng.random((*batch, 1, 1, columns)) < 0.1
    hidden[..., :1] = False
    return hidden


def _random_mask(rng, shape):
    return (rng.random(shape) < 0.8) & ~_hidden_keys(rng, shape)


def _block_mask(rng, shape):
    """Whole blocks, whole rows and single elements are hidden."""
    *outer, rows, columns = shape
    blocks = rng.random((*outer, -(-rows // 32), -(-columns // 32))) < 0.6
    blocks = np.repeat(np.repeat(blocks, 32, axis=-2), 32, axis=-1)
    mask = blocks[..., :rows, :columns] & (rng.random(shape) < 0.9)
    return mask & (rng.random((*outer, rows, 1)) < 0.9)


def _one_key_mask(rng, shape):
    """Each row sees one key."""
    mask = np.zeros(shape, bool)
    index = rng.integers(0, max(1, shape[-1]), (*shape[:-1], 1))
    if mask.size:
        np.put_along_axis(mask, index, True, axis=-1)
    return mask


MASKS = {
    "random": _random_mask,
    "blocks": _block_mask,
    "one-key": _one_key_mask,
    "none": lambda rng, shape: np.zeros(shape, bool),
    "all": lambda rng, shape: np.ones(shape, bool),
}

# Segment ids of a length, of queries and of keys alike, before the padding.
SEGMENTS = {
    # One sequence behind the other; each side has its own borders.
    "packed": lambda rng, shape: np.sort(rng.integers(0, 3, shape), axis=-1),
    # In no order, negative and large ones too.
    "mixed": lambda rng, shape: rng.choice([-(2**31), -1, 2**31 - 1], shape),
    "one": lambda rng, shape: np.full(shape, 7),
}


def _mixed_lengths(rng, shape, length):
    """Most of it, all of it and more; the last of several is 0."""
    lengths = rng.integers(int(0.6 * length), length + 6, shape)
    if lengths.size > 1:
        lengths[(-1,) * lengths.ndim] = 0
    return lengths


LENGTHS = {
    "mixed": _mixed_lengths,
    "half": lambda rng, shape, length: np.full(shape, (length + 1) // 2),
    "zero": lambda rng, shape, length: np.zeros(shape),
    "whole": lambda rng, shape, length: np.full(shape, length),
}


def _bias(case, rng, shape):
    dtype = tolerances.DTYPES[case.bias]
    return BIASES[case.bias_values](rng, shape, dtype).astype(dtype)


def _mask(case, rng, shape):
    return np.asarray(MASKS[case.mask](rng, shape), bool)


def _offsets(case, rng, shape):
    count = int(np.prod(shape))
    return (case.q_offset + np.arange(count) % 3).reshape(shape).astype(np.int32)


def _ids(case, rng, shape, padding):
    """With padding that nobody sees, and that sees nobody, at the end."""
    ids = SEGMENTS[case.segments](rng, shape).astype(np.int32)
    ids[..., shape[-1] - shape[-1] // 10 :] = padding
    return ids


def _q_segment_ids(case, rng, shape):
    return _ids(case, rng, shape, 100)


def _kv_segment_ids(case, rng, shape):
    return _ids(case, rng, shape, 101)


def _query_lengths(case, rng, shape):
    lengths = LENGTHS[case.query_lengths](rng, shape, case.q_len)
    return np.asarray(lengths, np.int32)


def _kv_lengths(case, rng, shape):
    lengths = LENGTHS[case.kv_lengths](rng, shape, case.kv_len)
    return np.asarray(lengths, np.int32)


def _sinks(case, rng, shape):
    return rng.standard_normal(shape).astype(np.float32)


def _slopes(case, rng, shape):
    """Of either sign, small enough to keep many keys in play."""
    return (0.1 * rng.standard_normal(shape)).astype(np.float32)


def _dropout_key(case, rng, shape):
    return rng.integers(0, 2**32, shape).astype(np.uint32)


def _indices(case, rng, shape):
    return rng.integers(0, 2**31, shape).astype(np.int32)


_FEATURES = {
    "bias": _bias,
    "mask": _mask,
    "q_offset": _offsets,
    "q_segment_ids": _q_segment_ids,
    "kv_segment_ids": _kv_segment_ids,
    "query_seq_lengths": _query_lengths,
    "key_value_seq_lengths": _kv_lengths,
    "sinks": _sinks,
    "alibi_slopes": _slopes,
    "dropout_key": _dropout_key,
    "dropout_batch_indices": _indices,
    "dropout_head_indices": _indices,
}
