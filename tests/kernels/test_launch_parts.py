"""A long launch is cut into several, so that no GPU is busy with one for seconds.

The limit is lowered here until small problems are cut. Parts are of the grid: the bits
must be those of the whole, wherever it is cut.
"""

import math

import pytest

from tests.support import cases, native
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import run

CASES = [
    cases.Case("heads-f32", batch=(3,), q_len=37, kv_len=70, head_dim=24),
    cases.Case("causal-f16", dtype="float16", q_len=100, kv_len=90, is_causal=True),
    cases.Case("one-head-bf16", dtype="bfloat16", batch=(), q_len=130, kv_len=150,
               num_heads=1, num_kv_heads=1),
    cases.Case("several-batches-f32", batch=(2, 3), query_batch=(2, 1), q_len=40),
    cases.Case("short-f32", batch=(2,), q_len=5, kv_len=700),
    cases.Case("outer-batches-f16", dtype="float16", batch=(2, 2, 2, 2, 2), q_len=9,
               kv_len=11, head_dim=8, query_batch=(2, 1, 2, 1, 2),
               key_batch=(1, 2, 1, 2, 1), value_batch=(2, 1, 1, 2, 2)),
    cases.Case("everything-f32", q_len=70, kv_len=90, head_dim=16, **cases.EVERYTHING),
    cases.Case("everything-short-f16", dtype="float16", q_len=6, kv_len=200,
               head_dim=16, **cases.EVERYTHING),
]  # fmt: skip


def _num_launches(inputs, options):
    operands = dict(zip(native.FORWARD_OPERANDS, inputs.operands))
    problem = native.make_problem(operands, **options)
    native.attach_results(problem, operands, native.FORWARD_RESULTS)
    return native.num_launches(problem, False)


def _forward_work(case):
    """Operations of S = QKᵀ and O = PV over all pairs."""
    batch = 1
    for size in case.batch:
        batch *= size
    pairs = batch * case.num_heads * case.q_len * case.kv_len
    return 2 * pairs * (case.head_dim + case.width)


@pytest.mark.parametrize("parts", [2, 3, 7, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_parts_give_the_same_bits(case, parts):
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(native, inputs, **arguments)
    whole = _num_launches(inputs, arguments)
    with native.planning(max_launch_work=_forward_work(case) / parts):
        if not case.is_causal and "outer" not in case.id:
            assert _num_launches(inputs, arguments) > whole
        actual = run(native, inputs, **arguments)
    for name, array in actual.present():
        context = f"{case.context}, {parts} parts"
        assert_identical(array, getattr(expected, name), name=name, context=context)


def test_no_part_is_too_large():
    """Without a mask, n times the limit makes at least n parts, and not many more."""
    case = cases.Case("counted", batch=(4,), q_len=64, kv_len=64)
    inputs = make_inputs(case)
    for parts in (1, 2, 4, 8, 24):
        with native.planning(max_launch_work=_forward_work(case) / parts * 1.001):
            launches = _num_launches(inputs, case.options)
        assert parts <= launches <= 2 * parts


def test_causal_work_is_what_is_visible():
    """A causal call has half the pairs, so half the parts."""
    full = cases.Case("full", batch=(16,), q_len=64, kv_len=64)
    causal = cases.Case("causal", batch=(16,), q_len=64, kv_len=64, is_causal=True)
    with native.planning(max_launch_work=_forward_work(full) / 16 * 1.05):
        counts = [_num_launches(make_inputs(c), c.options) for c in (full, causal)]
    assert counts == [16, 8]


def test_the_default_cuts_nothing_small():
    case = cases.Case("uncut", batch=(2,), q_len=512, kv_len=512)
    assert _num_launches(make_inputs(case), case.options) == 1


def test_every_kernel_is_named_once_however_often_it_is_launched():
    """The proof of the kernels goes by the names: none may be lost among the others."""
    case = cases.Case("named", batch=(2,), q_len=128, kv_len=120)
    inputs = make_inputs(case)
    values = (*inputs.operands, *(2 * (inputs.dout, inputs.dlogsumexp)))
    operands = dict(zip(native.BACKWARD_OPERANDS, values))
    problem = native.make_problem(operands, **case.options)
    native.attach_results(problem, operands, native.BACKWARD_RESULTS)
    launches = native.plan(problem, True)["launches"]
    names = native.kernels(problem, True)
    assert names == [launch["kernel"] for launch in launches]
    with native.planning(max_launch_work=1):
        # One per threadgroup, but for a launch that has next to no work.
        assert native.num_launches(problem, True) == sum(
            math.prod(launch["grid"]) if launch["work"] else 1 for launch in launches
        )
        assert native.kernels(problem, True) == names


def test_launches_of_a_bad_problem():
    with pytest.raises(native.NativeError, match="q_len must be at least 0"):
        native.num_launches(native.Problem(q_len=-1), False)
