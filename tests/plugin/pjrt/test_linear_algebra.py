"""LAPACK on platform flash_metal: jaxlib's own CPU handlers, called by our runtime."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.plugin.pjrt import on_platform
from tests.plugin.pjrt.on_platform import put

pytestmark = pytest.mark.xdist_group("pjrt")

MATRIX = np.random.default_rng(0).standard_normal((3, 5, 5)).astype(np.float32)


@pytest.fixture(autouse=True)
def default_device():
    with jax.default_device(on_platform.device()):
        yield


def symmetric():
    return MATRIX + MATRIX.swapaxes(-1, -2)


def test_eigh():
    values, vectors = jax.jit(jnp.linalg.eigh)(put(symmetric()))
    np.testing.assert_allclose(values, np.linalg.eigvalsh(symmetric()), atol=1e-4)
    rebuilt = np.einsum("bij,bj,bkj->bik", vectors, values, vectors)
    np.testing.assert_allclose(rebuilt, symmetric(), atol=1e-4)


def test_its_gradient():
    def top(x):
        return jnp.linalg.eigh(x + x.swapaxes(-1, -2))[0][..., -1].sum()

    gradient = jax.jit(jax.grad(top))(put(MATRIX))
    _, vectors = np.linalg.eigh(symmetric())
    expected = 2 * np.einsum("bi,bj->bij", vectors[..., -1], vectors[..., -1])
    np.testing.assert_allclose(gradient, expected, atol=1e-3)


def test_what_the_host_does_itself():
    spd = symmetric() @ symmetric().swapaxes(-1, -2) + np.eye(5, dtype=np.float32)
    factor = np.asarray(jax.jit(jnp.linalg.cholesky)(put(spd)))
    np.testing.assert_allclose(factor @ factor.swapaxes(-1, -2), spd, rtol=1e-4)
    solution = jax.jit(jnp.linalg.solve)(put(spd), put(MATRIX))
    np.testing.assert_allclose(spd @ np.asarray(solution), MATRIX, atol=1e-2)
    q, r = jax.jit(jnp.linalg.qr)(put(MATRIX))
    np.testing.assert_allclose(np.asarray(q) @ np.asarray(r), MATRIX, atol=1e-4)
    values = jax.jit(lambda x: jnp.linalg.svd(x, compute_uv=False))(put(MATRIX))
    expected = np.linalg.svd(MATRIX, compute_uv=False)
    np.testing.assert_allclose(values, expected, atol=1e-4)


def test_callbacks_are_refused_with_a_sentence():
    def run(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(Exception, match=r"(?i)callback.* not supported on flash_metal"):
        jax.jit(run)(put(MATRIX))
