"""Causal attention with grouped heads, and its gradient, and which kernels run."""

from functools import partial

import jax

from jax_flash_metal import explain, flash_attention

keys = jax.random.split(jax.random.key(0), 2)
query = jax.random.normal(keys[0], (2, 200, 8, 64))  # batch, q_len, heads, head_dim
key, value = jax.random.normal(keys[1], (2, 2, 200, 2, 64))  # 2 key-value heads
attend = partial(flash_attention, is_causal=True)
out, pullback = jax.vjp(jax.jit(attend), query, key, value)
print(explain(query, key, value, is_causal=True))
print("out", out.shape, "gradients", [gradient.shape for gradient in pullback(out)])
