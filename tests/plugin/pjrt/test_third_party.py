"""Third-party FFI handlers from JAX to their functions: all that jax.ffi can express.

What only C++ sees (versions of the ABI, exceptions, futures) is in test_custom_call.py.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import platforms
from jax_flash_metal._jax_compat import ffi
from tests.plugin.pjrt import custom_calls, on_platform
from tests.plugin.pjrt.on_platform import put
from tests.support.ffi_call import bind
from tests.support.processes import output_of

pytestmark = pytest.mark.xdist_group("pjrt")

SIMPLE = ("Split", "SumAll", "Scalars", "Arrays", "Dictionaries", "AllAttributes")


def capsule(function):
    return ffi.pycapsule(function)


def register_counter(library):
    """The type of the stateful handler's state, and the handler with all its stages."""
    if hasattr(ffi, "register_ffi_type"):
        info = (ctypes.c_size_t * 3)(24, 0, custom_calls.address(library.DeleteCounter))
        library.counter_info = info  # the registry reads it again at any time
        ffi.register_ffi_type(
            "test_Counter",
            {
                "type_id": capsule(library.CounterTypeId()),
                "type_info": capsule(ctypes.pointer(info)),
            },
            platform="flash_metal",
        )
    else:  # before jax 0.5 there was no way from Python
        error = ctypes.create_string_buffer(1024)
        failed = platforms.load_library().jfm_pjrt_register_type(
            b"test_Counter",
            ctypes.c_size_t(12),
            library.CounterTypeId(),
            None,
            error,
            ctypes.c_size_t(len(error)),
        )
        assert not failed, error.value
    ffi.register_ffi_target(
        "test_Count",
        {
            "instantiate": capsule(library.CountInstantiate),
            "prepare": capsule(library.CountPrepare),
            "initialize": capsule(library.CountInitialize),
            "execute": capsule(library.Count),
        },
        platform="flash_metal",
    )


@pytest.fixture(scope="module", autouse=True)
def library():
    on_platform.register_handlers()
    handlers = custom_calls.handlers()
    names = (*SIMPLE, *(("Ids",) if handlers.ApiMinor() >= 3 else ()))
    for name in names:
        if name not in on_platform.TARGETS:
            function = capsule(getattr(handlers, name))
            ffi.register_ffi_target(f"test_{name}", function, platform="flash_metal")
    register_counter(handlers)
    return handlers


@pytest.fixture(autouse=True)
def on_device(x64):
    with jax.default_device(on_platform.device()):
        yield


def text(target, **attributes):
    """What a handler writes into a result of bytes."""
    result = jax.ShapeDtypeStruct((512,), np.uint8)
    out = jax.jit(lambda: bind(f"test_{target}", [result], **attributes)[0])()
    return np.asarray(out).tobytes().rstrip(b"\0").decode()


def test_scalars():
    assert text(
        "Scalars",
        **{"b": True, "s8": np.int8(-8), "s16": np.int16(-16), "s32": np.int32(-32)},
        **{"s64": np.int64(-(2**40)), "u8": np.uint8(200), "u16": np.uint16(60000)},
        **{"u32": np.uint32(4_000_000_000), "u64": np.uint64(2**40)},
        **{"f32": np.float32(0.5), "f64": np.float64(-0.25), "text": "text, é"},
        **{"mode": np.int32(2)},
    ) == (
        "1 -8 -16 -32 -1099511627776 200 60000 4000000000 1099511627776 "
        "0.500000 -0.250000 text, é 2 "
    )


def test_arrays():
    if not hasattr(ffi, "register_ffi_type"):
        pytest.skip("before jax 0.5, programs with such attributes reach no plugin")
    assert text(
        "Arrays",
        **{"u8": np.array([1, 255], np.uint8), "s8": np.array([-1, 2, -3], np.int8)},
        **{"s32": np.array([1 << 30], np.int32), "s64": np.array([1 << 40, 2])},
        **{"f32": np.array([0.5], np.float32), "f64": np.array([0.25, 1])},
        **{"none": np.array([], np.int64)},
    ) == (
        "[1 255 ] [-1 2 -3 ] [1073741824 ] [1099511627776 2 ] [0.500000 ] "
        "[0.250000 1.000000 ] [] "
    )


def test_dictionaries_and_structs():
    assert (
        text(
            "Dictionaries",
            range={"high": np.int64(9), "low": np.int64(-9)},
            outer={"number": np.float32(1.5), "other": "text"},
        )
        == "1.500000 2 -9 9 "
    )


def test_attributes_in_any_order():
    values = {"zebra": np.int32(1), "apple": np.int32(2), "mango": "unused"}
    assert text("AllAttributes", **values) == "2 1 0 "


def test_results_of_different_types():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((2,), np.int64),
    ]
    whole, sizes = jax.jit(lambda x: bind("test_Split", results, x))(put(x))
    np.testing.assert_array_equal(whole, x)
    assert sizes.tolist() == [6, 2]


@pytest.mark.parametrize("num_operands", [0, 1, 30])
def test_variadic(num_operands):
    operands = [jnp.full((i,), i, jnp.float32) for i in range(num_operands)]
    scalar = jax.ShapeDtypeStruct((), np.float32)
    sums = jax.jit(lambda *xs: bind("test_SumAll", [scalar] * 3, *xs))(*operands)
    expected = sum(i * i for i in range(num_operands))
    assert [float(s) for s in sums] == [expected, expected + 1, expected + 2]


def test_stages_and_state(library):
    before = library.NumCounters()
    result = jax.ShapeDtypeStruct((3,), np.int64)

    def run(start):
        call = jax.jit(lambda: bind("test_Count", [result], start=np.int64(start))[0])
        return call.lower().compile()

    first, second = run(5), run(50)
    assert library.NumCounters() == before + 2
    assert [first().tolist() for _ in range(2)] == [[5, 105, 1105], [6, 105, 1105]]
    assert second().tolist() == [50, 150, 1150]
    del first, second
    jax.clear_caches()
    assert library.NumCounters() == before


def test_an_error_at_the_instantiate_stage():
    result = jax.ShapeDtypeStruct((3,), np.int64)
    with pytest.raises(Exception, match=r"\[instantiate\] start must not be negative"):
        jax.jit(lambda: bind("test_Count", [result], start=np.int64(-1))[0])()


def test_calls_of_one_execution_have_one_run_id(library):
    if library.ApiMinor() < 3:
        pytest.skip("this jaxlib's headers have no run ids")
    result = jax.ShapeDtypeStruct((3,), np.int64)

    @jax.jit
    def run(x):
        first = bind("test_Ids", [result])[0]
        second = bind("test_Ids", [result])[0]
        return first, second, x + 1

    (a, b, _), (c, d, _) = run(put(1.0)), run(put(1.0))
    assert a[0] == b[0] != c[0] == d[0]
    assert a[1] == 0  # the ordinal of the device


def test_a_stateful_handler_registered_before_the_platform_starts():
    program = """
    import jax
    from tests.plugin.pjrt import custom_calls, test_third_party
    test_third_party.register_counter(custom_calls.handlers())
    import numpy as np
    jax.config.update("jax_enable_x64", True)
    from tests.support.ffi_call import bind
    result = jax.ShapeDtypeStruct((3,), np.int64)
    print(*jax.jit(lambda: bind("test_Count", [result], start=np.int64(5))[0])())
    """
    if not hasattr(ffi, "register_ffi_type"):
        pytest.skip("types cannot be registered from Python before jax 0.5")
    assert output_of(program, JAX_PLATFORMS="flash_metal") == "5 105 1105"
