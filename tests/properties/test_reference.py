"""The pairs of features that the kernels are tested with, at our own reference."""

import jax
import pytest

from tests.support import cases, reference_run
from tests.support.kernel_check import check


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.pairwise_features(), ids=lambda case: case.id)
def test_pairwise_features(case):
    with jax.disable_jit():  # every case would compile programs of its own
        check(reference_run, case)
