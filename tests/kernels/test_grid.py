"""The whole grid: dtypes x head dims x lengths x lengths x causal x group sizes."""

import pytest

from tests.support import cases, tolerances
from tests.support.kernel_check import check

_REPORTED = 5


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
@pytest.mark.parametrize("dtype", tolerances.DTYPES)
def test_grid(dtype, head_dim, kernels):
    failures, count = [], 0
    for case in cases.grid(dtype, head_dim):
        count += 1
        try:
            check(kernels, case)
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, (
        f"{len(failures)} of {count} cases failed, the first {_REPORTED}:\n"
        + "\n".join(failures[:_REPORTED])
    )
