"""Element offsets beyond 32 bits, in sparse memory of which a few pages exist."""

import mmap
import sys

import numpy as np
import pytest

from tests.support import cases, native, reference_f64
from tests.support.cases import DIFFERENTIABLE
from tests.support.compare import assert_identical, assert_matches
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import BACKWARD, FORWARD, KIND, run

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32,
    reason="needs 64-bit Linux to reserve memory without having it",
)

_MAP_NORESERVE = 0x4000  # Linux; in the mmap module from Python 3.13 only
_FAR = 2**32 + 64  # offset in elements of the last index along the far axis


def _spread(array, axis):
    """The same values, with `axis` walking over more than 2**32 elements."""
    size = array.shape[axis]
    assert size > 1
    far = -(-_FAR // (size - 1))
    inner = 1
    strides = [0] * array.ndim
    for i in reversed(range(array.ndim)):
        strides[i] = far if i == axis % array.ndim else inner
        if i != axis % array.ndim:
            inner *= array.shape[i]
    assert inner <= far
    extent = far * (size - 1) + inner
    memory = mmap.mmap(
        -1,
        extent * array.itemsize,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
    )
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, array.dtype),
        array.shape,
        [s * array.itemsize for s in strides],
    )
    view[...] = array
    return view


@pytest.mark.parametrize("q_len", [33, 5])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "far", [*native.BACKWARD_OPERANDS, *(f"result-{n}" for n in (*FORWARD, *BACKWARD))]
)
def test_far_strides(far, axis, q_len, kernels, backend):
    case = cases.Case(
        f"far-q{q_len}",
        dtype="float16",
        q_len=q_len,
        kv_len=34,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        is_causal=True,
    )
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    forward = dict(zip(native.FORWARD_OPERANDS, inputs.operands))
    saved = {"out": expected.out, "logsumexp": expected.logsumexp}
    cotangents = {"dout": inputs.dout, "dlogsumexp": inputs.dlogsumexp}
    backward = forward | saved | cotangents
    for function, operands, names in [
        ("jfm_attention_forward", forward, FORWARD),
        ("jfm_attention_backward", backward, BACKWARD),
    ]:
        results = {n: np.full_like(getattr(expected, n), np.nan) for n in names}
        name = far.removeprefix("result-")
        if far != name and name in results:
            results[name] = _spread(results[name], axis)
        elif far in operands:
            operands = operands | {far: _spread(operands[far], axis)}
        else:
            continue  # this pass has no such tensor
        problem = native.make_problem(operands, backend=backend, **case.options)
        for name, result in results.items():
            setattr(problem, name, native.make_tensor(name, result, case.batch))
        native.call(function, problem)
        for name, actual in results.items():
            assert_identical(
                actual,
                getattr(expected, name),
                name=name,
                context=f"{case.context}, {far} far along axis {axis}",
            )


def test_more_than_2_31_scores(kernels):
    """q_len * kv_len beyond 2**31, of which the causal mask leaves a corner."""
    length, seen = 50_000, 70
    case = cases.Case(
        "many-scores",
        batch=(),
        q_len=length,
        kv_len=length,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        is_causal=True,
        q_offset=seen - length,
    )
    inputs = make_inputs(case)
    results = run(kernels, inputs, **case.options)
    rows, keys = slice(length - seen, None), slice(0, seen)
    corner = {
        "query": inputs.query[rows],
        "key": inputs.key[keys],
        "value": inputs.value[keys],
    }
    options = case.options | {"q_offset": 0}
    expected = reference_f64.attention(**corner, **options)
    gradients = reference_f64.attention_gradients(
        **corner,
        dout=inputs.dout[rows],
        dlogsumexp=inputs.dlogsumexp[:, rows],
        **options,
    )
    corners = {
        "out": (rows, expected.out),
        "logsumexp": ((slice(None), rows), expected.logsumexp),
        "dquery": (rows, gradients.dquery),
        "dkey": (keys, gradients.dkey),
        "dvalue": (keys, gradients.dvalue),
    }
    for name, (index, reference) in corners.items():
        actual = getattr(results, name)
        assert_matches(
            actual[index],
            reference,
            None,
            name=name,
            kind=KIND[name],
            dtype=case.np_dtype,
            context=case.context,
        )
        outside = np.ones(actual.shape, bool)
        outside[index] = False
        hidden = -np.inf if name == "logsumexp" else 0
        assert (actual[outside] == hidden).all(), name


@pytest.mark.parametrize("q_len", [33, 5])
def test_report_25_mlx_2894(q_len, kernels):
    """64-bit offsets: every operand of a feature, far along each axis."""
    case = cases.Case(
        f"far-features-q{q_len}",
        dtype="float16",
        q_len=q_len,
        kv_len=34,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        **cases.EVERYTHING | {"feature_batch": {}, "mask_ones": ""},
    )
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    for name in case.features:
        array = arguments[name]
        for axis in range(array.ndim - (name in ("bias", "mask", "dropout_key"))):
            far = arguments | {name: _spread(array, axis)}
            for result, actual in run(kernels, inputs, **far).present():
                assert_identical(
                    actual,
                    getattr(expected, result),
                    name=result,
                    context=f"{case.context}, {name} far along axis {axis}",
                )


@pytest.mark.parametrize("q_len", [33, 5])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_far_gradients_of_features(name, q_len, kernels, backend):
    case = cases.Case(
        f"far-gradient-q{q_len}", q_len=q_len, kv_len=34, num_heads=4, num_kv_heads=2,
        head_dim=16, bias="float16", sinks=True, slopes=True,
    )  # fmt: skip
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    of, wanted = DIFFERENTIABLE[name], getattr(expected, name)
    values = (*inputs.operands, expected.out, expected.logsumexp)
    values += (inputs.dout, inputs.dlogsumexp)
    operands = dict(zip(native.BACKWARD_OPERANDS, values))
    for axis in range(wanted.ndim - (of == "bias")):
        problem = native.make_problem(operands, backend=backend, **arguments)
        native.attach_gradient(problem, of, arguments[of])
        far = _spread(np.full_like(wanted, np.nan), axis)
        problem.gradient = native.make_tensor(of, far, case.batch)
        native.call("jfm_attention_gradient", problem)
        assert_identical(far, wanted, name=name, context=f"{case.context}, axis {axis}")


@pytest.mark.slow
@pytest.mark.parametrize("operand", ["mask", "bias"])
def test_report_25_mlx_2894_whole(operand, kernels):
    """A dense mask or bias of [1, 1, 46400, 46400] that shows a corner.

    Its pages exist only where something is visible. (A bias of float16, whose zeros are
    ordinary numbers: the causal offset hides the rest.)
    """
    length, seen = 46_400, 70
    case = cases.Case(
        f"many-elements-{operand}", batch=(1,), q_len=length, kv_len=length,
        num_heads=1, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    inputs = make_inputs(case)
    rng = np.random.default_rng(case.seed)
    dtype = np.dtype(bool if operand == "mask" else np.float16)
    memory = mmap.mmap(
        -1,
        length * length * dtype.itemsize,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
    )
    array = np.frombuffer(memory, dtype).reshape(1, 1, length, length)
    rows = slice(length - seen, None)
    if operand == "mask":  # the last rows see some of the last keys
        keys = slice(length - seen, None)
        corner = rng.random((1, 1, seen, seen)) < 0.5
        whole, options = {}, {}
    else:  # the last rows see the first keys
        keys = slice(0, seen)
        corner = rng.standard_normal((1, 1, seen, seen)).astype(dtype)
        whole = {"is_causal": True, "q_offset": seen - length}
        options = {"is_causal": True}
    array[..., rows, keys] = corner
    whole[operand] = array
    out, logsumexp = kernels.run_forward(*inputs.operands, **whole)
    # No gradient of the bias: it would have so many elements that exist.
    dquery, dkey, dvalue = kernels.run_backward(
        *inputs.operands, out, logsumexp, inputs.dout, inputs.dlogsumexp, **whole
    )
    few = [x[:, part] for x, part in zip(inputs, (rows, keys, keys, rows))]
    options |= {operand: corner}
    expected = reference_f64.attention(*few[:3], **options)
    gradients = reference_f64.attention_gradients(
        *few, inputs.dlogsumexp[..., rows], **options
    )
    for name, actual, wanted in [
        ("out", out[:, rows], expected.out),
        ("logsumexp", logsumexp[..., rows], expected.logsumexp),
        ("dquery", dquery[:, rows], gradients.dquery),
        ("dkey", dkey[:, keys], gradients.dkey),
        ("dvalue", dvalue[:, keys], gradients.dvalue),
    ]:
        assert_matches(actual, wanted, None, name=name, kind=KIND[name],
                       dtype=case.np_dtype, context=case.context)  # fmt: skip
    assert not out[:, : length - seen].any()
    assert np.isneginf(logsumexp[..., : length - seen]).all()
