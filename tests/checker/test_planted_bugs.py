"""Bugs planted in copies of our kernels: each must be caught, by what should catch it.

A barrier whose deletion nothing catches is redundant (remove it) or shows a hole in the
checker.
"""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from tests.checker.checked import LANE_ORDERS, Finding, judge, library_of
from tests.checker.planted import (
    AnchorMissing,
    Bug,
    barrier_bugs,
    copy_of_kernels,
)
from tests.support.cases import Case

# Small, but with several simdgroups at work, several key blocks, and every tail. A
# kernel of the copies has head_dim >= 32, so 20 leaves columns of a fragment over.
_SMALL = {"batch": (), "num_heads": 2, "num_kv_heads": 1}
CASES = [
    Case("planted-tiled", q_len=37, kv_len=75, head_dim=20, **_SMALL),
    # q_offset 1: the last visible key of a query block is the first of a key block.
    Case("planted-causal", batch=(), q_len=40, kv_len=75, num_heads=4, num_kv_heads=2,
         head_dim=24, is_causal=True, q_offset=1),
    # 18 rows: the combine kernels have a tail too.
    Case("planted-short", batch=(2,), q_len=3, kv_len=150, num_heads=3, num_kv_heads=1,
         head_dim=20, is_causal=True, q_offset=147),
    Case("planted-aligned", q_len=32, kv_len=64, head_dim=32, **_SMALL),
]  # fmt: skip

COMMON = "attention_common.h"
BACKWARD = "attention_backward.h"
SHORT = "attention_short.h"
FORWARD = "attention_forward.metal"
DKV = "attention_backward_dkv.metal"
SHORT_FORWARD = "attention_short_forward.metal"
SHORT_DQ = "attention_short_dq.metal"
DELTA = "attention_delta.metal"

_XOR = "simd_shuffle_xor(x, ushort({}))"

# What catches it (a pattern for Finding.what), and the bug.
GUARDS: list[tuple[str, Bug]] = [
    # Tails
    ("read out of bounds", Bug(
        "tile-row-guard", COMMON,
        "if (first_row + row < num_rows && col < num_cols)", "if (col < num_cols)")),
    ("read out of bounds", Bug(
        "tile-column-guard", COMMON,
        "if (first_row + row < num_rows && col < num_cols)",
        "if (first_row + row < num_rows)")),
    ("uninitialized read|numbers", Bug(
        "tile-padding-not-written", COMMON,
        "if (col >= padded_cols) continue;", "if (col >= num_cols) continue;")),
    ("read out of bounds", Bug(
        "fragment-row-guard", COMMON, "if (row < num_rows) {", "{")),
    ("read out of bounds", Bug(
        "fragment-column-guard", COMMON,
        "if (col + 1 < num_cols) fragment", "fragment")),
    ("read out of bounds", Bug(
        "transposed-fragment-guard", COMMON, "if (row < num_cols) {", "{")),
    ("write out of bounds", Bug(
        "store-row-guard", COMMON, "if (row >= num_rows) return;", "")),
    ("race|write out of bounds", Bug(
        "store-column-guard", COMMON, "if (col + 1 < num_cols) p[col", "p[col")),
    ("numbers", Bug(
        "kv-tail-visible", COMMON, "aligned_kv || key_index < params.kv_len", "true")),
    ("numbers", Bug(
        "aligned-kv-inverted", COMMON, "aligned_kv || key", "!aligned_kv || key")),
    ("read out of bounds", Bug(
        "statistics-row-guard", BACKWARD,
        "if (aligned_q || row < params.q_len) {", "{")),
    ("out of bounds", Bug(
        "delta-row-guard", DELTA, "if (row >= params.q_len) return;", "")),
    ("out of bounds|numbers", Bug(
        "split-guard", SHORT_FORWARD, "if (split >= params.num_splits) return;", "")),
    ("out of bounds", Bug(
        "combine-row-guard", SHORT_FORWARD, "if (row >= num_rows) return;", "")),
    ("out of bounds", Bug(
        "dq-combine-row-guard", SHORT_DQ, "if (row >= num_rows) return;", "")),
    ("race|out of bounds", Bug(
        "packed-row-guard", SHORT_FORWARD, "if (!row.valid) return;", "")),
    # Meeting points that not all lanes reach
    ("error", Bug(
        "divergent-barrier", FORWARD,
        "threadgroup_barrier(mem_flags::mem_threadgroup);  // the K tile",
        "if (lane) threadgroup_barrier(mem_flags::mem_threadgroup);  // the K tile",
    )),
    ("error", Bug(
        "divergent-shuffle", FORWARD,
        "max(m, row_max(block_max))", "lane == 3 ? m : max(m, row_max(block_max))")),
    # Visibility
    ("numbers", Bug(
        "causal-excludes-diagonal", COMMON,
        "key_index <= query_index + params.q_offset",
        "key_index < query_index + params.q_offset")),
    ("numbers", Bug(
        "causal-sees-next", COMMON,
        "key_index <= query_index + params.q_offset",
        "key_index <= query_index + params.q_offset + 1")),
    ("numbers", Bug(
        "last-visible-block-skipped", COMMON,
        "last_query + params.q_offset + 1", "last_query + params.q_offset")),
    ("numbers", Bug(
        "first-visible-block-skipped", DKV,
        "first_key - params.q_offset)", "first_key - params.q_offset + 1)")),
    ("numbers", Bug(
        "splits-overlap", SHORT_FORWARD,
        "split_start + params.keys_per_split, end", "params.kv_len, end")),
    # Sums and addresses
    ("numbers", Bug(
        "row-max-mask-1", COMMON, _XOR.format(1), _XOR.format(2), 2, 0)),
    ("numbers", Bug(
        "row-max-mask-8", COMMON, _XOR.format(8), _XOR.format(4), 2, 0)),
    ("numbers", Bug(
        "row-sum-mask-1", COMMON, _XOR.format(1), _XOR.format(2), 2, 1)),
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
        "if (row >= num_rows) return;", "if (row + 1 >= num_rows) return;")),
    ("numbers|uninitialized read", Bug(
        "logsumexp-row-not-written", FORWARD,
        "if (row < params.q_len && col == 0)",
        "if (row + 1 < params.q_len && col == 0)")),
    ("uninitialized read|numbers", Bug(
        "delta-row-not-written", DELTA,
        "if (row >= params.q_len) return;", "if (row + 1 >= params.q_len) return;")),
]  # fmt: skip

# A lane that reads a tile before or while another writes it.
_BARRIER = "race|uninitialized read|numbers"
BUGS = [(_BARRIER, bug) for bug in barrier_bugs()] + GUARDS


# A process per library: a bug may well write where it must not.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.checker.checked"])


def first_findings(kernel_dir: Path) -> list[Finding]:
    """What is wrong in the first case and lane order in which anything is."""
    with ProcessPoolExecutor(1, mp_context=_PROCESSES) as pool:
        try:
            return pool.submit(_first_findings, kernel_dir).result()
        except BrokenProcessPool:
            return [Finding("crash", "the process that ran the kernels died")]


def _first_findings(kernel_dir: Path) -> list[Finding]:
    library = library_of(kernel_dir)
    for case in CASES:
        for lane_order in LANE_ORDERS:
            if found := judge(library, case, lane_order):
                return found
    return []


def test_there_are_barriers():
    assert any(bug.id.endswith("-deleted") for bug in barrier_bugs())


def test_the_copy_is_clean(tmp_path: Path):
    """So that what is caught below is the bug, and not the copy."""
    assert first_findings(copy_of_kernels(tmp_path)) == []


def test_a_missing_anchor_is_an_error(tmp_path: Path):
    kernel_dir = copy_of_kernels(tmp_path)
    with pytest.raises(AnchorMissing, match="expected 1 x 'no such text'"):
        Bug("none", COMMON, "no such text", "").plant(kernel_dir)


@pytest.mark.parametrize(
    ("caught_by", "bug"), BUGS, ids=lambda value: getattr(value, "id", "")
)
def test_bug_is_caught(caught_by: str, bug: Bug, tmp_path: Path):
    kernel_dir = copy_of_kernels(tmp_path)
    bug.plant(kernel_dir)
    found = first_findings(kernel_dir)
    assert found, f"nothing catches {bug.id}: redundant code, or a hole in the checker"
    assert any(re.search(caught_by, finding.what) for finding in found), found
    print(f"{bug.id}: caught by {sorted({finding.what for finding in found})}")
