"""Runs a case through an implementation and compares every result with the reference.

An implementation is anything with `run_forward`, `run_backward` and `run_gradient` of
native.py's signatures: native itself, native.cpu, or a stub of the meta-test.
"""

import functools
from typing import NamedTuple

import numpy as np

from tests.support import baseline, reference_f64, tolerances
from tests.support.cases import DIFFERENTIABLE
from tests.support.compare import assert_matches
from tests.support.inputs import make_arguments, make_inputs


class Results(NamedTuple):
    """All results of a call; None for a gradient of what it has not."""

    out: np.ndarray
    logsumexp: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dbias: np.ndarray | None = None
    dsinks: np.ndarray | None = None
    dslopes: np.ndarray | None = None

    def present(self):
        """(name, array) of those that are there."""
        return [(name, x) for name, x in self._asdict().items() if x is not None]


FORWARD = ("out", "logsumexp")
BACKWARD = ("dquery", "dkey", "dvalue")
KIND = (
    {"out": tolerances.OUT, "logsumexp": tolerances.LOGSUMEXP}
    | dict.fromkeys(BACKWARD, tolerances.GRADIENT)
    | dict.fromkeys(DIFFERENTIABLE, tolerances.DBIAS)
)


def run(implementation, inputs, **arguments) -> Results:
    """Forward, then the other passes with the forward's own out and logsumexp."""
    out, logsumexp = implementation.run_forward(*inputs.operands, **arguments)
    saved = (*inputs.operands, out, logsumexp, inputs.dout, inputs.dlogsumexp)
    gradients = implementation.run_backward(*saved, **arguments)
    others = {
        name: implementation.run_gradient(operand, *saved, **arguments)
        for name, operand in DIFFERENTIABLE.items()
        if arguments.get(operand) is not None
    }
    return Results(out, logsumexp, *gradients, **others)


def run_case(implementation, case) -> Results:
    return run(implementation, make_inputs(case), **make_arguments(case))


def check_forward(implementation, case):
    operands, arguments = make_inputs(case).operands, make_arguments(case)
    actual = implementation.run_forward(*operands, **arguments)
    judges = (_forward(judge, case) for judge in (reference_f64, baseline))
    _compare(case, FORWARD, actual, *judges)


def check_backward(implementation, case):
    """Every gradient: those of the backward pass and those of the gradient pass."""
    names = (*BACKWARD, *case.gradients)
    results = run_case(implementation, case)
    judges = (_gradients(judge, case) for judge in (reference_f64, baseline))
    _compare(case, names, *([getattr(x, n) for n in names] for x in (results, *judges)))


def check(implementation, case) -> Results:
    """Everything; returns the results, for what else is to be said of them."""
    results = run_case(implementation, case)
    names = [name for name, _ in results.present()]
    assert names == [*FORWARD, *BACKWARD, *case.gradients]
    judges = (all_results(judge, case) for judge in (reference_f64, baseline))
    _compare(case, names, *([getattr(x, n) for n in names] for x in (results, *judges)))
    return results


def all_results(judge, case, arguments=None) -> Results:
    """What reference_f64 or baseline say to the case."""
    if arguments is None:
        return Results(*_forward(judge, case), *_gradients(judge, case))
    inputs = make_inputs(case)
    return Results(
        *judge.attention(*inputs.operands, **arguments),
        *judge.attention_gradients(*inputs, **arguments),
    )


# Kept, because judging takes longer than the kernels: cases are checked with several
# implementations.
_NUM_KEPT = 300


@functools.lru_cache(_NUM_KEPT)
def _forward(judge, case):
    return _read_only(
        judge.attention(*make_inputs(case).operands, **make_arguments(case))
    )


@functools.lru_cache(_NUM_KEPT)
def _gradients(judge, case):
    return _read_only(
        judge.attention_gradients(*make_inputs(case), **make_arguments(case))
    )


def _read_only(results):
    for array in results:
        if array is not None:
            array.flags.writeable = False
    return results


def size_of(name, case):
    """The `size` of a result for assert_matches.

    Dropout makes a few terms 1 / (1 - rate) times as large out of many.
    """
    size = _size_without_dropout(name, case)
    return size if name == "logsumexp" else size / (1 - case.dropout_rate)


def _size_without_dropout(name, case):
    if name == "dkey":
        num_groups = case.num_heads // case.num_kv_heads
        rows_per_key = case.q_len * num_groups / max(1, case.kv_len)
    elif name == "dquery":
        rows_per_key = 1.0
    elif name in DIFFERENTIABLE:
        return _size_of_feature_gradient(name, case)
    else:
        return 1.0
    return tolerances.score_gradient_size(
        case.options["scale"], case.width, rows_per_key
    )


def _size_of_feature_gradient(name, case):
    # Weight of one row among the elements: spread over its keys, or on one element.
    num_rows = case.num_summed(DIFFERENTIABLE[name]) / max(1, case.kv_len)
    distance = 1
    if name == "dslopes":
        distance = max(case.q_len + abs(case.q_offset), case.kv_len)
    return tolerances.feature_gradient_size(case.width, num_rows, distance)


def dtype_of(name, case):
    """The dtype that a result must have."""
    if name == "dbias":
        return tolerances.DTYPES[case.bias]
    if name in ("logsumexp", "dsinks", "dslopes"):
        return tolerances.FLOAT32
    return case.np_dtype


def assert_result(case, name, actual, expected, plain=None, **others):
    """assert_matches for a result of a case; `others` replace what follows from it."""
    arguments = {
        "kind": KIND[name],
        "dtype": case.np_dtype,
        "result_dtype": dtype_of(name, case),
        "context": case.context,
        "tolerance": case.tolerance,
        "size": size_of(name, case),
    }
    assert_matches(actual, expected, plain, name=name, **arguments | others)


def _compare(case, names, actual, expected, plain):
    for name, a, e, p in zip(names, actual, expected, plain, strict=True):
        assert_result(case, name, a, e, p)
