"""Programs with custom calls as they run: results, donation, time, errors."""

from __future__ import annotations

import inspect
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal._jax_compat import ffi
from tests.plugin.pjrt import on_platform
from tests.plugin.pjrt.on_platform import like, put, scale
from tests.support.ffi_call import bind

pytestmark = pytest.mark.xdist_group("pjrt")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test ends without buffers of plans; pending ones are waited for."""
    with jax.default_device(on_platform.device()):
        yield
    deadline = time.monotonic() + 10
    while on_platform.statistics()["live_buffers"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert on_platform.statistics()["live_buffers"] == 0


def wait(x: jax.Array, delay_ms: int, error: str = "") -> jax.Array:
    """x + 1 after a while, or an error then."""
    on_platform.register_handlers()
    delay = np.int64(delay_ms)
    return bind("test_Async", [like(x)], x, delay_ms=delay, error=error)[0]


def fail(x: jax.Array, code: int, message: str) -> jax.Array:
    """An error whenever it runs; depends on x, and its result is int64[1]."""
    on_platform.register_handlers()
    with_type = jax.ShapeDtypeStruct((1,), jnp.int64)
    result = bind("test_Fail", [with_type], code=np.int32(code), message=message)[0]
    return x + result.sum().astype(x.dtype)


X = np.arange(6, dtype=np.float32).reshape(2, 3) + 1


def test_calls_between_the_hosts_segments():
    run = jax.jit(lambda x: jnp.sin(scale(jnp.cos(x), 3.0)) + scale(x))
    np.testing.assert_allclose(run(put(X)), np.sin(np.cos(X) * 3) + X * 2, rtol=1e-6)


def test_loops_and_branches():
    def body(carry, x):
        carry = jax.lax.cond(
            x > 2, lambda c: scale(c, 0.5), lambda c: scale(c + 1, 3.0), carry
        )
        return carry, carry.sum()

    def run(x, limit):
        x, sums = jax.lax.scan(body, x, jnp.arange(5.0))
        return jax.lax.while_loop(lambda c: c.sum() < limit, scale, x), sums

    expected, sums = X, []
    for step in range(5):
        expected = expected * 0.5 if step > 2 else (expected + 1) * 3
        sums.append(expected.sum())
    while expected.sum() < 1e4:
        expected = expected * 2
    got, got_sums = jax.jit(run)(put(X), 1e4)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(got_sums, sums, rtol=1e-6)


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 7])
def test_switch_clamps_its_index(index):
    branches = [lambda x, f=factor: scale(x, f) for factor in (2.0, 3.0, 5.0)]
    run = jax.jit(lambda i, x: jax.lax.switch(i, branches, x))
    factor = (2, 3, 5)[min(max(index, 0), 2)]
    np.testing.assert_array_equal(run(index, put(X)), X * factor)


def test_arguments_constants_and_results_twice_come_as_buffers_of_their_own():
    def run(x, y):
        doubled = scale(x)
        return x, doubled, doubled, y, jnp.ones((3,)), jnp.zeros((0, 2)), x

    x, y = put(X), put(X + 1)
    results = jax.jit(run)(x, y)
    for got, expected in zip(results, (X, X * 2, X * 2, X + 1, np.ones(3))):
        np.testing.assert_array_equal(got, expected)
    filled = [r for r in results if r.size]
    pointers = {r.unsafe_buffer_pointer() for r in (*filled, x, y)}
    assert len(pointers) == len(filled) + 2
    for result in results:
        result.delete()
    np.testing.assert_array_equal(x, X)


def test_a_program_of_one_call_and_one_without_arguments():
    np.testing.assert_array_equal(jax.jit(scale)(put(X)), X * 2)
    on_platform.register_handlers()
    struct = jax.ShapeDtypeStruct((1,), jnp.float32)
    run = jax.jit(lambda: bind("test_SumAll", [struct, struct]))
    np.testing.assert_array_equal(np.ravel(run()), [0, 1])


# -- Donation --------------------------------------------------------------------------


def test_donated_memory_is_reused():
    run = jax.jit(lambda x, w: (x - scale(w), scale(w).sum()), donate_argnums=0)
    # Not put(X) itself: the host may have NumPy's memory there, and then keeps to it.
    x, w = put(X) * 1, put(X * 10)
    pointer = x.unsafe_buffer_pointer()
    result, _ = run(x, w)
    assert x.is_deleted()
    np.testing.assert_array_equal(result, X - X * 20)
    assert result.unsafe_buffer_pointer() == pointer
    assert not w.is_deleted()


def test_memory_of_a_loops_carry_is_reused():
    def run(x):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(scale(c)) + c, x)

    expected = X
    for _ in range(3):
        expected = np.sin(expected * 2) + expected
    x = put(X)
    np.testing.assert_allclose(jax.jit(run)(x), expected, rtol=1e-5)
    np.testing.assert_array_equal(x, X)  # not donated: as it was


def test_a_donated_buffer_cannot_be_used_again():
    run = jax.jit(lambda x: scale(x) + 1, donate_argnums=0)
    x = put(X)
    run(x)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)deleted|donated"):
        jax.block_until_ready(run(x))


def test_one_buffer_donated_and_kept():
    # Twice the same buffer: its memory must not be reused while the other use lasts.
    run = jax.jit(lambda x, y: scale(x) + y * 3, donate_argnums=0)
    x = put(X)
    try:
        result = np.asarray(run(x, x))
    except (RuntimeError, ValueError) as error:  # JAX itself may refuse it
        assert "donate" in str(error)
    else:
        np.testing.assert_array_equal(result, X * 5)


# -- Calls that write over an operand --------------------------------------------------


def sum_in_place(x: jax.Array) -> jax.Array:
    """x with its sum for x[0], in x's memory if nobody else needs that."""
    if "input_output_aliases" not in inspect.signature(ffi.ffi_call).parameters:
        pytest.skip("this version's ffi_call has no aliases")
    on_platform.register_handlers()
    call = ffi.ffi_call("test_SumAll", [like(x)], input_output_aliases={0: 0})
    return call(x)[0]


def summed(x: np.ndarray) -> np.ndarray:
    return np.concatenate([[x.sum()], x[1:]])


def test_a_call_in_place_changes_nothing_that_is_still_needed():
    def run(x):
        y = x + 1
        return sum_in_place(x), sum_in_place(y), y * 3, sum_in_place(x * 5)

    values = np.arange(6, dtype=np.float32)
    x = put(values)
    results = jax.jit(run)(x)
    y = values + 1
    for got, expected in zip(results, (summed(values), summed(y), y * 3)):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(results[3], summed(values * 5))
    np.testing.assert_array_equal(x, values)


# -- Time ------------------------------------------------------------------------------


def test_returns_before_the_work_is_done():
    run = jax.jit(lambda x: wait(x, 400) * 2)
    jax.block_until_ready(run(put(X)))
    start = time.perf_counter()
    result = run(put(X))
    returned = time.perf_counter() - start
    assert not result.is_ready()
    np.testing.assert_array_equal(result, (X + 1) * 2)
    assert time.perf_counter() - start >= 0.4
    assert returned < 0.3


def test_arguments_may_be_deleted_and_donated_while_it_runs():
    slow = jax.jit(lambda x, y: wait(x, 200) + y)
    x, y, z = put(X), put(X * 2), put(X * 3)
    first = slow(x, y)
    x.delete()
    assert x.is_deleted()
    second = slow(y, z)
    # The host may overwrite y only after both have read it.
    third = jax.jit(lambda y: y + 1, donate_argnums=0)(y)
    fourth = jax.jit(lambda z: scale(z) + 1, donate_argnums=0)(z)
    del y, z
    np.testing.assert_array_equal(first, X + 1 + X * 2)
    np.testing.assert_array_equal(second, X * 2 + 1 + X * 3)
    np.testing.assert_array_equal(third, X * 2 + 1)
    np.testing.assert_array_equal(fourth, X * 6 + 1)


def test_donated_memory_is_not_reused_while_an_earlier_execution_needs_it():
    earlier = jax.jit(lambda x, y: wait(x, 200) + y)
    # Its first segment would take y's memory, long before the other has read it.
    later = jax.jit(lambda y: scale(jnp.sin(y)), donate_argnums=0)
    jax.block_until_ready((earlier(put(X), put(X)), later(put(X))))
    x, y = put(X), put(X * 3)
    first = earlier(x, y)
    second = later(y)
    assert y.is_deleted()
    np.testing.assert_allclose(second, np.sin(X * 3) * 2, rtol=1e-6)
    np.testing.assert_array_equal(first, X + 1 + X * 3)


def test_results_that_do_not_exist_yet_can_be_used():
    pending = jax.jit(lambda x: wait(x, 200))(put(X))
    plus = pending + 1  # the host's, not ours
    again = jax.jit(lambda x: scale(x))(pending)
    assert pending.unsafe_buffer_pointer()  # waits rather than crash
    np.testing.assert_array_equal(plus, X + 2)
    np.testing.assert_array_equal(again, (X + 1) * 2)


def test_many_pending_executions():
    run = jax.jit(lambda x: wait(x, 5) * 1)
    x = put(X)
    for _ in range(20):
        x = run(x)
    np.testing.assert_array_equal(x, X + 20)


def test_several_threads():
    run = jax.jit(lambda x: jnp.cos(scale(jnp.sin(x))) + wait(x, 1))
    expected = np.asarray(run(put(X)))
    wrong: list[int] = []

    def work(seed: int) -> None:
        with jax.default_device(on_platform.device()):
            for _ in range(30):
                x = put(X + seed)
                y = run(x)
                reference = np.cos(np.sin(X + seed) * 2) + X + seed + 1
                if not np.allclose(y, reference, rtol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    np.testing.assert_array_equal(run(put(X)), expected)


# -- Errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "name"),
    [(3, "INVALID_ARGUMENT"), (8, "RESOURCE_EXHAUSTED"), (9, "FAILED")],
)
def test_a_handlers_error_in_the_middle(x64, code, name):
    run = jax.jit(lambda x: scale(fail(scale(x), code, "seven is enough")) * 2)
    x = put(X)
    with pytest.raises(Exception, match=f"{name}.*test_Fail.*seven is enough"):
        np.asarray(run(x))
    # Nothing is broken by it: neither the arguments nor the platform.
    np.testing.assert_array_equal(jax.jit(scale)(x), X * 2)


def test_a_late_error_comes_with_every_result():
    run = jax.jit(lambda x: (wait(x, 50, "lost on the way"), scale(x)))
    results = run(put(X))
    for result in results:
        with pytest.raises(Exception, match="lost on the way"):
            np.asarray(result)


def test_an_error_passes_through_what_uses_its_result():
    bad = jax.jit(lambda x: wait(x, 50, "lost on the way"))(put(X))
    for use in (lambda x: x + 1, scale):
        with pytest.raises(Exception, match="lost on the way"):
            np.asarray(jax.jit(use)(bad))


def test_an_error_in_a_loop_leaves_nothing():
    def run(x, y):
        x = jax.lax.fori_loop(0, 3, lambda _, c: scale(c), x)
        return (
            jax.lax.fori_loop(0, 3, lambda _, c: wait(c + 1, 1, "in the loop"), x) + y
        )

    with pytest.raises(Exception, match="in the loop"):
        np.asarray(jax.jit(run, donate_argnums=1)(put(X), put(X)))


def test_host_memory_that_does_not_suffice():
    huge = jax.jit(
        lambda x: scale(jnp.broadcast_to(x[:1, :1], (1 << 21, 1 << 22))).sum()
    )
    with pytest.raises(Exception, match=r"(?i)exhausted|out of memory|alloc"):
        np.asarray(huge(put(X)))
    np.testing.assert_array_equal(jax.jit(scale)(put(X)), X * 2)


def test_an_unregistered_target_is_named_with_the_registered_ones():
    on_platform.register_handlers()
    run = jax.jit(lambda x: bind("nobody_has_this", [like(x)], scale(x))[0])
    with pytest.raises(Exception, match=r"(?s)nobody_has_this.*test_Fail.*test_Scale"):
        run(put(X))
