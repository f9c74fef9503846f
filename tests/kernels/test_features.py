"""Every feature of a call, alone and with every other, in all passes.

Against the float64 reference; and where one call says the same as another, against the
bits of that one.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.support import cases, reference_f64, tolerances
from tests.support.cases import DIFFERENTIABLE
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_features, make_inputs
from tests.support.kernel_check import (
    assert_result,
    check,
    run,
    run_case,
)

SMALL = {"kv_len": 41, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
short_and_long = pytest.mark.parametrize("q_len", [37, 5])


def _id(case):
    return case.id


def _ones(dims):
    return [
        "".join(p)
        for n in range(len(dims) + 1)
        for p in itertools.combinations(dims, n)
    ]


@pytest.mark.parametrize("case", cases.FEATURES, ids=_id)
def test_feature(case, kernels):
    check(kernels, case)


@pytest.mark.parametrize("case", cases.SHARED, ids=lambda c: f"{c.id}-q{c.q_len}")
def test_shared_over_batch_dims(case, kernels):
    check(kernels, case)


@pytest.mark.parametrize("case", cases.pairwise_features(), ids=_id)
def test_pairwise(case, kernels):
    check(kernels, case)


def test_every_pair_of_features_has_a_case():
    rows = cases._pairwise_rows(cases.FEATURE_FACTORS)
    for a, b in itertools.combinations(cases.FEATURE_FACTORS, 2):
        seen = {(row[a], row[b]) for row in rows}
        pairs = itertools.product(cases.FEATURE_FACTORS[a], cases.FEATURE_FACTORS[b])
        assert seen == set(pairs), (a, b)


def test_the_cases_are_not_hidden_away():
    """Most rows of most cases see a key; else they would show nothing."""
    shares = []
    for case in cases.pairwise_features():
        operands = make_inputs(case).operands
        logsumexp = reference_f64.attention(*operands, **make_arguments(case)).logsumexp
        shares.append(np.isfinite(logsumexp).mean())
    assert np.mean(shares) > 0.5 and np.mean(np.array(shares) > 0.2) > 0.75


@short_and_long
@pytest.mark.parametrize("ones", _ones("bnts"))
def test_every_broadcast_of_bias_and_its_gradient(ones, q_len, kernels):
    number = _ones("bnts").index(ones)
    case = cases.Case(
        f"bias-over-{ones}-q{q_len}",
        dtype=list(tolerances.DTYPES)[number % 3],
        q_len=q_len,
        bias=list(tolerances.DTYPES)[number % 2 * 2],
        bias_ones=ones.replace("b", ""),
        feature_batch={"bias": (1,)} if "b" in ones else {},
        **SMALL,
    )
    check(kernels, case)


@short_and_long
@pytest.mark.parametrize("operand", ["bias", "mask"])
def test_every_broadcast_has_the_bits_of_its_copy(operand, q_len, kernels):
    """A mask or bias with dims of 1, a broadcast view and a copy say the same."""
    for ones in _ones("bnts"):
        case = cases.Case(
            f"{operand}-over-{ones}-q{q_len}",
            q_len=q_len,
            bias="float32" if operand == "bias" else None,
            mask="blocks" if operand == "mask" else None,
            bias_ones=ones.replace("b", ""),
            mask_ones=ones.replace("b", ""),
            feature_batch={operand: (1,)} if "b" in ones else {},
            **SMALL,
        )
        inputs, arguments = make_inputs(case), make_arguments(case)
        expected = run(kernels, inputs, **arguments)
        shape = (*case.batch, case.num_heads, case.q_len, case.kv_len)
        view = np.broadcast_to(arguments[operand], shape)
        for other in (view, np.ascontiguousarray(view)):
            actual = run(kernels, inputs, **arguments | {operand: other})
            for name in ("out", "logsumexp", "dquery", "dkey", "dvalue"):
                assert_identical(
                    getattr(actual, name),
                    getattr(expected, name),
                    name=name,
                    context=case.id,
                )


@short_and_long
@pytest.mark.parametrize("of", DIFFERENTIABLE.values())
def test_gradient_of_a_shared_operand_per_batch_element(of, q_len, kernels):
    """vmap asks for it: full in some batch dims that the operand is shared over."""
    batch = (2, 3)
    case = cases.Case(
        f"gradient-per-element-{of}-q{q_len}",
        batch=batch,
        q_len=q_len,
        bias="float32",
        bias_ones="n",
        sinks=True,
        slopes=True,
        feature_batch={of: (1, 1)},
        **SMALL,
    )
    inputs, arguments = make_inputs(case), make_arguments(case)
    saved = kernels.run_forward(*inputs.operands, **arguments)
    operand = arguments[of]
    (name,) = (n for n, o in DIFFERENTIABLE.items() if o == of)
    for full in itertools.product((False, True), repeat=2):
        shape = tuple(n if f else 1 for n, f in zip(batch, full)) + operand.shape[2:]
        operands = (*inputs.operands, *saved, inputs.dout, inputs.dlogsumexp)
        actual = kernels.run_gradient(of, *operands, shape=shape, **arguments)
        wide = arguments | {of: np.broadcast_to(operand, shape)}
        expected = reference_f64.attention_gradients(
            *inputs.operands, inputs.dout, inputs.dlogsumexp, **wide
        )
        context = f"{case.context} to {shape}"
        assert_result(case, name, actual, getattr(expected, name), context=context)


@pytest.mark.parametrize("dtype", tolerances.DTYPES)
@short_and_long
def test_many_summed_parts(dtype, q_len, kernels):
    """Sums long enough to be cut: over batch, heads, queries and keys."""
    for ones in ("nt", "nts", "ts"):
        case = cases.Case(
            f"many-parts-{ones}-{dtype}-q{q_len}",
            dtype=dtype,
            batch=(5,),
            q_len=q_len * 4,
            kv_len=130,
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            bias="float32",
            bias_ones=ones,
            slopes=True,
            sinks=True,
            feature_batch={"bias": (1,), "alibi_slopes": (1,), "sinks": (1,)},
        )
        check(kernels, case)


@short_and_long
def test_lengths_are_a_mask(q_len, kernels):
    case = cases.Case(
        f"lengths-q{q_len}",
        batch=(4,),
        q_len=q_len,
        query_lengths="mixed",
        kv_lengths="mixed",
        **SMALL,
    )
    features = make_features(case)
    mask = (
        np.arange(q_len)[:, None] < features["query_seq_lengths"][:, None, None, None]
    ) & (np.arange(41) < features["key_value_seq_lengths"][:, None, None, None])
    _assert_same(kernels, case, {"mask": mask})


@short_and_long
def test_segments_are_a_mask(q_len, kernels):
    case = cases.Case(f"segments-q{q_len}", q_len=q_len, segments="packed", **SMALL)
    features = make_features(case)
    mask = (
        features["q_segment_ids"][:, None, :, None]
        == features["kv_segment_ids"][:, None, None, :]
    )
    _assert_same(kernels, case, {"mask": mask})


@short_and_long
@pytest.mark.parametrize("window", [(3, 2), (None, 4), (6, None), (0, 0), (None, None)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_are_a_mask(window, is_causal, q_len, kernels):
    case = cases.Case(
        f"window-{window}-{is_causal}-q{q_len}",
        q_len=q_len,
        q_offset=5,
        is_causal=is_causal,
        sliding_window=window,
        **SMALL,
    )
    distance = np.arange(q_len)[:, None] + 5 - np.arange(41)
    left, right = (10**6 if n is None else n for n in window)
    mask = (distance <= left) & (distance >= (0 if is_causal else -right))
    _assert_same(
        kernels,
        case,
        {"mask": mask[None, None]},
        {"is_causal": False, "sliding_window": None},
    )


def _assert_same(kernels, case, other, without=None):
    """The case has the bits of one that has `other` instead of its features."""
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options | (without or {}) | other)
    for name, actual in run_case(kernels, case).present():
        assert_identical(
            actual, getattr(expected, name), name=name, context=case.context
        )


@short_and_long
def test_an_operand_offset_is_an_offset(q_len, kernels):
    """One offset for all, per batch element or static: the same bits."""
    case = cases.Case(
        f"offsets-q{q_len}", q_len=q_len, is_causal=True, sliding_window=(9, None),
        slopes=True, q_offset=6, **SMALL,
    )  # fmt: skip
    inputs, arguments = make_inputs(case), make_arguments(case)
    expected = run(kernels, inputs, **arguments)
    for offset in (np.array([6], np.int32), np.array([6, 6], np.int32)):
        actual = run(kernels, inputs, **arguments | {"q_offset": offset})
        for name, array in actual.present():
            assert_identical(
                array, getattr(expected, name), name=name, context=case.context
            )


@short_and_long
def test_scores_that_do_nothing(q_len, kernels):
    """Features in a value without effect: 0, everything, no limit."""
    case = cases.Case(f"nothing-q{q_len}", q_len=q_len, **SMALL)
    inputs = make_inputs(case)
    expected = run(kernels, inputs, **case.options)
    whole = np.array([[q_len + 3]], np.int32).reshape(1)
    for options in [
        {"mask": np.ones((1, 1, 1, 1), bool)},
        {"sliding_window": (2**40, 2**40)},
        {"query_seq_lengths": whole},
        {"key_value_seq_lengths": np.array([2**31 - 1], np.int32)},
        {"q_segment_ids": np.full((1, q_len), -5, np.int32),
         "kv_segment_ids": np.full((2, 41), -5, np.int32)},
        {"sinks": np.full((1, 4), -np.inf, np.float32)},
    ]:  # fmt: skip
        actual = run(kernels, inputs, **case.options | options)
        for name in ("out", "logsumexp", "dquery", "dkey", "dvalue"):
            assert_identical(
                getattr(actual, name),
                getattr(expected, name),
                name=name,
                context=f"{case.context} with {list(options)}",
            )


@short_and_long
@pytest.mark.parametrize("bias", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sinks": True},
        {"mask": "random"},
        {"dropout_rate": 0.3},
        {"mask": "random", "sinks": True, "dropout_rate": 0.3},
    ],
    ids=" ".join,
)
def test_rows_whose_logsumexp_holds_no_sum(features, bias, q_len, kernels):
    """All scores of a row are equal and huge: float32 has lost log(sum) beside them."""
    case = cases.Case(
        f"huge-rows-{'-'.join(features)}-q{q_len}",
        q_len=q_len,
        bias=bias,
        bias_values="huge-rows",
        **features,
        **SMALL,
    )
    check(kernels, case)


@pytest.mark.parametrize("head_dim", [20, 32])
@pytest.mark.parametrize("size", [1e5, 3e9, 1e20])
@short_and_long
def test_rows_whose_scores_are_huge(q_len, size, head_dim, kernels):
    """One key outweighs all others: its weight must be 1, whatever the rounding."""
    sizes = SMALL | {"head_dim": head_dim}
    case = cases.Case(f"huge-scores-q{q_len}", q_len=q_len, **sizes)
    inputs = make_inputs(case)
    inputs.query[..., 1::3, :, :] *= np.float32(size)
    results = run(kernels, inputs, **make_arguments(case))
    out, logsumexp = reference_f64.attention(*inputs.operands, **case.options)
    expected = reference_f64.attention_gradients(*inputs, **case.options)
    assert_result(case, "out", results.out, out)
    np.testing.assert_allclose(results.logsumexp, logsumexp, rtol=1e-5, atol=1e-5)
    assert_result(case, "dvalue", results.dvalue, expected[2])
    assert_result(case, "dquery", results.dquery, expected[0])
    # A rounding error of dS times such a query is no small number.
    assert np.isfinite(results.dkey).all()


@pytest.mark.parametrize("features", [{}, {"sinks": True}], ids=["plain", "sinks"])
@pytest.mark.parametrize("size", [1e3, 1e9, 1e15, 1e30])
@short_and_long
def test_huge_scores_that_are_equal_share_a_row(q_len, size, features, kernels):
    """n keys alike have 1/n each: log(n) is nothing beside the scores, and not lost."""
    case = cases.Case(
        f"equal-scores-q{q_len}", inputs="equal-keys", q_len=q_len, **SMALL, **features
    )
    inputs, arguments = make_inputs(case), make_arguments(case)
    inputs.query[...] = np.abs(inputs.query) * np.float32(size)
    inputs.key[...] = np.abs(inputs.key)
    results = run(kernels, inputs, **arguments)
    expected = reference_f64.attention_gradients(*inputs, **arguments)
    assert_result(case, "dvalue", results.dvalue, expected[2])


@short_and_long
def test_dropout_does_not_depend_on_the_neighbours(q_len, kernels):
    """An element's bits are its own: alone, in a batch, with fewer heads."""
    case = cases.Case(
        f"dropout-alone-q{q_len}", batch=(3,), q_len=q_len, dropout_rate=0.4, **SMALL
    )
    inputs, arguments = make_inputs(case), make_arguments(case)
    together = run(kernels, inputs, **arguments)
    one, heads, kv_heads = slice(1, 2), slice(2, 4), slice(1, 2)
    part = type(inputs)(
        inputs.query[one, :, heads],
        inputs.key[one, :, kv_heads],
        inputs.value[one, :, kv_heads],
        inputs.dout[one, :, heads],
        inputs.dlogsumexp[one, heads],
    )
    alone = run(
        kernels,
        part,
        **case.options,
        dropout_key=arguments["dropout_key"][one],
        dropout_batch_indices=arguments["dropout_batch_indices"][one],
        dropout_head_indices=np.ascontiguousarray(
            arguments["dropout_head_indices"][one, heads]
        ),
    )
    for name, array in alone.present():
        whole = getattr(together, name)[one]
        if name == "logsumexp":
            whole = whole[:, heads]
        else:
            whole = whole[:, :, kv_heads if name in ("dkey", "dvalue") else heads]
        assert_identical(array, whole, name=name, context=case.context)


@short_and_long
def test_dropout_of_everything_but_chance(q_len, kernels):
    """A rate near 1 drops nearly all, one near 0 nearly none; logsumexp never cares."""
    case = cases.Case(f"dropout-rates-q{q_len}", q_len=q_len, **SMALL)
    inputs = make_inputs(case)
    plain = run(kernels, inputs, **case.options)
    features = make_features(dataclasses.replace(case, dropout_rate=0.5))
    for rate in (1e-12, 1 - 1e-7):
        out, logsumexp = kernels.run_forward(
            *inputs.operands, **case.options, **features, dropout_rate=rate
        )
        assert_identical(logsumexp, plain.logsumexp, name="logsumexp", context=case.id)
        assert np.isfinite(out).all()
        if rate > 0.5:
            assert (out == 0).all()
        else:
            np.testing.assert_allclose(out, plain.out, rtol=1e-6)
