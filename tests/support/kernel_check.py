"""Runs a case through an implementation and compares every result with the reference.

An implementation is anything with `run_forward` and `run_backward` of native.py's
signatures: native itself, or a stub of the meta-test.
"""

from typing import NamedTuple

import numpy as np

from tests.support import baseline, reference_f64, tolerances
from tests.support.compare import assert_matches
from tests.support.inputs import make_inputs


class Results(NamedTuple):
    out: np.ndarray
    logsumexp: np.ndarray
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray


FORWARD = ("out", "logsumexp")
BACKWARD = ("dquery", "dkey", "dvalue")
KIND = {"out": tolerances.OUT, "logsumexp": tolerances.LOGSUMEXP} | dict.fromkeys(
    BACKWARD, tolerances.GRADIENT
)


def run(implementation, inputs, **options) -> Results:
    """Forward, then backward with the forward's own out and logsumexp."""
    out, logsumexp = implementation.run_forward(*inputs.operands, **options)
    gradients = implementation.run_backward(
        *inputs.operands, out, logsumexp, inputs.dout, inputs.dlogsumexp, **options
    )
    return Results(out, logsumexp, *gradients)


def check_forward(implementation, case):
    inputs = make_inputs(case)
    actual = implementation.run_forward(*inputs.operands, **case.options)
    _compare(
        case,
        FORWARD,
        actual,
        reference_f64.attention(*inputs.operands, **case.options),
        baseline.attention(*inputs.operands, **case.options),
    )


def check_backward(implementation, case):
    inputs = make_inputs(case)
    results = run(implementation, inputs, **case.options)
    arguments = (*inputs.operands, inputs.dout, inputs.dlogsumexp)
    _compare(
        case,
        BACKWARD,
        results[2:],
        reference_f64.attention_gradients(*arguments, **case.options)[:3],
        baseline.attention_gradients(*arguments, **case.options)[:3],
    )


def check(implementation, case):
    check_forward(implementation, case)
    check_backward(implementation, case)


def size_of(name, case):
    """The `size` of a result for assert_matches."""
    if name not in ("dquery", "dkey"):
        return 1.0
    rows_per_key = 1.0
    if name == "dkey":
        num_groups = case.num_heads // case.num_kv_heads
        rows_per_key = case.q_len * num_groups / max(1, case.kv_len)
    return tolerances.score_gradient_size(
        case.options["scale"], case.width, rows_per_key
    )


def _compare(case, names, actual, expected, plain):
    for name, a, e, p in zip(names, actual, expected, plain, strict=True):
        assert_matches(
            a,
            e,
            p,
            name=name,
            kind=KIND[name],
            dtype=case.np_dtype,
            context=case.context,
            tolerance=case.tolerance,
            size=size_of(name, case),
        )
