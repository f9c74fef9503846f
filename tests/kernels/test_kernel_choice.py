"""Which kernels a problem launches: the short-query ones up to q_len 8, and no more."""

import pytest

from tests.support import cases, native
from tests.support.inputs import make_inputs


def _problem(case, *, backward):
    """For the operands of the case; nothing runs."""
    inputs = make_inputs(case)
    operands = dict(zip(native.FORWARD_OPERANDS, inputs.operands))
    results = native.FORWARD_RESULTS
    if backward:
        operands |= {
            "out": inputs.dout,
            "logsumexp": inputs.dlogsumexp,
            "dout": inputs.dout,
            "dlogsumexp": inputs.dlogsumexp,
        }
        results = native.BACKWARD_RESULTS
    problem = native.make_problem(operands, **case.options)
    native.attach_results(problem, operands, results)
    return problem


def _kernels(case, *, backward):
    """Their full names."""
    return native.kernels(_problem(case, backward=backward), backward)


def _num_launches(case):
    """Of the forward pass."""
    return native.num_launches(_problem(case, backward=False), False)


def _templates(case, *, backward):
    return [name.split("_float32_")[0] for name in _kernels(case, backward=backward)]


@pytest.mark.parametrize("q_len", [1, 8])
def test_short_queries(q_len):
    case = cases.Case("choice", q_len=q_len)
    assert _templates(case, backward=False) == [
        "attention_short_forward",
        "attention_short_forward_combine",
    ]
    assert _templates(case, backward=True) == [
        "attention_delta",
        "attention_short_dq",
        "attention_short_dq_combine",
        "attention_backward_dkv",
    ]


def test_longer_queries():
    case = cases.Case("choice", q_len=9)
    assert _templates(case, backward=False) == ["attention_forward"]
    assert _templates(case, backward=True) == [
        "attention_delta",
        "attention_backward_dq",
        "attention_backward_dkv",
    ]


@pytest.mark.parametrize(
    ("batch", "launches"), [((2,), 1), ((2, 3, 2, 2, 2, 2), 1), ((0, 3), 0)], ids=str
)
def test_batch_dims_are_merged(batch, launches):
    assert _num_launches(cases.Case("choice", batch=batch)) == launches


def test_dims_that_cannot_be_merged_cost_launches():
    """Six alternately shared dims; a kernel addresses four, the outer two are 2 x 3."""
    case = cases.Case(
        "choice",
        batch=(2, 3, 2, 3, 2, 3),
        key_batch=(1, 3, 1, 3, 1, 3),
        value_batch=(2, 1, 2, 1, 2, 1),
        q_len=9,
        kv_len=9,
        head_dim=8,
    )
    assert _num_launches(case) == 2 * 3


@pytest.mark.parametrize(
    ("head_dim", "width", "expected"), [(64, 64, 64), (65, 8, 96), (8, 65, 96)]
)
def test_the_larger_head_dim_decides(head_dim, width, expected):
    case = cases.Case("choice", head_dim=head_dim, value_head_dim=width, q_len=9)
    (name,) = _kernels(case, backward=False)
    assert f"_d{expected}_" in name
