"""Implementations for the meta-test: the right answer, or one with a known flaw."""

import numpy as np

from tests.support import baseline, reference_f64


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

    def ask(self, query, key, value):
        return query, key, value

    def tell(self, options):
        return options

    def answer(self, gradients, query):
        return gradients


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


class SilentNan(Stub):
    """Drops every non-finite input: rows that see one look healthy."""

    def run_forward(self, query, *operands, **options):
        return super().run_forward(*map(_finite, (query, *operands)), **options)

    def run_backward(self, *operands, **options):
        query, key, value, out, lse, dout, dlse = operands
        arguments = map(_finite, (query, key, value, out, lse, dout, dlse))
        return super().run_backward(*arguments, **options)


def _finite(x):
    return np.where(np.isfinite(x), x, np.zeros((), x.dtype))
