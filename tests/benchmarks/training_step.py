"""A training step of the demo's model, as a subject of bench_worker.

The subjects are values of the model's `implementation`, and "jax.nn": the same model
with JAX's own attention. For cpu_attention.py.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from jax_flash_metal import bench_worker

EXAMPLES = Path(__file__).parents[2] / "examples"
# As in the demo, but for the length.
BATCH, LENGTH, WIDTH, HEADS, LAYERS = 8, 1024, 128, 4, 2
TOLERANCE = 1e-3  # of the losses, as in the demo


def _jax_nn(query: Any, key: Any, value: Any, *, is_causal: bool, **_: Any) -> Any:
    """In place of the model's attention; the other arguments are Flax's defaults."""
    import jax

    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="xla"
    )


class TrainingStep(bench_worker.Subject):
    """Loss, gradient and update of the parameters, on random bytes."""

    def __init__(self, implementation: str) -> None:
        self._implementation = implementation

    def load(self) -> dict[str, str]:
        import jax

        jax.devices()
        names = ("jax", "jaxlib", "flax", "optax")
        return {name: importlib.metadata.version(name) for name in names}

    def prepare(self, case: Any) -> dict[str, Any]:
        """Compiles; compares two losses with those of implementation="xla"."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        sys.path.insert(0, str(EXAMPLES))
        import train_gpt

        def model_of(implementation: str) -> Any:
            return train_gpt.Transformer(
                length=LENGTH,
                width=WIDTH,
                num_heads=HEADS,
                num_layers=LAYERS,
                implementation=implementation,
            )

        rng = np.random.default_rng(0)
        windows = jnp.asarray(rng.integers(0, 256, (BATCH, LENGTH + 1)), jnp.int32)
        right = model_of("xla")
        params = jax.jit(right.init)(jax.random.key(0), windows[:, :-1])
        optimizer = optax.adamw(1e-3)
        state = optimizer.init(params)

        def step(model: Any, params: Any, state: Any, windows: Any) -> Any:
            loss = functools.partial(train_gpt.mean_loss, model)
            value, gradient = jax.value_and_grad(loss)(params, windows)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        def compile_step(model: Any) -> Any:
            lowered = jax.jit(step, static_argnums=0).lower(
                model, params, state, windows
            )
            return lowered.compile()

        def two_losses(compiled: Any) -> Any:
            """The second shows the gradients of the first step."""
            moved, moved_state, first = compiled(params, state, windows)
            return np.array([first, compiled(moved, moved_state, windows)[2]])

        wanted = two_losses(compile_step(right))
        name = self._implementation
        if name == "jax.nn":
            train_gpt.dot_product_attention = _jax_nn
        compiled = compile_step(model_of(name))
        # The same step each time: that it takes the same time is all that matters.
        self._step = lambda: jax.block_until_ready(compiled(params, state, windows))
        error = float(np.abs(two_losses(compiled) - wanted).max())
        return {"error": error, "tolerance": TOLERANCE}

    def call(self) -> Any:
        return self._step()


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    bench_worker.serve(lambda: TrainingStep(settings["subject"]), settings)
