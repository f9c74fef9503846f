"""2,000 random calls: right where float32 can be, and finite wherever float64 is.

Small shapes, any mix of features, scores up to the end of float16's range and biases up
to those of their own dtypes.
"""

import numpy as np
import pytest

from tests.support import baseline, cases, native, reference_f64
from tests.support.kernel_check import (
    FORWARD,
    all_results,
    assert_result,
    run_case,
)

_PER_TEST = 100
_NUM_TESTS = 20
_IN_EVERY_RUN = 3
_REPORTED = 5
# A probability is the exponential of score - logsumexp, both float32: beyond this their
# difference says nothing any more, and only that the gradients are finite is asked.
_MEANINGFUL_LOGSUMEXP = 1e5


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(i, marks=() if i < _IN_EVERY_RUN else pytest.mark.slow)
        for i in range(_NUM_TESTS)
    ],
)
def test_random(part, kernels):
    failures = []
    for index in range(part * _PER_TEST, (part + 1) * _PER_TEST):
        failures += _failures(kernels, cases.random_case(index))
    assert not failures, (
        f"{len(failures)} results are wrong, the first {_REPORTED}:\n"
        + "\n".join(failures[:_REPORTED])
    )


@pytest.mark.parametrize("num_cases", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_random_with_every_instruction_set(num_cases, isa):
    failures = []
    for index in range(num_cases):
        failures += _failures(native.cpu, cases.random_case(index))
    assert not failures, "\n".join(failures[:_REPORTED])


def _failures(kernels, case):
    expected, plain = (all_results(judge, case) for judge in (reference_f64, baseline))
    logsumexp = expected.logsumexp[np.isfinite(expected.logsumexp)]
    is_meaningful = (np.abs(logsumexp) < _MEANINGFUL_LOGSUMEXP).all()
    failures = []
    for name, actual in run_case(kernels, case).present():
        try:
            assert_finite(actual, getattr(expected, name), name, case)
            if is_meaningful or name in FORWARD:
                assert_result(
                    *(case, name, actual),
                    *(getattr(judge, name) for judge in (expected, plain)),
                    context=f"{case.context}, {case}",
                )
        except AssertionError as failure:
            failures.append(str(failure))
    return failures


def assert_finite(actual, expected, name, case):
    """No NaN or inf where the exact result, rounded to the dtype, is finite."""
    with np.errstate(over="ignore"):
        should = np.isfinite(expected.astype(actual.dtype))
    broken = should & ~np.isfinite(actual)
    assert not broken.any(), (
        f"{name} of {case.context} is {actual[broken][0]} in {broken.sum()} of "
        f"{broken.size} elements where float64 has {expected[broken][0]}; {case}"
    )
