"""Bugs planted in copies of our kernels: each must be caught, by what should catch it.

A bug is built into one part of the kernels and run with the cases of that part, or, if
it is a wrong meaning of a feature, with a case that has the feature.

A barrier whose deletion nothing catches is redundant (remove it) or shows a hole in the
checker.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checker.checked import LANE_ORDERS, PASSES, Finding, judge, library_of
from tests.checker.planted import (
    PARTS,
    AnchorMissing,
    Bug,
    barrier_bugs,
    copy_of_kernels,
    part_of,
)
from tests.kernels.test_poison import check_minus_infinity, check_not_silent
from tests.support.cases import Case
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import run

# Small, but with several simdgroups at work, several key blocks, and every tail. A
# kernel of the copies has head_dim >= 32, so 20 leaves columns of a fragment over.
_SMALL = {"batch": (), "num_heads": 2, "num_kv_heads": 1}
TILED = [
    Case("planted-tiled", q_len=37, kv_len=75, head_dim=20, **_SMALL),
    # q_offset 1: the last visible key of a query block is the first of a key block.
    Case("planted-causal", batch=(), q_len=70, kv_len=75, num_heads=4, num_kv_heads=2,
         head_dim=24, is_causal=True, q_offset=1),
    Case("planted-aligned", q_len=64, kv_len=64, head_dim=32, **_SMALL),
    Case("planted-keys-over", q_len=64, kv_len=75, head_dim=32, **_SMALL),
]  # fmt: skip
# dK and dV in parts of several blocks.
GROUPS = [
    Case("planted-groups", q_len=9, kv_len=20, num_heads=128, num_kv_heads=1,
         head_dim=20),
]  # fmt: skip
# 18 rows: the combine kernels have a tail too.
SHORT = [
    Case("planted-short", batch=(2,), q_len=3, kv_len=150, num_heads=3, num_kv_heads=1,
         head_dim=20, is_causal=True, q_offset=147),
]  # fmt: skip


def _case(name: str, **features) -> Case:
    sizes = {"q_len": 70, "kv_len": 45, "num_heads": 4, "num_kv_heads": 2}
    return Case(f"planted-{name}", head_dim=20, **sizes | features)


# The gradient pass is for features only; the parts of a sum need several blocks.
GRADIENTS = [
    _case(
        "bias-of-keys",
        bias="float32",
        bias_ones="nt",
        sinks=True,
        feature_batch={"bias": (1,), "sinks": (1,)},
    ),
    _case("bias-of-rows", bias="float32", bias_ones="ns"),
    _case("bias", bias="float32", kv_len=75, q_len=37),
    _case("slopes", slopes=True, q_offset=3),
]
CASES = {
    "forward": TILED,
    "backward": [*TILED, *GROUPS],
    "device forward": TILED,
    "device backward": [*TILED, *GROUPS],
    "short forward": SHORT,
    "short backward": SHORT,
    "gradient": GRADIENTS,
}
COMMON = "attention_common.h"
SCORES = "attention_scores.h"
SOFTMAX = "attention_softmax.h"
BACKWARD = "attention_backward.h"
FORWARD = "attention_forward.metal"
DKV = "attention_backward_dkv.metal"
DQ_PRODUCT = "attention_backward_dq_product.metal"
SHORT_FORWARD = "attention_short_forward.metal"
SHORT_DQ = "attention_short_dq.metal"
DELTA = "attention_delta.metal"
MASK_BLOCKS = "attention_mask_blocks.metal"
BIAS_GRADIENT = "attention_bias_gradient.metal"
SINKS_GRADIENT = "attention_sinks_gradient.metal"

_XOR = "simd_shuffle_xor(x, ushort({}))"

# What catches it (a pattern for Finding.what), and the bug.
GUARDS: list[tuple[str, Bug]] = [
    # Tails
    ("read out of bounds", Bug(
        "row-guard", COMMON,
        "if (!matrix.has_whole) row = min(row, matrix.num_rows - 1);", "")),
    ("read out of bounds", Bug(
        "row-guard-inverted", COMMON,
        "if (!matrix.has_whole) row = min", "if (matrix.has_whole) row = min",
        part="device forward", is_slow=True)),
    ("read out of bounds|numbers", Bug(
        "column-guard", COMMON,
        "num_cols % 8 == 0 || col < num_cols ? T(row[col])",
        "num_cols % 4 == 0 || col < num_cols ? T(row[col])")),
    ("read out of bounds|numbers", Bug(
        "column-guard-of-short", COMMON,
        "num_cols % 8 == 0 || col < num_cols ? T(row[col])",
        "true ? T(row[col])", part="short forward", is_slow=True)),
    ("uninitialized read|numbers", Bug(
        "last-columns-of-tile-not-written", COMMON,
        "if (col >= tile.matrix.num_cols - tile.first_col) return false;",
        "if (col + 4 >= tile.matrix.num_cols - tile.first_col) return false;")),
    ("read out of bounds|numbers", Bug(
        "columns-dealt-that-are-not-there", COMMON,
        "return num_cols % JFM_DEALT_COLUMNS == 0;", "return num_cols % 4 == 0;")),
    ("numbers", Bug(
        "columns-dealt-to-one-operand", COMMON,
        "dealt_column(d * 8 + fragment_row(lane), num_cols)",
        "d * 8 + fragment_row(lane)")),
    ("write out of bounds", Bug(
        "store-row-guard", COMMON, "if (row < num_rows) {", "{")),
    ("race|write out of bounds", Bug(
        "store-column-guard", COMMON,
        "if (j * 8 + col + e < num_cols) {", "{")),
    ("numbers", Bug(
        "kv-tail-visible", SCORES, "return !aligned_kv || ", "return ")),
    ("numbers", Bug(
        "aligned-kv-inverted", SCORES,
        "return !aligned_kv || ", "return aligned_kv || ", is_slow=True)),
    ("read out of bounds", Bug(
        "statistics-row-guard", BACKWARD,
        "if (aligned_q || row < params.q_len) {", "{")),
    ("out of bounds", Bug(
        "delta-row-guard", DELTA, "if (row >= params.q_len) return;", "")),
    ("out of bounds|numbers", Bug(
        "split-guard", SHORT_FORWARD, "if (split >= params.num_splits) return;", "")),
    ("out of bounds", Bug(
        "combine-row-guard", SHORT_FORWARD, "if (row >= num_rows) return;", "",
        is_slow=True)),
    ("out of bounds", Bug(
        "dq-combine-row-guard", SHORT_DQ, "if (row >= num_rows) return;", "")),
    ("race|out of bounds", Bug(
        "packed-row-guard", SHORT_FORWARD, "if (!row.valid) return;", "")),
    ("out of bounds", Bug(
        "gradient-row-guard", BIAS_GRADIENT,
        "if (row < params.q_len && col < gradient_cols(params))",
        "if (col < gradient_cols(params))", is_slow=True)),
    ("out of bounds|race", Bug(
        "gradient-column-guard", BIAS_GRADIENT,
        "if (int(thread_index) < BLOCK_KV && col < gradient_cols(params))",
        "if (int(thread_index) < BLOCK_KV)", is_slow=True)),
    ("out of bounds", Bug(
        "gradient-combine-guard", BIAS_GRADIENT,
        "if (element >= num_elements) return;", "")),
    # Meeting points that not all lanes reach
    ("error", Bug(
        "divergent-barrier", FORWARD,
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (lane) threadgroup_barrier(mem_flags::mem_threadgroup);",
    )),
    ("error", Bug(
        "divergent-shuffle", SOFTMAX,
        "const float correction = raise_max(row, high);",
        "const float correction = lane == 3 ? 1.0f : raise_max(row, high);")),
    # Visibility
    ("numbers", Bug(
        "causal-excludes-diagonal", SCORES,
        "min(keys.end, clamp_position(position + 1, params.kv_len))",
        "min(keys.end, clamp_position(position, params.kv_len))")),
    ("numbers", Bug(
        "causal-sees-next", SCORES,
        "min(keys.end, clamp_position(position + 1, params.kv_len))",
        "min(keys.end, clamp_position(position + 2, params.kv_len))")),
    ("numbers", Bug(
        "last-visible-block-skipped", SCORES,
        "Range range = {first.begin, last.end}",
        "Range range = {first.begin, last.end - 1}")),
    ("numbers", Bug(
        "first-visible-block-skipped", DKV,
        "max(first_block, block_queries.begin / BLOCK_Q)",
        "max(first_block, (block_queries.begin + BLOCK_Q - 1) / BLOCK_Q)")),
    ("numbers", Bug(
        "block-with-a-hidden-end-is-interior", SCORES,
        "visible_keys(params, operands, first_query).end >=",
        "visible_keys(params, operands, last_query).end >=")),
    ("numbers", Bug(
        "block-past-the-lengths-is-interior", SCORES,
        "return last_query < operands.query_length &&", "return",
        part="device backward", is_slow=True)),
    ("read out of bounds|uninitialized read|numbers", Bug(
        "score-gradient-of-hidden-blocks", DQ_PRODUCT, "if (is_written[r]) {", "{")),
    ("uninitialized read|read out of bounds|numbers", Bug(
        "score-gradient-past-the-keys", DQ_PRODUCT,
        "k < min(first_key + block, end)", "k < first_key + block")),
    ("numbers", Bug(
        "score-gradient-not-transposed", BACKWARD,
        "p[fragment_col(lane) * 8 + fragment_row(lane)]",
        "p[fragment_row(lane) * 8 + fragment_col(lane)]", part="device backward",
        is_slow=True)),
    ("numbers", Bug(
        "splits-overlap", SHORT_FORWARD,
        "min(split_start + params.keys_per_split, block_keys.end)", "block_keys.end")),
    # Sums and addresses
    ("numbers", Bug(
        "row-max-mask-1", COMMON, _XOR.format(1), _XOR.format(2), 2, 0, is_slow=True)),
    ("numbers", Bug(
        "row-max-mask-8", COMMON, _XOR.format(8), _XOR.format(4), 2, 0)),
    ("numbers", Bug(
        "row-sum-mask-1", COMMON, _XOR.format(1), _XOR.format(2), 2, 1, is_slow=True)),
    ("numbers", Bug(
        "row-sum-mask-8", COMMON, _XOR.format(8), _XOR.format(4), 2, 1)),
    ("numbers", Bug(
        "wrong-kv-head", FORWARD,
        "head / params.num_groups", "head % params.num_kv_heads")),
    ("numbers", Bug(
        "last-split-dropped", SHORT_DQ,
        "s < params.num_splits", "s + 1 < params.num_splits")),
    ("numbers|uninitialized read", Bug(
        "output-row-not-written", COMMON,
        "if (row < num_rows) {", "if (row + 1 < num_rows) {")),
    ("numbers|uninitialized read", Bug(
        "logsumexp-row-not-written", FORWARD,
        "if (row < params.q_len && fragment_col(lane) == 0)",
        "if (row + 1 < params.q_len && fragment_col(lane) == 0)")),
    ("uninitialized read|numbers", Bug(
        "delta-row-not-written", DELTA,
        "if (row >= params.q_len) return;", "if (row + 1 >= params.q_len) return;")),
    ("numbers", Bug(
        "sums-of-keys-overlap", DKV,
        "min(first_item + params.blocks_per_part,",
        "min(first_item + params.blocks_per_part + 1,")),
    ("numbers", Bug(
        "sum-of-keys-lacks-a-part", DKV,
        "p < params.num_parts", "p + 1 < params.num_parts", is_slow=True)),
    ("race|numbers", Bug(
        "pairs-share-weights", DKV,
        "shared_weights + int(simdgroup) / ROLES * kTurns * kWeights", "shared_weights",
        is_slow=True)),
    *(("numbers", Bug(
        f"gradient-rows-mask-{mask}", BIAS_GRADIENT, _XOR.format(mask), _XOR.format(1),
        is_slow=mask > 2))
      for mask in (2, 4, 16)),
    ("numbers", Bug(
        "gradient-columns-of-one-lane", BIAS_GRADIENT, "row_sum(x)", "x",
        is_slow=True)),
    ("numbers", Bug(
        "gradient-pair-missing", BIAS_GRADIENT,
        "long(params.num_summed) * rows_summed",
        "(long(params.num_summed) - 1) * rows_summed")),
    ("numbers", Bug(
        "gradient-parts-overlap", BIAS_GRADIENT,
        "first_block + params.blocks_per_part,",
        "first_block + params.blocks_per_part + 1,")),
    ("numbers", Bug(
        "gradient-part-missing", BIAS_GRADIENT,
        "p < params.num_parts", "p + 1 < params.num_parts", is_slow=True)),
    ("numbers", Bug(
        "gradient-parts-beside-pairs", BIAS_GRADIENT,
        "(part * num_pairs + pair)", "(pair * params.num_parts + part)", is_slow=True)),
    ("numbers", Bug(
        "gradient-summed-head-missing", COMMON,
        "int(index % params.num_heads)", "0", part="gradient", is_slow=True)),
    ("numbers", Bug(
        "slope-gradient-sign", BIAS_GRADIENT, "x *= -alibi", "x *= alibi")),
    ("numbers", Bug(
        "sinks-of-one-batch-index", SINKS_GRADIENT,
        "kept.batch + summed.batch", "kept.batch")),
    ("numbers", Bug(
        "sinks-of-one-simdgroup", SINKS_GRADIENT, "i < NUM_SIMDGROUPS", "i < 1",
        is_slow=True)),
]  # fmt: skip

# Wrong meanings of one feature, with the case that shows them.
_PACKED = {"segments": "packed"}
_PER_HEAD = {"mask": "blocks", "q_len": 4, "kv_len": 150}
FEATURES: list[tuple[dict[str, Any], Bug]] = [
    ({"mask": "random"}, Bug(
        "mask-ignored-in-dkv", DKV,
        "key_is_seen(params, operands, queries[r], query_index, row, bias)",
        "contains(queries[r], query_index)")),
    (_PACKED, Bug(
        "segments-ignored-in-dkv", DKV,
        "key_is_seen(params, operands, queries[r], query_index, row, bias)",
        "contains(queries[r], query_index)")),
    ({"mask": "random", "mask_ones": "n"}, Bug(
        "mask-of-another-column", SCORES,
        "long(key) * params.mask_col", "long(key ^ 1) * params.mask_col",
        is_slow=True)),
    ({"mask": "blocks"}, Bug(
        "mask-block-by-its-first-row", MASK_BLOCKS,
        "first_row + JFM_MASK_BLOCK, num_rows", "first_row + 1, num_rows")),
    ({"mask": "blocks"}, Bug(
        "mask-block-by-all", MASK_BLOCKS, "simd_any(sees)", "simd_all(sees)",
        is_slow=True)),
    ({"mask": "blocks"}, Bug(
        "mask-block-beside", SCORES,
        "i * params.mask_blocks.row + j", "j * params.mask_blocks.row + i",
        is_slow=True)),
    ({"mask": "blocks", "mask_ones": "s"}, Bug(
        "mask-blocks-of-one-column", SCORES,
        "one_col = params.mask_col == 0", "one_col = false", is_slow=True)),
    (_PER_HEAD, Bug(
        "mask-blocks-of-one-head", SCORES,
        "return simd_all(hidden)", "return simd_any(hidden)", part="short forward")),
    ({**_PACKED, "q_len": 130, "kv_len": 130}, Bug(
        "segments-skipped-when-equal", SCORES,
        "simd_max(q_max) < simd_min(kv_min)", "simd_max(q_max) <= simd_min(kv_min)",
        is_slow=True)),
    ({**_PACKED, "q_len": 130, "kv_len": 96}, Bug(
        "segments-of-the-first-32-queries", SCORES,
        "i < end_query; i += 32", "i < min(end_query, first_query + 32); i += 32",
        is_slow=True)),
    (_PACKED, Bug(
        "segments-not-compared", SCORES, "if (has_segment_ids && operands",
        "if (false && operands", is_slow=True)),
    ({"sliding_window": (5, 3)}, Bug(
        "window-left-of-keys", SCORES,
        "clamp_position(position - long(params.window_left), params.kv_len)",
        "clamp_position(position - long(params.window_left) + 1, params.kv_len)",
        is_slow=True)),
    ({"sliding_window": (5, 3)}, Bug(
        "window-right-of-keys", SCORES,
        "position + long(params.window_right) + 1",
        "position + long(params.window_right)", is_slow=True)),
    ({"sliding_window": (5, 3)}, Bug(
        "window-left-of-queries", SCORES,
        "position + long(params.window_left) + 1",
        "position + long(params.window_left)",
        part="backward", is_slow=True)),
    ({"sliding_window": (5, 3)}, Bug(
        "window-right-of-queries", SCORES,
        "position - long(params.window_right), params.q_len",
        "position - long(params.window_right) + 1, params.q_len", part="backward")),
    ({"is_causal": True, "q_offset": 4, "kv_len": 90}, Bug(
        "causal-of-queries", SCORES,
        "queries.begin = clamp_position(position, params.q_len)",
        "queries.begin = clamp_position(position + 1, params.q_len)", part="backward",
        is_slow=True)),
    ({"traced_offset": True, "q_offset": 2, "is_causal": True}, Bug(
        "offset-ignored", SCORES, "operands.q_offset = pointers.q_offsets",
        "operands.query_length += 0 * pointers.q_offsets", is_slow=True)),
    ({"query_lengths": "half"}, Bug(
        "query-lengths-ignored-in-skip", SCORES,
        "num_queries, operands.query_length) - 1;\n  const Range",
        "num_queries, params.q_len) - 1;\n  const Range")),
    ({"kv_lengths": "half", "is_causal": True}, Bug(
        "kv-lengths-ignored-in-skip", SCORES,
        "num_keys, operands.kv_length) - 1;\n  const Range",
        "num_keys, params.kv_len) - 1;\n  const Range", part="backward",
        is_slow=True)),
    ({"kv_lengths": "half"}, Bug(
        "kv-lengths-ignored", SCORES,
        "query < operands.query_length ? operands.kv_length : 0",
        "query < operands.query_length ? params.kv_len : 0", is_slow=True)),
    ({"query_lengths": "half"}, Bug(
        "query-lengths-ignored-in-dkv", SCORES,
        "key < operands.kv_length ? operands.query_length : 0",
        "key < operands.kv_length ? params.q_len : 0", part="backward", is_slow=True)),
    ({"bias": "float32", "logits_soft_cap": 2.0}, Bug(
        "bias-after-softcap", SCORES,
        "x = params.soft_cap * t;",
        "x = params.soft_cap * precise::tanh((x - bias) / params.soft_cap) + bias;")),
    ({"bias": "float16", "bias_values": "hidden", "logits_soft_cap": 2.0}, Bug(
        "bias-of-minus-infinity", SCORES,
        "return !is_minus_infinity(bias);", "return true;",
        is_slow=True)),
    ({"bias": "bfloat16"}, Bug(
        "bias-of-another-dtype", SCORES, "device const bfloat*", "device const half*",
        is_slow=True)),
    ({"bias": "float16"}, Bug(
        "bias-offset-in-bytes", SCORES,
        "bias_dtype == JFM_DTYPE_FLOAT32 ? 4 : 2", "4", is_slow=True)),
    ({"bias": "float32", "bias_values": "huge-rows"}, Bug(
        "remainder-of-a-coarse-logsumexp-ignored", BACKWARD,
        "row.shift -\n                  row.remainder", "row.shift")),
    ({"bias": "float32", "bias_values": "huge-rows"}, Bug(
        "coarse-logsumexp-not-summed", DELTA,
        "if (is_coarse(row_lse))", "if (false)", is_slow=True)),
    ({"logits_soft_cap": 1.5}, Bug(
        "softcap-slope-missing", BACKWARD,
        "return has_softcap ? ds * weight.slope : ds;", "return ds;")),
    ({"logits_soft_cap": 1.5}, Bug(
        "softcap-slope-missing-in-a-pair", DKV,
        "visible ? weight.p * weight.slope", "visible ? weight.p", is_slow=True)),
    ({"logits_soft_cap": 1.5}, Bug(
        "softcap-not-divided", SCORES, "tanh(x / params.soft_cap)", "tanh(x)",
        is_slow=True)),
    ({"slopes": True, "q_offset": 9}, Bug(
        "distance-without-offset", SCORES,
        "long(query) + long(operands.q_offset) - long(key)",
        "long(query) - long(key)", is_slow=True)),
    ({"slopes": True, "q_len": 3}, Bug(
        "slopes-of-one-head", SHORT_FORWARD,
        "load_score_operands(params, pointers, group.z, row.head)",
        "load_score_operands(params, pointers, group.z, kv_head)", is_slow=True)),
    ({"slopes": True}, Bug(
        "slopes-of-one-head-in-dkv", DKV,
        "load_score_operands(params, pointers, group.z, head)",
        "load_score_operands(params, pointers, group.z, kv_head)", is_slow=True)),
    ({"sinks": True, "q_offset": -9, "is_causal": True}, Bug(
        "sink-of-a-row-without-keys", SOFTMAX,
        "if (row.sum == 0.0f) return result;",
        "if (!has_sinks && row.sum == 0.0f) return result;")),
    ({"sinks": True, "is_causal": True}, Bug(
        "sink-without-correction", SOFTMAX,
        "row.sum * correction + exp_score", "row.sum + exp_score", is_slow=True)),
    ({"sinks": True, "q_len": 3, "kv_len": 150}, Bug(
        "sink-of-another-row", SHORT_FORWARD,
        "partial_row_offset(params, params.sinks, row)", "0", is_slow=True)),
    ({"sinks": True, "q_offset": -9, "is_causal": True}, Bug(
        "sinks-gradient-of-a-row-without-keys", SINKS_GRADIENT,
        "if (is_minus_infinity(row_lse)) continue;", "", is_slow=True)),
    ({"dropout_rate": 0.3}, Bug(
        "dropout-transposed-in-dkv", DKV,
        "dropout_word(operands, query_index, row);",
        "dropout_word(operands, row, query_index);")),
    ({"dropout_rate": 0.3}, Bug(
        "dropout-by-one-word", SOFTMAX, "words[e]", "words[0]", is_slow=True)),
    ({"dropout_rate": 0.3}, Bug(
        "dropout-of-the-sum", SOFTMAX, "row.sum += p;",
        "row.sum += has_dropout ? dropped(params, words[e], p) : p;", is_slow=True)),
    ({"dropout_rate": 0.3}, Bug(
        "dropout-not-in-dvalue", DKV,
        "has_dropout ? dropped(params, word, weight.p) : weight.p", "weight.p",
        is_slow=True)),
    ({"dropout_rate": 0.3}, Bug(
        "dropout-not-in-dp", BACKWARD,
        "(has_dropout ? dropped(params, word, dp) : dp)", "dp", is_slow=True)),
    ({"dropout_rate": 0.3, "batch": (3,)}, Bug(
        "dropout-of-one-batch-index", SCORES, "uint2(uint(b), uint(n))",
        "uint2(0u * uint(b), uint(n))", is_slow=True)),
]  # fmt: skip

# Float64 is no judge of infinities: what catches it is test_poison.py.
SILENT_INFINITY = Bug(
    "silent-infinity", SOFTMAX, "y > -INFINITY ? x : quiet_nan()", "x"
)

# A lane that reads a tile before or while another writes it.
_BARRIER = "race|uninitialized read|numbers"
BUGS = [(_BARRIER, bug) for bug in barrier_bugs()] + GUARDS


# A process per library: a bug may well write where it must not.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.checker.checked"])


def first_findings(
    kernel_dir: Path,
    cases: Sequence[Case],
    part: str | None = None,
    lane_orders: Sequence[tuple[int, int]] = LANE_ORDERS,
) -> list[Finding]:
    """What is wrong in the first case and lane order in which anything is."""
    with ProcessPoolExecutor(1, mp_context=_PROCESSES) as pool:
        arguments = (kernel_dir, cases, part, lane_orders)
        try:
            return pool.submit(_first_findings, *arguments).result()
        except BrokenProcessPool:
            return [Finding("crash", "the process that ran the kernels died")]


def _first_findings(
    kernel_dir: Path,
    cases: Sequence[Case],
    part: str | None,
    lane_orders: Sequence[tuple[int, int]],
) -> list[Finding]:
    library = library_of(kernel_dir, None if part is None else PARTS[part].kernels)
    passes = PASSES if part is None else (part.split()[-1],)
    for case in cases:
        for lane_order in lane_orders:
            if found := judge(library, case, lane_order, passes):
                return found
    return []


def test_there_are_barriers():
    assert any(bug.id.endswith("-deleted") for bug in barrier_bugs())


@pytest.mark.parametrize(
    ("part", "cases"),
    [
        ("forward", [*TILED, *GROUPS, *SHORT, *GRADIENTS]),
        pytest.param("device backward", [*TILED, *GROUPS], marks=pytest.mark.slow),
    ],
)
def test_the_copy_is_clean(part: str, cases: list[Case], tmp_path: Path):
    """So that what is caught below is the bug, and not the copy."""
    assert first_findings(copy_of_kernels(tmp_path, part), cases) == []


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_copy_has_the_features(is_slow: bool, tmp_path: Path):
    cases = [
        _case(bug.id, **features)
        for features, bug in FEATURES
        if bug.is_slow == is_slow
    ]
    kernel_dir = copy_of_kernels(tmp_path)
    assert first_findings(kernel_dir, cases, lane_orders=LANE_ORDERS[:1]) == []


def test_a_missing_anchor_is_an_error(tmp_path: Path):
    kernel_dir = copy_of_kernels(tmp_path)
    with pytest.raises(AnchorMissing, match="expected 1 x 'no such text'"):
        Bug("none", COMMON, "no such text", "").plant(kernel_dir)


def _params(table: list[tuple[Any, Bug]], every: int = 1) -> list[Any]:
    """Of those that are not slow, one in `every` is in each run: each is a build."""
    return [
        pytest.param(
            *row,
            id=row[1].id,
            marks=[pytest.mark.slow] * (row[1].is_slow or i % every != 0),
        )
        for i, row in enumerate(table)
    ]


@pytest.mark.parametrize(("caught_by", "bug"), _params(BUGS, every=3))
def test_bug_is_caught(caught_by: str, bug: Bug, tmp_path: Path):
    _check_is_caught(caught_by, bug, CASES[part_of(bug)], tmp_path)


@pytest.mark.parametrize(("features", "bug"), _params(FEATURES))
def test_wrong_meaning_is_caught(features: dict[str, Any], bug: Bug, tmp_path: Path):
    _check_is_caught(".", bug, [_case(bug.id, **features)], tmp_path)


def test_a_silent_infinity_is_caught(tmp_path: Path):
    kernel_dir = copy_of_kernels(tmp_path)
    SILENT_INFINITY.plant(kernel_dir)
    kernels = (*PARTS["forward"].kernels, *PARTS["backward"].kernels)
    library = library_of(kernel_dir, kernels)
    check_not_silent(library, TILED[0], 1e30, 1e30)
    with pytest.raises(AssertionError, match="out of"):
        check_not_silent(library, TILED[0], 1e30, -1e30)
    with pytest.raises(AssertionError, match="dquery of"):
        check_minus_infinity(library, TILED[0], 3, 0)


def test_scores_summed_in_two_orders_give_finite_gradients(tmp_path: Path):
    """No GPU promises in which order a product of 8x8 matrices sums."""
    kernel_dir = copy_of_kernels(tmp_path)
    other_order = (
        "dealt_column(i, head_dim)",
        "dealt_column(head_dim - 1 - i, head_dim)",
    )
    Bug("another-order", DELTA, *other_order).plant(kernel_dir)
    kernels = (*PARTS["forward"].kernels, *PARTS["backward"].kernels)
    library = library_of(kernel_dir, kernels)
    inputs = make_inputs(TILED[0])
    for size in (1e5, 3e9, 1e20):
        inputs.query[...] *= size
        for name, array in run(library, inputs, **make_arguments(TILED[0])).present():
            assert np.isfinite(array).all(), (name, size)


def _check_is_caught(caught_by: str, bug: Bug, cases: list[Case], folder: Path) -> None:
    part = part_of(bug)
    kernel_dir = copy_of_kernels(folder, part)
    bug.plant(kernel_dir)
    found = first_findings(kernel_dir, cases, part)
    assert found, f"nothing catches {bug.id}: redundant code, or a hole in the checker"
    assert any(re.search(caught_by, finding.what) for finding in found), found
    print(f"{bug.id}: caught by {sorted({finding.what for finding in found})}")
