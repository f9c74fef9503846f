"""Handlers given bad buffers or attributes, through JAX: an error in Python that names
the thing, and a process that lives on. What JAX cannot send is in test_ffi_frames.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import platforms
from tests.support.ffi_call import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    assert_good_call_works,
    call,
)

KNOWN = (
    "the attributes are version, scale, is_causal, q_offset, window_left, "
    "window_right, logits_soft_cap, dropout_rate, operands, backend."
)
DROPOUT = ("dropout_key", "dropout_batch_indices", "dropout_head_indices")


@dataclasses.dataclass(frozen=True)
class Case:
    """What differs from a good call (None = left out), and the sentence expected."""

    id: str
    error: str
    target: str = FORWARD
    shapes: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, Any] = dataclasses.field(default_factory=dict)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ()


CASES = [
    Case(
        "attribute-missing",
        "attribute scale (a scalar of type float32) is missing.",
        attributes={"scale": None},
    ),
    Case(
        "attribute-version-missing",
        "attribute version (a scalar of type int64) is missing.",
        attributes={"version": None},
    ),
    Case(
        "attribute-version-other",
        "attribute version must be 3, the version of this library, but got 4: the "
        "Python package and its library are of different releases.",
        attributes={"version": np.int64(4), "extra": "from the future"},
    ),
    Case(
        "attribute-unknown",
        f"unknown attribute bias_rank (a scalar of type int64); {KNOWN}",
        attributes={"bias_rank": np.int64(4)},
    ),
    Case(
        "attribute-unknown-string",
        f"unknown attribute mode (a string); {KNOWN}",
        attributes={"mode": "fast"},
    ),
    Case(
        "attribute-unknown-dictionary",
        f"unknown attribute options (a dictionary); {KNOWN}",
        attributes={"options": {"a": 1}},
    ),
    Case(
        "attribute-wider",
        "attribute scale must be a scalar of type float32, but got a scalar of type "
        "float64.",
        attributes={"scale": np.float64(0.5)},
    ),
    Case(
        "attribute-narrower",
        "attribute q_offset must be a scalar of type int64, but got a scalar of type "
        "int32.",
        attributes={"q_offset": np.int32(2)},
    ),
    Case(
        "attribute-int-for-bool",
        "attribute is_causal must be a scalar of type bool, but got a scalar of type "
        "int64.",
        attributes={"is_causal": np.int64(1)},
    ),
    Case(
        "attribute-string",
        "attribute scale must be a scalar of type float32, but got a string.",
        attributes={"scale": "0.5"},
    ),
    Case(
        "attribute-array",
        "attribute q_offset must be a scalar of type int64, but got an array of int64.",
        attributes={"q_offset": np.array([1, 2])},
    ),
    Case(
        "attribute-dictionary",
        "attribute q_offset must be a scalar of type int64, but got a dictionary.",
        attributes={"q_offset": {"a": 1}},
    ),
    Case(
        "operand-missing",
        "expected 3 operands (query, key, value), but got 2.",
        shapes={"value": None},
    ),
    Case(
        "result-missing",
        "expected 2 results (out, logsumexp), but got 1.",
        shapes={"logsumexp": None},
    ),
    Case(
        "backward-operand-missing",
        "expected 7 operands (query, key, value, out, logsumexp, dout, dlogsumexp), "
        "but got 6.",
        target=BACKWARD,
        shapes={"dlogsumexp": None},
    ),
    Case(
        "backward-result-missing",
        "expected 3 results (dquery, dkey, dvalue), but got 2.",
        target=BACKWARD,
        shapes={"dvalue": None},
    ),
    Case(
        "dtype-of-query",
        "query must be float32, float16 or bfloat16, but got int32.",
        dtypes={"query": jnp.int32},
    ),
    Case(
        "dtype-of-key",
        "key must be float32 like query, but got bfloat16.",
        dtypes={"key": jnp.bfloat16},
    ),
    Case(
        "dtype-of-out",
        "out must be float32 like query, but got float16.",
        dtypes={"out": jnp.float16},
    ),
    Case(
        "dtype-of-logsumexp",
        "logsumexp must be float32, but got float16.",
        dtypes={"logsumexp": jnp.float16},
    ),
    Case(
        "dtype-of-dout",
        "dout must be float32 like query, but got bool.",
        target=BACKWARD,
        dtypes={"dout": jnp.bool_},
    ),
    Case(
        "rank-of-query-too-low",
        "query must have 3 to 19 dimensions [*batch, q_len, num_heads, head_dim], but "
        "got shape [6, 8].",
        shapes={"query": (6, 8)},
    ),
    Case(
        "rank-of-query-too-high",
        "query must have 3 to 19 dimensions [*batch, q_len, num_heads, head_dim], but "
        "got shape [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 5, 6, 8].",
        shapes={"query": (1,) * 16 + (2, 5, 6, 8)},
    ),
    Case(
        "rank-of-key",
        "key must have 4 dimensions [*batch, kv_len, num_kv_heads, head_dim], with as "
        "many batch dimensions as query [2, 5, 6, 8], but got shape [7, 3, 8].",
        shapes={"key": (7, 3, 8)},
    ),
    Case(
        "rank-of-logsumexp",
        "logsumexp must have 3 dimensions [*batch, num_heads, q_len], with as many "
        "batch dimensions as query [2, 5, 6, 8], but got shape [2, 6, 5, 1].",
        shapes={"logsumexp": (2, 6, 5, 1)},
    ),
    Case(
        "kv_len",
        "value must have the same kv_len as key, but got key of shape [1, 7, 3, 8] and "
        "value of shape [2, 9, 3, 4].",
        shapes={"value": (2, 9, 3, 4)},
    ),
    Case(
        "head_dim",
        "key must have the same head_dim as query, but got query of shape [2, 5, 6, 8] "
        "and key of shape [1, 7, 3, 16].",
        shapes={"key": (1, 7, 3, 16)},
    ),
    Case(
        "num_kv_heads",
        "value must have the same num_kv_heads as key, but got key of shape "
        "[1, 7, 3, 8] and value of shape [2, 7, 6, 4].",
        shapes={"value": (2, 7, 6, 4)},
    ),
    Case(
        "value_head_dim",
        "out must have the same value_head_dim as value, but got value of shape "
        "[2, 7, 3, 4] and out of shape [2, 5, 6, 8].",
        shapes={"out": (2, 5, 6, 8)},
    ),
    Case(
        "num_heads-in-logsumexp",
        "logsumexp must have the same num_heads as query, but got query of shape "
        "[2, 5, 6, 8] and logsumexp of shape [2, 5, 5].",
        shapes={"logsumexp": (2, 5, 5)},
    ),
    Case(
        "q_len-in-dlogsumexp",
        "dlogsumexp must have the same q_len as query, but got query of shape "
        "[2, 5, 6, 8] and dlogsumexp of shape [2, 6, 7].",
        target=BACKWARD,
        shapes={"dlogsumexp": (2, 6, 7)},
    ),
    Case(
        "batch-of-operand",
        "batch dimension 0 of query must be 3 as in value or 1 (shared), but got "
        "value of shape [3, 7, 3, 4] and query of shape [2, 5, 6, 8].",
        shapes={"value": (3, 7, 3, 4)},
    ),
    Case(
        "batch-of-one-operand-empty",
        "batch dimension 0 of query must be 0 as in value or 1 (shared), but got "
        "value of shape [0, 7, 3, 4] and query of shape [2, 5, 6, 8].",
        shapes={"value": (0, 7, 3, 4)},
    ),
    Case(
        "batch-of-result",
        "batch dimension 0 of logsumexp must be 2 as in query, but got query of shape "
        "[2, 5, 6, 8] and logsumexp of shape [1, 6, 5].",
        shapes={"logsumexp": (1, 6, 5)},
    ),
    Case(
        "batch-of-dkey",
        "batch dimension 0 of dkey must be 2 as in query, but got query of shape "
        "[2, 5, 6, 8] and dkey of shape [1, 7, 3, 8].",
        target=BACKWARD,
        shapes={"dkey": (1, 7, 3, 8)},
    ),
    Case(
        "heads-not-a-multiple",
        "num_heads must be a multiple of num_kv_heads, but got num_heads=6 and "
        "num_kv_heads=4.",
        shapes={"key": (1, 7, 4, 8), "value": (2, 7, 4, 4)},
    ),
    Case(
        "no-heads",
        "num_kv_heads must be at least 1, but got 0.",
        shapes={"key": (1, 7, 0, 8), "value": (2, 7, 0, 4)},
    ),
    Case(
        "no-head_dim",
        "head_dim must be at least 1, but got 0.",
        shapes={"query": (2, 5, 6, 0), "key": (1, 7, 3, 0)},
    ),
    Case(
        "attribute-of-gradient-missing",
        "attribute gradient_of (a scalar of type int64) is missing.",
        target=GRADIENT,
        attributes={"gradient_of": None},
        optional=("bias",),
    ),
    Case(
        "attribute-of-gradient-elsewhere",
        f"unknown attribute gradient_of (a scalar of type int64); {KNOWN}",
        attributes={"gradient_of": np.int64(0)},
    ),
    Case(
        "gradient_of-unknown",
        "attribute gradient_of must be from 0 to 2, but got 3.",
        target=GRADIENT,
        attributes={"gradient_of": np.int64(3)},
        optional=("bias",),
    ),
    Case(
        "gradient_of-not-given",
        "gradient_of names sinks, but the call has no operand sinks.",
        target=GRADIENT,
        shapes={"gradient": (1, 6)},
        attributes={"gradient_of": np.int64(1)},
        optional=("bias",),
    ),
    Case(
        "backend-unknown",
        "attribute backend must be from 0 to 1, but got 2.",
        attributes={"backend": np.int64(2)},
    ),
    Case(
        "backend-negative",
        "attribute backend must be from 0 to 1, but got -1.",
        attributes={"backend": np.int64(-1)},
    ),
    Case(
        "backend-missing",
        "attribute backend (a scalar of type int64) is missing.",
        attributes={"backend": None},
    ),
    Case(
        "operands-unknown",
        "attribute operands must be from 0 to 4095, but got 4096.",
        attributes={"operands": np.int64(4096)},
    ),
    Case(
        "operands-not-there",
        "expected 5 operands (query, key, value, mask, sinks), but got 3.",
        attributes={"operands": np.int64(1 << 1 | 1 << 7)},
    ),
    Case(
        "operands-of-backward",
        "expected 9 operands (query, key, value, bias, alibi_slopes, out, logsumexp, "
        "dout, dlogsumexp), but got 7.",
        target=BACKWARD,
        attributes={"operands": np.int64(1 << 0 | 1 << 8)},
    ),
    Case(
        "dtype-of-bias",
        "bias must be float32, float16 or bfloat16, but got int32.",
        dtypes={"bias": jnp.int32},
        optional=("bias",),
    ),
    Case(
        "dtype-of-mask",
        "mask must be bool, but got uint8.",
        dtypes={"mask": jnp.uint8},
        optional=("mask",),
    ),
    Case(
        "dtype-of-sinks",
        "sinks must be float32, but got bfloat16.",
        dtypes={"sinks": jnp.bfloat16},
        optional=("sinks",),
    ),
    Case(
        "dtype-of-q_offset",
        "q_offset must be int32, but got uint32.",
        dtypes={"q_offset": jnp.uint32},
        optional=("q_offset",),
    ),
    Case(
        "dtype-of-dropout_key",
        "dropout_key must be uint32, but got int32.",
        dtypes={"dropout_key": jnp.int32},
        optional=DROPOUT,
    ),
    Case(
        "dtype-of-gradient",
        "gradient must be float16 like bias, but got float32.",
        target=GRADIENT,
        dtypes={"bias": jnp.float16},
        optional=("bias",),
    ),
    Case(
        "rank-of-bias",
        "bias must have 4 dimensions [*batch, num_heads, q_len, kv_len], with as many "
        "batch dimensions as query [2, 5, 6, 8], but got shape [6, 5, 7].",
        shapes={"bias": (6, 5, 7)},
        optional=("bias",),
    ),
    Case(
        "rank-of-q_offset",
        "q_offset must have 1 dimensions [*batch], with as many batch dimensions as "
        "query [2, 5, 6, 8], but got shape [].",
        shapes={"q_offset": ()},
        optional=("q_offset",),
    ),
    Case(
        "heads-of-mask",
        "mask must have the same num_heads as query, or 1, but got query of shape "
        "[2, 5, 6, 8] and mask of shape [1, 3, 1, 7].",
        shapes={"mask": (1, 3, 1, 7)},
        optional=("mask",),
    ),
    Case(
        "kv_len-of-bias",
        "bias must have the same kv_len as key, or 1, but got key of shape "
        "[1, 7, 3, 8] and bias of shape [2, 1, 5, 5].",
        shapes={"bias": (2, 1, 5, 5)},
        optional=("bias",),
    ),
    Case(
        "kv_len-of-segment_ids",
        "kv_segment_ids must have the same kv_len as key, but got key of shape "
        "[1, 7, 3, 8] and kv_segment_ids of shape [2, 1].",
        shapes={"kv_segment_ids": (2, 1)},
        optional=("q_segment_ids", "kv_segment_ids"),
    ),
    Case(
        "words-of-dropout_key",
        "dropout_key must have the shape [*batch, 2], but got shape [1, 4].",
        shapes={"dropout_key": (1, 4)},
        optional=DROPOUT,
    ),
    Case(
        "batch-of-lengths",
        "batch dimension 0 of query must be 3 as in query_seq_lengths or 1 (shared), "
        "but got query_seq_lengths of shape [3] and query of shape [2, 5, 6, 8].",
        shapes={"query_seq_lengths": (3,)},
        optional=("query_seq_lengths",),
    ),
    Case(
        "shape-of-gradient",
        "gradient must have the same q_len as query, or 1, but got query of shape "
        "[2, 5, 6, 8] and gradient of shape [2, 1, 7, 7].",
        target=GRADIENT,
        shapes={"gradient": (2, 1, 7, 7)},
        optional=("bias",),
    ),
    Case(
        "segment_ids-of-one-side",
        "q_segment_ids, kv_segment_ids must be given together, but got only "
        "kv_segment_ids.",
        optional=("kv_segment_ids",),
    ),
    Case(
        "dropout-incomplete",
        "dropout_key, dropout_batch_indices, dropout_head_indices must be given "
        "together, but got only dropout_key, dropout_head_indices.",
        optional=("dropout_key", "dropout_head_indices"),
    ),
    Case(
        "dropout-without-rate",
        "dropout_rate must be above 0 and below 1 with dropout operands, but got 0.",
        attributes={"dropout_rate": np.float64(0)},
        optional=DROPOUT,
    ),
    Case(
        "dropout-of-all",
        "dropout_rate must be above 0 and below 1 with dropout operands, but got 1.",
        attributes={"dropout_rate": np.float64(1)},
        optional=DROPOUT,
    ),
    Case(
        "dropout-rate-not-a-number",
        "dropout_rate must be 0 without dropout operands, but got nan.",
        attributes={"dropout_rate": np.float64(np.nan)},
    ),
    Case(
        "dropout-rate-alone",
        "dropout_rate must be 0 without dropout operands, but got 0.25.",
        attributes={"dropout_rate": np.float64(0.25)},
    ),
    Case(
        "window-below-no-limit",
        "window_left must be at least -1 (no limit), but got -2.",
        attributes={"window_left": np.int64(-2)},
    ),
    Case(
        "soft-cap-negative",
        "logits_soft_cap must be finite and at least 0 (none), but got -1.",
        attributes={"logits_soft_cap": np.float32(-1)},
    ),
    Case(
        "soft-cap-infinite",
        "logits_soft_cap must be finite and at least 0 (none), but got inf.",
        attributes={"logits_soft_cap": np.float32(np.inf)},
    ),
]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    platforms.ensure_registered()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_error(case: Case) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(case.target, case.shapes, case.dtypes, case.attributes, case.optional)
    # On platform flash_metal a prefix names the handler and its stage.
    assert str(caught.value).startswith("INVALID_ARGUMENT: ")
    assert f"{case.target}: {case.error}" in str(caught.value)
    assert_good_call_works()
