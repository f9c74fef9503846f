"""Kernel or reason: explain, is_supported, forced implementations, the log."""

import functools
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_flash_metal
from jax_flash_metal import api, kernel_proof, variant_table
from tests.unit.test_error_messages import B, H, K, N, S, T

TABLE = Path(__file__).parents[2] / "metal_kernels" / "variants.toml"


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def qkv(head_dim=H, dtype=jnp.float32):
    return (
        struct(B, T, N, head_dim, dtype=dtype),
        struct(B, S, K, head_dim, dtype=dtype),
        struct(B, S, K, head_dim, dtype=dtype),
    )


def test_limits_are_those_of_the_table():
    rows = variant_table.tomllib.loads(TABLE.read_text())["variant"]
    for dtype, limit in variant_table.max_head_dims().items():
        # Kernels that read none of query, key and value have a row for all dtypes.
        for kernel in {row["kernel"] for row in rows if dtype in row["dtypes"]}:
            assert any(
                row["kernel"] == kernel
                and row["head_dim"] >= limit
                and dtype in row["dtypes"]
                for row in rows
            )
    assert variant_table.max_head_dims() == {
        "float32": 256,
        "float16": 256,
        "bfloat16": 256,
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 40, 256])
def test_supported(dtype, head_dim):
    arguments = qkv(head_dim, dtype)
    assert jax_flash_metal.is_supported(*arguments, is_causal=True, q_offset=S - T)
    explanation = jax_flash_metal.explain(
        *arguments, implementation="metal", platform="cpu"
    )
    assert str(explanation) == "metal: the kernels run on the software Metal device."


FEATURES = {
    "bias": {"bias": struct(N, T, S)},
    "mask": {"mask": struct(T, S, dtype=bool)},
    "q_offset": {"q_offset": struct(dtype=jnp.int32), "is_causal": True},
    "segment_ids": {
        "segment_ids": (struct(B, T, dtype=jnp.int32), struct(B, S, dtype=jnp.int32))
    },
    "query_seq_lengths": {"query_seq_lengths": struct(B, dtype=jnp.int32)},
    "key_value_seq_lengths": {"key_value_seq_lengths": struct(B, dtype=jnp.int32)},
    "sinks": {"sinks": struct(N)},
    "alibi_slopes": {"alibi_slopes": struct(N)},
    "sliding_window": {"sliding_window": (3, None)},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "dropout": {"dropout_rate": 0.1, "dropout_key": struct(2, dtype=jnp.uint32)},
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_kernels_take_every_feature(name):
    assert jax_flash_metal.is_supported(*qkv(), **FEATURES[name])


def everything():
    return {name: x for options in FEATURES.values() for name, x in options.items()}


def test_the_kernels_take_all_features_together():
    assert jax_flash_metal.is_supported(*qkv(), **everything())
    explanation = jax_flash_metal.explain(
        *qkv(), **everything(), implementation="metal", platform="cpu"
    )
    assert str(explanation) == "metal: the kernels run on the software Metal device."


def test_forced_kernels_that_do_not_exist():
    explanation = jax_flash_metal.explain(*qkv(320), implementation="metal")
    assert str(explanation) == (
        "unsupported: head_dim 320 is above 256, the largest that the float32 kernels "
        "take."
    )
    with pytest.raises(NotImplementedError) as raised:
        jax.eval_shape(
            lambda *a: jax_flash_metal.flash_attention(*a, implementation="metal"),
            *qkv(320),
        )
    assert str(raised.value) == (
        "implementation='metal' cannot run this call: head_dim 320 is above 256, the "
        "largest that the float32 kernels take. The kernels take bfloat16 up to "
        "head_dim 256, float16 up to head_dim 256, float32 up to head_dim 256; "
        "implementation=None or 'xla' runs everything else."
    )


def test_each_pass_is_asked_about(monkeypatch):
    """A kernel that fails its proof changes the answer of the calls that need it."""
    asked = []

    def objection(shape, which, has_features):
        asked.append((which, has_features))
        return "the kernel is disabled" if which == failing else None

    monkeypatch.setattr(kernel_proof, "objection", objection)
    explain = functools.partial(
        jax_flash_metal.explain, implementation="metal", platform="cpu"
    )
    failing = None
    explain(*qkv())
    explain(*qkv(), **FEATURES["sliding_window"])
    explain(*qkv(), **FEATURES["bias"])
    assert asked == [
        *(("forward", False), ("backward", False)),
        *(("forward", True), ("backward", True)),
        *(("forward", True), ("backward", True), ("gradient", True)),
    ]
    failing = "forward"
    assert str(explain(*qkv())) == "unsupported: the kernel is disabled."
    failing = "gradient"
    assert explain(*qkv(), **FEATURES["mask"]).reason.endswith("Metal device.")
    assert explain(*qkv(), **FEATURES["sinks"]).reason.endswith(
        "The gradient is unsupported: the kernel is disabled."
    )


def test_head_dim_above_the_table():
    explanation = jax_flash_metal.explain(*qkv(320))
    assert explanation.implementation == "xla"
    assert explanation.reason == (
        "head_dim 320 is above 256, the largest that the float32 kernels take."
    )


def test_float64(x64):
    explanation = jax_flash_metal.explain(*qkv(dtype=jnp.float64))
    assert explanation.implementation == "xla"
    assert explanation.reason.startswith("there is no kernel for float64, only for ")


def test_platforms():
    explain = jax_flash_metal.explain
    assert str(explain(*qkv(), platform="cpu")) == (
        "xla: on platform 'cpu' the kernels run on the software Metal device, which "
        "is for development; implementation='metal' takes it."
    )
    assert str(explain(*qkv(), platform="tpu")) == (
        "xla: platform 'tpu' has no Metal kernels."
    )
    forced = explain(*qkv(), platform="tpu", implementation="metal")
    assert str(forced) == "unsupported: platform 'tpu' has no Metal kernels."
    asked = explain(*qkv(), implementation="xla")
    assert str(asked) == "xla: implementation='xla' asks for the reference."


def test_explain_takes_arrays_and_positional_arguments():
    x = jnp.zeros((B, T, N, 320))
    mask = jnp.ones((T, T), bool)
    assert "head_dim" in jax_flash_metal.explain(x, x, x, None, mask).reason


def test_explain_on_our_platform():
    explanation = jax_flash_metal.explain(*qkv(), platform="flash_metal")
    assert str(explanation) == (
        "metal: the kernels run on the software Metal device, everything around them "
        "on the host plugin."
    )


def test_forced_kernels_on_another_platform():
    def attend(query, key, value):
        return jax_flash_metal.flash_attention(
            query, key, value, implementation="metal"
        )

    traced = jax.jit(attend).trace(*qkv())
    with pytest.raises(NotImplementedError) as raised:
        traced.lower(lowering_platforms=("tpu",))
    assert str(raised.value) == (
        "implementation='metal' needs one of the platforms ['cpu', 'flash_metal'], but "
        "this program is compiled for 'tpu'; implementation=None or 'xla' runs "
        "everywhere."
    )


def test_default_lowers_on_another_platform():
    traced = jax.jit(jax_flash_metal.flash_attention).trace(*qkv())
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "dot_general" in text and "jax_flash_metal" not in text


def test_fallback_is_logged_once(caplog):
    api.log_fallback.cache_clear()
    x = jnp.zeros((B, T, N, 257))
    with caplog.at_level(logging.INFO, logger="jax_flash_metal"):
        for _ in range(2):
            jax_flash_metal.flash_attention(x, x, x)
    assert [record.getMessage() for record in caplog.records] == [
        "flash_attention takes the reference: head_dim 257 is above 256, the largest "
        "that the float32 kernels take."
    ]
