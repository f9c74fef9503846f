"""The custom calls' names, attributes and operands, as the handlers decode them."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_flash_metal
from jax_flash_metal import kernel_proof, platforms

T, S, N, K, H = 37, 53, 6, 3, 64


@pytest.fixture(autouse=True)
def without_library(monkeypatch):
    """Programs are lowered only."""
    monkeypatch.setattr(platforms, "ensure_registered", lambda: None)
    monkeypatch.setattr(kernel_proof, "objection", lambda *call: None)


@pytest.fixture
def program():
    """The text of a lowered gradient of the Metal kernels."""
    return lowered_gradient("metal")


def lowered_gradient(implementation):
    def loss(query, key, value):
        out = jax_flash_metal.flash_attention(
            query,
            key,
            value,
            is_causal=True,
            q_offset=S - T,
            scale=0.25,
            implementation=implementation,
        )
        return out.sum()

    shapes = [(2, T, N, H), (2, S, K, H), (2, S, K, H)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*operands).as_text()


def custom_calls(program):
    return [line for line in program.splitlines() if "custom_call" in line]


def test_targets(program):
    targets = re.findall(r"custom_call @(\w+)", program)
    assert targets == ["jax_flash_metal_forward_v3", "jax_flash_metal_backward_v3"]


@pytest.mark.parametrize(
    ("implementation", "backend"), [("metal", 0), ("cpu", 1), (None, 1)]
)
def test_attributes(implementation, backend):
    expected = (
        f"backend_config = {{backend = {backend} : i64, "
        "dropout_rate = 0.000000e+00 : f64, is_causal = true, "
        "logits_soft_cap = 0.000000e+00 : f32, operands = 0 : i64, "
        "q_offset = 16 : i64, scale = 2.500000e-01 : f32, version = 3 : i64, "
        "window_left = -1 : i64, window_right = -1 : i64}"
    )
    lines = custom_calls(lowered_gradient(implementation))
    assert len(lines) == 2
    for line in lines:
        assert expected in line


def test_options():
    """Every operand at its place, with its type; a gradient call for each of three."""

    def loss(x, bias, sinks, slopes, mask, ids, key):
        out = jax_flash_metal.flash_attention(
            *(x, x, x, bias, mask),
            implementation="metal",
            sliding_window=(5, None),
            logits_soft_cap=3.0,
            q_offset=jnp.int32(1),
            segment_ids=(ids, ids),
            query_seq_lengths=ids[:, 0],
            key_value_seq_lengths=ids[:, 1],
            sinks=sinks,
            alibi_slopes=slopes,
            dropout_rate=0.25,
            dropout_key=key,
        )
        return out.sum()

    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for dtype, shape in (
            (jnp.float16, (2, T, N, H)),
            (jnp.bfloat16, (N, 1, T)),
            (jnp.float32, (N,)),
            (jnp.float32, (N,)),
            (jnp.bool_, (2, 1, T, T)),
            (jnp.int32, (2, T)),
            (jnp.uint32, (2,)),
        )
    ]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    lines = custom_calls(gradient.lower(*operands).as_text())
    (forward,), (backward,), gradients = (
        [line for line in lines if f"@jax_flash_metal_{which}_v3" in line]
        for which in ("forward", "backward", "gradient")
    )
    for line in lines:
        assert "operands = 4095 : i64" in line
        assert "dropout_rate = 2.500000e-01 : f64" in line
        assert "logits_soft_cap = 3.000000e+00 : f32" in line
        assert "window_left = 5 : i64, window_right = -1 : i64" in line
    like_query, rows = f"2x{T}x{N}x{H}xf16", f"2x{N}x{T}xf32"
    optional = [
        *(f"1x{N}x1x{T}xbf16", f"2x1x{T}x{T}xi1", "1xi32"),
        *(f"2x{T}xi32", f"2x{T}xi32", "2xi32", "2xi32"),
        *(f"1x{N}xf32", f"1x{N}xf32", "1x2xui32", "2xi32", f"1x{N}xi32"),
    ]
    plain = [like_query] * 3
    residuals = [like_query, rows, like_query, rows]
    assert types(forward) == ([*plain, *optional], [like_query, rows])
    assert types(backward) == ([*plain, *optional, *residuals], plain)
    results = [f"1x{N}x1x{T}xbf16", f"1x{N}xf32", f"1x{N}xf32"]
    for i, line in enumerate(gradients):
        of = int(re.search(r"gradient_of = (\d) : i64", line)[1])
        assert types(line) == ([*plain, *optional, *residuals], [results[of]])
        results[of] = f"gradient {i} is a second one of the same"
    assert len(gradients) == 3


def types(line):
    """Those of a custom call's operands and results."""
    operands, results = line.rpartition(" : (")[2].split(") -> ")
    return tuple(re.findall(r"tensor<([^>]+)>", text) for text in (operands, results))


def test_layouts_are_row_major(program):
    for line in custom_calls(program):
        layouts = re.findall(r"dense<\[([\d, ]+)\]> : tensor<\dxindex>", line)
        assert len(layouts) == len(re.findall(r"tensor<\d+x\d+x\d+x\d+xf32>", line)) + (
            len(re.findall(r"tensor<2x6x37xf32>", line))
        )
        assert set(layouts) == {"3, 2, 1, 0", "2, 1, 0"}
