"""Ring attention: one sequence over several devices, none of which holds all keys.

Every device has a part of the queries, keys and values. In each round it attends to the
keys that it holds, merges the result with what it has by logsumexp, and passes the keys
on to its neighbour, until they have been everywhere. With is_causal a traced q_offset
says where the part of the keys lies; parts in the future cost nothing. Gradients go
through it all. They and the result are compared with attention on one device.

    python examples/ring_attention.py --devices 4 --length 512
"""

from __future__ import annotations

import argparse
import os
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--length", type=int, default=512, help="of the whole sequence")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--kv-heads", type=int, default=2)
parser.add_argument("--head-dim", type=int, default=32)
parser.add_argument("--implementation", choices=["metal", "cpu", "xla"], default=None)
parser.add_argument("--allowed", type=float, default=1e-4, help="largest difference")
args = parser.parse_args()
if args.length % args.devices:
    parser.error("--length must be a multiple of --devices")

# The CPU as several devices; before jax starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={args.devices}"
)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jax_flash_metal import flash_attention, merge_partials  # noqa: E402

try:
    shard_map = jax.shard_map
except AttributeError:  # before jax 0.6
    from jax.experimental.shard_map import shard_map


def ring_attention(query, key, value):
    """Causal attention inside shard_map over "ring"; [batch, part, heads, head_dim]."""
    part = query.shape[1]
    device = jax.lax.axis_index("ring")
    onwards = [(i, (i + 1) % args.devices) for i in range(args.devices)]
    merged = None
    for step in range(args.devices):
        # Whose keys these are: they have come `step` devices far.
        owner = (device - step) % args.devices
        out, logsumexp = flash_attention(
            query,
            key,
            value,
            is_causal=True,
            q_offset=(device - owner) * part,
            return_logsumexp=True,
            implementation=args.implementation,
        )
        if merged is None:
            merged = out, logsumexp
        else:
            merged = merge_partials([merged[0], out], [merged[1], logsumexp])
        if step + 1 < args.devices:
            key, value = jax.lax.ppermute((key, value), "ring", onwards)
    return merged[0]


def one_device(query, key, value):
    return flash_attention(
        query, key, value, is_causal=True, implementation=args.implementation
    )


def with_gradients(attention):
    """Result and gradients, jitted."""

    def run(query, key, value, dout):
        out, pullback = jax.vjp(attention, query, key, value)
        return out, *pullback(dout)

    return jax.jit(run)


def main():
    random = np.random.default_rng(0)

    def normal(heads):
        shape = (args.batch, args.length, heads, args.head_dim)
        return random.standard_normal(shape, np.float32)

    arrays = [normal(n) for n in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    devices = jax.devices("cpu")[: args.devices]
    mesh = Mesh(np.array(devices), ("ring",))
    spec = PartitionSpec(None, "ring")
    parts = [jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays]
    whole = [jax.device_put(a, devices[0]) for a in arrays]

    ring = shard_map(
        ring_attention, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec
    )
    results = {}
    for name, function, inputs in (
        ("ring", with_gradients(ring), parts),
        ("one device", with_gradients(one_device), whole),
    ):
        results[name] = jax.block_until_ready(function(*inputs))
        start = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        print(f"{name}: {time.perf_counter() - start:.3f} s for a result and gradients")

    part = args.length // args.devices
    print(f"{args.devices} devices with {part} of {args.length} queries and keys each")
    largest = 0.0
    for name, got, want in zip(
        ("out", "dquery", "dkey", "dvalue"), results["ring"], results["one device"]
    ):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)
        difference = float(np.abs(np.asarray(got) - np.asarray(want)).max())
        print(f"{name}: largest difference from one device {difference:.1e}")
        largest = max(largest, difference)
    print(f"largest difference {largest:.1e} (allowed {args.allowed:.0e})")
    if not largest <= args.allowed:
        raise SystemExit("the ring is wrong")


if __name__ == "__main__":
    main()
