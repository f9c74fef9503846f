"""Strided operands and results: the same bits as dense ones, nothing else touched.

What lies between and behind the elements of an operand is NaN, so that reading it
shows; what lies between those of a result must still be there afterwards.
"""

import numpy as np
import pytest

from tests.support import cases, native
from tests.support.cases import DIFFERENTIABLE
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import BACKWARD, FORWARD, check, run

_GUARD = -77.0


def _heads_first(array, fill):
    """[*batch, heads, rows, width] in memory."""
    return np.swapaxes(np.ascontiguousarray(np.swapaxes(array, -3, -2)), -3, -2)


def _rows_first(array, fill):
    """[rows, *batch, heads, width] in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -3, 0)), 0, -3)


def _every_other_row(array, fill):
    return _inside(array, fill, rows=2, heads=1, padding=0)


def _packed_heads(array, fill):
    """One of three operands that lie head by head beside each other."""
    return _inside(array, fill, rows=1, heads=3, padding=0)


def _padded_width(array, fill):
    return _inside(array, fill, rows=1, heads=1, padding=3)


def _inside(array, fill, *, rows, heads, padding):
    *batch, num_rows, num_heads, width = array.shape
    shape = (*batch, num_rows * rows, num_heads * heads, width + padding)
    view = np.full(shape, fill, array.dtype)[..., ::rows, ::heads, :width]
    view[...] = array
    return view


LAYOUTS = [_heads_first, _rows_first, _every_other_row, _packed_heads, _padded_width]
STATISTICS = ("logsumexp", "dlogsumexp")

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
shapes = pytest.mark.parametrize(
    "case",
    [
        cases.Case(f"layout-{dtype}-q{q_len}", dtype=dtype, q_len=q_len, is_causal=True,
                   head_dim=20, value_head_dim=24, q_offset=16)
        for dtype in ("float32", "bfloat16")
        for q_len in (37, 5)
    ],
    ids=lambda case: case.id,
)  # fmt: skip


def _laid_out(name, array, layout, fill=np.nan):
    if name not in STATISTICS:
        return layout(array, fill)
    # [*batch, heads, rows] as [*batch, heads, rows, 1]: rows and heads change places.
    return np.swapaxes(
        layout(np.swapaxes(array, -2, -1)[..., None], fill)[..., 0], -2, -1
    )


@layouts
@shapes
def test_strided_operands(case, layout, kernels):
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    operands = {
        **inputs._asdict(),
        "out": expected.out,
        "logsumexp": expected.logsumexp,
    }
    strided = {n: _laid_out(n, x, layout) for n, x in operands.items()}
    assert any(x.strides != operands[n].strides for n, x in strided.items())
    forward = kernels.run_forward(
        *(strided[n] for n in native.FORWARD_OPERANDS), **case.options
    )
    backward = kernels.run_backward(
        *(strided[n] for n in native.BACKWARD_OPERANDS), **case.options
    )
    for name, actual in zip((*FORWARD, *BACKWARD), (*forward, *backward)):
        assert_identical(
            actual, getattr(expected, name), name=name, context=case.context
        )


@shapes
def test_report_33_dao_ailab_818(case, kernels):
    """Nobody may take the strides of one operand for those of another."""
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    operands = {
        **inputs._asdict(),
        "out": expected.out,
        "logsumexp": expected.logsumexp,
    }
    for name in native.BACKWARD_OPERANDS:
        changed = operands | {name: _laid_out(name, operands[name], _every_other_row)}
        actual = kernels.run_backward(
            *(changed[n] for n in native.BACKWARD_OPERANDS), **case.options
        )
        for result, a in zip(BACKWARD, actual):
            assert_identical(
                a,
                getattr(expected, result),
                name=result,
                context=f"{case.context} with strided {name}",
            )


@layouts
@shapes
def test_strided_results(case, layout, kernels, backend):
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    forward = dict(zip(native.FORWARD_OPERANDS, inputs.operands))
    saved = {"out": expected.out, "logsumexp": expected.logsumexp}
    cotangents = {"dout": inputs.dout, "dlogsumexp": inputs.dlogsumexp}
    for function, operands, names in [
        ("jfm_attention_forward", forward, FORWARD),
        ("jfm_attention_backward", forward | saved | cotangents, BACKWARD),
    ]:
        problem = native.make_problem(operands, backend=backend, **case.options)
        results = {}
        for name in names:
            empty = np.full_like(getattr(expected, name), np.nan)
            results[name] = _laid_out(name, empty, layout, fill=_GUARD)
            setattr(problem, name, native.make_tensor(name, results[name], case.batch))
        native.call(function, problem)
        for name, actual in results.items():
            assert_identical(
                actual, getattr(expected, name), name=name, context=case.context
            )
            _assert_guard(actual, name)


def _assert_guard(view, name):
    """Every element of the view's memory that is not the view's is as it was."""
    owner = view
    while owner.base is not None:
        owner = owner.base
    kept = view.copy()
    view[...] = _GUARD
    assert (owner == _GUARD).all(), f"{name}: wrote beside the result"
    view[...] = kept


@pytest.mark.parametrize("kv_len", [38, 39, 70])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("q_len", [1, 5, 8, 9])
def test_report_30_pytorch_169222(q_len, kv_len, head_dim, kernels):
    """Nothing is read behind the end: tails of blocks, NaN right behind every row."""
    case = cases.Case(
        f"behind-the-end-q{q_len}-k{kv_len}-d{head_dim}",
        dtype="float16",
        batch=(1,),
        q_len=q_len,
        kv_len=kv_len,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
    )
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    strided = inputs._replace(
        **{
            name: _laid_out(name, getattr(inputs, name), _padded_width)
            for name in inputs._fields
        }
    )
    for name, actual in run(kernels, strided, **case.options).present():
        assert_identical(
            actual, getattr(expected, name), name=name, context=case.context
        )


def test_report_29_pytorch_163597(kernels):
    """Permuted tiny heads: batch 84, 3 rows, 3 heads, all permuted."""
    case = cases.Case(
        "permuted", batch=(84,), q_len=3, kv_len=3, num_heads=3, num_kv_heads=3
    )
    check(kernels, case)
    inputs = make_inputs(case)
    expected = kernels.run_forward(*inputs.operands)
    actual = kernels.run_forward(*(_heads_first(x, None) for x in inputs.operands))
    for name, a, e in zip(FORWARD, actual, expected):
        assert_identical(a, e, name=name, context=case.id)


FEATURES = cases.EVERYTHING | {"feature_batch": {}}
with_features = pytest.mark.parametrize(
    "case",
    [
        cases.Case(f"feature-layout-q{q_len}", batch=(2, 3), q_len=q_len, kv_len=41,
                   num_heads=4, num_kv_heads=2, head_dim=16, **FEATURES)
        for q_len in (37, 5)
    ],
    ids=lambda case: case.id,
)  # fmt: skip


def _every_other(array, axis):
    """The same values on every other index of an axis; what is between is garbage."""
    shape = list(array.shape)
    shape[axis] *= 2
    garbage = {"f": np.nan, "b": True, "i": 3, "u": 3}[
        "f" if array.dtype.kind in "fV" else array.dtype.kind
    ]
    index = [slice(None)] * array.ndim
    index[axis] = slice(None, None, 2)
    view = np.full(shape, garbage, array.dtype)[tuple(index)]
    view[...] = array
    return view


def _axes_of(name, array):
    """The axes that may have any stride: not the dense last one of some."""
    dense = name in ("bias", "mask", "dropout_key")
    return range(array.ndim - dense)


@with_features
def test_strided_features(case, kernels):
    """Each operand with each of its axes stretched, alone."""
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    for name in case.features:
        for axis in _axes_of(name, arguments[name]):
            view = _every_other(arguments[name], axis)
            actual = run(kernels, inputs, **arguments | {name: view})
            for result, array in actual.present():
                assert_identical(
                    array,
                    getattr(expected, result),
                    name=result,
                    context=f"{case.context} with {name} stretched along {axis}",
                )


@with_features
@pytest.mark.parametrize("operand", ["bias", "mask"])
def test_transposed_heads_and_batch(operand, case, kernels):
    """Heads outermost in memory, as a transposed view."""
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    array = arguments[operand]
    for order in [(2, 0, 1, 3, 4), (1, 0, 2, 3, 4), (3, 2, 1, 0, 4)]:
        back = np.argsort(order)
        view = np.ascontiguousarray(array.transpose(order)).transpose(back)
        actual = run(kernels, inputs, **arguments | {operand: view})
        for result, got in actual.present():
            assert_identical(
                got, getattr(expected, result), name=result, context=case.context
            )


@with_features
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_strided_gradients_of_features(name, case, kernels, backend):
    """Into every other element along each axis; the others keep what they had."""
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    of, wanted = DIFFERENTIABLE[name], getattr(expected, name)
    values = (*inputs.operands, expected.out, expected.logsumexp)
    values += (inputs.dout, inputs.dlogsumexp)
    operands = dict(zip(native.BACKWARD_OPERANDS, values))
    for axis in _axes_of(of, wanted):
        problem = native.make_problem(operands, backend=backend, **arguments)
        native.attach_gradient(problem, of, arguments[of])
        shape = list(wanted.shape)
        shape[axis] *= 2
        index = [slice(None)] * wanted.ndim
        index[axis] = slice(None, None, 2)
        view = np.full(shape, _GUARD, wanted.dtype)[tuple(index)]
        view[...] = np.nan
        problem.gradient = native.make_tensor(of, view, case.batch)
        native.call("jfm_attention_gradient", problem)
        assert_identical(
            view, wanted, name=name, context=f"{case.context}, axis {axis}"
        )
        _assert_guard(view, name)


@pytest.mark.parametrize("q_len", [37, 5])
def test_nothing_of_a_feature_is_read_behind_the_end(q_len, kernels):
    """Bias and mask that end with their memory's page; ids that end before poison."""
    case = cases.Case(f"feature-end-q{q_len}", batch=(1,), q_len=q_len, kv_len=39,
                      num_heads=2, num_kv_heads=1, head_dim=16, mask="random",
                      bias="float32", segments="packed")  # fmt: skip
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    padded = {
        "bias": np.full((1, 2, q_len + 30, 39 + 30), np.nan, np.float32),
        "mask": np.ones((1, 2, q_len + 30, 39 + 30), bool),
    }
    for name, memory in padded.items():
        memory[..., :q_len, :39] = arguments[name]
        view = memory[..., :q_len, :39]
        actual = run(kernels, inputs, **arguments | {name: view})
        for result, array in actual.present():
            assert_identical(
                array, getattr(expected, result), name=result, context=case.context
            )
