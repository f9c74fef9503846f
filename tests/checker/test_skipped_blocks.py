"""Blocks of queries and keys that nobody of sees anyone of cost nothing, in any pass.

The matrix products of a kernel tell how many blocks it worked on: each takes equally
many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jax_flash_metal.counts import scores_block
from jax_flash_metal.variant_table import variants
from tests.checker.checked import library_of
from tests.support import kernel_check
from tests.support.cases import Case
from tests.support.inputs import make_arguments, make_inputs

LENGTH = 128
_BLOCK = np.arange(LENGTH, dtype=np.int32)[None] // 32
_BIAS = np.zeros((1, 1, LENGTH, LENGTH), np.float32)
_ROWS = {variant.host_name: variant for variant in variants()}
_BACKWARD = {
    "A": ("attention_backward_dq", "attention_backward_dkv"),
    "B": ("attention_backward_dkv", "attention_backward_dq_product"),
}

Visible = Callable[[np.ndarray, np.ndarray], np.ndarray]

# Options, and whether query i sees key j then.
FEATURES: dict[str, tuple[dict[str, Any], Visible]] = {
    "causal": ({"is_causal": True}, lambda i, j: j <= i),
    "causal-offset": ({"is_causal": True, "q_offset": 32}, lambda i, j: j <= i + 32),
    "offsets": (
        {"is_causal": True, "q_offset": np.array([-64], np.int32)},
        lambda i, j: j <= i - 64,
    ),
    "window": ({"sliding_window": (31, 0)}, lambda i, j: (i - 31 <= j) & (j <= i)),
    "window-diagonal": ({"sliding_window": (0, 0)}, lambda i, j: i == j),
    "window-before": (
        {"sliding_window": (None, 0), "q_offset": -96},
        lambda i, j: j <= i - 96,
    ),
    "segments": (
        {"q_segment_ids": _BLOCK, "kv_segment_ids": _BLOCK},
        lambda i, j: i // 32 == j // 32,
    ),
    "kv-lengths": (
        {"key_value_seq_lengths": np.array([64], np.int32)},
        lambda i, j: j < 64,
    ),
    "query-lengths": (
        {"query_seq_lengths": np.array([33], np.int32)},
        lambda i, j: i < 33,
    ),
    "mask": (
        {"mask": (_BLOCK[:, :, None] < _BLOCK[:, None])[None]},
        lambda i, j: i // 32 < j // 32,
    ),
    "mask-of-keys": ({"mask": (_BLOCK == 3)[:, None, None]}, lambda i, j: j >= 96),
    "mask-and-causal": (
        {"mask": (_BLOCK == 0)[:, None, None], "is_causal": True},
        lambda i, j: (j < 32) & (j <= i),
    ),
}


# The same for 8 queries, which are one block.
SHORT: dict[str, tuple[dict[str, Any], Visible]] = {
    "causal": ({"is_causal": True, "q_offset": 32}, lambda i, j: j <= i + 32),
    "window": (
        {"sliding_window": (20, 0), "q_offset": 120},
        lambda i, j: (i + 100 <= j) & (j <= i + 120),
    ),
    "segments": (
        {"q_segment_ids": _BLOCK[:, :8] + 2, "kv_segment_ids": _BLOCK},
        lambda i, j: j // 32 == 2,
    ),
    "kv-lengths": (
        {"key_value_seq_lengths": np.array([64], np.int32)},
        lambda i, j: j < 64,
    ),
    "mask": ({"mask": (_BLOCK > 0)[:, None, None]}, lambda i, j: j >= 32),
}


def products(q_len: int, family: int, form: str, **features) -> dict[str, int]:
    """Products of each kernel of a call with these features and a bias."""
    case = Case("skipped", batch=(1,), q_len=q_len, kv_len=LENGTH, num_heads=1,
                num_kv_heads=1, head_dim=8)  # fmt: skip
    library = library_of()
    library.clear()
    arguments = make_arguments(case) | {"bias": _BIAS[:, :, :q_len]} | features
    with library.forced(family=family, form=form):
        kernel_check.run(library, make_inputs(case), **arguments)
    return library.products()


@functools.cache
def products_of_all(q_len: int, family: int, form: str) -> dict[str, int]:
    """The same where everybody sees everybody."""
    return products(q_len, family, form)


def visible_share(q_len: int, sees: Visible, block: tuple[int, int]) -> float:
    """Of the blocks, that of those in which somebody sees anyone."""
    visible = np.broadcast_to(
        sees(np.arange(q_len)[:, None], np.arange(LENGTH)), (q_len, LENGTH)
    )
    cells = [
        visible[i : i + block[0], j : j + block[1]].any()
        for i in range(0, q_len, block[0])
        for j in range(0, LENGTH, block[1])
    ]
    return sum(cells) / len(cells)


@pytest.mark.parametrize(("family", "form"), [(0, "A"), (9, "B")])
@pytest.mark.parametrize("name", FEATURES)
def test_only_visible_blocks_are_worked_on(name: str, family: int, form: str):
    kernels = ("attention_forward", *_BACKWARD[form], "attention_bias_gradient")
    _check_shares(LENGTH, family, form, *FEATURES[name], kernels)


@pytest.mark.parametrize("name", SHORT)
def test_only_visible_blocks_of_short_queries_are_worked_on(name: str):
    kernels = ("attention_short_forward", "attention_short_dq")
    kernels += ("attention_backward_dkv", "attention_bias_gradient")
    _check_shares(8, 0, "-", *SHORT[name], kernels)


def _check_shares(
    q_len: int,
    family: int,
    form: str,
    features: dict[str, Any],
    sees: Visible,
    kernels: tuple[str, ...],
) -> None:
    found = products(q_len, family, form, **features)
    of_all = products_of_all(q_len, family, form)
    rows = {_ROWS[name].kernel: _ROWS[name] for name in found}
    for kernel in kernels:
        name = rows[kernel].host_name
        queries, keys = scores_block(rows[kernel])
        if kernel == "attention_backward_dq_product":
            # In the blocks of keys that dK and dV left out or not; 8 keys at a time at
            # the end of what a simdgroup's rows see.
            least = visible_share(q_len, sees, (queries, keys))
            keys = scores_block(rows["attention_backward_dkv"])[1]
            most = visible_share(q_len, sees, (queries, keys))
            assert least <= found[name] / of_all[name] <= most, name
        else:
            share = visible_share(q_len, sees, (queries, keys))
            assert found[name] == of_all[name] * share, name
