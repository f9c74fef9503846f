"""Properties of the kernels, through the C ABI, in both passes and all gradients."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import bounded, calls
from tests.support import native
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import (
    BACKWARD,
    Results,
    assert_result,
    check,
    run,
    size_of,
)

libraries = pytest.mark.parametrize(
    "library",
    [pytest.param(native, id="metal"), pytest.param(native.cpu, id="cpu")],
)

# Options whose meaning depends on where a key stands.
POSITIONAL = ("is_causal", "sliding_window", "slopes", "traced_offset", "q_offset")


def _assert_close(case, actual: Results, expected: Results):
    """Two ways to the same results: of one tolerance, spent by both."""
    for name, array in actual.present():
        wanted = getattr(expected, name).astype(np.float64)
        assert_result(case, name, array, wanted, context=f"{case.context}, {case}")


@libraries
@bounded(80)
@given(calls())
def test_any_call_is_right(library, case):
    check(library, case)


@pytest.mark.slow
@libraries
@bounded(1000)
@given(calls())
def test_any_of_many_calls_is_right(library, case):
    check(library, case)


@libraries
@bounded(20)
@given(calls())
def test_bits_repeat(library, case):
    inputs, arguments = make_inputs(case), make_arguments(case)
    first = run(library, inputs, **arguments)
    for name, array in run(library, inputs, **arguments).present():
        assert_identical(array, getattr(first, name), name=name, context=case.context)


@libraries
@bounded(30)
@given(calls(without=(*POSITIONAL, "kv_lengths", "dropout_rate")), st.data())
def test_keys_have_no_order(library, case, data):
    """Keys permuted with their values and columns: the same, and gradients permuted."""
    order = np.array(data.draw(st.permutations(range(case.kv_len))))
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(library, inputs, **arguments)
    permuted = inputs._replace(
        key=inputs.key[..., order, :, :], value=inputs.value[..., order, :, :]
    )
    columns = ("bias", "mask", "kv_segment_ids")
    others = {
        name: np.ascontiguousarray(x[..., order])
        if name in columns and x.shape[-1] == case.kv_len
        else x
        for name, x in arguments.items()
    }
    actual = run(library, permuted, **others)
    back = np.argsort(order)
    actual = actual._replace(
        dkey=actual.dkey[..., back, :, :], dvalue=actual.dvalue[..., back, :, :]
    )
    if actual.dbias is not None and actual.dbias.shape[-1] == case.kv_len:
        actual = actual._replace(dbias=actual.dbias[..., back])
    _assert_close(case, actual, expected)


@libraries
@bounded(30)
@given(calls(without=("sinks", "kv_lengths", "dropout_rate")), st.data())
def test_parts_of_the_keys_add_up(library, case, data):
    """Forward: merged by logsumexp. Backward: with the whole's out and logsumexp the
    parts' dquery add up, and dkey and dvalue are those of the whole."""
    cut = data.draw(st.integers(0, case.kv_len))
    inputs, arguments = make_inputs(case), make_arguments(case)
    whole = run(library, inputs, **arguments)
    saved = (whole.out, whole.logsumexp, inputs.dout, inputs.dlogsumexp)
    outs, logsumexps, gradients = [], [], []
    for keys in (slice(0, cut), slice(cut, None)):
        operands = (
            inputs.query,
            inputs.key[..., keys, :, :],
            inputs.value[..., keys, :, :],
        )
        part = dict(arguments)
        # Positions are counted from the part's first key.
        part["q_offset"] = arguments["q_offset"] - (keys.start or 0)
        for name in ("bias", "mask", "kv_segment_ids"):
            if name in part and part[name].shape[-1] == case.kv_len:
                part[name] = part[name][..., keys]
        out, logsumexp = library.run_forward(*operands, **part)
        outs.append(np.swapaxes(out.astype(np.float64), -2, -3))
        logsumexps.append(logsumexp.astype(np.float64))
        gradients.append(library.run_backward(*operands, *saved, **part))
    with np.errstate(invalid="ignore"):
        total = np.logaddexp(*logsumexps)
        weights = [np.where(np.isneginf(x), 0, np.exp(x - total)) for x in logsumexps]
    out = sum(w[..., None] * o for w, o in zip(weights, outs))
    (dquery0, dkey0, dvalue0), (dquery1, dkey1, dvalue1) = gradients
    merged = Results(
        np.swapaxes(out, -2, -3).astype(case.np_dtype),
        total.astype(np.float32),
        (dquery0.astype(np.float64) + dquery1).astype(case.np_dtype),
        np.concatenate([dkey0, dkey1], axis=-3),
        np.concatenate([dvalue0, dvalue1], axis=-3),
    )
    _assert_close(case, merged, whole)


@libraries
@bounded(20)
@given(calls(without=("logits_soft_cap", "sinks", "bias_values")))
def test_a_constant_bias_shifts_logsumexp(library, case):
    case = dataclasses.replace(case, bias="float32")
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(library, inputs, **arguments)
    shift = np.float32(3.0)
    shifted = arguments | {"bias": arguments["bias"] + shift}
    actual = run(library, inputs, **shifted)
    actual = actual._replace(logsumexp=actual.logsumexp - shift)
    _assert_close(case, actual, expected)


@libraries
@bounded(30)
@given(
    calls(without=("query_lengths", "kv_lengths")),
    st.integers(0, 40),
    st.integers(0, 9),
)
def test_padding_with_lengths_changes_nothing(library, case, more_keys, more_queries):
    """Whatever stands in the padding, which gets no gradient."""
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(library, inputs, **arguments)

    def pad(array, axis, count, fill):
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, count)
        return np.pad(array, widths, constant_values=fill)

    padded = type(inputs)(
        pad(inputs.query, -3, more_queries, np.nan),
        pad(inputs.key, -3, more_keys, np.nan),
        pad(inputs.value, -3, more_keys, np.nan),
        pad(inputs.dout, -3, more_queries, np.nan),
        pad(inputs.dlogsumexp, -1, more_queries, np.nan),
    )
    others = dict(arguments)
    for name, fill in (("bias", np.nan), ("mask", True)):
        if name in others:
            ones = case.bias_ones if name == "bias" else case.mask_ones
            if "t" not in ones:
                others[name] = pad(others[name], -2, more_queries, fill)
            if "s" not in ones:
                others[name] = pad(others[name], -1, more_keys, fill)
    if case.segments:
        others["q_segment_ids"] = pad(others["q_segment_ids"], -1, more_queries, 0)
        others["kv_segment_ids"] = pad(others["kv_segment_ids"], -1, more_keys, 0)
    lengths = (1,) * len(case.batch)
    actual = run(
        library,
        padded,
        **others,
        query_seq_lengths=np.full(lengths, case.q_len, np.int32),
        key_value_seq_lengths=np.full(lengths, case.kv_len, np.int32),
    )
    queries, keys = slice(case.q_len, None), slice(case.kv_len, None)
    for array, part in [(actual.out, queries), (actual.dquery, queries),
                        (actual.dkey, keys), (actual.dvalue, keys)]:  # fmt: skip
        assert (array[..., part, :, :] == 0).all()
    assert np.isneginf(actual.logsumexp[..., queries]).all()
    unpadded = Results(
        actual.out[..., : case.q_len, :, :],
        actual.logsumexp[..., : case.q_len],
        actual.dquery[..., : case.q_len, :, :],
        actual.dkey[..., : case.kv_len, :, :],
        actual.dvalue[..., : case.kv_len, :, :],
        None if actual.dbias is None else _front(actual.dbias, expected.dbias.shape),
        actual.dsinks,
        actual.dslopes,
    )
    _assert_close(case, unpadded, expected)
    if actual.dbias is not None:
        beside = actual.dbias.copy()
        beside[tuple(slice(0, size) for size in expected.dbias.shape)] = 0
        assert (beside == 0).all()


def _front(array, shape):
    return array[tuple(slice(0, size) for size in shape)]


PACKED = (
    "segments",
    "query_lengths",
    "kv_lengths",
    "mask",
    "traced_offset",
    "dropout_rate",
)


@libraries
@bounded(30)
@given(calls(without=PACKED, max_batch_dims=1), st.integers(2, 3))
def test_packed_sequences_are_the_separate_ones(library, case, count):
    """`count` sequences of one length behind each other, told apart by ids."""
    case = dataclasses.replace(case, bias_ones=case.bias_ones.replace("s", ""))
    case = dataclasses.replace(case, bias_ones=case.bias_ones.replace("t", ""))
    # One offset for all: query i of a sequence stands at key i of it, if sizes agree.
    case = dataclasses.replace(case, kv_len=case.q_len)
    sequences = []
    for i in range(count):
        one = dataclasses.replace(case, id=f"{case.id}-sequence{i}")
        sequences.append((make_inputs(one), make_arguments(one)))
    shared = {n: x for n, x in sequences[0][1].items() if n != "bias"}
    alone = []
    for inputs, arguments in sequences:
        own = {"bias": arguments["bias"]} if case.bias else {}
        alone.append(run(library, inputs, **shared | own))
    packed = type(sequences[0][0])(
        *(
            np.concatenate([getattr(inputs, name) for inputs, _ in sequences], axis)
            for name, axis in zip(sequences[0][0]._fields, (-3, -3, -3, -3, -1))
        )
    )
    one_batch = (1,) * len(case.batch)
    ids = np.repeat(np.arange(count), case.q_len).astype(np.int32)
    ids = ids.reshape(*one_batch, -1)
    if case.bias:
        blocks = [arguments["bias"] for _, arguments in sequences]
        length = case.q_len
        bias = np.full(
            (*blocks[0].shape[:-2], count * length, count * length),
            np.nan,
            blocks[0].dtype,
        )
        for i, block in enumerate(blocks):
            part = slice(i * length, (i + 1) * length)
            bias[..., part, part] = block
        shared["bias"] = bias
    whole = run(library, packed, **shared, q_segment_ids=ids, kv_segment_ids=ids)
    for i, expected in enumerate(alone):
        part = slice(i * case.q_len, (i + 1) * case.q_len)
        actual = Results(
            whole.out[..., part, :, :],
            whole.logsumexp[..., part],
            *(getattr(whole, name)[..., part, :, :] for name in BACKWARD),
            None if whole.dbias is None else whole.dbias[..., part, part],
        )
        _assert_close(case, actual, expected)
    for name in ("dsinks", "dslopes"):
        if getattr(whole, name) is not None:
            total = sum(getattr(x, name).astype(np.float64) for x in alone)
            rows = dataclasses.replace(case, q_len=count * case.q_len)
            assert_result(
                *(case, name, getattr(whole, name), total),
                context=f"{case.context}, {case}",
                size=size_of(name, rows),
            )


@libraries
@bounded(20)
@given(calls(without=("dropout_rate",)))
def test_grouped_heads_are_repeated_heads(library, case):
    """Keys and values repeated per query head; their gradients then sum."""
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(library, inputs, **arguments)
    groups = case.num_heads // case.num_kv_heads
    repeated = inputs._replace(
        key=np.repeat(inputs.key, groups, axis=-2),
        value=np.repeat(inputs.value, groups, axis=-2),
    )
    actual = run(library, repeated, **arguments)

    def summed(gradient):
        shape = (*gradient.shape[:-2], case.num_kv_heads, groups, gradient.shape[-1])
        total = gradient.astype(np.float64).reshape(shape).sum(-2)
        return total.astype(case.np_dtype)

    actual = actual._replace(dkey=summed(actual.dkey), dvalue=summed(actual.dvalue))
    _assert_close(case, actual, expected)
