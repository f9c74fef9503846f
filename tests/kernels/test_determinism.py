"""The same bits from run to run and for every number of threads, in both passes."""

import numpy as np
import pytest

from tests.support import cases
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import run, run_case

CASES = [
    *cases.CURATED,
    *(
        cases.Case(f"short-{dtype}", dtype=dtype, q_len=4, kv_len=500)
        for dtype in ("float32", "float16", "bfloat16")
    ),
    cases.Case("many-groups", num_heads=24, num_kv_heads=3, q_len=100, kv_len=100),
    *(case for case in cases.FEATURES if case.id.startswith("everything")),
    *cases.SHARED,
    cases.Case("summed-parts", batch=(5,), q_len=70, kv_len=90, head_dim=8,
               bias="float16", bias_ones="nt", slopes=True, sinks=True, feature_batch={
                   "bias": (1,), "alibi_slopes": (1,), "sinks": (1,)}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_report_35_dao_ailab_429(case, set_threads, kernels):
    set_threads(1)
    expected = run_case(kernels, case)
    for threads in (1, 2, 5):
        set_threads(threads)
        actual = run_case(kernels, case)
        for name, array in actual.present():
            assert_identical(
                array,
                getattr(expected, name),
                name=name,
                context=f"{case.context}, {threads} threads",
            )


def test_bits_do_not_depend_on_the_neighbours(kernels):
    """A batch element has the bits that it has alone, also in split kernels."""
    for q_len in (37, 5):
        case = cases.Case(f"neighbours-q{q_len}", batch=(3,), q_len=q_len, kv_len=300)
        inputs = make_inputs(case)
        together = run(kernels, inputs, **case.options)
        alone = run(kernels, type(inputs)(*(x[1:2] for x in inputs)), **case.options)
        for name, array in alone.present():
            assert_identical(
                array, getattr(together, name)[1:2], name=name, context=case.context
            )


@pytest.mark.parametrize("q_len", [37, 5])
def test_features_do_not_depend_on_the_neighbours(q_len, kernels):
    case = cases.Case(
        f"feature-neighbours-q{q_len}",
        batch=(3,),
        q_len=q_len,
        kv_len=100,
        head_dim=16,
        **cases.EVERYTHING | {"feature_batch": {}},
    )
    inputs, arguments = make_inputs(case), make_arguments(case)
    together = run(kernels, inputs, **arguments)
    one = {n: x[1:2] if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    alone = run(kernels, type(inputs)(*(x[1:2] for x in inputs)), **one)
    for name, array in alone.present():
        assert_identical(
            array, getattr(together, name)[1:2], name=name, context=case.context
        )
