"""Names, signatures and examples of the public functions."""

import doctest
import inspect

import jax
import pytest

import jax_flash_metal
import jax_flash_metal.flax
from jax_flash_metal import api

# The newest jax.nn.dot_product_attention's, read in jax 0.12.
JAX_NN_PARAMETERS = [
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "scale",
    "is_causal",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "local_window_size",
    "implementation",
    "return_residual",
]


def test_names():
    assert set(jax_flash_metal.__all__) == {
        "Explanation",
        "SegmentIds",
        "__version__",
        "autotune",
        "dot_product_attention",
        "explain",
        "flash_attention",
        "is_supported",
        "merge_partials",
    }
    assert all(hasattr(jax_flash_metal, name) for name in jax_flash_metal.__all__)


def test_flash_attention_signature():
    parameters = inspect.signature(jax_flash_metal.flash_attention).parameters
    assert list(parameters) == [
        "query",
        "key",
        "value",
        "bias",
        "mask",
        "scale",
        "is_causal",
        "q_offset",
        "sliding_window",
        "logits_soft_cap",
        "segment_ids",
        "query_seq_lengths",
        "key_value_seq_lengths",
        "sinks",
        "alibi_slopes",
        "dropout_rate",
        "dropout_key",
        "return_logsumexp",
        "implementation",
    ]
    keyword_only = [p.kind == p.KEYWORD_ONLY for p in parameters.values()]
    assert keyword_only == [False] * 5 + [True] * 14


def test_dot_product_attention_signature():
    ours = inspect.signature(jax_flash_metal.dot_product_attention).parameters
    assert list(ours) == JAX_NN_PARAMETERS
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


def test_flax_signature_has_every_name():
    # linen passes only the arguments that it finds here.
    from flax import linen, nnx

    ours = inspect.signature(jax_flash_metal.flax.dot_product_attention).parameters
    for function in (linen.dot_product_attention, nnx.dot_product_attention):
        for name, parameter in inspect.signature(function).parameters.items():
            assert name in ours
            if name != "promote_dtype":
                assert ours[name].default == parameter.default


@pytest.mark.parametrize(
    "name", ["flash_attention", "dot_product_attention", "explain", "merge_partials"]
)
def test_docstring_example(name):
    function = getattr(api, name)
    test = doctest.DocTestFinder(recurse=False).find(function, name)[0]
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(
    "name", ["flash_attention", "dot_product_attention", "merge_partials"]
)
def test_docstring_names_every_argument(name):
    function = getattr(api, name)
    for parameter in inspect.signature(function).parameters:
        assert f"  {parameter}: " in inspect.getdoc(function)
