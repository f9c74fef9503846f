"""Properties of the public functions, under jit, vmap and reverse mode."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jax_flash_metal import flash_attention, merge_partials
from jax_flash_metal.config import BACKENDS
from tests.properties.strategies import calls, compiled
from tests.support import cases, jax_call, reference_f64
from tests.support.inputs import make_inputs
from tests.support.kernel_check import (
    all_results,
    assert_result,
)

B = 2


@st.composite
def public_calls(draw, **options):
    """A Case with one batch dim, as the public function takes it."""
    case = draw(calls(max_batch_dims=0, **options))
    # The first example would be a plain call of sizes 1, and each is a compilation.
    assume(case.features)
    shared = {name: (draw(st.sampled_from((1, B))),) for name in ("bias", "mask")}
    return jax_call.public(dataclasses.replace(case, batch=(B,), feature_batch=shared))


def _check(case, results, arguments):
    expected = all_results(reference_f64, case, arguments)
    for name, actual in results.present():
        wanted = getattr(expected, name)
        assert_result(case, name, actual, wanted, context=f"{case.context}, {case}")


def _is_right(implementation, case):
    inputs, arguments = make_inputs(case), jax_call.make_public_arguments(case)
    results = jax_call.run(implementation, inputs, **arguments)
    _check(case, results, arguments)


kernels = pytest.mark.parametrize("implementation", BACKENDS)
every = pytest.mark.parametrize(
    "implementation", [*BACKENDS, "xla", "fallback"], indirect=True
)


@kernels
@compiled(6)
@given(public_calls())
def test_any_call_of_the_kernels_is_right(implementation, case):
    _is_right(implementation, case)


@compiled(2)
@given(public_calls())
def test_any_call_of_the_reference_is_right(case):
    _is_right("xla", case)


@pytest.mark.slow
@every
@compiled(40)
@given(public_calls())
def test_any_of_many_calls_is_right(implementation, case):
    _is_right(implementation, case)


def _vmapped_is_looped(implementation, case, mapped, num_mapped):
    """Each operand is mapped or shared; the shared ones have gradients too."""
    elements = []
    for i in range(num_mapped):
        one = dataclasses.replace(case, id=f"{case.id}-element{i}")
        arguments = jax_call.make_public_arguments(one)
        elements.append((make_inputs(one), arguments))
    first_inputs, first = elements[0]
    arrays = {n: x for n, x in first.items() if jax_call.is_array(x)}
    static = {n: x for n, x in first.items() if n not in arrays}

    def values(inputs, arguments):
        return {**inputs._asdict(), **{n: arguments[n] for n in arrays}}

    every = [values(*element) for element in elements]
    is_mapped = {n: n in mapped for n in every[0]}
    is_mapped |= dict.fromkeys(("dout", "dlogsumexp"), True)
    arguments = {
        name: jax.tree.map(lambda *x: np.stack(x), *(e[name] for e in every))
        if is_mapped[name]
        else every[0][name]
        for name in every[0]
    }

    def call(arguments):
        inputs = type(first_inputs)(*(arguments[n] for n in first_inputs._fields))
        traced = {n: arguments[n] for n in arrays}
        return jax_call.results(
            implementation, static, inputs.operands, traced, inputs.dout,
            inputs.dlogsumexp,
        )  # fmt: skip

    axes = {name: 0 if is_mapped[name] else None for name in arguments}
    together = jax.jit(jax.vmap(call, (axes,)))(arguments)
    alone = jax.jit(call)
    for i in range(num_mapped):
        one = {
            name: jax.tree.map(lambda x: x[i], x) if is_mapped[name] else x  # noqa: B023
            for name, x in arguments.items()
        }
        for name, a, e in zip(
            jax_call.Results._fields, together, alone(one), strict=True
        ):
            if e is None:
                continue
            assert_result(
                *(case, name, np.asarray(a[i]), np.asarray(e).astype(np.float64)),
                context=f"{case.context}, mapped {sorted(mapped)}, {case}",
            )


MAPPABLE = (
    *("query", "key", "value", "bias", "mask", "q_offset", "segment_ids"),
    *("query_seq_lengths", "key_value_seq_lengths", "sinks", "alibi_slopes"),
    "dropout_key",
)
mappings = st.sets(st.sampled_from(MAPPABLE))


@kernels
@compiled(3)
@given(public_calls(), mappings, st.integers(2, 3))
def test_vmapped_kernels_are_looped_ones(implementation, case, mapped, num_mapped):
    _vmapped_is_looped(implementation, case, mapped, num_mapped)


@pytest.mark.slow
@every
@compiled(20)
@given(public_calls(), mappings, st.integers(2, 3))
def test_vmapped_is_looped_often(implementation, case, mapped, num_mapped):
    _vmapped_is_looped(implementation, case, mapped, num_mapped)


def _merged_is_whole(implementation, case, cuts, sinks_in):
    """Parts of the keys, some of which see nothing, with gradients through the merge.

    `sinks_in`: given to the merge, to one part, or to nobody.
    """
    case = dataclasses.replace(case, sinks=sinks_in is not None)
    inputs, arguments = make_inputs(case), jax_call.make_public_arguments(case)
    sinks = arguments.pop("sinks", None)
    edges = [0, *sorted(cuts), case.kv_len]

    def attend(query, key, value, sinks):
        outs, logsumexps = [], []
        for number, (start, end) in enumerate(itertools.pairwise(edges)):
            part = dict(arguments)
            if "q_offset" in part:
                part["q_offset"] = arguments["q_offset"] - start
            for name in ("bias", "mask"):
                if name in part and part[name].shape[-1] == case.kv_len:
                    part[name] = part[name][..., start:end]
            if "segment_ids" in part:
                ids = part["segment_ids"]
                part["segment_ids"] = (ids[0], ids[1][:, start:end])
            out, logsumexp = flash_attention(
                query,
                key[:, start:end],
                value[:, start:end],
                **part,
                sinks=sinks if sinks_in == "part" and number == 0 else None,
                return_logsumexp=True,
                implementation=implementation,
            )
            outs.append(out)
            logsumexps.append(logsumexp)
        given = {"sinks": sinks} if sinks_in == "merge" else {}
        return merge_partials(outs, logsumexps, **given)

    @jax.jit
    def results(operands, dout, dlogsumexp):
        primals, pullback = jax.vjp(attend, *operands)
        return (*primals, *pullback((dout, dlogsumexp)))

    out, logsumexp, *gradients = results(
        (*inputs.operands, sinks), jnp.asarray(inputs.dout), inputs.dlogsumexp
    )
    dsinks = gradients.pop()
    actual = jax_call.Results(
        *map(np.asarray, (out, logsumexp, *gradients)),
        dsinks=None if dsinks is None else np.asarray(dsinks),
    )
    whole = arguments if sinks is None else arguments | {"sinks": sinks}
    _check(case, actual, whole)


# The parts' dropout bits would be counted from their own first key.
merges = public_calls(
    without=("sinks", "kv_lengths", "dropout_rate", "traced_offset", "slopes"),
    dtypes=("float32",),
)


@kernels
@compiled(2)
@given(
    merges, st.lists(st.integers(0, 9), max_size=2), st.sampled_from((None, "merge"))
)
def test_merged_parts_are_the_whole(implementation, case, cuts, sinks_in):
    cuts = [min(cut * 7, case.kv_len) for cut in cuts]
    _merged_is_whole(implementation, case, cuts, sinks_in)


@pytest.mark.slow
@every
@compiled(40)
@given(
    merges, st.lists(st.integers(0, 9), max_size=3), st.sampled_from((None, "merge"))
)
def test_merged_parts_are_the_whole_often(implementation, case, cuts, sinks_in):
    cuts = [min(cut * 7, case.kv_len) for cut in cuts]
    _merged_is_whole(implementation, case, cuts, sinks_in)


in_short = pytest.mark.parametrize(
    "implementation", [*BACKENDS, pytest.param("xla", marks=pytest.mark.slow)]
)


@pytest.mark.parametrize("sinks_in", ["merge", "part"])
@in_short
def test_sinks_count_once(implementation, sinks_in):
    """Given to the merge, or to one part where every row sees a key."""
    case = cases.Case("sinks-once", q_len=9, kv_len=30, head_dim=8, sinks=True)
    _merged_is_whole(implementation, jax_call.public(case), [12, 12], sinks_in)


@in_short
def test_parts_that_see_nothing(implementation):
    """Every row's keys are in one part; some rows have none at all, also with sinks."""
    case = cases.Case("empty-parts", q_len=9, kv_len=30, head_dim=8, is_causal=True,
                      q_offset=-4)  # fmt: skip
    for sinks_in in (None, "merge"):
        _merged_is_whole(implementation, jax_call.public(case), [8, 20], sinks_in)
