"""Third-party FFI handlers of every kind, called by our side of XLA's FFI."""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from jaxlib.cpu import _lapack

from tests.plugin.pjrt import custom_calls
from tests.plugin.pjrt.custom_calls import Call, CallError, call

CODES = {  # absl::StatusCode
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}
SIMPLE_HANDLERS = (
    *(
        "Scale",
        "Split",
        "SumAll",
        "TokenPass",
        "Scalars",
        "Complex",
        "Arrays",
        "Dictionaries",
    ),
    *("AllAttributes", "Scratch", "Pool", "NestedPool", "UserDataNumber", "Stream"),
    *("Fail", "Throw", "Async", "Nothing"),
)


@pytest.fixture(scope="module", autouse=True)
def handlers():
    library = custom_calls.handlers()
    custom_calls.register_type(
        "Counter", library.CounterTypeId(), library.DeleteCounter
    )
    custom_calls.register_type("Payload", library.PayloadTypeId())
    for name in SIMPLE_HANDLERS:
        custom_calls.register(name, getattr(library, name))
    if library.ApiMinor() >= 3:
        custom_calls.register("Ids", library.Ids)
    custom_calls.register(
        "Count",
        library.Count,
        instantiate=library.CountInstantiate,
        prepare=library.CountPrepare,
        initialize=library.CountInitialize,
    )
    return library


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def text(target, **attributes):
    """What a handler writes into a result of bytes."""
    out = np.zeros(512, np.uint8)
    call(target, [], [out], **attributes)
    return out.tobytes().rstrip(b"\0").decode()


# -- Operands and results ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (2, 3), (), (0,), (3, 0, 2), (1,) * 12])
def test_operand_and_result(shape):
    x, y = floats(*shape), np.full(shape, np.nan, np.float32)
    call("Scale", [x], [y], factor=np.float32(3))
    np.testing.assert_array_equal(y, 3 * x)


def test_results_of_different_types():
    x, whole, sizes = floats(2, 3), np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    call("Split", [x], [whole, sizes])
    np.testing.assert_array_equal(whole, x)
    assert sizes.tolist() == [6, 2]


def test_result_in_the_memory_of_the_operand():
    x = floats(7)
    Call("Scale", [x], [x], factor=np.float32(2))([x], [x])
    np.testing.assert_array_equal(x, 2 * floats(7))


# 40: more than fit into the arrays on the stack.
@pytest.mark.parametrize("num_operands", [0, 1, 3, 40])
@pytest.mark.parametrize("num_results", [1, 2, 40])
def test_variadic(num_operands, num_results):
    operands = [floats(i + 1) for i in range(num_operands)]
    results = [np.zeros((), np.float32) for _ in range(num_results)]
    call("SumAll", operands, results)
    expected = sum(float(x.sum()) for x in operands)
    assert [float(r) for r in results] == [expected + i for i in range(num_results)]


def test_tokens():
    x, y = floats(3), np.zeros(3, np.float32)
    call("TokenPass", [None, x], [None, y])
    np.testing.assert_array_equal(y, x)


def test_wrong_dtype_is_the_handlers_error():
    with pytest.raises(CallError, match=r"FFI handler Scale: \[execute\] .*operands"):
        call("Scale", [floats(3).astype(np.int32)], [floats(3)], factor=np.float32(1))


def test_wrong_number_of_operands_is_the_handlers_error():
    with pytest.raises(
        CallError,
        match=r"^FFI handler Scale: \[execute\] Wrong number of arguments: "
        r"expected 1 but got 2$",
    ) as error:
        call("Scale", [floats(3)] * 2, [floats(3)], factor=np.float32(1))
    assert error.value.code == CODES["INVALID_ARGUMENT"]


# -- Attributes ------------------------------------------------------------------------


def test_scalars():
    assert (
        text(
            "Scalars",
            u8=np.uint8(200),
            u16=np.uint16(60000),
            u32=np.uint32(4_000_000_000),
            u64=np.uint64(2**63),
            s8=np.int8(-8),
            s16=np.int16(-16),
            s32=np.int32(-32),
            s64=np.int64(-(2**40)),
            b=np.bool_(True),
            f32=np.float32(0.5),
            f64=np.float64(-0.25),
            text="some text, é and \0",
            mode=np.int32(2),
        )
        == "1 -8 -16 -32 -1099511627776 200 60000 4000000000 9223372036854775808 "
        "0.500000 -0.250000 some text, é and \0 2 "
    )


def test_complex_scalar():
    assert text("Complex", c64=np.complex64(1 + 2j)) == "1.000000 2.000000 "


def test_arrays():
    assert (
        text(
            "Arrays",
            u8=np.array([1, 255], np.uint8),
            s8=np.array([-1, 2, -3], np.int8),
            s32=np.array([1 << 30], np.int32),
            s64=np.array([1 << 40, 2], np.int64),
            f32=np.array([0.5], np.float32),
            f64=np.array([0.25, 1], np.float64),
            none=np.array([], np.int64),
        )
        == "[1 255 ] [-1 2 -3 ] [1073741824 ] [1099511627776 2 ] [0.500000 ] "
        "[0.250000 1.000000 ] [] "
    )


def test_dictionaries_and_structs():
    assert (
        text(
            "Dictionaries",
            range={"high": np.int64(9), "low": np.int64(-9)},
            outer={"number": np.float32(1.5), "inner": {"text": "deep", "a": "b"}},
        )
        == "1.500000 2 -9 9 deep 2 "
    )


def test_all_attributes_at_once_in_any_order():
    values = {"zebra": np.int32(1), "apple": np.int32(2), "mango": "unused"}
    assert text("AllAttributes", **values) == "2 1 0 "


def test_missing_attribute_is_the_handlers_error():
    with pytest.raises(CallError, match="Wrong number of attributes"):
        call("Scale", [floats(3)], [floats(3)])


def test_attribute_of_another_type_is_the_handlers_error():
    with pytest.raises(CallError, match="bad operands at"):
        call("Scale", [floats(3)], [floats(3)], factor=np.float64(1))


def test_malformed_attributes_are_refused():
    plan = custom_calls.plan
    for bad, message in (
        ((("a", plan.Scalar(11, b"123")),), "attribute a has 3 bytes for 1 values"),
        ((("a", plan.Array(4, 2, b"1234")),), "attribute a has 4 bytes for 2 values"),
        ((("a", plan.Scalar(99, b"")),), "data type 99"),
        ((("a", "x"), ("a", "y")), "attribute a is there twice"),
        ((("d", (("a", plan.Scalar(11, b"")),)),), "attribute d.a has 0 bytes"),
    ):
        site = Call.__new__(Call)
        with pytest.raises(CallError, match=message):
            site.create(plan.Call("Nothing", bad, (), (), (), False))


def test_malformed_types_are_refused():
    plan = custom_calls.plan
    for bad, message in (
        (plan.Tensor(99, (1,)), "operand 0 has the unknown XLA data type 99"),
        (plan.Tensor(11, (2, -1)), "operand 0 has a negative dimension"),
    ):
        site = Call.__new__(Call)
        with pytest.raises(CallError, match=message):
            site.create(plan.Call("Nothing", (), (bad,), (), (), False))


def test_wrong_addresses_are_refused():
    x = floats(3)
    site = Call("Scale", [x], [x], factor=np.float32(1))
    with pytest.raises(CallError, match="got 2 addresses for 1 operands"):
        site([x, x], [x])
    with pytest.raises(CallError, match="operand 0 has no memory"):
        site([None], [x])


# -- Stages ----------------------------------------------------------------------------


def test_states_of_stages(handlers):
    prepared, initialized = handlers.NumPrepared(), handlers.NumInitialized()
    before = handlers.NumCounters()
    out = np.zeros(3, np.int64)
    first = Call("Count", [], [out], start=np.int64(5))
    second = Call("Count", [], [out], start=np.int64(50))
    assert handlers.NumCounters() == before + 2
    for expected in ([5, 105, 1105], [6, 105, 1105]):
        first([], [out])
        assert out.tolist() == expected
    second([], [out])
    assert out.tolist() == [50, 150, 1150]
    # The other stages' states end with the execution, this one with the call site.
    assert handlers.NumCounters() == before + 2
    first.close()
    assert handlers.NumCounters() == before + 1
    second.close()
    assert handlers.NumCounters() == before
    assert handlers.NumPrepared() == prepared + 3
    assert handlers.NumInitialized() == initialized + 3


def test_error_at_the_instantiate_stage():
    with pytest.raises(
        CallError,
        match=r"^FFI handler Count: \[instantiate\] start must not be negative$",
    ) as error:
        Call("Count", [], [np.zeros(3, np.int64)], start=np.int64(-1))
    assert error.value.code == CODES["INTERNAL"]


# -- Contexts --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20])
@pytest.mark.parametrize("alignment", [1, 16, 64, 4096])
def test_scratch_memory(size, alignment):
    x, y = floats(10), np.zeros(10, np.float32)
    call("Scratch", [x], [y], size=np.int64(size), alignment=np.int64(alignment))
    np.testing.assert_array_equal(y, x if size >= x.nbytes else np.zeros(10))


def test_out_of_scratch_memory():
    x, y = floats(10), np.zeros(10, np.float32)
    with pytest.raises(CallError, match=r"\[execute\] no scratch memory"):
        call("Scratch", [x], [y], size=np.int64(1 << 60), alignment=np.int64(1))
    with pytest.raises(CallError, match=r"\[execute\] no scratch memory"):
        call("Scratch", [x], [y], size=np.int64(1), alignment=np.int64(3))


@pytest.mark.parametrize("tasks", [1, 10, 1000])
def test_thread_pool(tasks):
    out = np.zeros((), np.int64)
    call("Pool", [], [out], tasks=np.int64(tasks))
    assert out == tasks * (tasks - 1) // 2


@pytest.mark.parametrize("target", ["Pool", "NestedPool"])
def test_many_handlers_that_wait_for_the_thread_pool(target):
    tasks = 12
    outs = [np.zeros((), np.int64) for _ in range(24)]
    site = Call(target, [], [outs[0]], tasks=np.int64(tasks))
    barrier = threading.Barrier(len(outs))

    def execute(out):
        barrier.wait()
        site([], [out])

    with ThreadPoolExecutor(len(outs)) as pool:
        for done in [pool.submit(execute, out) for out in outs]:
            done.result(timeout=60)
    assert [int(out) for out in outs] == [tasks * (tasks - 1) // 2] * len(outs)


def test_user_data(handlers):
    out = np.zeros((), np.int64)
    number = ctypes.c_int64(77)
    site = Call("UserDataNumber", [], [out])
    type_id = handlers.PayloadTypeId()[0]
    site([], [out], user_data=(type_id, ctypes.addressof(number)))
    assert out == 77
    with pytest.raises(CallError, match="the execution has no user data of type id"):
        site([], [out])


def test_there_is_no_stream():
    with pytest.raises(CallError, match="there is no stream"):
        call("Stream", [], [np.zeros((), np.int64)])


def test_ids(handlers):
    if handlers.ApiMinor() < 3:
        pytest.skip("this jaxlib's headers have no run ids")
    out = np.zeros(3, np.int64)
    Call("Ids", [], [out])([], [out], run_id=123, device_ordinal=4)
    assert out[:2].tolist() == [123, 4]
    assert out[2] >= 1


# -- Errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_error_codes(code):
    with pytest.raises(
        CallError, match=r"^FFI handler Fail: \[execute\] my é$"
    ) as error:
        call("Fail", [], [np.zeros(1, np.int64)], code=np.int32(code), message="my é")
    assert error.value.code == code


def test_unknown_error_code():
    with pytest.raises(CallError) as error:
        call("Fail", [], [np.zeros(1, np.int64)], code=np.int32(99), message="")
    assert error.value.code == CODES["UNKNOWN"]


EXCEPTIONS = pytest.mark.parametrize(
    ("what", "message", "code"),
    [
        ("runtime_error", "std::runtime_error: a thrown message", "INTERNAL"),
        ("special", "Special: a special message", "INTERNAL"),
        ("bad_alloc", "std::bad_alloc", "RESOURCE_EXHAUSTED"),
        ("int", "threw a C\\+\\+ exception of type int$", "INTERNAL"),
        ("unusual", "Unusual$", "INTERNAL"),
        ("rethrown", "threw a C\\+\\+ exception", "INTERNAL"),
    ],
)


def check_exception(target, what, message, code):
    out = np.zeros(1, np.int64)
    for _ in range(3):
        with pytest.raises(CallError, match=message) as error:
            call(target, [], [out], what=what)
        assert error.value.code == CODES[code]
        assert str(error.value).startswith(f"FFI handler {target}: [execute] threw a C")
    call(target, [], [out], what="nothing")


@EXCEPTIONS
def test_exceptions_do_not_leave_the_handler(what, message, code):
    check_exception("Throw", what, message, code)


@EXCEPTIONS
def test_exceptions_of_another_cpp_runtime(what, message, code):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, whose libstdc++ and unwinder are not zig's")
    custom_calls.register("ThrowGcc", custom_calls.handlers(compiler).Throw)
    check_exception("ThrowGcc", what, message, code)


def test_async():
    x, y = floats(5), np.zeros(5, np.float32)
    for delay in (0, 0, 0, 20):
        y[:] = 0
        call("Async", [x], [y], delay_ms=np.int64(delay), error="")
        np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("delay", [0, 20])
def test_async_error(delay):
    with pytest.raises(CallError, match=r"Async: \[execute\] lost") as error:
        call("Async", [floats(1)], [floats(1)], delay_ms=np.int64(delay), error="lost")
    assert error.value.code == CODES["DATA_LOSS"]


# -- Registration ----------------------------------------------------------------------


def test_unknown_target_names_it_and_the_registered():
    with pytest.raises(
        CallError, match=r"custom call target nobody_has_it; registered are: .*Scale"
    ) as error:
        call("nobody_has_it", [], [])
    assert error.value.code == CODES["NOT_FOUND"]


def test_registering_again(handlers):
    custom_calls.register("Scale", handlers.Scale)
    with pytest.raises(CallError, match="another one of that name") as error:
        custom_calls.register("Scale", handlers.Split)
    assert error.value.code == CODES["ALREADY_EXISTS"]


def test_registration_errors(handlers):
    with pytest.raises(CallError, match="no function for the execute stage"):
        custom_calls.register("x", None)
    with pytest.raises(CallError, match=r"only typed FFI handlers.*api_version 0"):
        custom_calls.register("x", handlers.Scale, api_version=0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("RawFuture", r"version 0\.6 of XLA's FFI headers; the known ones are 0\.1 to"),
        ("RawMajor", r"version 1\.0 of XLA's FFI headers"),
        ("RawSilent", "it did not tell its FFI version"),
        ("RawRefuses", "it did not tell its FFI version: .*not today"),
    ],
)
def test_functions_of_another_kind_are_refused(handlers, function, message):
    with pytest.raises(CallError, match=f"FFI handler x cannot be .*{message}"):
        custom_calls.register("x", getattr(handlers, function))
    with pytest.raises(CallError, match=f"FFI handler x cannot be .*{message}"):
        custom_calls.register("x", handlers.Scale, prepare=getattr(handlers, function))


@pytest.mark.parametrize(
    ("function", "code", "run_id"),
    [
        ("Raw01First", 77, -1),
        ("Raw01Later", 77, 5),
        ("Raw02", 77, 5),
        ("Raw03", 77, 5),
        ("Raw05", CODES["NOT_FOUND"], 5),
    ],
)
def test_layouts_of_every_version(handlers, function, code, run_id):
    custom_calls.register(
        function, getattr(handlers, function), instantiate=getattr(handlers, function)
    )
    out = np.full(3, -1, np.int64)
    before = handlers.NumDeleted()
    site = Call(function, [], [out])
    with pytest.raises(CallError, match=r"\[execute\] the future's error") as error:
        site([], [out], run_id=5)
    assert error.value.code == CODES["UNAVAILABLE"]
    assert out.tolist() == [1, code, run_id]
    site.close()
    assert handlers.NumDeleted() == before + 1


def test_types_keep_their_ids(handlers):
    type_id = handlers.CounterTypeId()
    before = type_id[0]
    custom_calls.register_type("Counter", type_id, handlers.DeleteCounter)
    assert type_id[0] == before
    with pytest.raises(CallError, match="which is that of Counter"):
        custom_calls.register_type("Other", ctypes.byref(ctypes.c_int64(before)))
    with pytest.raises(CallError, match="Counter is registered already"):
        custom_calls.register_type("Counter", ctypes.byref(ctypes.c_int64(before + 1)))


def test_a_handler_of_jaxlib():
    """Cholesky by LAPACK: compiled by someone else, with the options they use."""
    _lapack.initialize()
    handler = _lapack.registrations()["lapack_spotrf_ffi"]
    functions = handler if isinstance(handler, dict) else {"execute": handler}
    stages = {stage: capsule_pointer(f) for stage, f in functions.items()}
    custom_calls.register("lapack_spotrf_ffi", stages.pop("execute"), **stages)
    x = np.array([[4, 2, 0], [2, 5, 1], [0, 1, 3]], np.float32)
    out, info = np.zeros_like(x), np.zeros((), np.int32)
    call("lapack_spotrf_ffi", [x], [out, info], uplo=np.uint8(ord("L")))
    assert info == 0
    # Column-major, and the other triangle is left alone.
    np.testing.assert_allclose(np.tril(out.T), np.linalg.cholesky(x), rtol=1e-6)


def capsule_pointer(capsule):
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(
        api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    )


# -- Threads and time ------------------------------------------------------------------


def test_one_call_site_from_many_threads():
    x = floats(100)
    site = Call("Scale", [x], [x], factor=np.float32(2))

    def execute(seed):
        mine, out = x + seed, np.zeros_like(x)
        for _ in range(50):
            site([mine], [out])
            np.testing.assert_array_equal(out, 2 * mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(execute, range(8)))
    gc.collect()


def test_overhead_is_small():
    operands = [floats(4) for _ in range(6)]
    site = Call("Nothing", operands, operands[:2])
    times = [site.time(operands, operands[:2], 20_000) for _ in range(5)]
    # Measured: 0.1 µs. The limit allows for a busy machine.
    assert 0 < min(times) < 2000


# -- Objects of the device -----------------------------------------------------------


def last_native_call(handlers) -> tuple[bool, list[int | None]]:
    data, count = (ctypes.c_void_p * 8)(), ctypes.c_int64()
    is_native = handlers.NativeLastCall(data, ctypes.byref(count))
    return bool(is_native), list(data)[: count.value]


def test_objects_of_the_device_reach_handlers_that_take_them():
    handlers = custom_calls.handlers()
    custom_calls.register("TakesNative", handlers.TakesNative)
    x, empty = np.zeros(3, np.float32), np.zeros((0, 4), np.float32)
    site = Call("TakesNative", [x, empty], [x, empty])
    assert site.takes_native()
    before = handlers.NativeStages()
    site.execute_native([0x1230, None], [0x4560, None])
    # No other memory stands in for that of empty arrays.
    assert last_native_call(handlers) == (True, [0x1230, None, 0x4560, None])
    assert handlers.NativeStages() == before + 1
    # The same handler with addresses.
    site([x, empty], [x, empty])
    is_native, data = last_native_call(handlers)
    assert not is_native and data[0] == x.ctypes.data
    with pytest.raises(CallError, match="result 0 has no memory"):
        site.execute_native([0x1230, None], [None, None])


def test_every_stage_gets_the_objects():
    handlers = custom_calls.handlers()
    stage = handlers.TakesNative
    custom_calls.register("AllNative", stage, prepare=stage, initialize=stage)
    x = np.zeros(3, np.float32)
    before = handlers.NativeStages()
    Call("AllNative", [x], [x]).execute_native([0x1230], [0x4560])
    assert handlers.NativeStages() == before + 3


def test_other_handlers_take_no_objects():
    x = np.zeros(3, np.float32)
    assert not Call("Scale", [x], [x], factor=np.float32(2)).takes_native()
    # What counts is the execute stage.
    handlers = custom_calls.handlers()
    custom_calls.register("Halfway", handlers.Nothing, prepare=handlers.TakesNative)
    assert not Call("Halfway", [], []).takes_native()
