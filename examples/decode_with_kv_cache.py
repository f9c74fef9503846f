"""Decoding with a KV cache of static size: one compiled step, whatever the position.

The cache has room for --capacity tokens from the start. A step writes its keys and
values behind those that are there and attends with two traced numbers: q_offset, where
its queries stand, and key_value_seq_lengths, how much of the cache is filled. So the
prompt takes one compilation (prefill) and all tokens after it another, and no step
computes with the empty rest. The result is compared with causal attention over all of
the sequence at once; a step's time is printed as tokens per second.

    python examples/decode_with_kv_cache.py --prompt 100 --tokens 40
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import flash_attention

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--prompt", type=int, default=100, help="tokens")
parser.add_argument("--tokens", type=int, default=40, help="decoded after the prompt")
parser.add_argument("--capacity", type=int, default=192, help="of the cache, in tokens")
parser.add_argument("--width", type=int, default=64, help="of the layer")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--kv-heads", type=int, default=2)
parser.add_argument("--head-dim", type=int, default=32)
parser.add_argument("--implementation", choices=["metal", "cpu", "xla"], default=None)
parser.add_argument("--allowed", type=float, default=1e-4, help="largest difference")


class Weights(NamedTuple):
    query: jax.Array  # [width, heads, head_dim]
    key: jax.Array  # [width, kv_heads, head_dim]
    value: jax.Array
    out: jax.Array  # [heads, head_dim, width]


class Cache(NamedTuple):
    key: jax.Array  # [batch, capacity, kv_heads, head_dim]
    value: jax.Array
    length: jax.Array  # int32: tokens that are in it


def project(x, weights):
    return (jnp.einsum("btw,wnh->btnh", x, w) for w in weights[:3])


def whole_sequence(x, weights, implementation):
    """What every step must agree with: [batch, length, width]."""
    query, key, value = project(x, weights)
    out = flash_attention(
        query, key, value, is_causal=True, implementation=implementation
    )
    return jnp.einsum("btnh,nhw->btw", out, weights.out)


def step(x, cache, weights, implementation):
    """The layer on the next tokens; one for decoding, the whole prompt for prefill."""
    query, key, value = project(x, weights)
    start = (0, cache.length, 0, 0)
    length = cache.length + x.shape[1]
    cache_after = Cache(
        jax.lax.dynamic_update_slice(cache.key, key, start),
        jax.lax.dynamic_update_slice(cache.value, value, start),
        length,
    )
    out = flash_attention(
        query,
        cache_after.key,
        cache_after.value,
        is_causal=True,
        q_offset=cache.length,
        key_value_seq_lengths=jnp.full(x.shape[0], length),
        implementation=implementation,
    )
    return jnp.einsum("btnh,nhw->btw", out, weights.out), cache_after


def main():
    args = parser.parse_args()
    total = args.prompt + args.tokens
    if not 0 < total <= args.capacity or args.tokens < 2:
        parser.error("--prompt and --tokens (at least 2) must fit into --capacity")
    random = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * random.standard_normal(shape), jnp.float32)

    shapes = [
        (args.width, n, args.head_dim) for n in (args.heads, *[args.kv_heads] * 2)
    ]
    weights = Weights(
        *(normal(*shape, scale=args.width**-0.5) for shape in shapes),
        normal(args.heads, args.head_dim, args.width, scale=args.width**-0.5),
    )
    x = normal(args.batch, total, args.width)
    kv_shape = (args.batch, args.capacity, args.kv_heads, args.head_dim)
    # NaN in the empty rest would show in the result if a step looked at it.
    empty = jnp.full(kv_shape, jnp.nan)
    cache = Cache(empty, empty, jnp.int32(0))

    compilations = []

    # The cache is donated: it is written in place.
    @functools.partial(jax.jit, donate_argnums=1)
    def run(x, cache):
        compilations.append(x.shape)
        return step(x, cache, weights, args.implementation)

    # Two arrays: the same one cannot be donated twice.
    cache = cache._replace(value=jnp.array(empty))
    out, cache = run(x[:, : args.prompt], cache)
    outs = [out]
    for position in range(args.prompt, total):
        if position == args.prompt + 1:  # the first token compiled the step
            jax.block_until_ready(out)
            start = time.perf_counter()
        out, cache = run(x[:, position : position + 1], cache)
        outs.append(out)
    jax.block_until_ready(out)
    seconds = time.perf_counter() - start

    print(f"prefill of {args.prompt} tokens, then {args.tokens} one by one")
    print(f"cache: {int(cache.length)} of {args.capacity} tokens")
    print(f"compiled {len(compilations)} times: {compilations}")
    decoded = args.batch * (args.tokens - 1)
    print(f"{decoded / seconds:.0f} tokens per second, {args.batch} sequences at once")
    whole = jax.jit(whole_sequence, static_argnums=2)
    want = whole(x, weights, args.implementation)
    difference = float(jnp.abs(jnp.concatenate(outs, axis=1) - want).max())
    print(
        f"largest difference from the whole sequence at once {difference:.1e} "
        f"(allowed {args.allowed:.0e})"
    )
    if len(compilations) != 2 or not difference <= args.allowed:
        raise SystemExit("decoding is wrong")


if __name__ == "__main__":
    main()
