"""The cases that kernels are proven with: their definition, reach and judgement."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from jax_flash_metal import attention_library, kernel_cases, kernel_proof
from jax_flash_metal.attention_library import AttentionLibrary
from jax_flash_metal.kernel_cases import KernelCase, kernel_of
from jax_flash_metal.variant_table import row_head_dim, variants
from tests.support import (
    launch_params,
    native,
    reference_f64,
    tolerances,
    variant_coverage,
)

ROOT = Path(__file__).parents[2]
LIBRARY = AttentionLibrary(native.load())
DTYPES = tuple(attention_library.DTYPES)
ALL_ROWS = sorted({(v.dtype, v.head_dim) for v in variants()})
# The least head_dim of the table.
LEAST = min(v.head_dim for v in variants())
CASES = kernel_cases.cases_of("float32", LEAST)
FORWARD_WITH_OPTIONS = [
    KernelCase("float32", LEAST, "forward", is_short, has_options=True)
    for is_short in (False, True)
]


def test_tolerances_are_those_of_the_tests():
    for dtype, kinds in kernel_cases.TOLERANCES.items():
        assert kinds == tolerances.CEILING[tolerances.DTYPES[dtype]]


def test_dtypes_are_those_of_the_tests():
    assert attention_library.NUMPY_DTYPES == tolerances.DTYPES


def test_names_are_those_of_the_build():
    assert {v.host_name for v in variants()} == variant_coverage.all_kernels()


def make_operands(case):
    rng = np.random.default_rng(3)
    sizes = attention_library.sizes_of(case.shape)
    return [
        rng.standard_normal((2, *(sizes[letter] for letter in dims)))
        for dims in ("TNH", "SKH", "SKV")
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition_is_that_of_the_tests(case):
    operands, options = make_operands(case), case.options
    out, logsumexp = kernel_cases.attention(*operands, **options)
    expected = reference_f64.attention(*operands, **options)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(logsumexp, expected[1], rtol=1e-12, atol=1e-12)
    rng = np.random.default_rng(4)
    cotangents = [rng.standard_normal(x.shape) for x in (out, logsumexp)]
    gradients = kernel_cases.attention_gradients(
        *operands, out, logsumexp, *cotangents, **options
    )
    expected = reference_f64.attention_gradients(*operands, *cotangents, **options)
    assert len(gradients) == (6 if case.has_options else 3)
    for name, actual in gradients.items():
        wanted = getattr(expected, name.replace("alibi_", ""))
        np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-11)


def test_unaligned_cases_have_tails_everywhere():
    for variant in variants():
        for case in kernel_cases.cases_of(variant.dtype, variant.head_dim):
            shape = case.shape
            assert shape.q_len % variant.block_q
            assert shape.kv_len % variant.block_kv
            assert shape.head_dim % 8 and shape.value_head_dim % 8
            assert shape.num_heads > shape.num_kv_heads > 1
            # Some row sees a part of the keys only, none sees nothing.
            assert 0 <= case.q_offset < shape.kv_len - shape.q_len


@pytest.mark.parametrize("form", ["A", "B"])
def test_grouped_cases_sum_parts_that_differ(form):
    """By every row, or the kernel that sums the parts would not be proven."""
    rows = [v for v in variants() if v.kernel == DKV]
    for v in rows:
        choice = f"{form}\t{v.host_name}"
        row = KernelCase(v.dtype, v.head_dim, "backward", choice=choice)
        case = dataclasses.replace(row, is_grouped=True)
        with case.chosen(LIBRARY):
            plan = LIBRARY.plan(case.problem(), "backward")
        (launch,) = (x for x in plan["launches"] if x["kernel"] == v.host_name)
        shape, params = case.shape, launch_params.params_of(launch)
        blocks = -(-shape.q_len // v.block_q)
        num_blocks = blocks * shape.num_heads // shape.num_kv_heads
        assert blocks > 1 and shape.kv_len > v.block_kv
        assert params.num_parts > 1
        assert params.num_parts * params.blocks_per_part != num_blocks
        assert plan["form"] == form


def test_aligned_cases_have_no_tails():
    for variant in variants():
        is_short = "short" in variant.kernel
        case = KernelCase(variant.dtype, variant.head_dim, "forward", is_short, True)
        assert case.shape.q_len % variant.block_q == 0
        assert case.shape.kv_len % variant.block_kv == 0


def test_cases_on_the_cpu_have_tails_of_blocks_or_whole_ones():
    text = (ROOT / "plugin" / "cpu" / "masks.h").read_text()
    queries, keys = (
        int(re.search(rf"int kBlock{what} = (\d+);", text)[1])
        for what in ("Queries", "Keys")
    )
    for case in kernel_cases.cases_of(
        "float32", LEAST, with_aligned=True, backend="cpu"
    ):
        shape = case.shape
        if case.is_aligned:
            assert shape.kv_len % keys == 0
            assert case.is_short or shape.q_len % queries == 0
            continue
        assert shape.kv_len > keys and shape.kv_len % keys % 8
        assert case.is_short or (shape.q_len > queries and shape.q_len % queries % 6)
        # The last block of keys is seen by some queries, not by all.
        first = shape.kv_len // keys * keys
        assert case.q_offset < first < shape.q_len + case.q_offset < shape.kv_len


def test_cases_with_options_have_all_of_them():
    arguments = {
        *attention_library.OPTIONAL_OPERANDS,
        *("sliding_window", "logits_soft_cap", "dropout_rate", "is_causal", "scale"),
    }
    for case in FORWARD_WITH_OPTIONS:
        assert set(case.options) == arguments


# Options that come together.
TOGETHER = [
    ("bias",),
    ("mask",),
    ("q_segment_ids", "kv_segment_ids"),
    ("query_seq_lengths",),
    ("key_value_seq_lengths",),
    ("sinks",),
    ("alibi_slopes",),
    ("sliding_window",),
    ("logits_soft_cap",),
    (
        *("dropout_rate", "dropout_key"),
        *("dropout_batch_indices", "dropout_head_indices"),
    ),
]


@pytest.mark.parametrize("case", FORWARD_WITH_OPTIONS, ids=str)
def test_every_option_shows(case):
    """Without it the result is another: a kernel that ignores it is found."""
    operands, options = make_operands(case), case.options
    whole = kernel_cases.attention(*operands, **options)
    for names in TOGETHER:
        rest = {k: v for k, v in options.items() if k not in names}
        out, _ = kernel_cases.attention(*operands, **rest)
        assert np.abs(out - whole[0]).max() > 0.05, names
    for index in range(2):  # of the offsets, each batch index has its own
        changed = options["q_offset"].copy()
        changed[index] += 1
        out, _ = kernel_cases.attention(*operands, **options | {"q_offset": changed})
        assert np.abs(out - whole[0])[index].max() > 0.03
    # A block of the mask hides all, and others of its size do not.
    mask = options["mask"]
    starts = [range(0, size, 32) for size in mask.shape[2:]]
    blocks = [
        mask[..., i : i + 32, j : j + 32].any() for i in starts[0] for j in starts[1]
    ]
    assert blocks.count(False) == 1
    # Some row sees nothing.
    assert np.isneginf(whole[1]).any() and np.isfinite(whole[1]).any()


def all_kernels_of(shape, which):
    """The kernels of a call with every option, with arrays that are not the cases'."""
    sizes = attention_library.sizes_of(shape) | {"K": 4}
    shape = dataclasses.replace(shape, num_kv_heads=4)
    dtype = attention_library.NUMPY_DTYPES[shape.dtype]
    arrays = {
        name: np.zeros((3, *(sizes[letter] for letter in dims)), dtype)
        for name, dims in attention_library.DIMS.items()
    }
    operands = {name: arrays[name] for name in attention_library.FORWARD_OPERANDS}
    if which != "forward":
        operands = {n: arrays[n] for n in attention_library.BACKWARD_OPERANDS}
    case = KernelCase(shape.dtype, 64, "forward", has_options=True)
    options = {
        name: arrays[name].astype(value.dtype)
        if isinstance(value, np.ndarray)
        else value
        for name, value in case.options.items()
    }
    for name in ("logsumexp", "dlogsumexp"):
        if name in operands:
            operands[name] = operands[name].astype(np.float32)
    problem = attention_library.make_problem(operands, **options)
    names = []
    for of in attention_library.DIFFERENTIABLE_OPTIONS:
        if which != "gradient":
            results = getattr(attention_library, f"{which.upper()}_RESULTS")
            attention_library.attach_results(problem, operands, results)
            return LIBRARY.kernels(problem, which)
        attention_library.attach_gradient(problem, of, options[of][:1])
        names += LIBRARY.kernels(problem, which)
    return names


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_proof_of_a_call_runs_the_kernels_of_the_call(dtype):
    """Whatever the call's head_dim, the case of its row runs the same kernels."""
    proofs = kernel_proof._Proofs(LIBRARY)
    for head_dim in (1, 31, 32, 33, 64, 65, 97, 129, 193, 256):
        row = row_head_dim(dtype, head_dim)
        for is_short in (False, True):
            for which in ("forward", "backward"):
                case = KernelCase(dtype, row, which, is_short)
                shape = dataclasses.replace(
                    case.shape, head_dim=head_dim, value_head_dim=1
                )
                problem = attention_library.shape_problem(shape)
                kernels = LIBRARY.kernels(problem, which)
                assert kernels == case.kernels(LIBRARY)
                own = list(case.keys(LIBRARY).values())
                assert proofs._asked(problem, which, False)[0] == own
            for which in attention_library.PASSES:
                keys, _ = proofs._asked(problem, which, True)
                plain, _ = proofs._asked(problem, which, False)
                wanted = set(all_kernels_of(shape, which))
                # Delta without options is that with options: asked of once.
                found = {kernel_cases.kernel_of_key(key) for key in keys}
                assert found == wanted
                changed = {k for k in keys if k != kernel_cases.kernel_of_key(k)}
                changed -= set(plain)
                few = 1 if which == "forward" and not is_short else 2
                assert len(changed) == (3 if which == "gradient" else few)


# float16 is bfloat16 here but for its dS; doctor's test_this_installation runs all.
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(d, marks=[pytest.mark.slow] if d == "bfloat16" else [])
        for d in DTYPES
    ],
)
def test_every_kernel_is_reached_and_right(dtype):
    found = {}
    for row_dtype, head_dim in ALL_ROWS:
        if row_dtype == dtype:
            for case in kernel_cases.every_case(dtype, head_dim):
                found |= kernel_cases.check(LIBRARY, case)
    wanted = {v.host_name for v in variants() if v.dtype == dtype}
    assert {kernel_cases.kernel_of_key(key) for key in found} == wanted
    # 0.4 at most when this was written: far from the limit, so no chance failures.
    assert all(v.failure is None and v.error < 0.5 for v in found.values())


class Wrong(AttentionLibrary):
    """Spoils some results."""

    def __init__(self, *spoiled, by=0.01):
        super().__init__(native.load())
        self._spoiled, self._by = spoiled, by

    def run_forward(self, *operands, **options):
        return self._spoil(("out", "logsumexp"), super().run_forward, operands, options)

    def run_backward(self, *operands, **options):
        names = ("dquery", "dkey", "dvalue")
        return self._spoil(names, super().run_backward, operands, options)

    def run_gradient(self, of, *operands, **options):
        def run(*operands, **options):
            return (super(Wrong, self).run_gradient(of, *operands, **options),)

        return self._spoil((f"d{of}",), run, operands, options)[0]

    def _spoil(self, names, run, operands, options):
        results = run(*operands, **options)
        for name, result in zip(names, results):
            if name in self._spoiled:
                result[0, ..., 0] += self._by
        return results


DQ, DKV = "attention_backward_dq", "attention_backward_dkv"
PRODUCT, DKV_OF_B = f"{DQ}_product", f"{DKV} of form B"
MASK_BLOCKS = "attention_mask_blocks"
BIAS_GRADIENT = "attention_bias_gradient"
COMBINE = f"{BIAS_GRADIENT}_combine"


def blamed_by(library, dtype="float32", *, has_options, form=""):
    """The kernels that fail and those that do not, of the longer cases.

    `form`: of the backward pass, if not the default.
    """
    verdicts = {}
    for case in kernel_cases.cases_of(dtype, LEAST):
        is_longer = not case.is_short and not case.is_grouped
        if is_longer and case.has_options == has_options:
            if form and case.which == "backward":
                case = dataclasses.replace(case, choice=f"{form}\t")
            verdicts |= kernel_cases.check(library, case)
    kernels = {
        key: " ".join((kernel_of(kernel_cases.kernel_of_key(key)), *key.split()[1:]))
        for key in verdicts
    }
    failed = {kernels[key] for key, verdict in verdicts.items() if verdict.failure}
    return sorted(failed), sorted(set(kernels.values()) - failed)


@pytest.mark.parametrize(
    ("spoiled", "form", "blamed"),
    [
        ("out", "", ["attention_forward"]),
        ("logsumexp", "", ["attention_forward"]),
        ("dquery", "", [PRODUCT]),
        ("dkey", "", [DKV_OF_B]),
        ("dvalue", "", [DKV_OF_B]),
        # All go through it.
        ("dquery dkey dvalue", "", [DKV_OF_B]),
        ("dquery", "A", [DQ]),
        ("dvalue", "A", [DKV]),
        # All depend on delta.
        ("dquery dkey dvalue", "A", [DKV, DQ, "attention_delta"]),
        ("", "", []),
    ],
    ids=str,
)
def test_who_is_blamed(spoiled, form, blamed):
    failed, good = blamed_by(Wrong(*spoiled.split()), has_options=False, form=form)
    assert failed == blamed
    # In form B nothing is known of what is beside a wrong kernel of dK and dV.
    assert len(failed) + len(good) == (2 if DKV_OF_B in failed else 4)


def test_who_is_blamed_for_sums_in_parts():
    case = KernelCase("float32", LEAST, "backward", is_grouped=True)
    verdicts = kernel_cases.check(Wrong("dvalue"), case)
    blamed = {key for key, verdict in verdicts.items() if verdict.failure}
    combine, of_parts = sorted(blamed)
    assert of_parts.startswith(f"{DKV}_float32_")
    assert of_parts.endswith(" of form B in parts")
    assert kernel_of(combine) == f"{DKV}_combine"
    assert len(verdicts) == 2


FORM_B = [
    case
    for dtype, head_dim in ALL_ROWS
    for case in kernel_cases.every_case(dtype, head_dim)
    if case.choice.startswith("B\t")
]


def test_verdicts_of_form_b_have_names_of_their_own():
    assert FORM_B
    for case in FORM_B:
        keys = {kernel_of(name): key for name, key in case.keys(LIBRARY).items()}
        options = " with options" if case.has_options else ""
        parts = " in parts" if case.is_grouped else ""
        assert keys[DKV].endswith(f" of form B{parts}{options}")
        assert keys[PRODUCT].partition("_device")[2] == options


WITH_OPTIONS = " with options"


@pytest.mark.parametrize(
    ("spoiled", "form", "blamed"),
    [
        ("out", "", [f"attention_forward{WITH_OPTIONS}"]),
        ("logsumexp", "", [f"attention_forward{WITH_OPTIONS}"]),
        ("dquery", "", [f"{PRODUCT}{WITH_OPTIONS}"]),
        ("dquery", "A", [f"{DQ}{WITH_OPTIONS}"]),
        ("dkey", "", [f"{DKV_OF_B}{WITH_OPTIONS}"]),
        ("dquery dkey dvalue", "", [f"{DKV_OF_B}{WITH_OPTIONS}"]),
        (
            *("dquery dkey dvalue", "A"),
            [
                *(f"{DKV}{WITH_OPTIONS}", f"{DQ}{WITH_OPTIONS}"),
                *("attention_delta", MASK_BLOCKS),
            ],
        ),
        ("dbias", "", [f"{BIAS_GRADIENT} of bias"]),
        ("dalibi_slopes", "", [f"{BIAS_GRADIENT} of alibi_slopes", COMBINE]),
        ("dsinks", "", ["attention_sinks_gradient"]),
        ("", "", []),
    ],
    ids=str,
)
def test_who_is_blamed_with_options(spoiled, form, blamed):
    library = Wrong(*spoiled.split(), by=2)
    failed, good = blamed_by(library, has_options=True, form=form)
    assert failed == blamed
    all_of_b = f"{DKV_OF_B}{WITH_OPTIONS}" in failed
    assert len(failed) + len(good) == (6 if all_of_b else 9)


def test_a_shared_bias_is_judged_on_its_own():
    """Its kernel sums over queries and heads, which is another path."""
    for is_short in (False, True):
        case = KernelCase("float32", LEAST, "gradient", is_short, False, True, "bias")
        verdicts = kernel_cases.check(Wrong("dbias", by=5), case)
        (key,) = (key for key in verdicts if " of " in key)
        assert key.endswith(" of shared bias" if is_short else "_s4 of bias")
        assert verdicts[key].failure


def test_kernels_of_all_dtypes_are_judged_once():
    """A wrong kernel of one dtype must not take what is right from the others."""
    library = Wrong("dquery", "dkey", "dvalue", "dbias", "dsinks", by=5)
    failed, _ = blamed_by(library, "bfloat16", has_options=True)
    assert not {MASK_BLOCKS, COMBINE} & set(failed)
    assert f"{BIAS_GRADIENT} of bias" in failed


def test_the_sentences_of_wrong_numbers():
    case = KernelCase("float32", 64, "forward")
    (verdict,) = kernel_cases.check(Wrong("out", by=1), case).values()
    assert "its out is wrong: " in verdict.failure
    assert verdict.failure.endswith("times the allowed error")
    (verdict,) = kernel_cases.check(Wrong("out", by=np.nan), case).values()
    assert verdict.error is None
    assert verdict.failure.endswith(" numbers of its out are not finite")


def test_a_row_without_keys_must_be_minus_infinity():
    case = FORWARD_WITH_OPTIONS[0]

    class Zero(AttentionLibrary):
        def run_forward(self, *operands, **options):
            out, logsumexp = super().run_forward(*operands, **options)
            return out, np.where(np.isneginf(logsumexp), 0, logsumexp)

    (verdict,) = kernel_cases.check(Zero(native.load()), case).values()
    assert "of its logsumexp are not finite" in verdict.failure


def test_short_kernels_share_their_results():
    case = KernelCase("float16", 64, "backward", True)
    verdicts = kernel_cases.check(Wrong("dquery"), case)
    failed = {name.split("_float16")[0] for name, v in verdicts.items() if v.failure}
    assert failed == {"attention_short_dq", "attention_short_dq_combine"}
