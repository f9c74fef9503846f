"""Implementations for the meta-test: the right answer, or one with a known flaw."""

import numpy as np

from tests.support import baseline, reference_f64
from tests.support.cases import DIFFERENTIABLE, FEATURE_OPERANDS


class Stub:
    """Rounds the float64 reference. Subclasses change the question, or the answer."""

    def run_forward(self, query, key, value, **options):
        result = reference_f64.attention(
            *self.ask(query, key, value), **self.tell(options)
        )
        return result.out.astype(query.dtype), result.logsumexp.astype(np.float32)

    def run_backward(
        self, query, key, value, out, logsumexp, dout, dlogsumexp, **options
    ):
        gradients = reference_f64.attention_gradients(
            *self.ask(query, key, value), dout, dlogsumexp, **self.tell(options)
        )
        return tuple(x.astype(query.dtype) for x in self.answer(gradients[:3], query))

    def run_gradient(
        self, of, query, key, value, out, logsumexp, dout, dlogsumexp, **options
    ):
        gradients = reference_f64.attention_gradients(
            *self.ask(query, key, value), dout, dlogsumexp, **self.tell(options)
        )
        gradient = self.answer_gradient(_gradient_of(gradients, of), options[of])
        return gradient.astype(options[of].dtype)

    def ask(self, query, key, value):
        return query, key, value

    def tell(self, options):
        return options

    def answer(self, gradients, query):
        return gradients

    def answer_gradient(self, gradient, operand):
        return gradient


class OffByOneCausal(Stub):
    def tell(self, options):
        return options | {"q_offset": options["q_offset"] + 1}


class BottomRightCausal(Stub):
    def ask(self, query, key, value):
        self.q_offset = key.shape[-3] - query.shape[-3]
        return query, key, value

    def tell(self, options):
        return options | {"q_offset": self.q_offset}


class DroppedScale(Stub):
    def tell(self, options):
        return options | {"scale": 1.0}


class SwappedGroups(Stub):
    """Query head n uses kv head n % num_kv_heads instead of n // num_groups."""

    def ask(self, query, key, value):
        num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
        head = np.arange(num_heads) % num_kv_heads
        return query, key[..., head, :], value[..., head, :]

    def answer(self, gradients, query):
        dquery, *others = gradients
        num_kv_heads = others[0].shape[-2] // 2
        return dquery, *(
            x[..., :num_kv_heads, :] + x[..., num_kv_heads:, :] for x in others
        )


class SwappedBatch(Stub):
    def ask(self, query, key, value):
        return query, key[::-1], value


class DroppedLastKey(Stub):
    def ask(self, query, key, value):
        self.kv_len = key.shape[-3]
        return query, key, value

    def tell(self, options):
        return options | {"key_value_seq_lengths": self.kv_len - 1}


class UnsummedGroups(Stub):
    """dk and dv are those of the mean over the group's heads."""

    def answer(self, gradients, query):
        dquery, dkey, dvalue = gradients
        num_groups = query.shape[-2] // dkey.shape[-2]
        return dquery, dkey / num_groups, dvalue / num_groups


class DroppedLogsumexpCotangent(Stub):
    def run_backward(self, *operands, **options):
        *rest, dlogsumexp = operands
        return super().run_backward(*rest, np.zeros_like(dlogsumexp), **options)


class UnwrittenRow(Stub):
    """The last row stays as the NaN that was there before."""

    def run_forward(self, *operands, **options):
        out, logsumexp = super().run_forward(*operands, **options)
        out[..., -1, :, :] = np.nan
        return out, logsumexp


class Base2Logsumexp(Stub):
    def run_forward(self, *operands, **options):
        out, logsumexp = super().run_forward(*operands, **options)
        return out, logsumexp * np.float32(np.log2(np.e))


class Imprecise(Stub):
    """Off by four roundings of the dtype: inside no tolerance."""

    def run_forward(self, query, *operands, **options):
        out, logsumexp = super().run_forward(query, *operands, **options)
        step = {2: 2.0**-6, 4: 2.0**-12}[query.dtype.itemsize]
        return (out.astype(np.float32) * np.float32(1 + step)).astype(
            query.dtype
        ), logsumexp


def _gradient_of(gradients, operand):
    (name,) = (n for n, of in DIFFERENTIABLE.items() if of == operand)
    return getattr(gradients, name)


def _without(name):
    """Ignores an operand or option of that name."""

    class Ignorant(Stub):
        def tell(self, options):
            return {n: x for n, x in options.items() if n != name}

        def run_gradient(self, of, *operands, **options):
            if of == name:
                return np.zeros_like(options[of])
            return super().run_gradient(of, *operands, **options)

    Ignorant.__name__ = f"Without-{name}"
    return Ignorant


# An implementation per feature that does not know it.
IGNORANT = {
    name: _without(name)
    for name in (
        *FEATURE_OPERANDS[:3],
        *("query_seq_lengths", "key_value_seq_lengths", "sinks", "alibi_slopes"),
        *("dropout_batch_indices", "dropout_head_indices"),
        *("sliding_window", "logits_soft_cap"),
    )
}


class SwappedSegments(Stub):
    """Compares the ids of the queries with those of the queries."""

    def tell(self, options):
        length = options["kv_segment_ids"].shape[-1]
        ids = np.resize(options["q_segment_ids"], (*options["kv_segment_ids"].shape,))
        return options | {"kv_segment_ids": ids[..., :length]}


class SinkForAll(Stub):
    """The sink of head 0 counts for every head."""

    def tell(self, options):
        sinks = np.broadcast_to(options["sinks"][..., :1], options["sinks"].shape)
        return options | {"sinks": sinks}


class ExclusiveWindow(Stub):
    def tell(self, options):
        window = tuple(None if n is None else n - 1 for n in options["sliding_window"])
        return options | {"sliding_window": window}


class OtherDropoutInTheBackward(Stub):
    def run_backward(self, *operands, **options):
        other = {"dropout_key": options["dropout_key"] ^ np.uint32(1)}
        return super().run_backward(*operands, **options | other)


class UnsummedGradient(Stub):
    """The mean instead of the sum over the dims that bias was broadcast over."""

    def answer_gradient(self, gradient, operand):
        return gradient / 2


class LowestBiasHides(Stub):
    """Takes every very negative number for a mask."""

    def tell(self, options):
        bias = options["bias"].astype(np.float32)
        return options | {"bias": np.where(bias < -1e4, -np.inf, bias)}


class LeakingNan:
    """Plain attention: 0 * NaN of a hidden key or value reaches every row."""

    def run_forward(self, *operands, **options):
        result = baseline.attention(*operands, **options)
        return (
            result.out.astype(operands[0].dtype),
            result.logsumexp.astype(np.float32),
        )

    def run_backward(self, *operands, **options):
        query, key, value, _, _, dout, dlogsumexp = operands
        gradients = baseline.attention_gradients(
            query, key, value, dout, dlogsumexp, **options
        )
        return tuple(x.astype(query.dtype) for x in gradients[:3])

    def run_gradient(self, of, *operands, **options):
        query, key, value, _, _, dout, dlogsumexp = operands
        gradients = baseline.attention_gradients(
            query, key, value, dout, dlogsumexp, **options
        )
        return _gradient_of(gradients, of).astype(options[of].dtype)


class SilentNan(Stub):
    """Drops every non-finite input: rows that see one look healthy."""

    def run_forward(self, query, *operands, **options):
        options = {n: _finite(x) for n, x in options.items()}
        return super().run_forward(*map(_finite, (query, *operands)), **options)

    def run_backward(self, *operands, **options):
        options = {n: _finite(x) for n, x in options.items()}
        return super().run_backward(*map(_finite, operands), **options)

    def run_gradient(self, of, *operands, **options):
        options = {n: _finite(x) for n, x in options.items()}
        return super().run_gradient(of, *map(_finite, operands), **options)


def _finite(x):
    if not isinstance(x, np.ndarray) or x.dtype.kind in "biu":
        return x
    return np.where(np.isfinite(x), x, np.zeros((), x.dtype))
