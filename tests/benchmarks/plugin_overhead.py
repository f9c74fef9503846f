"""What platform flash_metal costs over its host plugin used directly.

    python -m tests.benchmarks.plugin_overhead

Three figures, each against the host in the same process, repetitions interleaved:
a call of a program without custom calls, a custom call between two others, and the
compilation of a training step of a 12-layer transformer with fused attention. The host
compiles the same step with a sum in attention's place, in one piece.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu,flash_metal,host")

import jax
import jax.numpy as jnp

from jax_flash_metal import flash_attention, hosts, partition
from jax_flash_metal._jax_compat import ffi, register_platform
from tests.plugin.pjrt import custom_calls, on_platform
from tests.support.ffi_call import bind

ROUNDS = 9
CALLS = 2000
CHAIN = 20
LAYERS = 12


def register_host() -> None:
    """The host plugin itself as a JAX platform, to compare with."""
    host = hosts.find()
    register_platform("host", str(host.path), host.options, priority=0)


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats * 1e6


def interleaved(
    a: Callable[[], Any], b: Callable[[], Any], repeats: int
) -> list[float]:
    """The differences a - b, in microseconds per call, one a round."""
    return [microseconds(a, repeats) - microseconds(b, repeats) for _ in range(ROUNDS)]


def summary(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"median {statistics.median(values):.1f} (from {low:.1f} to {high:.1f})"


def pass_through() -> None:
    """A program that is the host's alone."""
    run = jax.jit(lambda x: x + 1)
    ours, theirs, again = (
        jax.device_put(jnp.zeros(4), jax.devices(name)[0])
        for name in ("flash_metal", "host", "host")
    )
    for x in (ours, theirs, again):
        jax.block_until_ready(run(x))
    noise = interleaved(lambda: run(theirs), lambda: run(again), CALLS)
    cost = interleaved(lambda: run(ours), lambda: run(theirs), CALLS)
    print(f"pass-through call, µs more than the host: {summary(cost)}")
    print(f"  the host against itself: {summary(noise)}")


def custom_call() -> None:
    """A handler that does nothing, called in a chain: time per link."""
    target = "benchmark_nothing"
    handler = ffi.pycapsule(custom_calls.handlers().Nothing)
    ffi.register_ffi_target(target, handler, platform="flash_metal")

    def chain(length: int) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(length):
                (x,) = bind(target, [jax.ShapeDtypeStruct(x.shape, x.dtype)], x)
            return x

        return jax.jit(run)

    x = on_platform.put(jnp.zeros(1024))
    long, short = chain(CHAIN + 1), chain(1)
    for run in (long, short):
        jax.block_until_ready(run(x))
    one_by_one = [
        lambda run=run: jax.block_until_ready(run(x)) for run in (long, short)
    ]
    cost = interleaved(*one_by_one, CALLS // 4)
    print(f"custom call, µs a step: {summary([c / CHAIN for c in cost])}")


def training_step(attention: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A gradient step of a small transformer; the layers are written out."""

    def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            x = x - x.mean(-1, keepdims=True)
            return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

        heads = [
            (norm(x) @ w[name]).reshape(*x.shape[:2], 4, -1) for name in ("q", "k", "v")
        ]
        x = x + attention(*heads).reshape(x.shape) @ w["o"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]

    def loss(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(w, x)
        return (x**2).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return jax.jit(step, donate_argnums=0)


def compilation() -> None:
    """The same step, cut at 24 custom calls, and in one piece by the host."""
    width = 64
    shapes = {name: (width, width) for name in "qkvo"}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}

    def lower(platform: str, attention: Callable[..., jax.Array]) -> Any:
        device = jax.sharding.SingleDeviceSharding(jax.devices(platform)[0])
        struct = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
            for name, shape in shapes.items()
        }
        x = jax.ShapeDtypeStruct((2, 128, width), jnp.float32, sharding=device)
        return training_step(attention).lower([struct] * LAYERS, x)

    in_python: list[float] = []
    plan_program = partition.plan_program

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return plan_program(*arguments)
        finally:
            in_python[-1] += time.perf_counter() - start

    partition.plan_program = timed
    times: dict[str, list[float]] = {"flash_metal": [], "host": []}
    for _ in range(3):
        in_python.append(0.0)
        for platform, attention in (
            ("flash_metal", flash_attention),
            ("host", lambda q, k, v: q + k * v),
        ):
            lowered = lower(platform, attention)
            start = time.perf_counter()
            lowered.compile()
            times[platform].append(time.perf_counter() - start)
            jax.clear_caches()
    ours, theirs = (statistics.median(times[name]) for name in times)
    print(
        f"compiling a step of {LAYERS} layers: {ours:.2f} s, of which partitioning "
        f"{statistics.median(in_python):.2f} s; the host in one piece {theirs:.2f} s; "
        f"ratio {ours / theirs:.2f}"
    )


def main() -> None:
    register_host()
    pass_through()
    custom_call()
    compilation()


if __name__ == "__main__":
    main()
