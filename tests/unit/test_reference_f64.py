"""The judge is judged: the float64 reference, by central differences and by hand."""

import numpy as np
import pytest

from tests.support import baseline, cases, reference_f64
from tests.support.inputs import make_inputs

_STEP = 1e-5


def _arrays(rng):
    """Distinct sizes: batch 2, q_len 5, kv_len 7, heads 6 on 3, head dims 4 and 3."""
    return {
        "query": rng.standard_normal((2, 5, 6, 4)),
        "key": rng.standard_normal((2, 7, 3, 4)),
        "value": rng.standard_normal((2, 7, 3, 3)),
    }


RNG = np.random.default_rng(0)
FEATURES = {
    "plain": {},
    "causal": {"is_causal": True, "q_offset": 2},
    "masked-rows": {"is_causal": True, "q_offset": -2},
    "bias": {"bias": RNG.standard_normal((2, 6, 5, 7))},
    "bias-broadcast": {"bias": RNG.standard_normal((6, 1, 7))},
    "bias-minus-inf": {"bias": np.where(np.tri(5, 7, 1), 0.5, -np.inf)},
    "mask": {"mask": RNG.random((2, 1, 5, 7)) < 0.6},
    "window": {"sliding_window": (2, 1)},
    "window-causal": {"sliding_window": 1, "is_causal": True},
    "softcap": {"logits_soft_cap": 0.7, "bias": RNG.standard_normal((5, 7))},
    "segments": {
        "segment_ids": (
            np.array([[0, 0, 1, 1, 2]]),
            np.array([[0, 1, 1, 1, 2, 2, 3], [3, 3, 0, 1, 1, 2, 2]]),
        )
    },
    "lengths": {
        "query_seq_lengths": np.array([3, 5]),
        "key_value_seq_lengths": np.array([7, 4]),
    },
    "sinks": {"sinks": RNG.standard_normal(6), "is_causal": True, "q_offset": -1},
    "sinks-per-batch": {"sinks": RNG.standard_normal((2, 1))},
    "alibi": {"alibi_slopes": 2.0 ** -np.arange(6), "q_offset": 2},
    "alibi-per-batch": {"alibi_slopes": RNG.standard_normal((2, 6))},
    "scale": {"scale": -1.3},
    "offsets": {"is_causal": True, "q_offset": np.array([-1, 3])},
    "dropout": {"dropout_rate": 0.4, "dropout_key": np.array([3, 4], np.uint32)},
    "everything": {
        "bias": RNG.standard_normal((2, 1, 5, 7)),
        "mask": RNG.random((6, 5, 7)) < 0.8,
        "sliding_window": (4, 2),
        "q_offset": np.array([1, 2]),
        "logits_soft_cap": 1.7,
        "q_segment_ids": np.array([[0, 0, 1, 1, 1]]),
        "kv_segment_ids": np.array([[0, 1, 1, 1, 0, 0, 1]]),
        "query_seq_lengths": np.array([4, 5]),
        "key_value_seq_lengths": np.array([7]),
        "sinks": RNG.standard_normal(6),
        "alibi_slopes": RNG.standard_normal((1, 6)),
        "dropout_rate": 0.2,
        "dropout_key": np.array([[1, 2], [3, 4]], np.uint32),
        "dropout_batch_indices": np.array([5, 3], np.int32),
        "dropout_head_indices": np.array([[0, 9, 2, 3, 4, 7]], np.int32),
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_equal_central_differences(name):
    options = dict(FEATURES[name])
    rng = np.random.default_rng(1)
    arrays = _arrays(rng)
    dout = rng.standard_normal((2, 5, 6, 3))
    dlogsumexp = rng.standard_normal((2, 6, 5))

    def loss(changed):
        arguments = arrays | options | changed
        out, logsumexp = reference_f64.attention(**arguments)
        hidden = np.isneginf(logsumexp)
        return (dout * out).sum() + (dlogsumexp * np.where(hidden, 0, logsumexp)).sum()

    gradients = reference_f64.attention_gradients(
        **arrays, dout=dout, dlogsumexp=dlogsumexp, **options
    )
    for operand in ("query", "key", "value", "bias", "sinks", "alibi_slopes"):
        x = (arrays | options).get(operand)
        if x is None:
            continue
        analytic = getattr(gradients, f"d{operand.removeprefix('alibi_')}")
        assert analytic.shape == x.shape
        for _ in range(20):
            index = tuple(rng.integers(0, size) for size in x.shape)
            if np.isneginf(x[index]):
                continue
            step = np.zeros(x.shape)
            step[index] = _STEP
            numeric = (loss({operand: x + step}) - loss({operand: x - step})) / (
                2 * _STEP
            )
            np.testing.assert_allclose(
                analytic[index], numeric, rtol=1e-6, atol=1e-7, err_msg=operand
            )


def test_two_keys_by_hand():
    query, key = np.full((1, 1, 1), 2.0), np.array([1.0, 3.0]).reshape(2, 1, 1)
    value = np.array([5.0, 7.0]).reshape(2, 1, 1)
    out, logsumexp = reference_f64.attention(query, key, value, scale=0.5)
    e, e3 = np.exp(1), np.exp(3)
    np.testing.assert_allclose(out.item(), (5 * e + 7 * e3) / (e + e3))
    np.testing.assert_allclose(logsumexp.item(), np.log(e + e3))


def test_rows_without_keys():
    arrays = _arrays(np.random.default_rng(2))
    options = {"is_causal": True, "q_offset": -2}
    out, logsumexp = reference_f64.attention(**arrays, **options)
    assert (out[:, :2] == 0).all() and np.isneginf(logsumexp[..., :2]).all()
    assert np.isfinite(logsumexp[..., 2:]).all()
    gradients = reference_f64.attention_gradients(
        **arrays, dout=np.ones((2, 5, 6, 3)), dlogsumexp=np.ones((2, 6, 5)), **options
    )
    assert (gradients.dquery[:, :2] == 0).all()
    assert all(np.isfinite(x).all() for x in gradients[:3])


def test_rows_without_keys_have_no_sink():
    arrays = _arrays(np.random.default_rng(2))
    options = {"is_causal": True, "q_offset": -2, "sinks": np.arange(6.0)}
    out, logsumexp = reference_f64.attention(**arrays, **options)
    assert (out[:, :2] == 0).all() and np.isneginf(logsumexp[..., :2]).all()
    assert np.isfinite(logsumexp[..., 2:]).all()
    dout, dlogsumexp = np.zeros((2, 5, 6, 3)), np.zeros((2, 6, 5))
    dout[:, :2] = dlogsumexp[..., :2] = 1
    gradients = reference_f64.attention_gradients(
        **arrays, dout=dout, dlogsumexp=dlogsumexp, **options
    )
    for name in ("dquery", "dkey", "dvalue", "dsinks"):
        assert (getattr(gradients, name) == 0).all(), name


def test_later_queries_by_offset():
    """The rows of a longer problem, given their position, are those of the whole."""
    arrays = _arrays(np.random.default_rng(3))
    options = {
        "is_causal": True,
        "sliding_window": (3, 1),
        "alibi_slopes": np.arange(6.0),
    }
    whole = reference_f64.attention(**arrays, **options)
    later = arrays | {"query": arrays["query"][:, 2:]}
    out, logsumexp = reference_f64.attention(**later, **options, q_offset=2)
    np.testing.assert_allclose(out, whole.out[:, 2:], rtol=1e-13)
    np.testing.assert_allclose(logsumexp, whole.logsumexp[..., 2:], rtol=1e-13)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_threefry_by_known_answers(key, counter, expected):
    """kat_vectors of the Random123 library."""
    assert tuple(map(int, reference_f64._threefry2x32(*key, *counter))) == expected


def test_dropout_by_hand():
    """Element (i, j): word j % 2 of threefry(threefry(key, (b, n)), (i, j // 2))."""
    options = {
        "dropout_rate": 0.3,
        "dropout_key": np.array([11, 12], np.uint32),
        "dropout_batch_indices": np.array([7, 8]),
        "dropout_head_indices": np.array([[0, 1, 2, 3, 4, 20]]),
    }
    arrays = _arrays(np.random.default_rng(4))
    problem = reference_f64.Problem.build(**arrays, **options)
    keep = problem.probs(slice(0, 5)).keep
    for b, n, i, j in [(0, 0, 0, 0), (1, 5, 3, 6), (1, 2, 4, 5), (0, 5, 1, 1)]:
        head = options["dropout_head_indices"][0, n]
        subkey = reference_f64._threefry2x32(11, 12, 7 + b, head)
        bits = reference_f64._threefry2x32(*subkey, i, j // 2)[j % 2]
        assert keep[b, n // 2, n % 2, i, j] == (bits < round(0.7 * 2**32))
    assert 0.5 < keep.mean() < 0.9


def test_dropout_keeps_the_expectation():
    """The mean over many keys is attention without dropout."""
    rng = np.random.default_rng(5)
    query, key = rng.standard_normal((4, 1, 8)), rng.standard_normal((6, 1, 8))
    value = rng.standard_normal((6, 1, 3))
    keys = rng.integers(0, 2**32, (20_000, 2)).astype(np.uint32)
    copies = (np.broadcast_to(x, (len(keys), *x.shape)) for x in (query, key, value))
    out, logsumexp = reference_f64.attention(
        *copies, dropout_rate=0.25, dropout_key=keys
    )
    plain = reference_f64.attention(query, key, value)
    np.testing.assert_allclose(out.mean(0), plain.out, atol=0.02)
    np.testing.assert_allclose(logsumexp[0], plain.logsumexp)


@pytest.mark.parametrize("shared", ["query", "key", "value"])
def test_shared_operands_equal_copies(shared):
    arrays = _arrays(np.random.default_rng(3))
    one = arrays | {shared: arrays[shared][:1]}
    copies = arrays | {shared: np.repeat(arrays[shared][:1], 2, axis=0)}
    dout = np.random.default_rng(4).standard_normal((2, 5, 6, 3))
    for a, b in zip(reference_f64.attention(**one), reference_f64.attention(**copies)):
        np.testing.assert_array_equal(a, b)
    a = reference_f64.attention_gradients(**one, dout=dout)
    b = reference_f64.attention_gradients(**copies, dout=dout)
    for x, y in zip(a[:3], b[:3]):
        np.testing.assert_array_equal(x, y)


def test_chunks_do_not_change_the_result(monkeypatch):
    arrays = _arrays(np.random.default_rng(5))
    options = FEATURES["everything"] | {"is_causal": True}
    dout = np.ones((2, 5, 6, 3))
    whole = reference_f64.attention(**arrays, **options)
    gradients = reference_f64.attention_gradients(**arrays, dout=dout, **options)
    monkeypatch.setattr(reference_f64, "_CHUNK_ELEMENTS", 30)
    for a, b in zip(whole, reference_f64.attention(**arrays, **options)):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)
    chunked = reference_f64.attention_gradients(**arrays, dout=dout, **options)
    for a, b in zip(gradients, chunked, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", cases.CURATED[:8], ids=lambda case: case.id)
def test_the_baseline_is_attention(case):
    """Loosely: it is what errors are measured against, so it must be no worse."""
    inputs = make_inputs(case)
    arguments = (*inputs.operands, inputs.dout, inputs.dlogsumexp)
    pairs = [
        *zip(
            baseline.attention(*inputs.operands, **case.options),
            reference_f64.attention(*inputs.operands, **case.options),
        ),
        *zip(
            baseline.attention_gradients(*arguments, **case.options)[:3],
            reference_f64.attention_gradients(*arguments, **case.options)[:3],
        ),
    ]
    tolerance = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.15}[case.dtype]
    for plain, expected in pairs:
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(plain[~finite], expected[~finite])
        assert np.abs(plain[finite] - expected[finite]).max() < tolerance


def test_every_pair_of_values_has_a_case():
    rows = cases._pairwise_rows(cases.FACTORS)
    names = list(cases.FACTORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            seen = {(row[a], row[b]) for row in rows}
            assert len(seen) == len(cases.FACTORS[a]) * len(cases.FACTORS[b]), (a, b)
