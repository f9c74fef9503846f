"""The suite can fail: wrong implementations are caught, the right one is not."""

import numpy as np
import pytest

from tests.support import cases, stub
from tests.support.compare import assert_identical
from tests.support.kernel_check import check, check_backward, check_forward
from tests.support.poison import RULES, Poison, check_hidden, check_poison, rule_case

CASES = {case.id: case for case in cases.CURATED}
CAUSAL = cases.Case("meta-causal", is_causal=True, q_len=21, kv_len=21)


@pytest.mark.parametrize("case", cases.CURATED, ids=lambda case: case.id)
def test_the_right_answer_passes(case):
    check(stub.Stub(), case)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    "flawed",
    [stub.DroppedScale, stub.SwappedGroups, stub.SwappedBatch, stub.DroppedLastKey,
     stub.UnwrittenRow, stub.Base2Logsumexp, stub.Imprecise],
)  # fmt: skip
def test_a_wrong_forward_is_caught(flawed, dtype):
    with pytest.raises(AssertionError, match="breaks the rule"):
        check_forward(flawed(), CASES[f"default-{dtype}"])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    "flawed",
    [stub.DroppedScale, stub.SwappedGroups, stub.SwappedBatch, stub.DroppedLastKey,
     stub.UnsummedGroups, stub.DroppedLogsumexpCotangent],
)  # fmt: skip
def test_a_wrong_backward_is_caught(flawed, dtype):
    with pytest.raises(AssertionError, match="breaks the rule"):
        check_backward(flawed(), CASES[f"default-{dtype}"])


@pytest.mark.parametrize("flawed", [stub.OffByOneCausal, stub.BottomRightCausal])
@pytest.mark.parametrize("check_pass", [check_forward, check_backward])
def test_a_wrong_causal_mask_is_caught(flawed, check_pass):
    with pytest.raises(AssertionError, match="breaks the rule"):
        check_pass(flawed(), CASES["causal-f32"])


@pytest.mark.parametrize("operand", ["key", "value"])
def test_a_leaking_nan_is_caught(operand):
    with pytest.raises(AssertionError, match="other bits"):
        check_poison(stub.LeakingNan(), CAUSAL, Poison(operand, 20, np.nan))


@pytest.mark.parametrize("operand", ["query", "key", "value", "dout"])
def test_a_swallowed_nan_is_caught(operand):
    with pytest.raises(AssertionError, match="sees the NaN is finite"):
        check_poison(stub.SilentNan(), CAUSAL, Poison(operand, 5, np.nan))


ONLY = {
    "bias": {"bias": "float32"},
    "mask": {"mask": "random"},
    "q_offset": {"traced_offset": True, "is_causal": True, "q_offset": 5},
    "query_seq_lengths": {"query_lengths": "half"},
    "key_value_seq_lengths": {"kv_lengths": "half"},
    "sinks": {"sinks": True},
    "alibi_slopes": {"slopes": True},
    "dropout_batch_indices": {"dropout_rate": 0.3},
    "dropout_head_indices": {"dropout_rate": 0.3},
    "sliding_window": {"sliding_window": (5, 3)},
    "logits_soft_cap": {"logits_soft_cap": 1.5},
}
FLAWED_FEATURES = [
    *((stub.IGNORANT[name], features) for name, features in ONLY.items()),
    (stub.SwappedSegments, {"segments": "packed"}),
    (stub.SinkForAll, ONLY["sinks"]),
    (stub.ExclusiveWindow, ONLY["sliding_window"]),
    (stub.LowestBiasHides, {"bias": "float32", "bias_values": "all-lowest"}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("flawed", "features"), FLAWED_FEATURES, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_wrong_feature_is_caught(flawed, features, dtype):
    """In the forward pass and in the gradients."""
    case = cases.Case(f"meta-{flawed.__name__}", dtype=dtype, head_dim=16, **features)
    check(stub.Stub(), case)
    for check_pass in (check_forward, check_backward):
        with pytest.raises(AssertionError, match="breaks the rule"):
            check_pass(flawed(), case)


@pytest.mark.parametrize(
    ("flawed", "features"),
    [
        (stub.UnsummedGradient, ONLY["bias"]),
        (stub.UnsummedGradient, ONLY["sinks"]),
        (stub.UnsummedGradient, ONLY["alibi_slopes"]),
        (stub.OtherDropoutInTheBackward, {"dropout_rate": 0.3}),
        (stub.DroppedLogsumexpCotangent, ONLY["bias"]),
    ],
)
def test_a_wrong_gradient_of_a_feature_is_caught(flawed, features):
    case = cases.Case(f"meta-{flawed.__name__}", head_dim=16, **features)
    check_forward(flawed(), case)
    with pytest.raises(AssertionError, match="breaks the rule"):
        check_backward(flawed(), case)


@pytest.mark.parametrize("case", cases.pairwise_features(), ids=lambda case: case.id)
def test_the_right_features_pass(case):
    check(stub.Stub(), case)


@pytest.mark.parametrize("rule", RULES)
def test_a_leak_past_any_rule_is_caught(rule):
    with pytest.raises(AssertionError, match="other bits"):
        check_hidden(stub.LeakingNan(), rule_case(rule, 40), np.nan)


@pytest.mark.parametrize("operand", ["bias", "sinks", "alibi_slopes"])
def test_a_swallowed_nan_of_an_operand_is_caught(operand):
    case = cases.Case("meta-swallowed", head_dim=16, **ONLY[operand])
    with pytest.raises(AssertionError, match="sees the NaN is finite"):
        check_poison(stub.SilentNan(), case, Poison(operand, (3, 4), np.nan))


def test_the_report_names_what_failed():
    with pytest.raises(AssertionError) as failure:
        check_forward(stub.UnwrittenRow(), CASES["default-f32"])
    report = str(failure.value)
    for part in [
        "out of case default-f32 (seed ",
        "worst element (b=0, t=36, n=0, h=0): actual np.float64(nan)",
        "within the ceiling: 97.297 %",
        "of plain attention ",
    ]:
        assert part in report, report


def test_identical_sees_a_single_bit():
    x = np.ones((2, 3), np.float16)
    y = x.copy()
    y.view(np.uint16)[1, 2] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 6 .* at \(1, 2\)"):
        assert_identical(x, y, name="x", context="a test")
