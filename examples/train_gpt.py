"""Trains a small byte-level GPT on the sources of Python's standard library.

Flax, jax.grad and optax; attention through jax_flash_metal. Checks itself: the first
losses against implementation="xla", the held-out loss against the unigram entropy. Says
how long a step takes with both; for long sequences:

    python examples/train_gpt.py --length 1024 --steps 20 --sample 0 --margin -9
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jax_flash_metal.flax import dot_product_attention, explain

Array = jax.Array
Implementation = str | None  # None: the one that fits the platform

VOCABULARY = 256  # bytes
COMPARED_STEPS = 20  # steps whose losses are compared with implementation="xla"
LOSS_TOLERANCE = 1e-3
HELD_OUT_EVERY = 10  # one file in ten is not trained on
HELD_OUT_WINDOWS = 512


class Block(nn.Module):
    """Pre-norm transformer block."""

    num_heads: int
    implementation: Implementation

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # is_causal instead of a dense causal mask: the kernels skip what is hidden.
        attention_fn = functools.partial(
            dot_product_attention, is_causal=True, implementation=self.implementation
        )
        attention = nn.MultiHeadDotProductAttention(
            num_heads=self.num_heads, attention_fn=attention_fn
        )
        x = x + attention(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class Transformer(nn.Module):
    """Logits [batch, length, 256] of the next byte, from bytes [batch, length]."""

    length: int
    width: int
    num_heads: int
    num_layers: int
    implementation: Implementation

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        positions = jnp.arange(tokens.shape[-1])
        x = nn.Embed(VOCABULARY, self.width)(tokens)
        x = x + nn.Embed(self.length, self.width)(positions)
        for _ in range(self.num_layers):
            x = Block(self.num_heads, self.implementation)(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def mean_loss(model: nn.Module, params: Any, windows: Array) -> Array:
    """Nats per byte; each window holds length + 1 bytes."""
    logits = model.apply(params, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean()


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """The standard library's modules as bytes, (train, held out), split by files."""
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata is a generated table, different on every machine.
    files = [f for f in sorted(folder.glob("*.py")) if "_sysconfigdata" not in f.name]
    if len(files) < HELD_OUT_EVERY:
        sys.exit(f"{folder} has no Python sources to train on.")
    held_out = files[::HELD_OUT_EVERY]
    train = [f for f in files if f not in held_out]

    def read(group: list[Path]) -> np.ndarray:
        return np.frombuffer(b"".join(f.read_bytes() for f in group), np.uint8)

    return read(train), read(held_out)


def batches(
    text: np.ndarray, batch_size: int, length: int, seed: int
) -> Iterator[np.ndarray]:
    """Random windows of length + 1 bytes, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, batch_size)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def unigram_entropy(text: np.ndarray) -> float:
    """Bits per byte that the best model without context needs for this text."""
    counts = np.bincount(text.ravel(), minlength=VOCABULARY)
    frequencies = counts[counts > 0] / text.size
    return float(-(frequencies * np.log2(frequencies)).sum())


def train(
    model: nn.Module,
    text: np.ndarray,
    arguments: argparse.Namespace,
    num_steps: int,
    description: str,
) -> tuple[Any, list[float], float]:
    """Trains from scratch.

    Returns:
      The parameters, every step's loss in nats, and the median of the steps' seconds.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=arguments.learning_rate,
        warmup_steps=max(1, arguments.steps // 20),
        decay_steps=arguments.steps,
        end_value=arguments.learning_rate / 20,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99)
    )

    @jax.jit
    def step(params: Any, state: Any, windows: Array) -> tuple[Any, Any, Array]:
        loss, gradient = jax.value_and_grad(functools.partial(mean_loss, model))(
            params, windows
        )
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    data = batches(text, arguments.batch, arguments.length, arguments.seed)
    key = jax.random.key(arguments.seed)
    params = jax.jit(model.init)(key, next(data)[:, :-1])
    state = optimizer.init(params)
    losses: list[float] = []
    seconds: list[float] = []
    bar = tqdm(range(num_steps), desc=description, unit="step", mininterval=1)
    report_every = max(1, num_steps // 10)
    for i in bar:
        windows = next(data)
        started = time.perf_counter()
        params, state, loss = step(params, state, windows)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
        loss_bits = losses[-1] / math.log(2)
        bar.set_postfix_str(f"loss {loss_bits:.3f} bits/byte", refresh=False)
        if (i + 1) % report_every == 0:
            recent = np.mean(losses[-report_every:]) / math.log(2)
            tqdm.write(f"{description}: step {i + 1:4d}, {recent:.3f} bits/byte")
    # Without the first step, which compiles.
    return params, losses, float(np.median(seconds[1:] or seconds))


def evaluate(
    model: nn.Module, params: Any, text: np.ndarray, batch_size: int, length: int
) -> tuple[float, float]:
    """(loss, unigram entropy) of the same held-out bytes, in bits per byte."""
    starts = np.arange(0, len(text) - length, length)
    starts = starts[:: max(1, len(starts) // HELD_OUT_WINDOWS)][:HELD_OUT_WINDOWS]
    starts = starts[: len(starts) // batch_size * batch_size]
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    loss = jax.jit(functools.partial(mean_loss, model))
    groups = windows.reshape(-1, batch_size, length + 1)
    mean = float(np.mean([loss(params, group) for group in groups]))
    return mean / math.log(2), unigram_entropy(windows[:, 1:])


def generate(
    model: Transformer, params: Any, prompt: bytes, num_bytes: int, seed: int
) -> str:
    """The prompt and `num_bytes` sampled bytes (temperature 0.8)."""

    @jax.jit
    def next_byte(key: Array, tokens: Array, last: Array) -> Array:
        # What stands behind `last` is padding, hidden by causality.
        logits = model.apply(params, tokens[None])[0, last]
        return jax.random.categorical(key, logits / 0.8)

    text = list(prompt)
    for key in jax.random.split(jax.random.key(seed), num_bytes):
        context = text[-model.length :]
        tokens = np.zeros(model.length, np.int32)
        tokens[: len(context)] = context
        text.append(int(next_byte(key, tokens, len(context) - 1)))
    return bytes(text).decode("utf-8", errors="replace")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--implementation", choices=("metal", "cpu", "xla"), default=None)
    add("--steps", type=int, default=700)
    add("--batch", type=int, default=8, help="windows per step")
    add("--length", type=int, default=128, help="bytes of context")
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--layers", type=int, default=2)
    add("--learning-rate", type=float, default=4e-3)
    add("--seed", type=int, default=0)
    add("--sample", type=int, default=300, help="bytes to generate")
    add(
        "--margin",
        type=float,
        default=0.5,
        help="bits/byte that the held-out loss must stay below the unigram entropy",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    started = time.perf_counter()

    def model_for(implementation: Implementation) -> Transformer:
        return Transformer(
            length=arguments.length,
            width=arguments.width,
            num_heads=arguments.heads,
            num_layers=arguments.layers,
            implementation=implementation,
        )

    train_text, held_out_text = load_text()
    print(
        f"text: Python's standard library, {len(train_text) / 1e6:.1f} MB to train on, "
        f"{len(held_out_text) / 1e6:.1f} MB held out"
    )
    head_dim = arguments.width // arguments.heads
    head_shape = (arguments.batch, arguments.length, arguments.heads, head_dim)
    heads = jax.ShapeDtypeStruct(head_shape, jnp.float32)
    taken = explain(
        heads, heads, heads, is_causal=True, implementation=arguments.implementation
    )
    print(f"attention: {taken}")
    if taken.implementation == "metal" and sys.platform == "linux":
        print("It is a correctness tool that runs the GPU's kernels on the CPU.")
        print("Its speed means nothing.")

    model = model_for(arguments.implementation)
    params, losses, seconds = train(
        model, train_text, arguments, arguments.steps, taken.implementation
    )
    failures = []

    if taken.implementation != "xla":
        num_steps = min(COMPARED_STEPS, arguments.steps)
        _, expected, xla_seconds = train(
            model_for("xla"), train_text, arguments, num_steps, "xla, to compare"
        )
        print(
            f"median step: {taken.implementation} {1e3 * seconds:.1f} ms, xla "
            f"{1e3 * xla_seconds:.1f} ms, {xla_seconds / seconds:.2f} times as long"
        )
        difference = float(np.abs(np.subtract(losses[:num_steps], expected)).max())
        print(
            f"first {num_steps} losses: largest difference from "
            f'implementation="xla" {difference:.1e} (allowed {LOSS_TOLERANCE})'
        )
        if not difference <= LOSS_TOLERANCE:
            failures.append("the losses differ from those of implementation='xla'")

    loss, entropy = evaluate(
        model, params, held_out_text, arguments.batch, arguments.length
    )
    print(
        f"held out: {loss:.3f} bits/byte; unigram entropy of the same bytes "
        f"{entropy:.3f}; {entropy - loss:.3f} below (wanted {arguments.margin})"
    )
    if not entropy - loss >= arguments.margin:
        failures.append("the held-out loss is too high")

    print("sample:")
    sample = generate(model, params, b"def ", arguments.sample, arguments.seed)
    print("    " + sample.replace("\n", "\n    "))
    print(f"{time.perf_counter() - started:.0f} s of training and checking")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
