"""Good custom calls as a runtime makes them: empty, twice, many at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import platforms
from tests.support.ffi_call import (
    ATTRIBUTES,
    BACKWARD,
    FORWARD,
    SHAPES,
    assert_good_call_works,
    bind,
    call,
)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    platforms.ensure_registered()


def resized(axis_sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The good call's shapes with other sizes: "batch", "q_len", "kv_len"."""
    old = {"batch": 2, "q_len": 5, "kv_len": 7}
    new = {old[name]: size for name, size in axis_sizes.items()}
    return {name: tuple(new.get(n, n) for n in shape) for name, shape in SHAPES.items()}


def test_forward() -> None:
    assert_good_call_works()


def test_backward() -> None:
    # Every operand is 1, out and logsumexp too, which no forward gave: only signs are
    # known here. Values are the kernel tests' affair.
    dquery, dkey, dvalue = call(BACKWARD)
    assert np.isfinite(dquery).all()
    assert np.isfinite(dkey).all()
    assert (dvalue > 0).all()


def test_registering_twice_is_harmless() -> None:
    platforms.ensure_registered.__wrapped__()
    assert_good_call_works()


@pytest.mark.parametrize("axis", ["batch", "q_len", "kv_len"])
def test_empty_forward(axis: str) -> None:
    shapes = resized({axis: 0})
    out, logsumexp = call(FORWARD, shapes)
    assert out.shape == shapes["out"]
    assert (out == 0).all()
    assert (logsumexp == -np.inf).all()


@pytest.mark.parametrize("axis", ["batch", "q_len", "kv_len"])
def test_empty_backward(axis: str) -> None:
    for gradient in call(BACKWARD, resized({axis: 0})):
        assert (gradient == 0).all()


def many_calls(query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.Array]:
    """32 calls that the runtime may run side by side."""
    results = [
        jax.ShapeDtypeStruct(SHAPES[name], jnp.float32) for name in ("out", "logsumexp")
    ]
    return [
        bind(FORWARD, results, query, key, value * i, **ATTRIBUTES)[0]
        for i in range(32)
    ]


def test_many_calls_in_one_program_and_from_many_threads() -> None:
    operands = [jnp.ones(SHAPES[name]) for name in ("query", "key", "value")]
    program = jax.jit(many_calls)

    def run(_: int) -> None:
        for i, out in enumerate(program(*operands)):
            np.testing.assert_allclose(out, np.full(SHAPES["out"], i), rtol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(8)))
