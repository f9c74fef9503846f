"""What logsumexp means, and that its cotangent reaches every gradient."""

import numpy as np
import pytest

from tests.support import cases, reference_f64, tolerances
from tests.support.compare import assert_matches
from tests.support.inputs import make_inputs
from tests.support.kernel_check import BACKWARD, KIND, run

SHAPES = [
    cases.Case(f"logsumexp-{dtype}-q{q_len}", dtype=dtype, q_len=q_len, is_causal=True)
    for dtype in tolerances.DTYPES
    for q_len in (37, 5)
]
all_shapes = pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)


@all_shapes
def test_gradient_of_logsumexp_alone(case, kernels):
    inputs = make_inputs(case)
    inputs = inputs._replace(dout=np.zeros_like(inputs.dout))
    results = run(kernels, inputs, **case.options)
    expected = reference_f64.attention_gradients(
        *inputs.operands, inputs.dout, inputs.dlogsumexp, **case.options
    )
    assert (results.dvalue == 0).all()
    for name in BACKWARD:
        assert_matches(
            getattr(results, name),
            getattr(expected, name),
            None,
            name=name,
            kind=KIND[name],
            dtype=case.np_dtype,
            context=case.context,
        )


@pytest.mark.parametrize("q_len", [9, 2])
def test_one_key_gives_its_score(q_len, kernels):
    """The natural logarithm of one exponential: the scaled score itself."""
    case = cases.Case(f"one-key-q{q_len}", q_len=q_len, kv_len=1, scale=0.7)
    inputs = make_inputs(case)
    out, logsumexp = kernels.run_forward(*inputs.operands, **case.options)
    query = inputs.query.astype(np.float64).reshape(2, q_len, 3, 2, 64)
    score = np.float32(0.7) * np.einsum("btkgh,bskh->bkgt", query, inputs.key)
    assert_matches(
        logsumexp,
        score.reshape(logsumexp.shape),
        None,
        name="logsumexp",
        kind=tolerances.LOGSUMEXP,
        dtype=case.np_dtype,
        context=case.context,
    )
    np.testing.assert_array_equal(
        out, np.broadcast_to(np.repeat(inputs.value, 2, axis=2), out.shape)
    )


@pytest.mark.parametrize("q_len", [37, 5])
def test_partial_results_merge(q_len, kernels):
    """Attention over two parts of the keys, merged by logsumexp, is that over all."""
    case = cases.Case(f"merge-q{q_len}", q_len=q_len)
    inputs = make_inputs(case)
    parts = []
    for keys in (slice(0, 20), slice(20, None)):
        key, value = inputs.key[:, keys], inputs.value[:, keys]
        parts.append(kernels.run_forward(inputs.query, key, value, **case.options))
    outs, logsumexps = (np.stack(x).astype(np.float64) for x in zip(*parts))
    total = np.logaddexp(*logsumexps)
    weights = np.swapaxes(np.exp(logsumexps - total), -1, -2)[..., None]
    expected = reference_f64.attention(*inputs.operands, **case.options)
    # Two parts have two roundings: the same ceiling, halved and spent twice, is enough.
    for actual, name in [((weights * outs).sum(0), "out"), (total, "logsumexp")]:
        assert_matches(
            actual.astype(np.float32),
            getattr(expected, name),
            None,
            name=name,
            kind=KIND[name],
            dtype=case.np_dtype,
            context=case.context,
        )
