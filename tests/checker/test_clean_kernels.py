"""Our kernels under the checker: no report, right numbers, in three lane orders.

Small shapes that reach every guard: tails in both lengths and both head sizes, causal
edges on and beside block borders, rows that see nothing, several key blocks, both the
tiled and the short-query kernels; every feature, alone and all together. Every row of
the variant table runs; what they all did is judged together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from plugin import build
from tests.checker.checked import LANE_ORDERS, Finding, judge, library_of
from tests.support.cases import EVERYTHING, Case

_SMALL = {"batch": (), "num_heads": 2, "num_kv_heads": 1}
CASES = [
    Case("tails-f32", q_len=37, kv_len=75, head_dim=20, **_SMALL),
    Case("tails-f16", dtype="float16", q_len=33, kv_len=70, head_dim=50, **_SMALL),
    Case("tails-bf16", dtype="bfloat16", q_len=41, kv_len=34, head_dim=60, **_SMALL),
    Case("aligned-f32", q_len=64, kv_len=96, head_dim=32, **_SMALL),
    Case("aligned-causal-bf16", dtype="bfloat16", q_len=32, kv_len=64, head_dim=64,
         is_causal=True, **_SMALL),
    Case("causal-square-f32", q_len=65, kv_len=65, head_dim=32, is_causal=True,
         **_SMALL),
    Case("causal-border-f32", q_len=40, kv_len=75, head_dim=24, is_causal=True,
         q_offset=1, **_SMALL),
    Case("causal-bottom-right-f16", dtype="float16", q_len=35, kv_len=99, head_dim=32,
         is_causal=True, q_offset=64, **_SMALL),
    Case("causal-unseen-rows-f32", q_len=50, kv_len=40, head_dim=16, is_causal=True,
         q_offset=-35, **_SMALL),
    Case("value-wider-f32", q_len=20, kv_len=37, head_dim=20, value_head_dim=72,
         **_SMALL),
    Case("value-narrower-f16", dtype="float16", q_len=20, kv_len=37, head_dim=100,
         value_head_dim=12, **_SMALL),
    Case("batch-groups-f32", batch=(2, 2), key_batch=(1, 2), q_len=12, kv_len=35,
         num_heads=6, num_kv_heads=2, head_dim=8),
    Case("short-1-f32", q_len=1, kv_len=200, head_dim=40, **_SMALL),
    Case("short-8-bf16", dtype="bfloat16", q_len=8, kv_len=130, head_dim=64,
         is_causal=True, q_offset=122, **_SMALL),
    Case("short-3-groups-f16", dtype="float16", batch=(2,), q_len=3, kv_len=150,
         num_heads=6, num_kv_heads=2, head_dim=33, is_causal=True, q_offset=90),
    Case("short-unseen-f32", q_len=7, kv_len=90, head_dim=72, value_head_dim=24,
         is_causal=True, q_offset=-3, **_SMALL),
]  # fmt: skip

_HEADS = {"num_heads": 4, "num_kv_heads": 2}
FEATURE_CASES = [
    Case("everything-f32", q_len=70, kv_len=45, head_dim=20, **_HEADS, **EVERYTHING),
    Case("everything-aligned-bf16", dtype="bfloat16", q_len=32, kv_len=64, head_dim=32,
         **_HEADS, **EVERYTHING),
    Case("everything-short-f16", dtype="float16", q_len=3, kv_len=150, head_dim=33,
         **_HEADS, **EVERYTHING),
    Case("mask-f16", dtype="float16", q_len=37, kv_len=75, head_dim=16, mask="blocks",
         **_HEADS),
    # A byte per block: three rows of five.
    Case("mask-shared-f32", batch=(3,), q_len=67, kv_len=131, head_dim=8, mask="blocks",
         mask_ones="n", feature_batch={"mask": (1,)}, **_HEADS),
    Case("mask-of-keys-short-bf16", dtype="bfloat16", q_len=5, kv_len=150, head_dim=16,
         mask="random", mask_ones="nt", **_HEADS),
    Case("bias-bf16", dtype="bfloat16", q_len=40, kv_len=37, head_dim=20,
         bias="bfloat16", bias_values="hidden", **_HEADS),
    Case("bias-of-keys-f32", q_len=75, kv_len=37, head_dim=20, bias="float32",
         bias_ones="nt", is_causal=True, **_HEADS),
    Case("bias-of-rows-f16", dtype="float16", q_len=37, kv_len=75, head_dim=20,
         bias="float16", bias_ones="s", feature_batch={"bias": (1,)}, **_HEADS),
    Case("slopes-f32", q_len=70, kv_len=40, head_dim=20, slopes=True, q_offset=9,
         sliding_window=(20, 3), **_HEADS),
    Case("segments-f32", q_len=70, kv_len=100, head_dim=20, segments="packed",
         **_HEADS),
    Case("sinks-short-f32", batch=(2, 2), q_len=2, kv_len=90, head_dim=16, sinks=True,
         is_causal=True, q_offset=-1, feature_batch={"sinks": (2, 1)}, **_HEADS),
    Case("dropout-f32", q_len=37, kv_len=75, head_dim=16, dropout_rate=0.4, **_HEADS),
    Case("lengths-f16", dtype="float16", q_len=64, kv_len=64, head_dim=16,
         query_lengths="mixed", kv_lengths="mixed", **_HEADS),
]  # fmt: skip


_ROW_FEATURES = {"mask": "random", "bias": "float32", "bias_ones": "n", "sinks": True}
_PLAIN = {"is_causal": True, "q_offset": 20}


def _row_cases() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each dtype and head_dim with and without features, all passes, tiled and short.

    With the choice of kernels: both families of rows in both forms.
    """
    choices = {
        "row": (_PLAIN, ({"family": 0, "form": "B"}, {"family": 9, "form": "A"})),
        "row-features": (
            _ROW_FEATURES,
            ({"family": 0, "form": "A"}, {"family": 9, "form": "B"}),
        ),
    }
    rows = {(row.dtype, row.head_dim) for row in build.load_variants()}
    for dtype, head_dim in sorted(rows):
        sizes = {"kv_len": 33, "head_dim": head_dim, "dtype": dtype, **_SMALL}
        for name, (features, plans) in choices.items():
            for plan in plans:
                case = f"{name}-{dtype}-d{head_dim}"
                yield Case(f"{case}-q9", q_len=9, **sizes, **features), plan
            yield Case(f"{case}-q2", q_len=2, **sizes, **features), {}


def _chosen_rows(used: set[str]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """A case for each row that is nobody's default."""
    for row in build.load_variants():
        if row.host_name in used:
            continue
        case = Case(f"chosen-{row.host_name}", q_len=row.block_q + 1, kv_len=33,
                    head_dim=row.head_dim, dtype=row.dtype, **_SMALL)  # fmt: skip
        form = "A" if row.kernel == "attention_backward_dq" else "B"
        yield case, {"rows": (row.host_name,), "form": form}


# Sums in parts of several blocks: of a bias over batches, of dK and dV over heads.
_PARTS = [
    Case("parts-of-bias-f32", batch=(65,), q_len=9, kv_len=8, num_heads=2,
         num_kv_heads=1, head_dim=8, bias="float32", bias_ones="n",
         feature_batch={"bias": (1,)}),
    *(
        Case(f"parts-of-heads-{dtype}", dtype=dtype, q_len=9, kv_len=8, num_heads=128,
             num_kv_heads=1, head_dim=8)
        for dtype in ("float32", "float16", "bfloat16")
    ),
]  # fmt: skip


class RowsRun(NamedTuple):
    """Attributes:
    findings: Of all cases together.
    threadgroup_bytes: The largest by kernel.
    barriers: Whether each place in the source was needed, by template, file and line.
    """

    findings: list[Finding]
    threadgroup_bytes: dict[str, int]
    barriers: dict[tuple[str, str, int], bool]


@functools.cache
def run_rows() -> RowsRun:
    library = library_of()
    kernels = {row.host_name: row.kernel for row in build.load_variants()}
    run = RowsRun([], {}, defaultdict(bool))

    def judge_all(cases: Iterator[tuple[Case, dict[str, Any]]]) -> None:
        for number, (case, choices) in enumerate(cases):
            with library.forced(**choices):
                order = LANE_ORDERS[number % len(LANE_ORDERS)]
                run.findings.extend(judge(library, case, order))
            for name, size in library.threadgroup_bytes().items():
                used = run.threadgroup_bytes
                used[name] = max(size, used.get(name, 0))
            for place in library.barriers():
                key = (kernels[place["kernel"]], place["file"], place["line"])
                run.barriers[key] |= place["is_needed"]

    judge_all(_row_cases())
    judge_all((case, {}) for case in _PARTS)
    judge_all(_chosen_rows(set(run.threadgroup_bytes)))
    return run


@pytest.mark.parametrize("case", CASES + FEATURE_CASES, ids=lambda case: case.id)
def test_case_is_clean(case: Case):
    for lane_order in LANE_ORDERS:
        assert judge(library_of(), case, lane_order) == []


# One process runs all rows.
_OF_ALL_ROWS = pytest.mark.xdist_group("checked_rows")


@_OF_ALL_ROWS
def test_every_row_is_clean():
    run = run_rows()
    assert run.findings == []
    rows = {row.host_name for row in build.load_variants()}
    assert sorted(rows - set(run.threadgroup_bytes)) == [], "rows that no case ran"


@_OF_ALL_ROWS
def test_every_row_is_small_enough():
    rows = {row.host_name: row for row in build.load_variants()}
    limit = {n: (16 if r.head_dim <= 128 else 32) * 1024 for n, r in rows.items()}
    used = run_rows().threadgroup_bytes
    assert {n: b for n, b in used.items() if b > limit[n]} == {}


@_OF_ALL_ROWS
def test_no_barrier_is_redundant():
    """Each orders some pair of accesses that nothing else does, in each kernel."""
    barriers = run_rows().barriers
    assert len(barriers) > 5
    redundant = [place for place, is_needed in barriers.items() if not is_needed]
    assert redundant == []
