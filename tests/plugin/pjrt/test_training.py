"""A Flax model trained on flash_metal: the losses of the CPU, nothing left behind."""

from __future__ import annotations

import functools
import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_flash_metal.flax import dot_product_attention
from tests.plugin.pjrt import on_platform

pytestmark = pytest.mark.xdist_group("pjrt")

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 19, 24, 31


class Model(nn.Module):
    """Two transformer layers; `implementation` of the attention."""

    implementation: str | None

    @nn.compact
    def __call__(self, tokens):
        attention = functools.partial(
            dot_product_attention, is_causal=True, implementation=self.implementation
        )
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(
                num_heads=3, attention_fn=attention
            )(y, y)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def training(platform: str, implementation: str | None):
    """(state, step): `step(state, tokens)` gives the next state and the loss."""
    model = Model(implementation)
    optimizer = optax.adamw(3e-3)
    device = jax.devices(platform)[0]

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    with jax.default_device(device):
        init = jax.jit(model.init)  # operation by operation it takes seconds
        params = init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
        state = jax.device_put((params, optimizer.init(params)), device)
    return state, step


def batches(count: int):
    rng = np.random.default_rng(0)
    for _ in range(count):
        start = rng.integers(0, VOCABULARY, (BATCH, 1))
        yield ((start + np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)


def test_losses_are_those_of_the_cpu():
    losses = {}
    for platform, implementation in (("flash_metal", None), ("cpu", "xla")):
        state, step = training(platform, implementation)
        device = jax.devices(platform)[0]
        values = []
        for tokens in batches(40):
            state, value = step(state, jax.device_put(tokens, device))
            values.append(float(value))
        losses[platform] = np.array(values)
    assert losses["cpu"][-1] < 0.7 * losses["cpu"][0]
    np.testing.assert_allclose(losses["flash_metal"], losses["cpu"], rtol=2e-4)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_many_steps_leave_nothing():
    state, step = training("flash_metal", None)
    device = on_platform.device()
    tokens = [jax.device_put(batch, device) for batch in batches(8)]

    def run(count: int) -> None:
        nonlocal state
        for i in range(count):
            state, value = step(state, tokens[i % len(tokens)])
        jax.block_until_ready((state, value))
        gc.collect()

    run(50)
    arrays, before = len(jax.live_arrays("flash_metal")), resident_bytes()
    run(300)
    assert len(jax.live_arrays("flash_metal")) == arrays
    # One step's parameters and moments are 130 kB: a leak of those would be 39 MB.
    assert resident_bytes() - before < 20e6
    assert on_platform.statistics()["live_buffers"] == 0
