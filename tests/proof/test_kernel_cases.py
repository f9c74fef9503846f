"""The cases that kernels are proven with: their definition, reach and judgement."""

import dataclasses

import numpy as np
import pytest

from jax_flash_metal import attention_library, kernel_cases
from jax_flash_metal.attention_library import AttentionLibrary
from jax_flash_metal.kernel_cases import KernelCase
from jax_flash_metal.variant_table import row_head_dim, variants
from tests.support import native, reference_f64, tolerances, variant_coverage

LIBRARY = AttentionLibrary(native.load())
DTYPES = tuple(attention_library.DTYPES)


def cases(dtype, head_dim, *, is_aligned):
    return [
        KernelCase(dtype, head_dim, is_short, is_aligned, backward)
        for is_short in (False, True)
        for backward in (False, True)
    ]


def test_tolerances_are_those_of_the_tests():
    for dtype, kinds in kernel_cases.TOLERANCES.items():
        ceiling = tolerances.CEILING[tolerances.DTYPES[dtype]]
        assert kinds == {kind: ceiling[kind] for kind in kinds}
        assert set(kinds) == set(ceiling) - {tolerances.DBIAS}


def test_dtypes_are_those_of_the_tests():
    assert attention_library.NUMPY_DTYPES == tolerances.DTYPES


def test_names_are_those_of_the_build():
    assert {v.host_name for v in variants()} == variant_coverage.all_kernels()


@pytest.mark.parametrize("case", cases("float32", 32, is_aligned=False), ids=str)
def test_definition_is_that_of_the_tests(case):
    rng = np.random.default_rng(3)
    shape, options = case.shape, case.options

    def normal(rows, heads, width):
        return rng.standard_normal((2, rows, heads, width))

    query = normal(shape.q_len, shape.num_heads, shape.head_dim)
    key = normal(shape.kv_len, shape.num_kv_heads, shape.head_dim)
    value = normal(shape.kv_len, shape.num_kv_heads, shape.value_head_dim)
    out, logsumexp = kernel_cases.attention(query, key, value, **options)
    expected = reference_f64.attention(query, key, value, **options)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(logsumexp, expected[1], rtol=1e-12, atol=1e-12)
    dout = rng.standard_normal(out.shape)
    dlogsumexp = rng.standard_normal(logsumexp.shape)
    gradients = kernel_cases.attention_gradients(
        query, key, value, out, logsumexp, dout, dlogsumexp, **options
    )
    expected = reference_f64.attention_gradients(
        query, key, value, dout, dlogsumexp, **options
    )
    for actual, wanted in zip(gradients, expected[:3], strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-11)


def test_unaligned_cases_have_tails_everywhere():
    for variant in variants():
        for is_short in (False, True):
            case = KernelCase(variant.dtype, variant.head_dim, is_short, False, False)
            shape = case.shape
            assert shape.q_len % variant.block_q
            assert shape.kv_len % variant.block_kv
            assert shape.head_dim % 8 and shape.value_head_dim % 8
            assert shape.num_heads > shape.num_kv_heads > 1
            # Some row sees a part of the keys only, none sees nothing.
            assert 0 <= case.q_offset < shape.kv_len - shape.q_len


def test_aligned_cases_have_no_tails():
    for variant in variants():
        is_short = "short" in variant.kernel
        case = KernelCase(variant.dtype, variant.head_dim, is_short, True, False)
        assert case.shape.q_len % variant.block_q == 0
        assert case.shape.kv_len % variant.block_kv == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_proof_of_a_call_runs_the_kernels_of_the_call(dtype):
    """Whatever the call's head_dim, the case of its row runs the same kernels."""
    for head_dim in (1, 31, 32, 33, 64, 65, 97, 129, 193, 256):
        row = row_head_dim(dtype, head_dim)
        for is_short in (False, True):
            for backward in (False, True):
                case = KernelCase(dtype, row, is_short, False, backward)
                shape = dataclasses.replace(
                    case.shape, head_dim=head_dim, value_head_dim=1
                )
                problem = attention_library.shape_problem(shape)
                assert LIBRARY.kernels(problem, backward) == case.kernels(LIBRARY)


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_is_reached_and_right(dtype, is_aligned):
    wanted = {v.host_name for v in variants() if v.dtype == dtype}
    found = {}
    for head_dim in {v.head_dim for v in variants()}:
        for case in cases(dtype, head_dim, is_aligned=is_aligned):
            found |= kernel_cases.check(LIBRARY, case)
    assert set(found) == wanted
    # 0.3 at most when this was written: far from the limit, so no chance failures.
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

    def _spoil(self, names, run, operands, options):
        results = run(*operands, **options)
        for name, result in zip(names, results):
            if name in self._spoiled:
                result[-1, -1, -1] += self._by
        return results


DQ, DKV = "attention_backward_dq", "attention_backward_dkv"


@pytest.mark.parametrize(
    ("spoiled", "blamed"),
    [
        ("out", ["attention_forward"]),
        ("logsumexp", ["attention_forward"]),
        ("dquery", [DQ]),
        ("dkey", [DKV]),
        ("dvalue", [DKV]),
        # Both depend on delta.
        ("dquery dkey", [DKV, DQ, "attention_delta"]),
        ("", []),
    ],
    ids=str,
)
def test_who_is_blamed(spoiled, blamed):
    verdicts = {}
    for backward in (False, True):
        case = KernelCase("float32", 64, False, False, backward)
        verdicts |= kernel_cases.check(Wrong(*spoiled.split()), case)
    failed = {name.split("_float32")[0] for name, v in verdicts.items() if v.failure}
    assert sorted(failed) == blamed
    assert len(verdicts) == 4


def test_the_sentences_of_wrong_numbers():
    case = KernelCase("float32", 64, False, False, False)
    (verdict,) = kernel_cases.check(Wrong("out", by=1), case).values()
    assert "its out is wrong: " in verdict.failure
    assert verdict.failure.endswith("times the allowed error")
    (verdict,) = kernel_cases.check(Wrong("out", by=np.nan), case).values()
    assert verdict.error is None
    assert verdict.failure.endswith(" numbers of its out are not finite")


def test_short_kernels_share_their_results():
    case = KernelCase("float16", 64, True, False, True)
    verdicts = kernel_cases.check(Wrong("dquery"), case)
    failed = {name.split("_float16")[0] for name, v in verdicts.items() if v.failure}
    assert failed == {"attention_short_dq", "attention_short_dq_combine"}
