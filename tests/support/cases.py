"""The shapes that kernels are tested with: curated named ones and generated ones.

A case is a plain description. inputs.py makes its arrays, kernel_check.py runs it.
"""

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support import tolerances


@dataclass(frozen=True)
class Case:
    id: str
    dtype: str = "float32"
    batch: tuple[int, ...] = (2,)
    q_len: int = 37
    kv_len: int = 53
    num_heads: int = 6
    num_kv_heads: int = 3
    head_dim: int = 64
    value_head_dim: int | None = None  # None: head_dim
    is_causal: bool = False
    q_offset: int = 0
    scale: float | None = None  # None: 1/sqrt(head_dim)
    query_batch: tuple[int, ...] | None = None  # None: batch; 1 in it: shared
    key_batch: tuple[int, ...] | None = None
    value_batch: tuple[int, ...] | None = None
    inputs: str = "normal"  # a name in inputs.KINDS
    tolerance: tolerances.ToleranceClass = tolerances.STANDARD

    @property
    def np_dtype(self) -> np.dtype:
        return tolerances.DTYPES[self.dtype]

    @property
    def seed(self) -> int:
        return zlib.crc32(self.id.encode())

    @property
    def context(self) -> str:
        return f"case {self.id} (seed {self.seed})"

    @property
    def options(self) -> dict[str, Any]:
        """scale (rounded to float32, as it travels), is_causal and q_offset."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {
            "scale": float(np.float32(scale)),
            "is_causal": self.is_causal,
            "q_offset": self.q_offset,
        }

    @property
    def width(self) -> int:
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    def shape(self, operand: str) -> tuple[int, ...]:
        batch = {
            "query": self.query_batch,
            "key": self.key_batch,
            "value": self.value_batch,
        }.get(operand) or self.batch
        rows, heads, width = {
            "query": (self.q_len, self.num_heads, self.head_dim),
            "key": (self.kv_len, self.num_kv_heads, self.head_dim),
            "value": (self.kv_len, self.num_kv_heads, self.width),
            "dout": (self.q_len, self.num_heads, self.width),
        }[operand]
        return (*batch, rows, heads, width)


# All sizes distinct and none 1 unless the name says otherwise.
CURATED = [
    Case("default-f32"),
    Case("default-f16", dtype="float16"),
    Case("default-bf16", dtype="bfloat16"),
    Case("causal-f32", is_causal=True),
    Case("causal-bottom-right-bf16", dtype="bfloat16", is_causal=True, q_offset=16),
    Case("causal-more-queries-f32", q_len=70, kv_len=45, is_causal=True),
    Case("causal-partly-masked-f16", dtype="float16", is_causal=True, q_offset=-11),
    Case("mha-f32", num_heads=5, num_kv_heads=5),
    Case("mqa-bf16", dtype="bfloat16", num_heads=5, num_kv_heads=1),
    Case("one-block-f32", q_len=32, kv_len=32, is_causal=True),
    Case("block-plus-one-f16", dtype="float16", q_len=33, kv_len=65, is_causal=True),
    Case("block-minus-one-f32", q_len=31, kv_len=63, is_causal=True),
    Case("aligned-blocks-bf16", dtype="bfloat16", q_len=96, kv_len=128),
    Case("head-dim-1-f32", head_dim=1),
    Case("head-dim-77-bf16", dtype="bfloat16", head_dim=77),
    Case("head-dim-256-f32", head_dim=256, q_len=41, is_causal=True),
    Case("mla-192-128-f16", dtype="float16", head_dim=192, value_head_dim=128),
    Case("wide-value-f32", head_dim=40, value_head_dim=200, is_causal=True),
    Case("no-batch-dims-f32", batch=()),
    Case("several-batch-dims-bf16", dtype="bfloat16", batch=(2, 3), q_len=19),
    Case("negative-scale-f32", scale=-0.3),
    Case("zero-scale-f16", dtype="float16", scale=0.0),
    Case("scale-one-f32", scale=1.0, head_dim=8),
    Case("long-keys-f32", q_len=9, kv_len=700, head_dim=32, is_causal=True,
         q_offset=691),
    Case("long-queries-f16", dtype="float16", q_len=700, kv_len=9, head_dim=32),
]  # fmt: skip

# The adversarial values: a missing subtraction of the maximum, a wrong normaliser.
VALUES = [
    Case(f"{inputs}-{dtype}-q{q_len}", dtype=dtype, q_len=q_len, inputs=inputs,
         scale=scale, is_causal=is_causal, tolerance=tolerance)
    for inputs, scale, is_causal, tolerance in [
        ("normal", 30 / 8, True, tolerances.LARGE_LOGITS),
        ("equal-keys", None, False, tolerances.STANDARD),
        ("zero-query", None, True, tolerances.STANDARD),
        ("identity", None, False, tolerances.STANDARD),
        ("one-large-key", None, False, tolerances.LARGE_LOGITS),
    ]
    for dtype in tolerances.DTYPES
    for q_len in (37, 5)
]  # fmt: skip


HEAD_DIMS = (1, 8, 40, 64, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 7, 8, 9, 31, 33, 64, 127, 200)
CAUSAL = ("none", "top-left", "bottom-right")
GROUP_SIZES = (1, 3, 8)
# (batch, query, key, value)
BATCHES = (
    ((), (), (), ()),
    ((2,), (2,), (2,), (2,)),
    ((2, 3), (2, 3), (2, 3), (2, 3)),
    ((2, 3), (2, 3), (1, 3), (1, 3)),
    ((2, 3), (1, 3), (2, 1), (2, 3)),
    ((2, 3), (2, 3), (1, 1), (2, 1)),
    ((2,), (1,), (2,), (1,)),
)
FACTORS: dict[str, Sequence[Any]] = {
    "dtype": tuple(tolerances.DTYPES),
    "head_dim": HEAD_DIMS,
    "value_head_dim": (None, *HEAD_DIMS),
    "q_len": LENGTHS,
    "kv_len": LENGTHS,
    "causal": CAUSAL,
    "group_size": GROUP_SIZES,
    "num_kv_heads": (1, 2),
    "batch": BATCHES,
}


def pairwise() -> list[Case]:
    """Every pair of values of any two factors occurs in some case."""
    return [_from_factors("pair", row) for row in _pairwise_rows(FACTORS)]


def grid(dtype: str, head_dim: int) -> Iterator[Case]:
    """lengths x lengths x causal x group sizes; the other factors rotate."""
    rest = random.Random(f"{dtype}{head_dim}")
    for q_len, kv_len, causal, group_size in itertools.product(
        LENGTHS, LENGTHS, CAUSAL, GROUP_SIZES
    ):
        row = {
            "dtype": dtype,
            "head_dim": head_dim,
            "value_head_dim": rest.choice([None, None, *HEAD_DIMS]),
            "q_len": q_len,
            "kv_len": kv_len,
            "causal": causal,
            "group_size": group_size,
            "num_kv_heads": 1,
            "batch": rest.choice(BATCHES[:2]),
        }
        yield _from_factors("grid", row)


def _from_factors(prefix: str, row: dict[str, Any]) -> Case:
    batch, query_batch, key_batch, value_batch = row["batch"]
    kv_heads = row["num_kv_heads"]
    width = "" if row["value_head_dim"] is None else f"v{row['value_head_dim']}"
    return Case(
        id=f"{prefix}-{row['dtype']}-d{row['head_dim']}{width}"
        f"-q{row['q_len']}-k{row['kv_len']}-{row['causal']}"
        f"-n{kv_heads * row['group_size']}-{kv_heads}"
        f"-b{BATCHES.index(row['batch'])}",
        dtype=row["dtype"],
        batch=batch,
        query_batch=query_batch,
        key_batch=key_batch,
        value_batch=value_batch,
        q_len=row["q_len"],
        kv_len=row["kv_len"],
        num_heads=kv_heads * row["group_size"],
        num_kv_heads=kv_heads,
        head_dim=row["head_dim"],
        value_head_dim=row["value_head_dim"],
        is_causal=row["causal"] != "none",
        q_offset=row["kv_len"] - row["q_len"] if row["causal"] == "bottom-right" else 0,
    )


def _pairwise_rows(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy and deterministic: each row takes a pair that is still missing, then per
    factor the value that covers the most other missing pairs."""
    names = list(factors)
    order = random.Random(0)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }

    def pairs_with(row, factor, value):
        return {
            (min(factor, f), value if factor < f else v,
             max(factor, f), v if factor < f else value)
            for f, v in row.items()
        }  # fmt: skip

    rows = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        others = [f for f in range(len(names)) if f not in row]
        order.shuffle(others)
        for factor in others:
            values = list(range(len(factors[names[factor]])))
            order.shuffle(values)
            row[factor] = max(
                values, key=lambda v: len(pairs_with(row, factor, v) & missing)
            )
        missing -= {
            (f, row[f], g, row[g]) for f, g in itertools.combinations(sorted(row), 2)
        }
        rows.append({n: factors[n][row[i]] for i, n in enumerate(names)})
    return rows
