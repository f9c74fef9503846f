"""Element offsets beyond 32 bits, in sparse memory of which a few pages exist."""

import mmap
import sys

import numpy as np
import pytest

from tests.support import cases, native, reference_f64
from tests.support.compare import assert_identical, assert_matches
from tests.support.inputs import make_inputs
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
def test_far_strides(far, axis, q_len):
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
    expected = run(native, inputs, **case.options)
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
        problem = native.make_problem(operands, **case.options)
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


def test_more_than_2_31_scores():
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
    results = run(native, inputs, **case.options)
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
