"""Our kernels under the checker: no report, right numbers, in three lane orders.

Small shapes that reach every guard: tails in both lengths and both head sizes, causal
edges on and beside block borders, rows that see nothing, several key blocks, both the
tiled and the short-query kernels; every feature, alone and all together. Every row of
the variant table runs.
"""

from __future__ import annotations

import pytest

from plugin import build
from tests.checker.checked import LANE_ORDERS, judge, library_of
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


def _row_cases() -> list[Case]:
    """Each variant with and without features, all passes, tiled and short."""
    rows = {(row.dtype, row.head_dim) for row in build.load_variants()}
    plain = {"is_causal": True, "q_offset": 20}
    return [
        Case(
            f"{name}-{dtype}-d{head_dim}-q{q_len}",
            dtype=dtype,
            q_len=q_len,
            kv_len=33,
            head_dim=head_dim,
            **_SMALL,
            **features,
        )
        for dtype, head_dim in sorted(rows)
        for name, features in (("row", plain), ("row-features", _ROW_FEATURES))
        for q_len in (9, 2)
    ]


_ROW_FEATURES = {"mask": "random", "bias": "float32", "bias_ones": "n", "sinks": True}
ROW_CASES = _row_cases()


@pytest.mark.parametrize("case", CASES + FEATURE_CASES, ids=lambda case: case.id)
def test_case_is_clean(case: Case):
    for lane_order in LANE_ORDERS:
        assert judge(library_of(), case, lane_order) == []


def test_every_row_is_clean_and_small_enough():
    library = library_of()
    used: dict[str, int] = {}
    found = []
    for number, case in enumerate(ROW_CASES):
        found += judge(library, case, LANE_ORDERS[number % len(LANE_ORDERS)])
        used |= library.threadgroup_bytes()
    assert found == []
    rows = {row.host_name: row for row in build.load_variants()}
    assert sorted(set(rows) - set(used)) == [], "rows that no case ran"
    limit = {n: (16 if r.head_dim <= 128 else 32) * 1024 for n, r in rows.items()}
    assert {n: b for n, b in used.items() if b > limit[n]} == {}
