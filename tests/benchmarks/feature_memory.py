"""Peak memory of forward and backward for every feature: linear in the length.

    python -m tests.benchmarks.feature_memory [--implementation cpu|metal] [FEATURE…]

Every figure comes from a process of its own: its maximum resident size while a compiled
program runs once, without what it held before (the inputs among it). Fails if a
feature needs more than LINEAR times as much at twice the length; a dense bias of the
user's own, whose gradient is that large too, may need four times as much. Linux only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LENGTH = 2048
BATCH, HEADS, HEAD_DIM = 1, 1, 64
LINEAR, DENSE = 2.5, 4.5
# Beside 2 for the process' own noise: threads' stacks, pages of the libraries.
NOISE_MB = 2.0

# Options of the call that are no arrays, and arrays with a gradient.
STATIC = ("is_causal", "sliding_window", "logits_soft_cap", "dropout_rate")
SMOOTH = ("bias", "sinks", "alibi_slopes")

# By feature: options of the call, as functions of the length.
FEATURES = {
    "plain": lambda a, t: {},
    "is_causal": lambda a, t: {"is_causal": True},
    "traced q_offset": lambda a, t: {"is_causal": True, "q_offset": a.int32(8)},
    "sliding_window": lambda a, t: {"sliding_window": (200, 0)},
    "logits_soft_cap": lambda a, t: {"logits_soft_cap": 20.0},
    "segment_ids": lambda a, t: {"segment_ids": a.segments(t)},
    "seq lengths": lambda a, t: {"key_value_seq_lengths": a.int32([t // 2])},
    "sinks": lambda a, t: {"sinks": a.normal(HEADS)},
    "alibi_slopes": lambda a, t: {"alibi_slopes": a.normal(HEADS) ** 2},
    "dropout": lambda a, t: {"dropout_rate": 0.1, "dropout_key": a.key()},
    "mask of keys": lambda a, t: {"mask": a.normal(1, 1, 1, t) > -1},
    "bias of keys": lambda a, t: {"bias": a.normal(1, 1, 1, t)},
    "mask, dense": lambda a, t: {"mask": a.normal(1, 1, t, t) > -1},
    "bias, dense": lambda a, t: {"bias": a.normal(1, 1, t, t)},
}


class Arrays:
    """Makes the operands of FEATURES."""

    def __init__(self) -> None:
        import numpy as np

        self.random = np.random.default_rng(0)

    def normal(self, *shape: int) -> Any:
        import jax.numpy as jnp
        import numpy as np

        return jnp.asarray(self.random.standard_normal(shape, np.float32))

    def int32(self, values: Any) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(values, jnp.int32)

    def segments(self, length: int) -> Any:
        import numpy as np

        from jax_flash_metal import SegmentIds

        ids = self.int32(np.arange(length)[None] // 512)
        return SegmentIds(ids, ids)

    def key(self) -> Any:
        import jax

        return jax.random.key(0)


def status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def measure(feature: str, length: int, implementation: str) -> float:
    """MB that one forward and backward pass takes in this process."""
    import jax
    import jax.numpy as jnp

    from jax_flash_metal import flash_attention

    arrays = Arrays()
    shape = (BATCH, length, HEADS, HEAD_DIM)
    query, key, value, dout = (arrays.normal(*shape) for _ in range(4))
    options = FEATURES[feature](arrays, length)
    static = {n: options.pop(n) for n in STATIC if n in options}
    smooth = {n: options.pop(n) for n in SMOOTH if n in options}

    def run(differentiable: Any, options: Any, dout: Any) -> Any:
        def attend(differentiable: Any) -> Any:
            *qkv, smooth = differentiable
            return flash_attention(
                *qkv, **smooth, **options, **static, implementation=implementation
            )

        out, pullback = jax.vjp(attend, differentiable)
        return out, pullback(dout)

    inputs = ((query, key, value, smooth), options, dout)
    compiled = jax.jit(run).lower(*inputs).compile()
    jax.block_until_ready(jnp.zeros(8) + 1)
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    results = jax.block_until_ready(compiled(*inputs))
    del results
    return status_mb("VmHWM") - before


def measure_in_new_process(feature: str, length: int, implementation: str) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.feature_memory", "--measure"]
    done = subprocess.run(
        [*command, feature, str(length), implementation],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("features", nargs="*", help="of: " + ", ".join(FEATURES))
    parser.add_argument("--length", type=int, default=LENGTH, help="and twice that")
    parser.add_argument("--implementation", choices=("cpu", "metal"), default="cpu")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        feature, length, implementation = arguments.measure
        print(json.dumps(measure(feature, int(length), implementation)))
        return 0

    ours = arguments.implementation
    short, long = arguments.length, 2 * arguments.length
    print(
        f"MB of one forward and backward pass, batch {BATCH}, {HEADS} head of "
        f"{HEAD_DIM}, float32"
    )
    row = "{:>16}  {:>8}  {:>8}  {:>6}  {:>8}  {:>10}"
    titles = ("feature", str(short), str(long), "ratio", f"xla {long}", f"xla/{ours}")
    print(row.format(*titles))
    failed = []
    runs = ((short, ours), (long, ours), (long, "xla"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        features = arguments.features or list(FEATURES)
        futures = {
            feature: [pool.submit(measure_in_new_process, feature, *r) for r in runs]
            for feature in features
        }
        for feature, of_feature in futures.items():
            small, large, xla = (future.result() for future in of_feature)
            limit = DENSE if feature.endswith("dense") else LINEAR
            if large > limit * small + NOISE_MB:
                failed.append(feature)
            figures = (small, large, large / small, xla, xla / large)
            print(row.format(feature, *(f"{x:.1f}" for x in figures)), flush=True)
    if failed:
        print("more than linear in the length:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
