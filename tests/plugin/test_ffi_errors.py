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
from tests.support.ffi_call import BACKWARD, FORWARD, assert_good_call_works, call

KNOWN = "the attributes are version, scale, is_causal, q_offset."


@dataclasses.dataclass(frozen=True)
class Case:
    """What differs from a good call (None = left out), and the sentence expected."""

    id: str
    error: str
    target: str = FORWARD
    shapes: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, Any] = dataclasses.field(default_factory=dict)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)


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
        "attribute version must be 1, the version of this library, but got 2: the "
        "Python package and its library are of different releases.",
        attributes={"version": np.int64(2), "extra": "from the future"},
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
        "batch dimension 0 of value must be 2 as in the result out or 1 (shared), but "
        "got out of shape [2, 5, 6, 4] and value of shape [3, 7, 3, 4].",
        shapes={"value": (3, 7, 3, 4)},
    ),
    Case(
        "batch-of-result",
        "batch dimension 0 of logsumexp must be 2 as in the result out, but got out of "
        "shape [2, 5, 6, 4] and logsumexp of shape [1, 6, 5].",
        shapes={"logsumexp": (1, 6, 5)},
    ),
    Case(
        "batch-of-gradient",
        "batch dimension 0 of dkey must be 2 as in the result dquery, but got dquery "
        "of shape [2, 5, 6, 8] and dkey of shape [1, 7, 3, 8].",
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
]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    platforms.ensure_registered()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_error(case: Case) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(case.target, case.shapes, case.dtypes, case.attributes)
    # On platform flash_metal a prefix names the handler and its stage.
    assert str(caught.value).startswith("INVALID_ARGUMENT: ")
    assert f"{case.target}: {case.error}" in str(caught.value)
    assert_good_call_works()
