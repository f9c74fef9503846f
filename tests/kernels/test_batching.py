"""Batch dims: any number, each operand whole or shared (stride 0) in each of them.

A shared operand must give the very bits that its copies give.
"""

import itertools

import numpy as np
import pytest

from tests.support import cases
from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import check

OPERANDS = ("query", "key", "value")
short_and_long = pytest.mark.parametrize("q_len", [17, 3])


def _shared(batch, pattern):
    """`batch` with 1 where `pattern` has an s."""
    return tuple(1 if p == "s" else size for size, p in zip(batch, pattern))


def _patterns(num_dims):
    return ["".join(p) for p in itertools.product(".s", repeat=num_dims)]


@short_and_long
@pytest.mark.parametrize("batch", [(3,), (2, 3)], ids=str)
def test_forward_with_every_sharing(batch, q_len, kernels):
    for patterns in itertools.product(_patterns(len(batch)), repeat=3):
        shapes = [_shared(batch, p) for p in patterns]
        full = np.broadcast_shapes(*shapes)
        case = _case(full, q_len, *shapes)
        inputs = make_inputs(case)
        actual = kernels.run_forward(*inputs.operands, **case.options)
        copies = [_copied(x, full) for x in inputs.operands]
        expected = kernels.run_forward(*copies, **case.options)
        for name, a, e in zip(("out", "logsumexp"), actual, expected):
            assert_identical(a, e, name=name, context=f"sharing {patterns}")


@short_and_long
@pytest.mark.parametrize("batch", [(3,), (2, 3)], ids=str)
def test_backward_with_every_sharing(batch, q_len, kernels):
    """The cotangents too: vmap of a pullback shares everything but them."""
    for patterns in _backward_patterns(len(batch)):
        shapes = [_shared(batch, p) for p in patterns]
        saved_batch = np.broadcast_shapes(*shapes[:3])
        full = np.broadcast_shapes(*shapes)
        case = _case(saved_batch, q_len, *shapes[:3])
        inputs = make_inputs(case)
        cotangents = _cotangents(case, *shapes[3:])
        # out and logsumexp are shared where all operands are.
        saved = kernels.run_forward(*inputs.operands, **case.options)
        operands = (*inputs.operands, *saved, *cotangents)
        actual = kernels.run_backward(*operands, **case.options)
        trailing = (3, 3, 3, 3, 2, 3, 2)
        copies = [_copied(x, full, n) for x, n in zip(operands, trailing)]
        expected = kernels.run_backward(*copies, **case.options)
        for name, a, e in zip(("dquery", "dkey", "dvalue"), actual, expected):
            assert a.shape[: len(batch)] == full
            assert_identical(a, e, name=name, context=f"sharing {patterns}")


@pytest.mark.parametrize(
    "patterns",
    [
        (".....", ".....", "....."),
        (".s.s.", "s.s.s", "..s.."),
        ("sssss", ".....", "sssss"),
        ("s....", ".s...", "..s.."),
    ],
    ids="/".join,
)
@short_and_long
def test_more_dims_than_a_kernel_addresses(patterns, q_len, kernels):
    """Six dims, most of which cannot be merged: the planner launches several times."""
    batch = (2, 1, 3, 2, 2, 2)
    shapes = [_shared(batch, p[0] + "." + p[1:]) for p in patterns]
    full = np.broadcast_shapes(*shapes)
    check(kernels, _case(full, q_len, *shapes, kv_len=11, head_dim=8))


@short_and_long
def test_sixteen_dims(q_len, kernels):
    batch = (1, 2, 1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1)
    check(kernels, _case(batch, q_len, batch, batch, batch, kv_len=11, head_dim=8))


def test_report_27_mlx_3383(kernels):
    """A batch of one inside another, 4 query heads on 2."""
    check(
        kernels,
        cases.Case(
            "vmap-gqa", batch=(3, 1), q_len=4, kv_len=4, num_heads=4, num_kv_heads=2
        ),
    )


def _case(batch, q_len, query, key, value, *, kv_len=21, head_dim=16):
    return cases.Case(
        f"batch{batch}-{query}-{key}-{value}-q{q_len}",
        batch=batch,
        query_batch=query,
        key_batch=key,
        value_batch=value,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        is_causal=True,
    )


def _backward_patterns(num_dims):
    """All sharings of query, key and value; those of dout and dlogsumexp rotate."""
    patterns = _patterns(num_dims)
    rotating = itertools.cycle(itertools.product(patterns, patterns))
    next(rotating)  # so that the two cycles do not stay in step
    for first in itertools.product(patterns, repeat=3):
        yield (*first, *next(rotating))


def _cotangents(case, dout_batch, dlogsumexp_batch):
    rng = np.random.default_rng(case.seed)
    dout = rng.standard_normal((*dout_batch, case.q_len, case.num_heads, case.width))
    dlogsumexp = rng.standard_normal((*dlogsumexp_batch, case.num_heads, case.q_len))
    return dout.astype(case.np_dtype), dlogsumexp.astype(np.float32)


def _copied(array, batch, trailing=3):
    shape = (*batch, *array.shape[array.ndim - trailing :])
    return np.ascontiguousarray(np.broadcast_to(array, shape))
