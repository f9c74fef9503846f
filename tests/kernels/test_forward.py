"""out and logsumexp of the kernels against the float64 reference."""

import pytest

from tests.support import cases, native
from tests.support.kernel_check import check_forward


@pytest.mark.parametrize("case", cases.CURATED, ids=lambda case: case.id)
def test_curated(case):
    check_forward(native, case)


@pytest.mark.parametrize("case", cases.VALUES, ids=lambda case: case.id)
def test_values(case):
    check_forward(native, case)


@pytest.mark.parametrize("case", cases.pairwise(), ids=lambda case: case.id)
def test_pairwise(case):
    check_forward(native, case)
