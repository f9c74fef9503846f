"""Which kernels a problem launches: the short-query ones up to q_len 8, and no more."""

import pytest

from tests.support import cases, native
from tests.support.forced import Forced
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import run_case

_alive = []  # a problem points into its operands


def _problem(case, *, backward):
    """For the operands of the case; nothing runs."""
    inputs = make_inputs(case)
    arguments = make_arguments(case)
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
    problem = native.make_problem(operands, **arguments)
    native.attach_results(problem, operands, results)
    _alive.extend((operands, arguments))
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


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        ("A", ["attention_backward_dq", "attention_backward_dkv"]),
        ("B", ["attention_backward_dkv", "attention_backward_dq_product"]),
    ],
)
def test_longer_queries(form, kernels):
    case = cases.Case("choice", q_len=9)
    assert _templates(case, backward=False) == ["attention_forward"]
    names = Forced(form).plan(case)["kernels"]
    assert [name.split("_float32_")[0] for name in names] == [
        "attention_delta",
        *kernels,
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
    ("head_dim", "width", "expected"), [(64, 64, 64), (65, 8, 128), (8, 65, 128)]
)
def test_the_larger_head_dim_decides(head_dim, width, expected):
    case = cases.Case("choice", head_dim=head_dim, value_head_dim=width, q_len=9)
    (name,) = _kernels(case, backward=False)
    assert f"_d{expected}_" in name


def _gradient_kernels(case, of):
    inputs, arguments = make_inputs(case), make_arguments(case)
    values = (*inputs.operands, inputs.dout, inputs.dlogsumexp)
    values += (inputs.dout, inputs.dlogsumexp)
    operands = dict(zip(native.BACKWARD_OPERANDS, values))
    problem = native.make_problem(operands, **arguments)
    native.attach_gradient(problem, of, arguments[of])
    return [name.split("_float32_")[0] for name in native.kernels(problem, "gradient")]


def test_a_mask_is_summarised_first():
    for q_len in (5, 40):
        plain = cases.Case("choice", q_len=q_len)
        masked = cases.Case("choice", q_len=q_len, mask="random")
        for backward in (False, True):
            assert _templates(masked, backward=backward) == [
                "attention_mask_blocks",
                *_templates(plain, backward=backward),
            ]


def test_other_features_need_no_kernel_of_their_own():
    for q_len in (5, 40):
        plain = cases.Case("choice", q_len=q_len)
        features = cases.EVERYTHING | {"mask": None}
        everything = cases.Case("choice", q_len=q_len, **features)
        for backward in (False, True):
            expected = _templates(plain, backward=backward)
            assert _templates(everything, backward=backward) == expected


@pytest.mark.parametrize("q_len", [5, 40])
def test_gradients_of_features(q_len):
    case = cases.Case("choice", q_len=q_len, bias="float32", sinks=True, slopes=True)
    assert _gradient_kernels(case, "sinks") == [
        "attention_delta",
        "attention_sinks_gradient",
    ]
    assert _gradient_kernels(case, "bias") == [
        "attention_delta",
        "attention_bias_gradient",
    ]
    slopes = _gradient_kernels(case, "alibi_slopes")
    assert slopes[:2] == ["attention_delta", "attention_bias_gradient"]
    masked = cases.Case("choice", q_len=q_len, bias="float32", mask="random")
    assert _gradient_kernels(masked, "bias")[0] == "attention_mask_blocks"
    masked = cases.Case("choice", q_len=q_len, sinks=True, mask="random")
    assert _gradient_kernels(masked, "sinks")[0] == "attention_mask_blocks"


def test_long_sums_are_cut():
    case = cases.Case("choice", batch=(5,), q_len=200, kv_len=200, bias="float32",
                      bias_ones="nt", feature_batch={"bias": (1,)})  # fmt: skip
    assert _gradient_kernels(case, "bias") == [
        "attention_delta",
        "attention_bias_gradient",
        "attention_bias_gradient_combine",
    ]


def test_a_sum_over_an_outer_batch_dim_is_refused():
    """Beyond the dims that a kernel addresses, where a launch each would overwrite."""
    batch = (2, 3, 2, 3, 2, 3)
    case = cases.Case(
        "choice",
        batch=batch,
        key_batch=(1, 3, 1, 3, 1, 3),
        value_batch=(2, 1, 2, 1, 2, 1),
        q_len=9,
        kv_len=9,
        head_dim=8,
        bias="float32",
        feature_batch={"bias": (1, 3, 2, 3, 2, 3)},
    )
    with pytest.raises(
        native.NativeError, match="cannot be summed over outer batch dimensions"
    ):
        run_case(native, case)
