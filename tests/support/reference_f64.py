"""Attention in NumPy float64, straight from the formulas of the semantics page.

The judge of every implementation, so it shares no code with any of them and does not
import jax. Expects inputs that are already rounded to the dtype under test, and finite
but for a bias of -inf (the NaN rule is tested bit by bit, see poison.py).
Memory stays bounded: query rows are worked on in chunks.

Inside, arrays are [*batch, kv head, query head of the group, query, key or column].
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Score elements held at once, per float64 temporary (8 MiB).
_CHUNK_ELEMENTS = 1 << 20


class Forward(NamedTuple):
    out: np.ndarray  # [*batch, q_len, num_heads, value_head_dim]
    logsumexp: np.ndarray  # [*batch, num_heads, q_len]


class Gradients(NamedTuple):
    """dquery, dkey, dvalue have the full batch dims, also for shared operands.

    The others have the shape of their operand, and are None without it.
    """

    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None
    dslopes: np.ndarray | None


def attention(query, key, value, **options) -> Forward:
    """out and logsumexp; see `Problem.build` for the options."""
    problem = Problem.build(query, key, value, **options)
    out = np.zeros((*problem.heads, problem.q_len, problem.value.shape[-1]))
    logsumexp = np.zeros((*problem.heads, problem.q_len))
    for rows in problem.chunks():
        chunk = problem.probs(rows)
        out[..., rows, :] = chunk.dropped(chunk.probs) @ problem.value
        logsumexp[..., rows] = chunk.logsumexp
    return Forward(_rows_first(out), _merge_heads(logsumexp, 1))


def attention_gradients(
    query, key, value, dout, dlogsumexp=None, **options
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlogsumexp * logsumexp).

    A row that sees no key has a constant output, whatever its cotangents: it adds
    nothing to any gradient.
    """
    batch = np.broadcast_shapes(
        np.shape(dout)[:-3], () if dlogsumexp is None else np.shape(dlogsumexp)[:-2]
    )
    problem = Problem.build(query, key, value, batch=batch, **options)
    dout = problem.query_side(dout)
    if dlogsumexp is None:
        dlogsumexp = np.zeros((problem.num_heads, problem.q_len))
    dlogsumexp = problem.split_heads(dlogsumexp, 1)

    dquery = np.zeros(problem.query.shape)
    dkey = np.zeros((*problem.batch, *problem.key.shape[-4:]))
    dvalue = np.zeros((*problem.batch, *problem.value.shape[-4:]))
    dbias = _Sum(problem.bias_shape)
    dsinks = _Sum(problem.sinks_shape)
    dslopes = _Sum(problem.slopes_shape)
    for rows in problem.chunks():
        chunk = problem.probs(rows)
        q, do = (x[..., rows, :] for x in (problem.query, dout))
        out = chunk.dropped(chunk.probs) @ problem.value
        delta = (do * out).sum(-1) - dlogsumexp[..., rows]
        # 0 * inf of a row without keys would be NaN; such a row has no gradient.
        delta = np.where(np.isneginf(chunk.logsumexp), 0, delta)
        dp = chunk.dropped(do @ _transposed(problem.value))
        ds = chunk.probs * (dp - delta[..., None]) * chunk.softcap_slope
        dquery[..., rows, :] = problem.scale * (ds @ problem.key)
        dkey += problem.scale * _group_sum(_transposed(ds) @ q)
        dvalue += _group_sum(_transposed(chunk.dropped(chunk.probs)) @ do)
        dbias.add(_merge_heads(ds, 2), rows)
        if chunk.sink_probs is not None:
            dsinks.add(_merge_heads(-(chunk.sink_probs * delta).sum(-1), 0))
        if problem.slopes is not None:
            dslopes.add(_merge_heads(-(ds * abs(chunk.distance)).sum((-1, -2)), 0))
    return Gradients(
        _rows_first(dquery),
        *(np.moveaxis(x[..., 0, :, :], -3, -2) for x in (dkey, dvalue)),
        *(x.total for x in (dbias, dsinks, dslopes)),
    )


class Chunk(NamedTuple):
    """What some query rows see. Arrays [*batch, kv heads, groups, rows, ...]."""

    probs: np.ndarray  # [..., kv_len], before dropout
    logsumexp: np.ndarray
    softcap_slope: np.ndarray | float  # d capped / d uncapped score
    sink_probs: np.ndarray | None  # 0 where no key is seen
    distance: np.ndarray  # int [..., kv_len] > 0: the key is in the past
    keep: np.ndarray | None  # bool [..., kv_len]
    keep_probability: float

    def dropped(self, x):
        if self.keep is None:
            return x
        return np.where(self.keep, x / self.keep_probability, 0)


@dataclass
class Problem:
    """The operands in float64, every one broadcast (without copying) to full batch."""

    batch: tuple[int, ...]
    query: np.ndarray  # [*batch, kv_heads, groups, q_len, head_dim]
    key: np.ndarray  # [*batch, kv_heads, 1, kv_len, head_dim]
    value: np.ndarray
    scale: float
    is_causal: bool
    q_offset: np.ndarray  # int [*batch]
    bias: np.ndarray | None  # [*batch, kv_heads, groups, q_len, kv_len]
    bias_shape: tuple[int, ...] | None
    mask: np.ndarray | None  # like bias
    sliding_window: tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    segment_ids: tuple[np.ndarray, np.ndarray] | None
    query_seq_lengths: np.ndarray | None
    key_value_seq_lengths: np.ndarray | None
    sinks: np.ndarray | None  # [*batch, kv_heads, groups]
    sinks_shape: tuple[int, ...] | None
    slopes: np.ndarray | None
    slopes_shape: tuple[int, ...] | None
    dropout_rate: float
    dropout_key: tuple[np.ndarray, np.ndarray] | None  # uint32 [*batch, heads, groups]

    @classmethod
    def build(
        cls,
        query,
        key,
        value,
        *,
        batch=(),
        scale=None,
        is_causal=False,
        q_offset=0,
        bias=None,
        mask=None,
        sliding_window=None,
        logits_soft_cap=None,
        segment_ids=None,
        q_segment_ids=None,
        kv_segment_ids=None,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        sinks=None,
        alibi_slopes=None,
        dropout_rate=0.0,
        dropout_key=None,
        dropout_batch_indices=None,
        dropout_head_indices=None,
    ):
        """Options of flash_attention, or their form inside (docs/architecture.md).

        Every operand's leading dims are batch dims, each full, 1 or missing. A
        dropout_key is its words; the indices default to those of a call of its own.
        """
        q_offset = 0 if q_offset is None else q_offset
        if segment_ids is not None:
            q_segment_ids, kv_segment_ids = segment_ids
        if isinstance(sliding_window, int):
            sliding_window = (sliding_window, sliding_window)
        trailing = [
            *((x, 3) for x in (query, key, value, bias, mask)),
            *((x, 1) for x in (q_segment_ids, kv_segment_ids, sinks, alibi_slopes)),
            *((x, 1) for x in (dropout_key, dropout_head_indices)),
            *((x, 0) for x in (query_seq_lengths, key_value_seq_lengths, q_offset)),
            (dropout_batch_indices, 0),
        ]
        batch = np.broadcast_shapes(
            batch,
            *(
                np.shape(x)[: max(0, np.ndim(x) - n)]
                for x, n in trailing
                if x is not None
            ),
        )
        q_len, num_heads, head_dim = np.shape(query)[-3:]
        kv_len, num_kv_heads = np.shape(key)[-3:-1]
        groups = num_heads // num_kv_heads

        def split(x, inner):
            """[..., num_heads, *inner] to [*batch, kv_heads, groups, *inner]."""
            if x is None:
                return None
            x = np.broadcast_to(x, (*batch, num_heads, *inner))
            return x.reshape(*batch, num_kv_heads, groups, *inner)

        def full(x, *inner):
            return None if x is None else np.broadcast_to(_int(x), (*batch, *inner))

        def key_side(x):
            x = np.broadcast_to(_f64(x), (*batch, *np.shape(x)[-3:]))
            return np.moveaxis(x, -2, -3)[..., None, :, :]

        if dropout_rate:
            if dropout_batch_indices is None:
                dropout_batch_indices = np.arange(batch[0] if batch else 1)
            if dropout_head_indices is None:
                dropout_head_indices = np.arange(num_heads)
            head = split(_uint32(dropout_head_indices), ())
            index = np.broadcast_to(_uint32(dropout_batch_indices), batch)
            words = _key_words(dropout_key)
            words = [np.broadcast_to(w, batch)[..., None, None] for w in words]
            subkey = _threefry2x32(*words, index[..., None, None], head)
        scores = (q_len, kv_len)
        problem = cls(
            batch=batch,
            query=None,
            key=key_side(key),
            value=key_side(value),
            scale=head_dim**-0.5 if scale is None else float(scale),
            is_causal=is_causal,
            # Clipped, so that sums with positions stay in range.
            q_offset=full(np.clip(q_offset, -(2**62), 2**62)),
            bias=None if bias is None else split(_f64(bias), scores),
            bias_shape=None if bias is None else np.shape(bias),
            mask=split(mask, scores),
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            segment_ids=None
            if q_segment_ids is None
            else (full(q_segment_ids, q_len), full(kv_segment_ids, kv_len)),
            query_seq_lengths=full(query_seq_lengths),
            key_value_seq_lengths=full(key_value_seq_lengths),
            sinks=None if sinks is None else split(_f64(sinks), ()),
            sinks_shape=None if sinks is None else np.shape(sinks),
            slopes=None if alibi_slopes is None else split(_f64(alibi_slopes), ()),
            slopes_shape=None if alibi_slopes is None else np.shape(alibi_slopes),
            dropout_rate=dropout_rate,
            dropout_key=subkey if dropout_rate else None,
        )
        problem.query = split(np.swapaxes(_f64(query), -3, -2), (q_len, head_dim))
        return problem

    @property
    def heads(self):
        return self.query.shape[:-2]

    @property
    def num_heads(self):
        return self.heads[-2] * self.heads[-1]

    @property
    def q_len(self):
        return self.query.shape[-2]

    @property
    def kv_len(self):
        return self.key.shape[-2]

    def split_heads(self, x, num_inner):
        """[..., num_heads, *inner] to [*batch, kv_heads, groups, *inner], float64."""
        x = _f64(x)
        inner = x.shape[x.ndim - num_inner :]
        x = np.broadcast_to(x, (*self.batch, self.num_heads, *inner))
        return x.reshape(*self.heads, *inner)

    def query_side(self, x):
        """[..., q_len, num_heads, width] to [*heads, q_len, width]."""
        return self.split_heads(np.swapaxes(x, -3, -2), 2)

    def chunks(self):
        """Slices of query rows, covering everything once."""
        row = max(1, int(np.prod(self.heads)) * self.kv_len)
        step = max(1, _CHUNK_ELEMENTS // row)
        for start in range(0, self.q_len, step):
            yield slice(start, min(start + step, self.q_len))

    def scores(self, rows):
        """Scores after the softcap, its derivative, visibility and distances."""
        distance = self.distance(rows)
        x = self.scale * (self.query[..., rows, :] @ _transposed(self.key))
        if self.bias is not None:
            bias = self.bias[..., rows, :]
            x = x + np.where(np.isneginf(bias), 0, bias)
        if self.slopes is not None:
            x = x - self.slopes[..., None, None] * abs(distance)
        softcap_slope = 1.0
        if self.logits_soft_cap is not None:
            capped = np.tanh(x / self.logits_soft_cap)
            softcap_slope = 1 - capped**2
            x = self.logits_soft_cap * capped
        visible = self.visible(rows, distance)
        return np.where(visible, x, -np.inf), softcap_slope, visible, distance

    def probs(self, rows) -> Chunk:
        x, softcap_slope, visible, distance = self.scores(rows)
        has_keys = visible.any(-1)
        largest = np.max(x, axis=-1, initial=-np.inf)
        if self.sinks is not None:
            # A row that sees no key has no sink either.
            sink = np.where(has_keys, self.sinks[..., None], -np.inf)
            largest = np.maximum(largest, sink)
        shift = np.where(np.isneginf(largest), 0, largest)
        weights = np.exp(x - shift[..., None])
        sink_weights = None if self.sinks is None else np.exp(sink - shift)
        total = weights.sum(-1) + (0 if self.sinks is None else sink_weights)
        with np.errstate(divide="ignore"):
            logsumexp = shift + np.log(total)
        # Not exp(x - logsumexp): that forgets the number of keys where x is huge.
        total = np.where(total == 0, 1, total)
        return Chunk(
            probs=weights / total[..., None],
            logsumexp=logsumexp,
            softcap_slope=softcap_slope,
            sink_probs=None if self.sinks is None else sink_weights / total,
            distance=distance,
            keep=self.keep(rows) if self.dropout_rate else None,
            keep_probability=1 - self.dropout_rate,
        )

    def distance(self, rows):
        """i + q_offset - j, int [*batch, 1, 1, rows, kv_len]."""
        distance = np.arange(rows.start, rows.stop)[:, None] - np.arange(self.kv_len)
        return distance + self.q_offset[..., None, None, None, None]

    def visible(self, rows, distance):
        """bool [*batch, kv_heads, groups, rows, kv_len]: every rule says so."""
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
            same = q_ids[..., rows, None] == kv_ids[..., None, :]
            visible &= same[..., None, None, :, :]
        row, column = np.ogrid[rows, : self.kv_len]
        if self.query_seq_lengths is not None:
            visible &= row < self.query_seq_lengths[..., None, None, None, None]
        if self.key_value_seq_lengths is not None:
            visible &= column < self.key_value_seq_lengths[..., None, None, None, None]
        if self.bias is not None:
            visible = visible & ~np.isneginf(self.bias[..., rows, :])
        if self.mask is not None:
            visible = visible & self.mask[..., rows, :]
        shape = (*self.heads, *visible.shape[-2:])
        return np.broadcast_to(visible, shape)

    def keep(self, rows):
        """Element (i, j) of (b, n) has word j % 2 of threefry(subkey, (i, j // 2))."""
        row = np.arange(rows.start, rows.stop, dtype=np.uint32)[:, None]
        pair = np.arange((self.kv_len + 1) // 2, dtype=np.uint32)
        subkey = [word[..., None, None] for word in self.dropout_key]
        words = np.stack(_threefry2x32(*subkey, row, pair), axis=-1)
        bits = words.reshape(*words.shape[:-2], -1)[..., : self.kv_len]
        keep = 1 - self.dropout_rate
        return bits < min(round(keep * 2**32), 2**32 - 1)


class _Sum:
    """Adds chunks [*batch, num_heads, (rows, kv_len)] up to an operand's shape."""

    def __init__(self, shape):
        self.total = None if shape is None else np.zeros(shape)

    def add(self, x, rows=None):
        if self.total is None:
            return
        part = self.total
        if rows is not None and part.ndim >= 2 and part.shape[-2] != 1:
            part = part[..., rows, :]
        part += sum_to_shape(x, part.shape)


def sum_to_shape(x, shape):
    """Sums the dims that an array of `shape` was broadcast over."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1)
    return x.sum(axis=axes, keepdims=True)


def _threefry2x32(key0, key1, x0, x1):
    """Salmon et al., SC 2011: 20 rounds; after every 4 a part of the key is added."""
    key0, key1, x0, x1 = (np.asarray(x).astype(np.uint64) for x in (key0, key1, x0, x1))
    low = np.uint64(2**32 - 1)
    schedule = [key0, key1, key0 ^ key1 ^ np.uint64(0x1BD11BDA)]
    x0, x1 = (x0 + key0) & low, (x1 + key1) & low
    for turn in range(20):
        left = np.uint64((13, 15, 26, 6, 17, 29, 16, 24)[turn % 8])
        x0 = (x0 + x1) & low
        x1 = ((x1 << left) | (x1 >> (np.uint64(32) - left))) & low
        x1 = x1 ^ x0
        if turn % 4 == 3:
            i = turn // 4 + 1
            x0 = (x0 + schedule[i % 3]) & low
            x1 = (x1 + schedule[(i + 1) % 3] + np.uint64(i)) & low
    return x0, x1


def _key_words(key):
    """The two words of a dropout key; four of them mix to two."""
    words = [word for word in np.moveaxis(_uint32(key), -1, 0)]
    return words if len(words) == 2 else _threefry2x32(*words)


def _f64(x):
    return np.asarray(x).astype(np.float64)


def _int(x):
    return np.asarray(x).astype(np.int64)


def _uint32(x):
    return np.asarray(x).astype(np.uint32)


def _transposed(x):
    return np.swapaxes(x, -1, -2)


def _group_sum(x):
    return x.sum(-3, keepdims=True)


def _merge_heads(x, num_inner):
    """[*batch, kv_heads, groups, *inner] to [*batch, num_heads, *inner]."""
    axis = x.ndim - num_inner - 2
    kv_heads, groups, *inner = x.shape[axis:]
    return x.reshape(*x.shape[:axis], kv_heads * groups, *inner)


def _rows_first(x):
    """[*batch, kv_heads, groups, q_len, width] to [*batch, q_len, num_heads, width]."""
    return np.swapaxes(_merge_heads(x, 2), -3, -2)
