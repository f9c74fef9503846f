"""dquery, dkey and dvalue of the kernels against the float64 reference.

Every case has random cotangents of out and of logsumexp.
"""

import numpy as np
import pytest

from tests.support import cases
from tests.support.inputs import make_inputs
from tests.support.kernel_check import BACKWARD, check_backward, run


@pytest.mark.parametrize("case", cases.CURATED, ids=lambda case: case.id)
def test_curated(case, kernels):
    check_backward(kernels, case)


@pytest.mark.parametrize("case", cases.VALUES, ids=lambda case: case.id)
def test_values(case, kernels):
    check_backward(kernels, case)


@pytest.mark.parametrize("case", cases.pairwise(), ids=lambda case: case.id)
def test_pairwise(case, kernels):
    check_backward(kernels, case)


@pytest.mark.parametrize("q_len", [37, 5])
def test_zero_cotangents_give_zero(q_len, kernels):
    case = cases.Case(f"zero-cotangents-q{q_len}", q_len=q_len, is_causal=True)
    inputs = make_inputs(case)
    inputs = inputs._replace(
        dout=np.zeros_like(inputs.dout), dlogsumexp=np.zeros_like(inputs.dlogsumexp)
    )
    results = run(kernels, inputs, **case.options)
    for name in BACKWARD:
        assert (getattr(results, name) == 0).all(), name
