"""The custom calls' names, attributes and operands, as the handlers decode them."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_flash_metal
from jax_flash_metal import platforms

T, S, N, K, H = 37, 53, 6, 3, 64


@pytest.fixture
def program(monkeypatch):
    """The text of a lowered gradient; needs no library."""
    monkeypatch.setattr(platforms, "ensure_registered", lambda: None)

    def loss(query, key, value):
        out = jax_flash_metal.flash_attention(
            query,
            key,
            value,
            is_causal=True,
            q_offset=S - T,
            scale=0.25,
            implementation="metal",
        )
        return out.sum()

    shapes = [(2, T, N, H), (2, S, K, H), (2, S, K, H)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*operands).as_text()


def custom_calls(program):
    return [line for line in program.splitlines() if "custom_call" in line]


def test_targets(program):
    targets = re.findall(r"custom_call @(\w+)", program)
    assert targets == ["jax_flash_metal_forward_v1", "jax_flash_metal_backward_v1"]


def test_attributes(program):
    expected = (
        "backend_config = {is_causal = true, q_offset = 16 : i64, "
        "scale = 2.500000e-01 : f32, version = 1 : i64}"
    )
    for line in custom_calls(program):
        assert expected in line


def test_layouts_are_row_major(program):
    for line in custom_calls(program):
        layouts = re.findall(r"dense<\[([\d, ]+)\]> : tensor<\dxindex>", line)
        assert len(layouts) == len(re.findall(r"tensor<\d+x\d+x\d+x\d+xf32>", line)) + (
            len(re.findall(r"tensor<2x6x37xf32>", line))
        )
        assert set(layouts) == {"3, 2, 1, 0", "2, 1, 0"}
