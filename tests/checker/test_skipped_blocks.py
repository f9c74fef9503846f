"""Blocks of queries and keys that nobody of sees anyone of cost nothing, in any pass.

The matrix products of a kernel tell how many blocks it worked on: all of its blocks are
32 x 32 here, and each takes equally many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.checker.checked import library_of
from tests.support import kernel_check
from tests.support.cases import Case
from tests.support.inputs import make_arguments, make_inputs

LENGTH = 128
_BLOCK = np.arange(LENGTH, dtype=np.int32)[None] // 32
_BIAS = np.zeros((1, 1, LENGTH, LENGTH), np.float32)
_KERNELS = (
    "attention_forward",
    "attention_backward_dq",
    "attention_backward_dkv",
    "attention_bias_gradient",
)

# Options, and how many of the 4 x 4 blocks are then visible.
FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    "causal": ({"is_causal": True}, 10),
    "causal-offset": ({"is_causal": True, "q_offset": 32}, 13),
    "offsets": (
        {"is_causal": True, "q_offset": np.array([-64], np.int32)},
        3,
    ),
    "window": ({"sliding_window": (31, 0)}, 7),
    "window-diagonal": ({"sliding_window": (0, 0)}, 4),
    "window-before": ({"sliding_window": (None, 0), "q_offset": -96}, 1),
    "segments": ({"q_segment_ids": _BLOCK, "kv_segment_ids": _BLOCK}, 4),
    "kv-lengths": ({"key_value_seq_lengths": np.array([64], np.int32)}, 8),
    "query-lengths": ({"query_seq_lengths": np.array([33], np.int32)}, 8),
    "mask": ({"mask": (_BLOCK[:, :, None] < _BLOCK[:, None])[None]}, 6),
    "mask-of-keys": ({"mask": (_BLOCK == 3)[:, None, None]}, 4),
    "mask-and-causal": ({"mask": (_BLOCK == 0)[:, None, None], "is_causal": True}, 4),
}


# The same for 8 queries, which are one block.
SHORT: dict[str, tuple[dict[str, Any], int]] = {
    "causal": ({"is_causal": True, "q_offset": 32}, 2),
    "window": ({"sliding_window": (20, 0), "q_offset": 120}, 1),
    "segments": ({"q_segment_ids": _BLOCK[:, :8] + 2, "kv_segment_ids": _BLOCK}, 1),
    "kv-lengths": ({"key_value_seq_lengths": np.array([64], np.int32)}, 2),
    "mask": ({"mask": (_BLOCK > 0)[:, None, None]}, 3),
}


def products(q_len: int, **features) -> dict[str, int]:
    """Products of each kernel of a call with these features and a bias."""
    case = Case("skipped", batch=(1,), q_len=q_len, kv_len=LENGTH, num_heads=1,
                num_kv_heads=1, head_dim=8)  # fmt: skip
    library = library_of()
    library.clear()
    arguments = make_arguments(case) | {"bias": _BIAS[:, :, :q_len]} | features
    kernel_check.run(library, make_inputs(case), **arguments)
    return library.products()


@pytest.mark.parametrize("name", FEATURES)
def test_only_visible_blocks_are_worked_on(name: str):
    features, num_visible = FEATURES[name]
    _check_share(LENGTH, features, num_visible / 16, _KERNELS)


@pytest.mark.parametrize("name", SHORT)
def test_only_visible_blocks_of_short_queries_are_worked_on(name: str):
    features, num_visible = SHORT[name]
    kernels = ("attention_short_forward_f", "attention_short_dq_f", *_KERNELS[2:])
    _check_share(8, features, num_visible / 4, kernels)


def _check_share(q_len: int, features: dict[str, Any], share: float, names) -> None:
    found, of_all = products(q_len, **features), products(q_len)
    kernels = [kernel for kernel in found if kernel.startswith(names)]
    assert len(kernels) == len(names)
    assert {k: found[k] for k in kernels} == {k: of_all[k] * share for k in kernels}
