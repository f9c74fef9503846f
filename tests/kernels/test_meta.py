"""The suite can fail: wrong implementations are caught, the right one is not."""

import numpy as np
import pytest

from tests.support import cases, stub
from tests.support.compare import assert_identical
from tests.support.kernel_check import check, check_backward, check_forward
from tests.support.poison import Poison, check_poison

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
