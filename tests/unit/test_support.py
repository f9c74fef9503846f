"""Kernel or reason: explain, is_supported, forced implementations, the log."""

import functools
import logging
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_flash_metal
from jax_flash_metal import api, kernel_proof, platforms, variant_table
from jax_flash_metal.config import BACKENDS
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
    assert explanation.implementation == "metal"
    assert explanation.reason == "the kernels run on the software Metal device."
    assert explanation.kernels.startswith("forward d")


@pytest.fixture
def proven(monkeypatch):
    """Every kernel is right, and the CPU has these instructions."""
    monkeypatch.setattr(kernel_proof, "objection", lambda *call: None)
    monkeypatch.setattr(kernel_proof, "family", lambda backend: "avx2")


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
    assert explanation.implementation == "metal"
    assert explanation.reason == "the kernels run on the software Metal device."
    assert explanation.kernels.startswith("forward d")


@pytest.mark.parametrize("implementation", BACKENDS)
def test_forced_kernels_that_do_not_exist(implementation):
    explanation = jax_flash_metal.explain(*qkv(320), implementation=implementation)
    assert str(explanation) == (
        "unsupported: head_dim 320 is above 256, the largest that the float32 kernels "
        "take."
    )
    with pytest.raises(NotImplementedError) as raised:
        jax.eval_shape(
            functools.partial(
                jax_flash_metal.flash_attention, implementation=implementation
            ),
            *qkv(320),
        )
    assert str(raised.value) == (
        f"implementation={implementation!r} cannot run this call: head_dim 320 is "
        "above 256, the largest that the float32 kernels take. The kernels take "
        "bfloat16 up to head_dim 256, float16 up to head_dim 256, float32 up to "
        "head_dim 256; implementation=None or 'xla' runs everything else."
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_pass_is_asked_about(monkeypatch, backend):
    """A kernel that fails its proof changes the answer of the calls that need it."""
    asked = []

    def objection(of_backend, shape, which, has_features):
        assert of_backend == backend
        asked.append((which, has_features))
        return "the kernel is disabled" if which == failing else None

    monkeypatch.setattr(kernel_proof, "objection", objection)
    explain = functools.partial(
        jax_flash_metal.explain, implementation=backend, platform="cpu"
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
    assert "gradient" not in explain(*qkv(), **FEATURES["mask"]).reason
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


@pytest.mark.usefixtures("proven")
def test_platforms():
    explain = jax_flash_metal.explain
    for implementation in (None, "cpu"):
        assert str(explain(*qkv(), platform="cpu", implementation=implementation)) == (
            "cpu: the native CPU kernels (avx2) run on this machine's cores."
        )
    assert str(explain(*qkv(), platform="tpu")) == (
        "xla: platform 'tpu' has no kernels of ours."
    )
    forced = explain(*qkv(), platform="tpu", implementation="metal")
    assert str(forced) == "unsupported: platform 'tpu' has no Metal kernels."
    forced = explain(*qkv(), platform="flash_metal", implementation="cpu")
    assert str(forced) == (
        "unsupported: platform 'flash_metal' has no native CPU kernels."
    )
    asked = explain(*qkv(), implementation="xla")
    assert str(asked) == "xla: implementation='xla' asks for the reference."


def test_explain_takes_arrays_and_positional_arguments():
    x = jnp.zeros((B, T, N, 320))
    mask = jnp.ones((T, T), bool)
    assert "head_dim" in jax_flash_metal.explain(x, x, x, None, mask).reason


def test_explain_on_our_platform():
    explanation = jax_flash_metal.explain(*qkv(), platform="flash_metal")
    assert explanation.reason == (
        "the kernels run on the software Metal device, everything around them on the "
        "host plugin."
    )


@pytest.mark.parametrize(
    ("implementation", "platform", "places"),
    [
        ("metal", "tpu", "'cpu' or 'flash_metal'"),
        ("cpu", "tpu", "'cpu'"),
        ("cpu", "flash_metal", "'cpu'"),
    ],
)
def test_forced_kernels_on_another_platform(implementation, platform, places):
    attend = functools.partial(
        jax_flash_metal.flash_attention, implementation=implementation
    )
    traced = jax.jit(attend).trace(*qkv())
    with pytest.raises(NotImplementedError) as raised:
        traced.lower(lowering_platforms=(platform,))
    assert str(raised.value) == (
        f"implementation={implementation!r} needs platform {places}, but this program "
        f"is compiled for {platform!r}; implementation=None or 'xla' runs everywhere."
    )


def lowered(implementation):
    attend = functools.partial(
        jax_flash_metal.flash_attention, implementation=implementation
    )
    return jax.jit(attend).lower(*qkv()).as_text()


@pytest.mark.usefixtures("proven")
def test_the_default_on_the_cpu_is_the_native_kernels():
    assert "jax_flash_metal_forward" in lowered(None)
    assert lowered(None) == lowered("cpu")
    assert lowered("metal") not in (lowered(None), lowered("xla"))


@pytest.fixture
def without_library(monkeypatch, tmp_path):
    jax.devices()  # platform flash_metal needs the library to start
    monkeypatch.setattr(platforms, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(kernel_proof, "_warned", set())
    kernel_proof._only_proofs.cache_clear()


def test_without_a_library_the_default_on_the_cpu_is_the_reference(without_library):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "jax_flash_metal" not in lowered(None)
        assert (
            "jax_flash_metal"
            not in jax.jit(
                jax.grad(lambda *x: jax_flash_metal.flash_attention(*x).sum())
            )
            .lower(*qkv())
            .as_text()
        )
    (warning,) = caught
    assert warning.category is kernel_proof.KernelWarning
    text = str(warning.message)
    assert text.startswith("jax_flash_metal: the native library ")
    assert "needs no library. Such calls take the reference" in text
    explanation = jax_flash_metal.explain(*qkv(), platform="cpu")
    assert explanation.implementation == "xla"
    assert explanation.reason.endswith("implementation='xla' needs no library.")


@pytest.mark.parametrize("implementation", BACKENDS)
def test_demanded_kernels_without_a_library(without_library, implementation):
    with pytest.raises(platforms.LibraryError, match="is missing"):
        lowered(implementation)


@pytest.mark.parametrize(
    "failing", ["forward", "backward"], ids=lambda which: f"wrong-{which}"
)
def test_a_kernel_that_fails_its_proof_is_not_the_default(monkeypatch, failing):
    monkeypatch.setattr(kernel_proof, "_warned", set())
    monkeypatch.setattr(
        kernel_proof,
        "objection",
        lambda backend, shape, which, features: (
            f"the kernel of {which} is disabled" if which == failing else None
        ),
    )

    def gradient(implementation):
        attend = functools.partial(
            jax_flash_metal.flash_attention, implementation=implementation
        )
        step = jax.jit(jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2)))
        return step.lower(*qkv()).as_text()

    with pytest.warns(
        kernel_proof.KernelWarning, match=f"the kernel of {failing} is disabled"
    ):
        text = gradient(None)
    other = {"forward": "backward", "backward": "forward"}[failing]
    assert f"jax_flash_metal_{failing}" not in text
    assert f"jax_flash_metal_{other}" in text
    with pytest.raises(NotImplementedError, match=f"the kernel of {failing} is"):
        gradient("cpu")


def test_default_lowers_on_another_platform():
    traced = jax.jit(jax_flash_metal.flash_attention).trace(*qkv())
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "dot_general" in text and "jax_flash_metal" not in text


@pytest.mark.usefixtures("proven")
def test_platforms_that_share_a_rule_take_the_reference():
    """Only cpu has a rule of its own: the kernels of flash_metal are its alone."""

    def lowered_for(*platforms, implementation=None):
        attend = functools.partial(
            jax_flash_metal.flash_attention, implementation=implementation
        )
        traced = jax.jit(attend).trace(*qkv())
        return traced.lower(lowering_platforms=platforms).as_text()

    metal, native = "backend = 0 : i64", "backend = 1 : i64"
    text = lowered_for("flash_metal", "cpu")
    assert metal in text and native in text
    text = lowered_for("flash_metal", "cuda", "cpu")
    assert metal not in text and native in text
    with pytest.raises(NotImplementedError, match="for 'flash_metal/cuda'; impl"):
        lowered_for("flash_metal", "cuda", implementation="metal")


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
