"""Peak memory and time of one gradient step at long lengths: kernels against "xla".

One layer of the model of train_gpt.py; every figure comes from a process of its own.
Measures memory; the time of one step says little, and on the software Metal device
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# jax is imported by `measure` only: the peak of a process counts from before its exec,
# so this parent must stay small.

DEFAULT = "default"  # the kernels that fit the platform
IMPLEMENTATIONS = (DEFAULT, "metal", "cpu", "xla")
HEAD_DIM = 64


def peak_rss_mb() -> float:
    """This process's maximum resident size."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes, kilobytes


def measure(name: str, length: int) -> dict[str, Any]:
    """Runs one gradient step in this process."""
    import jax
    import jax.numpy as jnp
    from train_gpt import Transformer, explain, mean_loss

    implementation = None if name == DEFAULT else name
    heads = jax.ShapeDtypeStruct((1, length, 1, HEAD_DIM), jnp.float32)
    taken = explain(heads, heads, heads, is_causal=True, implementation=implementation)
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
        "implementation": taken.implementation,
        "reason": taken.reason,
        "seconds": seconds,
        "peak_mb": peak,
        "step_mb": peak - before,
        "loss": float(value),
    }


def measure_in_new_process(implementation: str, length: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve())]
    options = ["--measure", implementation, "--lengths", str(length)]
    done = subprocess.run(
        command + options, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    add("--implementation", choices=IMPLEMENTATIONS[:-1], default=DEFAULT)
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
    explanations: dict[str, str] = {}
    for length in arguments.lengths:
        for implementation in (arguments.implementation, "xla"):
            result = measure_in_new_process(implementation, length)
            peak, added = f"{result['peak_mb']:.0f}", f"{result['step_mb']:.0f}"
            seconds = f"{result['seconds']:.1f}"
            taken = result["implementation"]
            print(row.format(length, taken, peak, added, seconds), flush=True)
            explanations[taken] = result["reason"]
    for taken, reason in explanations.items():
        print(f"{taken}: {reason}")
    print("Memory is what this compares.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
