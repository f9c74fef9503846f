"""The same bits from run to run and for every number of threads, in both passes."""

import pytest

from tests.support import cases, native
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import run

CASES = [
    *cases.CURATED,
    *(
        cases.Case(f"short-{dtype}", dtype=dtype, q_len=4, kv_len=500)
        for dtype in ("float32", "float16", "bfloat16")
    ),
    cases.Case("many-groups", num_heads=24, num_kv_heads=3, q_len=100, kv_len=100),
]


@pytest.fixture
def set_threads():
    yield native.set_threads
    native.set_threads(0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bits_repeat(case, set_threads):
    inputs = make_inputs(case)
    set_threads(1)
    expected = run(native, inputs, **case.options)
    for threads in (1, 2, 5):
        set_threads(threads)
        actual = run(native, inputs, **case.options)
        for name, array in actual._asdict().items():
            assert_identical(
                array,
                getattr(expected, name),
                name=name,
                context=f"{case.context}, {threads} threads",
            )


def test_bits_do_not_depend_on_the_neighbours():
    """A batch element has the bits that it has alone, also in split kernels."""
    for q_len in (37, 5):
        case = cases.Case(f"neighbours-q{q_len}", batch=(3,), q_len=q_len, kv_len=300)
        inputs = make_inputs(case)
        together = run(native, inputs, **case.options)
        alone = run(native, type(inputs)(*(x[1:2] for x in inputs)), **case.options)
        for name, array in alone._asdict().items():
            assert_identical(
                array, getattr(together, name)[1:2], name=name, context=case.context
            )
