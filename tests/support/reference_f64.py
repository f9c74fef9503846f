"""Attention in NumPy float64, straight from the formulas of the semantics page.

The judge of every implementation, so it shares no code with any of them and does not
import jax. Expects inputs that are already rounded to the dtype under test, and finite
(the NaN rule is tested bit by bit, see poison.py). No dropout.
Memory stays bounded: query rows are worked on in chunks.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Score elements held at once, per float64 temporary (8 MiB).
_CHUNK_ELEMENTS = 1 << 20

_einsum = functools.partial(np.einsum, optimize=True)  # through BLAS


class Forward(NamedTuple):
    out: np.ndarray  # [*batch, q_len, num_heads, value_head_dim]
    logsumexp: np.ndarray  # [*batch, num_heads, q_len]


class Gradients(NamedTuple):
    """dquery, dkey, dvalue have the full batch dims, also for shared operands."""

    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dbias: np.ndarray | None  # in the shape of bias
    dsinks: np.ndarray | None  # [num_heads]


def attention(query, key, value, **options) -> Forward:
    """out and logsumexp; see `_Problem` for the options."""
    problem = _Problem.build(query, key, value, **options)
    out = np.zeros((*problem.batch, *problem.out_shape))
    logsumexp = np.full((*problem.batch, problem.num_heads, problem.q_len), -np.inf)
    for index, head, rows in problem.chunks():
        chunk = problem.probs(index, head, rows)
        heads = problem.query_heads(head)
        out[(*index, rows, heads)] = _einsum(
            "gts,sh->tgh", chunk.probs, problem.value[(*index, slice(None), head)]
        )
        logsumexp[(*index, heads, rows)] = chunk.logsumexp
    return Forward(out, logsumexp)


def attention_gradients(
    query, key, value, dout, dlogsumexp=None, **options
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlogsumexp * logsumexp).

    A row that sees no key has a constant output, whatever its cotangents: it adds
    nothing to any gradient.
    """
    batch = np.broadcast_shapes(
        *(np.shape(x)[:-3] for x in (query, key, value, dout)),
        () if dlogsumexp is None else np.shape(dlogsumexp)[:-2],
    )
    problem = _Problem.build(query, key, value, batch=batch, **options)
    dout = _full(dout, batch, 3)
    if dlogsumexp is None:
        dlogsumexp = np.zeros((problem.num_heads, problem.q_len))
    dlogsumexp = _full(dlogsumexp, batch, 2)

    dquery = np.zeros(problem.query.shape)
    dkey = np.zeros(problem.key.shape)
    dvalue = np.zeros(problem.value.shape)
    dbias = None if problem.bias is None else np.zeros(problem.bias.shape)
    dsinks = None if problem.sinks is None else np.zeros(problem.num_heads)
    for index, head, rows in problem.chunks():
        chunk = problem.probs(index, head, rows)
        heads = problem.query_heads(head)
        whole = (*index, slice(None), head)
        q, k, v = (
            problem.query[(*index, rows, heads)],
            *(x[whole] for x in (problem.key, problem.value)),
        )
        do = dout[(*index, rows, heads)]
        out = _einsum("gts,sh->tgh", chunk.probs, v)
        delta = _einsum("tgh,tgh->gt", do, out) - dlogsumexp[(*index, heads, rows)]
        # 0 * inf of a row without keys would be NaN; such a row has no gradient.
        delta = np.where(np.isneginf(chunk.logsumexp), 0, delta)
        dp = _einsum("tgh,sh->gts", do, v)
        ds = chunk.probs * (dp - delta[..., None]) * chunk.softcap_slope
        dquery[(*index, rows, heads)] = problem.scale * _einsum("gts,sh->tgh", ds, k)
        dkey[whole] += problem.scale * _einsum("gts,tgh->sh", ds, q)
        dvalue[whole] += _einsum("gts,tgh->sh", chunk.probs, do)
        if dbias is not None:
            dbias[(*index, heads, rows)] += ds
        if dsinks is not None:
            dsinks[heads] -= _einsum("gt,gt->g", chunk.sink_probs, delta)
    if dbias is not None:
        dbias = _sum_to_shape(dbias, problem.bias_shape)
    return Gradients(dquery, dkey, dvalue, dbias, dsinks)


class _Chunk(NamedTuple):
    probs: np.ndarray  # [num_groups, rows, kv_len]
    logsumexp: np.ndarray  # [num_groups, rows]
    softcap_slope: np.ndarray | float  # d capped / d uncapped score
    sink_probs: np.ndarray | None  # [num_groups, rows]


@dataclass
class _Problem:
    """The operands in float64, every one broadcast (without copying) to full batch."""

    batch: tuple[int, ...]
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: float
    is_causal: bool
    q_offset: int
    bias: np.ndarray | None
    bias_shape: tuple[int, ...] | None
    mask: np.ndarray | None
    sliding_window: tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    segment_ids: tuple[np.ndarray, np.ndarray] | None
    query_seq_lengths: np.ndarray | None
    key_value_seq_lengths: np.ndarray | None
    sinks: np.ndarray | None
    alibi_slopes: np.ndarray | None

    @classmethod
    def build(
        cls,
        query,
        key,
        value,
        *,
        batch=None,
        scale=None,
        is_causal=False,
        q_offset=0,
        bias=None,
        mask=None,
        sliding_window=None,
        logits_soft_cap=None,
        segment_ids=None,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        sinks=None,
        alibi_slopes=None,
    ):
        if batch is None:
            batch = np.broadcast_shapes(
                *(np.shape(x)[:-3] for x in (query, key, value))
            )
        q_len, num_heads, head_dim = np.shape(query)[-3:]
        kv_len = np.shape(key)[-3]
        scores = (*batch, num_heads, q_len, kv_len)
        if isinstance(sliding_window, int):
            sliding_window = (sliding_window, sliding_window)
        return cls(
            batch=batch,
            query=_full(query, batch, 3),
            key=_full(key, batch, 3),
            value=_full(value, batch, 3),
            scale=head_dim**-0.5 if scale is None else float(scale),
            is_causal=is_causal,
            q_offset=int(q_offset or 0),
            bias=None if bias is None else np.broadcast_to(_f64(bias), scores),
            bias_shape=None if bias is None else np.shape(bias),
            mask=None if mask is None else np.broadcast_to(mask, scores),
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            segment_ids=None
            if segment_ids is None
            else tuple(_full(ids, batch, 1, dtype=int) for ids in segment_ids),
            query_seq_lengths=_full(query_seq_lengths, batch, 0, dtype=int),
            key_value_seq_lengths=_full(key_value_seq_lengths, batch, 0, dtype=int),
            sinks=None if sinks is None else _f64(sinks),
            alibi_slopes=None if alibi_slopes is None else _f64(alibi_slopes),
        )

    @property
    def q_len(self):
        return self.query.shape[-3]

    @property
    def kv_len(self):
        return self.key.shape[-3]

    @property
    def num_heads(self):
        return self.query.shape[-2]

    @property
    def num_kv_heads(self):
        return self.key.shape[-2]

    @property
    def num_groups(self):
        return self.num_heads // self.num_kv_heads

    @property
    def out_shape(self):
        return (self.q_len, self.num_heads, self.value.shape[-1])

    def query_heads(self, kv_head):
        return slice(kv_head * self.num_groups, (kv_head + 1) * self.num_groups)

    def chunks(self):
        """(batch index, kv head, slice of query rows), covering everything once."""
        step = max(1, _CHUNK_ELEMENTS // max(1, self.num_groups * self.kv_len))
        for index in np.ndindex(*self.batch):
            for head in range(self.num_kv_heads):
                for start in range(0, self.q_len, step):
                    yield index, head, slice(start, min(start + step, self.q_len))

    def probs(self, index, head, rows) -> _Chunk:
        heads = self.query_heads(head)
        q = self.query[(*index, rows, heads)]
        k = self.key[(*index, slice(None), head)]
        position = np.arange(rows.start, rows.stop)[:, None] + self.q_offset
        distance = position - np.arange(self.kv_len)  # > 0: the key is in the past

        x = self.scale * _einsum("tgh,sh->gts", q, k)
        visible = np.broadcast_to(self._visible(index, rows, distance), x.shape)
        if self.bias is not None:
            bias = self.bias[(*index, heads, rows)]
            visible = visible & ~np.isneginf(bias)
            x = x + np.where(np.isneginf(bias), 0, bias)
        if self.alibi_slopes is not None:
            x = x - self.alibi_slopes[heads, None, None] * np.abs(distance)
        softcap_slope = 1.0
        if self.logits_soft_cap is not None:
            capped = np.tanh(x / self.logits_soft_cap)
            softcap_slope = 1 - capped**2
            x = self.logits_soft_cap * capped
        if self.mask is not None:
            visible = visible & self.mask[(*index, heads, rows)]
        x = np.where(visible, x, -np.inf)

        largest = np.max(x, axis=-1, initial=-np.inf)
        if self.sinks is not None:
            sink = self.sinks[heads, None]
            largest = np.maximum(largest, sink)
        shift = np.where(np.isneginf(largest), 0, largest)
        total = np.exp(x - shift[..., None]).sum(-1)
        if self.sinks is not None:
            total = total + np.exp(sink - shift)
        with np.errstate(divide="ignore"):
            logsumexp = shift + np.log(total)
        finite = np.where(np.isneginf(logsumexp), 0, logsumexp)
        return _Chunk(
            probs=np.exp(x - finite[..., None]),
            logsumexp=logsumexp,
            softcap_slope=softcap_slope,
            sink_probs=None if self.sinks is None else np.exp(sink - finite),
        )

    def _visible(self, index, rows, distance):
        """[rows, kv_len] from all rules that are the same for every head."""
        visible = np.ones(distance.shape, bool)
        if self.is_causal:
            visible &= distance >= 0
        if self.sliding_window is not None:
            left, right = self.sliding_window
            if left is not None:
                visible &= distance <= left
            if right is not None:
                visible &= distance >= -right
        if self.segment_ids is not None:
            q_ids, kv_ids = self.segment_ids
            visible &= q_ids[index][rows, None] == kv_ids[index][None, :]
        if self.query_seq_lengths is not None:
            row = np.arange(rows.start, rows.stop)[:, None]
            visible &= row < self.query_seq_lengths[index]
        if self.key_value_seq_lengths is not None:
            visible &= np.arange(self.kv_len) < self.key_value_seq_lengths[index]
        return visible


def _f64(x):
    return np.asarray(x).astype(np.float64)


def _full(x, batch, trailing, dtype=np.float64):
    """`x` with its leading dims broadcast to `batch`, its last `trailing` kept."""
    if x is None:
        return None
    x = np.asarray(x).astype(dtype)
    return np.broadcast_to(x, (*batch, *x.shape[x.ndim - trailing :]))


def _sum_to_shape(x, shape):
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1)
    return x.sum(axis=axes, keepdims=True)
