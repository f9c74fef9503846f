"""Plain unfused attention in the input dtype: what rule 1 of the tolerances uses.

As a framework without a fused kernel would do it: every array-valued step is rounded to
the input dtype, matrix products accumulate in float32. Not a reference: who sees whom,
and which elements dropout keeps, are reference_f64's.
"""

from typing import NamedTuple

import numpy as np

from tests.support.reference_f64 import Forward, Gradients, Problem, sum_to_shape


def attention(query, key, value, **options) -> Forward:
    plain = _Plain(query.dtype, Problem.build(query, key, value, **options))
    scores = plain.scores()
    probs, logsumexp = plain.probs(scores)
    out = plain.product(plain.dropped(probs, scores), plain.value)
    return Forward(_rows_first(out), _merge_heads(logsumexp, 1))


def attention_gradients(
    query, key, value, dout, dlogsumexp=None, **options
) -> Gradients:
    """The contract's formulas: p = exp(x - lse), delta = rowsum(dout * out) - dlse."""
    batch = np.shape(dout)[:-3]
    if dlogsumexp is not None:
        batch = np.broadcast_shapes(batch, np.shape(dlogsumexp)[:-2])
    problem = Problem.build(query, key, value, batch=batch, **options)
    plain = _Plain(query.dtype, problem)
    round_ = plain.round
    scores = plain.scores()
    probs, logsumexp = plain.probs(scores)
    out = plain.product(plain.dropped(probs, scores), plain.value)
    shift = np.where(np.isneginf(logsumexp), np.float32(0), logsumexp)
    with np.errstate(over="ignore", invalid="ignore"):
        of_logsumexp = round_(np.exp(scores.x - shift[..., None]))
    # Beyond 4096 a float32 logsumexp holds too little of log(sum).
    coarse = np.isfinite(logsumexp) & (np.abs(logsumexp) > 4096)
    probs = np.where(coarse[..., None], probs, of_logsumexp)
    do = problem.query_side(dout).astype(np.float32)
    dlse = np.float32(0)
    if dlogsumexp is not None:
        dlse = problem.split_heads(dlogsumexp, 1).astype(np.float32)
    dp = plain.dropped(plain.product(do, _transposed(plain.value)), scores)
    delta = round_(round_(do * out).sum(-1)) - dlse
    delta = np.where(np.isneginf(logsumexp), np.float32(0), delta)
    ds = round_(probs * round_(dp - delta[..., None]))
    ds = round_(ds * scores.softcap_slope)
    scaled = round_(ds * plain.scale)
    weights = plain.dropped(probs, scores)
    dquery = plain.product(scaled, plain.key)
    dkey = plain.grouped_product(scaled, plain.query)
    dvalue = plain.grouped_product(weights, do)
    dbias = dsinks = dslopes = None
    if problem.bias is not None:
        dbias = sum_to_shape(_merge_heads(ds, 2), problem.bias_shape)
    if problem.sinks is not None:
        dsinks = sum_to_shape(
            _merge_heads(-(plain.sink_probs(logsumexp) * delta).sum(-1), 0),
            problem.sinks_shape,
        )
    if problem.slopes is not None:
        distance = abs(scores.distance).astype(np.float32)
        dslopes = sum_to_shape(
            _merge_heads(-round_(ds * distance).sum((-1, -2)), 0), problem.slopes_shape
        )
    return Gradients(
        _rows_first(dquery),
        *(np.moveaxis(x[..., 0, :, :], -3, -2) for x in (dkey, dvalue)),
        *(dbias, dsinks, dslopes),
    )


class _Scores(NamedTuple):
    """float32 arrays [*batch, kv heads, groups, q_len, kv_len] of rounded values."""

    x: np.ndarray  # -inf where hidden
    softcap_slope: np.ndarray | np.float32
    has_keys: np.ndarray  # [*batch, kv heads, groups, q_len]
    distance: np.ndarray
    keep: np.ndarray | None


class _Plain:
    def __init__(self, dtype, problem):
        self.dtype = dtype
        self.problem = problem
        self.scale = np.float32(problem.scale)
        self.query, self.key, self.value = (
            x.astype(np.float32) for x in (problem.query, problem.key, problem.value)
        )

    def round(self, x):
        # Overflow in float16 is the baseline's own failure, not a warning of ours.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(x).astype(self.dtype).astype(np.float32)

    def product(self, a, b):
        with np.errstate(over="ignore", invalid="ignore"):
            return self.round(a @ b)

    def grouped_product(self, a, b):
        """aᵀ b, summed over the query heads of a group; full batch."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.round((_transposed(a) @ b).sum(-3, keepdims=True))

    def scores(self) -> _Scores:
        problem, round_ = self.problem, self.round
        rows = slice(0, problem.q_len)
        distance = problem.distance(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            x = round_(self.product(self.query, _transposed(self.key)) * self.scale)
            if problem.bias is not None:
                x = round_(x + problem.bias.astype(np.float32))
            if problem.slopes is not None:
                slopes = problem.slopes.astype(np.float32)[..., None, None]
                x = round_(x - round_(slopes * abs(distance).astype(np.float32)))
            softcap_slope = np.float32(1)
            if problem.logits_soft_cap is not None:
                cap = np.float32(problem.logits_soft_cap)
                capped = np.tanh(round_(x / cap))
                softcap_slope = round_(1 - capped**2)
                x = round_(cap * capped)
        visible = problem.visible(rows, distance)
        return _Scores(
            np.where(visible, x, np.float32(-np.inf)),
            softcap_slope,
            visible.any(-1),
            distance,
            problem.keep(rows) if problem.dropout_rate else None,
        )

    def probs(self, scores):
        """probs like x, and logsumexp."""
        round_ = self.round
        x = scores.x
        largest = x.max(-1, initial=-np.inf)
        if self.problem.sinks is not None:
            sink = self.problem.sinks.astype(np.float32)[..., None]
            sink = np.where(scores.has_keys, sink, np.float32(-np.inf))
            largest = np.maximum(largest, sink)
        shift = np.where(np.isneginf(largest), np.float32(0), largest)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            e = round_(np.exp(round_(x - shift[..., None])))
            total = e.sum(-1)
            if self.problem.sinks is not None:
                total = total + np.exp(sink - shift)
            total = round_(total)
            safe = np.where(total == 0, np.float32(1), total)
            logsumexp = shift + np.log(total)
        return round_(e / safe[..., None]), logsumexp.astype(np.float32)

    def sink_probs(self, logsumexp):
        sink = self.problem.sinks.astype(np.float32)[..., None]
        hidden = np.isneginf(logsumexp)
        shift = np.where(hidden, np.float32(0), logsumexp)
        with np.errstate(over="ignore"):
            return np.where(hidden, np.float32(0), np.exp(sink - shift))

    def dropped(self, x, scores):
        if scores.keep is None:
            return x
        keep_probability = np.float32(1 - self.problem.dropout_rate)
        return np.where(scores.keep, self.round(x / keep_probability), np.float32(0))


def _transposed(x):
    return np.swapaxes(x, -1, -2)


def _merge_heads(x, num_inner):
    axis = x.ndim - num_inner - 2
    kv_heads, groups, *inner = x.shape[axis:]
    return x.reshape(*x.shape[:axis], kv_heads * groups, *inner)


def _rows_first(x):
    return np.swapaxes(_merge_heads(x, 2), -3, -2)
