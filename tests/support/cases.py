"""The shapes that kernels are tested with: curated named ones and generated ones.

A case is a plain description. inputs.py makes its arrays, kernel_check.py runs it.
"""

import dataclasses
import itertools
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support import tolerances

Shape = tuple[int, ...]

# What a call may have besides query, key and value, in the order of the C ABI.
FEATURE_OPERANDS = (
    "bias",
    "mask",
    "q_offset",
    "q_segment_ids",
    "kv_segment_ids",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "sinks",
    "alibi_slopes",
    "dropout_key",
    "dropout_batch_indices",
    "dropout_head_indices",
)
# Those with a gradient of their own, by the name of the result.
DIFFERENTIABLE = {"dbias": "bias", "dsinks": "sinks", "dslopes": "alibi_slopes"}


@dataclass(frozen=True)
class Case:
    """One call. Every feature is off by default; inputs.py knows the named kinds."""

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
    sliding_window: tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    bias: str | None = None  # its dtype
    bias_ones: str = ""  # of "nts": its heads, queries, keys of size 1
    bias_values: str = "normal"  # a name in inputs.BIASES
    mask: str | None = None  # a name in inputs.MASKS
    mask_ones: str = ""
    traced_offset: bool = (
        False  # q_offset as an operand, q_offset + 0, 1, 2 … per batch
    )
    segments: str | None = None  # a name in inputs.SEGMENTS
    query_lengths: str | None = None  # a name in inputs.LENGTHS
    kv_lengths: str | None = None
    sinks: bool = False
    slopes: bool = False
    dropout_rate: float = 0.0
    # Batch dims of the features' operands that are not whole, by name in the C ABI.
    feature_batch: Mapping[str, Shape] = dataclasses.field(
        default_factory=dict, hash=False
    )
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
        """What is no array; inputs.make_arguments adds those.

        scale is rounded to float32, as it travels.
        """
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        options = {
            "scale": float(np.float32(scale)),
            "is_causal": self.is_causal,
            "q_offset": self.q_offset,
        }
        if self.sliding_window is not None:
            options["sliding_window"] = self.sliding_window
        if self.logits_soft_cap is not None:
            options["logits_soft_cap"] = self.logits_soft_cap
        if self.dropout_rate:
            options["dropout_rate"] = self.dropout_rate
        return options

    @property
    def width(self) -> int:
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def features(self) -> tuple[str, ...]:
        """The operands of FEATURE_OPERANDS that the call has."""
        given = {
            "bias": self.bias,
            "mask": self.mask,
            "q_offset": self.traced_offset,
            "q_segment_ids": self.segments,
            "kv_segment_ids": self.segments,
            "query_seq_lengths": self.query_lengths,
            "key_value_seq_lengths": self.kv_lengths,
            "sinks": self.sinks,
            "alibi_slopes": self.slopes,
            "dropout_key": self.dropout_rate,
            "dropout_batch_indices": self.dropout_rate,
            "dropout_head_indices": self.dropout_rate,
        }
        return tuple(name for name in FEATURE_OPERANDS if given[name])

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the results of the gradient pass."""
        return tuple(
            g for g, operand in DIFFERENTIABLE.items() if operand in self.features
        )

    def shape(self, operand: str) -> Shape:
        batch = {
            "query": self.query_batch,
            "key": self.key_batch,
            "value": self.value_batch,
            **self.feature_batch,
        }.get(operand)
        heads, q_len, kv_len = self.num_heads, self.q_len, self.kv_len
        inner = {
            "query": (q_len, heads, self.head_dim),
            "key": (kv_len, self.num_kv_heads, self.head_dim),
            "value": (kv_len, self.num_kv_heads, self.width),
            "dout": (q_len, heads, self.width),
            "dlogsumexp": (heads, q_len),
            "bias": self._scores(self.bias_ones),
            "mask": self._scores(self.mask_ones),
            "q_segment_ids": (q_len,),
            "kv_segment_ids": (kv_len,),
            "sinks": (heads,),
            "alibi_slopes": (heads,),
            "dropout_key": (2,),
            "dropout_head_indices": (heads,),
        }.get(operand, ())
        return (*(self.batch if batch is None else batch), *inner)

    def _scores(self, ones: str) -> Shape:
        sizes = {"n": self.num_heads, "t": self.q_len, "s": self.kv_len}
        return tuple(1 if dim in ones else size for dim, size in sizes.items())

    def num_summed(self, operand: str) -> float:
        """Scores that are summed into one element of the operand's gradient."""
        scores = math.prod((*self.batch, *self._scores("")))
        return scores / max(1, math.prod(self.shape(operand)))


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


def _features() -> Iterator[Case]:
    """Per feature: every dtype, tiled and short, in both values of what it has."""
    rows: dict[str, dict[str, Any]] = {
        "bias": {"bias": "float32"},
        "bias-f16": {"bias": "float16", "bias_ones": "n"},
        "bias-bf16-keys": {"bias": "bfloat16", "bias_ones": "nt"},
        "bias-rows": {"bias": "float32", "bias_ones": "s", "bias_values": "hidden"},
        "bias-hidden": {"bias": "float32", "bias_values": "hidden", "bias_ones": "n"},
        "bias-lowest-causal": {"bias": "float16", "bias_values": "lowest",
                               "is_causal": True, "q_offset": 16},
        "mask": {"mask": "random"},
        "mask-blocks-heads": {"mask": "blocks", "mask_ones": "n"},
        "mask-keys": {"mask": "random", "mask_ones": "nt"},
        "mask-rows-causal": {"mask": "random", "mask_ones": "ns", "is_causal": True},
        "mask-one-key": {"mask": "one-key"},
        "mask-none": {"mask": "none", "mask_ones": "nts"},
        "window": {"sliding_window": (5, 3)},
        "window-left": {"sliding_window": (7, None)},
        "window-right-offset": {"sliding_window": (None, 2), "q_offset": 4},
        "window-self": {"sliding_window": (0, 0), "q_offset": 9},
        "window-causal": {"sliding_window": (4, 4), "is_causal": True, "q_offset": 30},
        "softcap": {"logits_soft_cap": 1.5},
        "softcap-bias": {"logits_soft_cap": 2.0, "bias": "float32", "scale": 0.4},
        "segments": {"segments": "packed"},
        "segments-mixed": {"segments": "mixed", "is_causal": True, "q_offset": 40},
        "query-lengths": {"query_lengths": "mixed"},
        "kv-lengths": {"kv_lengths": "mixed"},
        "lengths-causal": {"query_lengths": "mixed", "kv_lengths": "mixed",
                           "is_causal": True, "q_offset": 3},
        "sinks": {"sinks": True},
        "sinks-causal": {"sinks": True, "is_causal": True, "q_offset": -2},
        "slopes": {"slopes": True},
        "slopes-causal": {"slopes": True, "is_causal": True, "q_offset": 16},
        "slopes-softcap": {"slopes": True, "logits_soft_cap": 3.0},
        "dropout": {"dropout_rate": 0.3},
        "dropout-causal": {"dropout_rate": 0.9, "is_causal": True, "q_offset": 5},
        "offsets-causal": {"traced_offset": True, "is_causal": True, "q_offset": 7},
        "offsets-window": {"traced_offset": True, "sliding_window": (9, 1),
                           "slopes": True, "q_offset": -1},
        "everything": EVERYTHING,
    }  # fmt: skip
    lengths = ((37, 53), (70, 45), (5, 70), (8, 150))
    for index, (name, features) in enumerate(rows.items()):
        # Every dtype in one of the two lengths.
        order = random.Random(name).sample(sorted(tolerances.DTYPES), 3)
        pairs = (order[:2], order[2:])
        for (q_len, kv_len), dtypes in zip(lengths[index % 2 :: 2], pairs):
            for dtype in dtypes:
                yield Case(f"{name}-{dtype}-q{q_len}", dtype=dtype, q_len=q_len,
                           kv_len=kv_len, head_dim=24, value_head_dim=20,
                           **features)  # fmt: skip


EVERYTHING: dict[str, Any] = {
    "bias": "float32",
    "bias_values": "hidden",
    "mask": "random",
    "mask_ones": "n",
    "traced_offset": True,
    "q_offset": 11,
    "is_causal": True,
    "sliding_window": (40, 9),
    "logits_soft_cap": 3.0,
    "segments": "packed",
    "query_lengths": "mixed",
    "kv_lengths": "half",
    "sinks": True,
    "slopes": True,
    "dropout_rate": 0.2,
    "feature_batch": {"bias": (1,), "sinks": (1,), "kv_segment_ids": (1,)},
}
FEATURES = list(_features())

# Several batch dims, each operand with a sharing of its own.
SHARED = [
    Case("shared-everything-f32", batch=(2, 3), key_batch=(1, 3), value_batch=(2, 1),
         q_len=q_len, kv_len=40, num_heads=4, num_kv_heads=2, head_dim=16,
         **EVERYTHING | {"feature_batch": {
             "bias": (1, 3), "mask": (2, 1), "q_offset": (1, 3),
             "q_segment_ids": (2, 1), "kv_segment_ids": (1, 1),
             "query_seq_lengths": (2, 1), "key_value_seq_lengths": (1, 3),
             "sinks": (2, 1), "alibi_slopes": (1, 3), "dropout_key": (1, 1),
             "dropout_batch_indices": (2, 3), "dropout_head_indices": (2, 1)}})
    for q_len in (33, 4)
] + [
    Case(f"shared-{name}-q{q_len}", batch=(2, 3), query_batch=(1, 3),
         key_batch=(1, 1), value_batch=(1, 1), q_len=q_len, kv_len=40, num_heads=4,
         num_kv_heads=2, head_dim=16, feature_batch={operand: (2, 1)}, **features)
    for q_len in (33, 4)
    for name, operand, features in [
        ("bias", "bias", {"bias": "float32"}),
        ("mask", "mask", {"mask": "random"}),
        ("lengths", "key_value_seq_lengths", {"kv_lengths": "mixed"}),
        ("sinks", "sinks", {"sinks": True}),
        ("slopes", "alibi_slopes", {"slopes": True}),
        ("dropout", "dropout_key", {"dropout_rate": 0.3}),
    ]
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


def _at_block_edges() -> Iterator[Case]:
    """Around the 192 queries and 256 keys of a block, and a vector of 16."""
    widths = (1, 15, 16, 17, 63, 64, 65, 80, 96, 128, 192, 256)
    dtypes = list(tolerances.DTYPES)
    ways: list[dict[str, Any]] = [
        {},
        {"is_causal": True, "q_offset": 63},
        {"sliding_window": (100, 3)},
        {"segments": "packed", "mask": "random", "mask_ones": "nt"},
    ]
    for i, head_dim in enumerate(widths):
        q_len, kv_len = 191 + i % 3, 255 + (i + i // 3) % 3
        dtype, width = dtypes[(i + i // 4) % 3], widths[(i * 5 + 3) % len(widths)]
        yield Case(
            f"edge-q{q_len}-k{kv_len}-d{head_dim}v{width}-{dtype}",
            dtype=dtype,
            batch=(),
            q_len=q_len,
            kv_len=kv_len,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            value_head_dim=width,
            **ways[i % 4],
        )


# What the CPU kernels cut in ways of their own.
CPU_BLOCKS = [
    *_at_block_edges(),
    # Units of several heads of a group, whole and not.
    Case("heads-together-f32", q_len=7, kv_len=300, num_heads=66, num_kv_heads=2,
         head_dim=16),
    Case("heads-together-bf16", dtype="bfloat16", q_len=50, kv_len=90, num_heads=21,
         num_kv_heads=3, head_dim=24, is_causal=True, q_offset=40),
    Case("heads-together-everything-f16", dtype="float16", q_len=13, kv_len=70,
         num_heads=10, num_kv_heads=2, head_dim=24, **EVERYTHING),
    # Keys in parts.
    Case("parts-f32", batch=(), q_len=3, kv_len=4700, num_heads=4, num_kv_heads=2,
         head_dim=24),
    Case("parts-bf16", dtype="bfloat16", batch=(), q_len=5, kv_len=4700, num_heads=6,
         num_kv_heads=2, head_dim=40, sinks=True, dropout_rate=0.3),
    Case("parts-no-key-rows-f16", dtype="float16", batch=(), q_len=9, kv_len=4700,
         num_heads=2, num_kv_heads=1, head_dim=24, is_causal=True, q_offset=-4),
    Case("parts-window-f32", batch=(), q_len=4, kv_len=4700, num_heads=2,
         num_kv_heads=1, head_dim=24, sliding_window=(50, 7), q_offset=1020,
         slopes=True, bias="bfloat16", bias_ones="n"),
    # One unit each.
    Case("many-tiny-f32", batch=(301,), q_len=3, kv_len=5, num_heads=4, num_kv_heads=2,
         head_dim=8),
    Case("many-tiny-bf16", dtype="bfloat16", batch=(7, 43), q_len=5, kv_len=3,
         num_heads=2, num_kv_heads=1, head_dim=12, is_causal=True, sinks=True),
]  # fmt: skip


# Every pair of these meets in some case (test_features.py): the feature tests proper.
FEATURE_FACTORS: dict[str, Sequence[Any]] = {
    "dtype": tuple(tolerances.DTYPES),
    "lengths": ((37, 53), (5, 70), (64, 64), (1, 33), (8, 9)),
    "causal": (*CAUSAL, "before-the-keys"),
    "traced_offset": (False, True),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "head_dims": ((16, None), (20, 24), (72, 40)),
    "batch": BATCHES[:5],
    "bias": (
        None,
        *(("float32", ""), ("float16", "n"), ("bfloat16", "nt"), ("float32", "ts")),
    ),
    "bias_values": ("normal", "hidden"),
    "mask": (None, ("random", ""), ("blocks", "n"), ("random", "nt"), ("all", "s")),
    "window": (None, (20, 9), (None, 3), (12, None)),
    "softcap": (None, 1.5),
    "segments": (None, "packed"),
    "query_lengths": (None, "mixed"),
    "kv_lengths": (None, "mixed"),
    "sinks": (False, True),
    "slopes": (False, True),
    "dropout": (0.0, 0.3),
    "feature_batch": ("whole", "shared", "mixed"),
}


def pairwise_features() -> list[Case]:
    """Every pair of values of any two of FEATURE_FACTORS occurs in some case."""
    rows = _pairwise_rows(FEATURE_FACTORS)
    return [_from_feature_factors(f"features-{i}", row) for i, row in enumerate(rows)]


def _from_feature_factors(name: str, row: dict[str, Any]) -> Case:
    (q_len, kv_len), (heads, kv_heads) = row["lengths"], row["heads"]
    batch, query_batch, key_batch, value_batch = row["batch"]
    bias, bias_ones = row["bias"] or (None, "")
    mask, mask_ones = row["mask"] or (None, "")
    batches = {
        "whole": [batch],
        "shared": [(1,) * len(batch)],
        "mixed": [
            tuple(1 if i == j else n for i, n in enumerate(batch)) for j in (0, 1)
        ],
    }[row["feature_batch"]]
    offset = {"bottom-right": kv_len - q_len, "before-the-keys": -(q_len // 8)}
    return Case(
        id=f"{name}-{row['dtype']}-q{q_len}-{row['causal']}",
        dtype=row["dtype"],
        batch=batch,
        query_batch=query_batch,
        key_batch=key_batch,
        value_batch=value_batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=row["head_dims"][0],
        value_head_dim=row["head_dims"][1],
        is_causal=row["causal"] != "none",
        q_offset=offset.get(row["causal"], 0),
        traced_offset=row["traced_offset"],
        bias=bias,
        bias_ones=bias_ones,
        bias_values=row["bias_values"],
        mask=mask,
        mask_ones=mask_ones,
        sliding_window=row["window"],
        logits_soft_cap=row["softcap"],
        segments=row["segments"],
        query_lengths=row["query_lengths"],
        kv_lengths=row["kv_lengths"],
        sinks=row["sinks"],
        slopes=row["slopes"],
        dropout_rate=row["dropout"],
        feature_batch=dict(zip(FEATURE_OPERANDS, itertools.cycle(batches))),
    )


def random_case(index: int) -> Case:
    """Anything: small shapes, any features, values up to the ends of the dtypes."""
    rng = random.Random(index)

    def some(probability, value):
        return value if rng.random() < probability else None

    rank = rng.choice((0, 1, 1, 1, 2))
    batch = tuple(rng.choice((1, 2, 2, 3)) for _ in range(rank))

    def part(probability=0.3):
        """`batch` with some of its dims shared."""
        return tuple(1 if rng.random() < probability else size for size in batch)

    def ones(dims):
        return "".join(d for d in dims if rng.random() < 0.3)

    def window():
        return tuple(some(0.7, rng.choice((0, 1, 3, 10, 33, 100))) for _ in range(2))

    kv_heads, groups = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    short = rng.random() < 0.4
    q_len = rng.randint(1, 8) if short else rng.randint(9, 48)
    kv_len = rng.choice((rng.randint(1, 12), rng.randint(13, 70), rng.randint(13, 70)))
    head_dim = rng.choice((1, 4, 8, 15, 16, 24, 32, 40, 65))
    huge = rng.random() < 0.2
    is_causal = rng.random() < 0.4
    places_keys = is_causal or rng.random() < 0.3
    case = Case(
        id=f"random-{index}",
        dtype=rng.choice(list(tolerances.DTYPES)),
        batch=batch,
        query_batch=some(0.2, part()),
        key_batch=some(0.2, part()),
        value_batch=some(0.2, part()),
        q_len=q_len,
        kv_len=kv_len,
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=some(0.3, rng.choice((1, 7, 16, 33, 64))),
        is_causal=is_causal,
        q_offset=rng.randint(-q_len - 3, kv_len + 3) if places_keys else 0,
        scale=None if huge else some(0.3, rng.choice((0.0, 1.0, -0.5, 0.1))),
        sliding_window=some(0.25, window()),
        logits_soft_cap=some(0.2, rng.choice((0.5, 3.0, 50.0))),
        bias=some(0.4, rng.choice(list(tolerances.DTYPES))),
        bias_ones=ones("nts"),
        bias_values=rng.choice(("normal", "hidden", "lowest", "extremes")),
        mask=some(0.3, rng.choice(("random", "random", "blocks", "one-key", "none"))),
        mask_ones=ones("nts"),
        traced_offset=rng.random() < 0.2,
        segments=some(0.2, rng.choice(("packed", "mixed"))),
        query_lengths=some(0.2, rng.choice(("mixed", "half"))),
        kv_lengths=some(0.2, rng.choice(("mixed", "half", "zero"))),
        sinks=rng.random() < 0.25,
        slopes=rng.random() < 0.25,
        dropout_rate=some(0.2, rng.choice((0.1, 0.5, 0.9))) or 0.0,
        feature_batch={name: part() for name in FEATURE_OPERANDS if rng.random() < 0.5},
        inputs="huge-scores" if huge else "normal",
    )
    extreme = case.bias and case.bias_values in ("lowest", "extremes")
    if huge or extreme:
        case = dataclasses.replace(case, tolerance=tolerances.HUGE_LOGITS)
    return case


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
