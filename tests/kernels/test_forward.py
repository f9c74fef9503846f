"""out and logsumexp of the kernels against the float64 reference."""

import numpy as np
import pytest

from tests.support import cases, reference_f64
from tests.support.inputs import make_inputs
from tests.support.kernel_check import assert_result, check_forward


@pytest.mark.parametrize("case", cases.CURATED, ids=lambda case: case.id)
def test_curated(case, kernels):
    check_forward(kernels, case)


@pytest.mark.parametrize("case", cases.VALUES, ids=lambda case: case.id)
def test_values(case, kernels):
    check_forward(kernels, case)


@pytest.mark.parametrize("case", cases.pairwise(), ids=lambda case: case.id)
def test_pairwise(case, kernels):
    check_forward(kernels, case)


@pytest.mark.parametrize("q_len", [37, 5])
def test_scores_far_beyond_what_float32_resolves(q_len, kernels):
    """Around 1e10, where neighbours are 1024 apart: equal ones must stay equal."""
    case = cases.Case(f"far-q{q_len}", q_len=q_len, head_dim=16)
    query, key, value = make_inputs(case).operands
    query, key = (np.float32(1e5) * x for x in (query, key))
    key[...] = key[:, :1]
    out, logsumexp = kernels.run_forward(query, key, value, **case.options)
    expected = reference_f64.attention(query, key, value, **case.options)
    assert_result(case, "out", out, expected.out)
    assert np.isfinite(logsumexp).all()
