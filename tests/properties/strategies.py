"""Random calls for hypothesis, which shrinks them: Case with any features.

How many are tried is bounded and always the same ones, so that a run can be repeated;
the tests marked slow try more of them.
"""

import dataclasses

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.support import cases, tolerances


def bounded(max_examples, **others):
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **others,
    )


def compiled(max_examples):
    """Without shrinking: every example compiles a program, and a failure names it."""
    return bounded(max_examples, phases=(Phase.explicit, Phase.generate))


def _shared(batch):
    return st.tuples(*(st.sampled_from((1, size)) for size in batch))


def _ones():
    return st.sets(st.sampled_from("nts")).map(lambda dims: "".join(sorted(dims)))


def optional(strategy):
    return st.none() | strategy


# What may be on: (name of the field, its values, off first).
FEATURES = {
    "is_causal": st.booleans(),
    "sliding_window": optional(
        st.tuples(*[optional(st.integers(0, 40))] * 2).map(tuple)
    ),
    "logits_soft_cap": optional(st.sampled_from((0.5, 2.0, 30.0))),
    "bias": optional(st.sampled_from(list(tolerances.DTYPES))),
    "bias_values": st.sampled_from(("normal", "hidden", "lowest")),
    "mask": optional(st.sampled_from(("random", "blocks", "one-key", "none"))),
    "segments": optional(st.sampled_from(("packed", "mixed"))),
    "query_lengths": optional(st.sampled_from(("mixed", "half", "zero"))),
    "kv_lengths": optional(st.sampled_from(("mixed", "half", "zero"))),
    "sinks": st.booleans(),
    "slopes": st.booleans(),
    "dropout_rate": st.sampled_from((0.0, 0.2, 0.5)),
    "traced_offset": st.booleans(),
}


@st.composite
def calls(draw, *, without=(), max_batch_dims=2, dtypes=tuple(tolerances.DTYPES)):
    """A Case; `without`: fields that keep their default."""
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=max_batch_dims)))
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q_len = draw(st.integers(1, 8) | st.integers(9, 50))
    kv_len = draw(st.integers(1, 70))
    features = {
        name: draw(strategy)
        for name, strategy in FEATURES.items()
        if name not in without
    }
    case = cases.Case(
        id="property",
        dtype=draw(st.sampled_from(dtypes)),
        batch=batch,
        query_batch=draw(optional(_shared(batch))),
        key_batch=draw(optional(_shared(batch))),
        value_batch=draw(optional(_shared(batch))),
        q_len=q_len,
        kv_len=kv_len,
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((1, 8, 15, 32, 40))),
        value_head_dim=draw(optional(st.sampled_from((1, 16, 33)))),
        q_offset=0 if "q_offset" in without else draw(st.integers(-q_len, kv_len)),
        bias_ones=draw(_ones()),
        mask_ones=draw(_ones()),
        feature_batch={
            name: draw(_shared(batch))
            for name in draw(st.sets(st.sampled_from(cases.FEATURE_OPERANDS)))
        },
        tolerance=tolerances.HUGE_LOGITS
        if features.get("bias_values") == "lowest"
        else tolerances.STANDARD,
        **features,
    )
    seed = draw(st.integers(0, 2**16))
    return dataclasses.replace(case, id=f"property-{seed}")
