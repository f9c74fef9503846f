"""Peak memory and time of one gradient step at long lengths: "metal" against "xla".

One layer of the model of train_gpt.py; every figure comes from a process of its own.
Measures memory; the time on the software Metal device says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

# jax is imported by `measure` only: the peak of a process counts from before its exec,
# so this parent must stay small.

IMPLEMENTATIONS = ("metal", "xla")
HEAD_DIM = 64


def peak_rss_mb() -> float:
    """This process's maximum resident size."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes, kilobytes


def measure(implementation: str, length: int) -> dict[str, float]:
    """Runs one gradient step in this process."""
    import jax
    import jax.numpy as jnp
    from train_gpt import Transformer, mean_loss

    model = Transformer(
        length=length,
        width=HEAD_DIM,
        num_heads=1,
        num_layers=1,
        implementation=implementation,
    )
    window = jax.random.randint(jax.random.key(0), (1, length + 1), 0, 256)
    # The parameters do not depend on the attention, so init needs no long run of it.
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))

    def loss(params: object) -> jax.Array:
        return mean_loss(model, params, window)

    step = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
    before = peak_rss_mb()
    started = time.perf_counter()
    value, _ = jax.block_until_ready(step(params))
    seconds = time.perf_counter() - started
    peak = peak_rss_mb()
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "step_mb": peak - before,
        "loss": float(value),
    }


def measure_in_new_process(implementation: str, length: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve())]
    options = ["--measure", implementation, "--lengths", str(length)]
    done = subprocess.run(
        command + options, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    add("--measure", choices=IMPLEMENTATIONS, help="measure here and print JSON")
    arguments = parser.parse_args()

    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.lengths[0])))
        return 0

    print(
        f"one gradient step of a one-layer model with one head of {HEAD_DIM}, "
        "each in its own process"
    )
    row = "{:>8}  {:>14}  {:>8}  {:>12}  {:>8}"
    print(row.format("length", "implementation", "peak MB", "of that step", "seconds"))
    for length in arguments.lengths:
        for implementation in IMPLEMENTATIONS:
            result = measure_in_new_process(implementation, length)
            peak, added = f"{result['peak_mb']:.0f}", f"{result['step_mb']:.0f}"
            seconds = f"{result['seconds']:.1f}"
            print(row.format(length, implementation, peak, added, seconds), flush=True)
    print(
        'Memory is what this compares. Where "metal" is the software Metal device (on '
        "Linux),\nit is a correctness tool; its time says nothing about a "
        "GPU."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
