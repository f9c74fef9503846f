"""What a compiled program with custom calls says about itself, and how it is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from tests.plugin.pjrt import on_platform
from tests.plugin.pjrt.on_platform import put, scale

pytestmark = pytest.mark.xdist_group("pjrt")

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(autouse=True)
def default_device():
    with jax.default_device(on_platform.device()):
        yield


def program(x, y):
    hidden = scale(jnp.sin(x))
    return {"a": hidden @ y, "b": hidden.astype(jnp.bfloat16), "c": hidden.sum() > 0}


def compiled(donate: bool = False):
    run = jax.jit(program, donate_argnums=(0,) if donate else ())
    return run.lower(put(X), put(np.ones((4, 5), np.float32))).compile()


def test_results_are_described():
    arguments = (put(X), put(np.ones((4, 5), np.float32)))
    info = jax.tree.map(lambda x: (x.shape, str(x.dtype)), compiled()(*arguments))
    assert info["a"] == ((2, 3, 5), "float32")
    assert info["b"] == ((2, 3, 4), "bfloat16")
    assert info["c"] == ((), "bool")


def test_the_text_is_that_of_the_real_program():
    text = compiled().as_text()
    assert "test_Scale" in text
    assert "sine" in text
    assert "dot" in text


def test_memory():
    stats = compiled().memory_analysis()
    assert stats.argument_size_in_bytes == X.nbytes + 4 * 5 * 4
    assert stats.output_size_in_bytes >= 2 * 3 * 5 * 4 + X.size * 2 + 1
    # sin(x) and its double live between the segments.
    assert 2 * X.nbytes <= stats.temp_size_in_bytes < 20 * X.nbytes
    assert compiled(donate=True).memory_analysis() is not None


def test_cost_is_the_hosts_or_nothing():
    plain = jax.jit(lambda x: jnp.sin(x) * 2).lower(put(X)).compile()
    assert (compiled().cost_analysis() is None) == (plain.cost_analysis() is None)


def test_fingerprints_tell_programs_apart():
    def fingerprint(factor):
        run = jax.jit(lambda x: scale(jnp.sin(x), factor)).lower(put(X)).compile()
        return run.runtime_executable().fingerprint

    assert fingerprint(2.0) == fingerprint(2.0)
    assert fingerprint(2.0) != fingerprint(3.0)


def test_serialised_and_loaded_it_computes_the_same():
    original = compiled()
    arguments = (put(X), put(np.full((4, 5), 0.5, np.float32)))
    expected = original(*arguments)
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(original), backend="flash_metal"
    )
    before = on_platform.statistics()["calls"]
    got = loaded(*arguments)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(value))
    assert np.abs(np.asarray(got["a"])).max() > 0.1
    assert on_platform.statistics()["calls"] == before + 1


def test_programs_without_our_calls_are_the_hosts():
    before = on_platform.statistics()
    run = jax.jit(lambda x: jnp.cos(x) + 5).lower(put(X)).compile()
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(run), backend="flash_metal"
    )
    np.testing.assert_array_equal(loaded(put(X)), run(put(X)))
    after = on_platform.statistics()
    assert (before["programs"], before["executions"]) == (
        after["programs"],
        after["executions"],
    )


def test_layouts_and_shardings():
    run = compiled()
    shardings = jax.tree.leaves(run.input_shardings)
    assert {s.memory_kind for s in shardings} == {"device"}
    assert len(jax.tree.leaves(run.output_shardings)) == 3


def test_equal_segments_are_compiled_once():
    def run(x):
        for _ in range(4):
            x = jnp.sin(scale(x)) + 1
        return x

    before = on_platform.statistics()["segments"]
    result = jax.jit(run)(put(X))
    expected = X
    for _ in range(4):
        expected = np.sin(expected * 2) + 1
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    # The last one does not give its argument's memory away in another way.
    assert on_platform.statistics()["segments"] - before <= 2
