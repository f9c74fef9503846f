"""The fake Metal runs kernels, and notices every kind of misuse."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from plugin import build
from tests.support import fake_metal

SOURCE = (fake_metal.FOLDER / "kernels.metal").read_text()
SCALE, INCREMENT = "scale_float32", "increment"
BOOL, INT, FLOAT = 53, 29, 3  # MTLDataType
PRIVATE = 0x20  # MTLResourceStorageModePrivate
COMPLETED, FAILED = 4, 5  # MTLCommandBufferStatus
FAIL_ON_MISS = 4  # MTLPipelineOptionFailOnBinaryArchiveMiss


# -- A sender of messages ------------------------------------------------------------


class Size(ctypes.Structure):
    """MTLSize."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("width", "height", "depth")]


class Block(ctypes.Structure):
    """A block without captured variables."""

    _fields_ = [
        ("isa", ctypes.c_void_p),
        ("flags", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("invoke", ctypes.c_void_p),
        ("descriptor", ctypes.c_void_p),
    ]


class ObjectiveC:
    """Sends messages as compiled Objective-C would, and knows no rules."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, result, arguments in (
            ("objc_getClass", ctypes.c_void_p, [ctypes.c_char_p]),
            ("sel_registerName", ctypes.c_void_p, [ctypes.c_char_p]),
            ("objc_autoreleasePoolPush", ctypes.c_void_p, []),
            ("objc_autoreleasePoolPop", None, [ctypes.c_void_p]),
            ("MTLCreateSystemDefaultDevice", ctypes.c_void_p, []),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.address = ctypes.cast(library.objc_msgSend, ctypes.c_void_p).value
        stack_block = ctypes.c_char.in_dll(library, "_NSConcreteStackBlock")
        self.stack_block = ctypes.addressof(stack_block)
        self.kept = []

    def cls(self, name: str) -> int:
        """A class, which must exist."""
        found = self.library.objc_getClass(name.encode())
        assert found, name
        return found

    def selector(self, name: str) -> int:
        """A SEL."""
        return self.library.sel_registerName(name.encode())

    def send(self, receiver, selector, *arguments, result=ctypes.c_void_p):
        """[receiver selector arguments...]; integers for objects."""
        types, values = [], []
        for argument in arguments:
            if isinstance(argument, bool):
                types.append(ctypes.c_bool)
            elif argument is None or isinstance(argument, int):
                types.append(ctypes.c_uint64)
                argument = argument or 0
            elif isinstance(argument, bytes):
                types.append(ctypes.c_char_p)
            elif isinstance(argument, ctypes.Structure):
                types.append(type(argument))
            else:
                types.append(ctypes.c_void_p)
            values.append(argument)
        if isinstance(selector, str):
            selector = self.selector(selector)
        prototype = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p, *types)
        return prototype(self.address)(receiver, selector, *values)

    def string(self, text: str) -> int:
        """An autoreleased NSString."""
        return self.send(
            self.cls("NSString"), "stringWithCString:encoding:", text.encode(), 4
        )

    def text(self, string: int) -> str:
        """What an NSString says."""
        return self.send(string, "UTF8String", result=ctypes.c_char_p).decode()

    def block(self, function, *arguments) -> Block:
        """A block on the stack, so to speak: function(block, arguments...)."""
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *arguments)(function)
        descriptor = (ctypes.c_ulong * 2)(0, ctypes.sizeof(Block))
        self.kept += [callback, descriptor]
        return Block(
            self.stack_block,
            0,
            0,
            ctypes.cast(callback, ctypes.c_void_p).value,
            ctypes.addressof(descriptor),
        )

    def pool(self):
        """A context: an autorelease pool."""
        return _Pool(self.library)


class _Pool:
    def __init__(self, library):
        self.library = library

    def __enter__(self):
        self.token = self.library.objc_autoreleasePoolPush()

    def __exit__(self, *_):
        self.library.objc_autoreleasePoolPop(self.token)


class Client:
    """The steps of a Metal program, small enough to get each one wrong."""

    def __init__(self, objc: ObjectiveC) -> None:
        self.objc = objc
        self.send = objc.send
        self.device = objc.library.MTLCreateSystemDefaultDevice()
        self.owned = [self.device]

    def own(self, thing: int | None) -> int | None:
        """Released by close()."""
        if thing:
            self.owned.append(thing)
        return thing

    def close(self) -> None:
        """Gives every reference back."""
        for thing in reversed(self.owned):
            self.send(thing, "release", result=None)
        self.owned = []

    def options(self, version: int | None = 0x30001, fast: bool = False) -> int:
        """MTLCompileOptions."""
        options = self.own(self.send(self.objc.cls("MTLCompileOptions"), "new"))
        if version is not None:
            self.send(options, "setLanguageVersion:", version, result=None)
        self.send(options, "setFastMathEnabled:", fast, result=None)
        return options

    def error_text(self, error: ctypes.c_void_p) -> str:
        """The localizedDescription of what an NSError** got."""
        assert error.value
        return self.objc.text(self.send(error.value, "localizedDescription"))

    def library(self, source: str = SOURCE, error=None) -> int | None:
        """MTLLibrary."""
        error = error if error is not None else ctypes.c_void_p()
        return self.own(
            self.send(
                self.device,
                "newLibraryWithSource:options:error:",
                self.objc.string(source),
                self.options(),
                ctypes.byref(error),
            )
        )

    def constants(self, *values) -> int:
        """MTLFunctionConstantValues of (type, index, ctypes value)."""
        constants = self.own(
            self.send(self.objc.cls("MTLFunctionConstantValues"), "new")
        )
        for data_type, index, value in values:
            self.send(
                constants,
                "setConstantValue:type:atIndex:",
                ctypes.byref(value),
                data_type,
                index,
                result=None,
            )
        return constants

    def good_constants(self, add_one: bool = True, offset: int = -3) -> int:
        """All that the kernels ask for."""
        return self.constants(
            (BOOL, 0, ctypes.c_uint8(add_one)), (INT, 1, ctypes.c_int32(offset))
        )

    def function(self, name=SCALE, constants=None, library=None, error=None):
        """MTLFunction."""
        error = error if error is not None else ctypes.c_void_p()
        return self.own(
            self.send(
                library or self.library(),
                "newFunctionWithName:constantValues:error:",
                self.objc.string(name),
                constants or self.good_constants(),
                ctypes.byref(error),
            )
        )

    def descriptor(self, function=None) -> int:
        """MTLComputePipelineDescriptor."""
        descriptor = self.own(
            self.send(self.objc.cls("MTLComputePipelineDescriptor"), "new")
        )
        function = function or self.function()
        self.send(descriptor, "setComputeFunction:", function, result=None)
        return descriptor

    def pipeline(self, name=SCALE, descriptor=None, options=0, error=None):
        """MTLComputePipelineState."""
        error = error if error is not None else ctypes.c_void_p()
        return self.own(
            self.send(
                self.device,
                "newComputePipelineStateWithDescriptor:options:reflection:error:",
                descriptor or self.descriptor(self.function(name)),
                options,
                None,
                ctypes.byref(error),
            )
        )

    def buffer(self, size: int = 128, options: int = 0) -> int | None:
        """MTLBuffer."""
        return self.own(
            self.send(self.device, "newBufferWithLength:options:", size, options)
        )

    def array(self, buffer: int, count: int = 32) -> np.ndarray:
        """A shared buffer's content as float32."""
        contents = self.send(buffer, "contents")
        pointer = ctypes.cast(contents, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (count,))

    def queue(self) -> int:
        """MTLCommandQueue."""
        return self.own(self.send(self.device, "newCommandQueue"))

    def encoder(self, command_buffer: int) -> int:
        """MTLComputeCommandEncoder."""
        return self.send(command_buffer, "computeCommandEncoder")

    def bind(self, encoder: int, buffers, pipeline=None, factor: float | None = 2.0):
        """A pipeline, buffers by index, and the factor at index 2."""
        if pipeline is None:
            pipeline = self.pipeline()
        self.send(encoder, "setComputePipelineState:", pipeline, result=None)
        for index, buffer in enumerate(buffers):
            self.send(
                encoder, "setBuffer:offset:atIndex:", buffer, 0, index, result=None
            )
        if factor is not None:
            value = ctypes.byref(ctypes.c_float(factor))
            self.send(encoder, "setBytes:length:atIndex:", value, 4, 2, result=None)

    def dispatch(self, encoder: int, groups=(1, 1, 1), threads=(32, 1, 1)) -> None:
        """dispatchThreadgroups."""
        self.send(
            encoder,
            "dispatchThreadgroups:threadsPerThreadgroup:",
            Size(*groups),
            Size(*threads),
            result=None,
        )

    def end(self, encoder: int) -> None:
        """endEncoding."""
        self.send(encoder, "endEncoding", result=None)

    def commit(self, command_buffer: int) -> None:
        """commit."""
        self.send(command_buffer, "commit", result=None)

    def wait(self, command_buffer: int) -> None:
        """waitUntilCompleted."""
        self.send(command_buffer, "waitUntilCompleted", result=None)

    def encoded(self, queue=None, buffers=None, pipeline=None) -> int:
        """A command buffer with one dispatch of SCALE, not committed."""
        command_buffer = self.send(queue or self.queue(), "commandBuffer")
        encoder = self.encoder(command_buffer)
        self.bind(encoder, buffers or (self.buffer(), self.buffer()), pipeline)
        self.dispatch(encoder)
        self.end(encoder)
        return command_buffer

    def status(self, command_buffer: int) -> int:
        """MTLCommandBufferStatus."""
        return self.send(command_buffer, "status", result=ctypes.c_uint64)


# -- Fixtures ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    """The fake, once for all tests."""
    return fake_metal.FakeMetal()


@pytest.fixture
def fake(loaded):
    """The fake as at the start; faults do not end the process."""
    loaded.reset()
    loaded.clear_faults()
    loaded.set_abort(0)
    yield loaded
    loaded.reset()
    loaded.drain()


@pytest.fixture
def objc(fake):
    """A sender."""
    return ObjectiveC(fake.library)


@pytest.fixture
def client(fake, objc):
    """A client; it must leave no object behind, nor a fault that nobody took."""
    before = fake.live_objects(), fake.device_references()
    with objc.pool():
        client = Client(objc)
        yield client
        client.close()
    fake.drain()
    assert fake.faults() == ""
    assert (fake.live_objects(), fake.device_references()) == before, fake.live_text()


def take_faults(fake) -> str:
    """The faults so far, then forgotten."""
    faults = fake.faults()
    fake.clear_faults()
    return faults


# -- It works ------------------------------------------------------------------------


def test_a_kernel_runs(client):
    x, y = client.buffer(), client.buffer()
    client.array(x)[:] = np.arange(32)
    command_buffer = client.encoded(buffers=(x, y))
    client.commit(command_buffer)
    client.wait(command_buffer)
    assert client.status(command_buffer) == COMPLETED
    np.testing.assert_array_equal(client.array(y), 2 * np.arange(32) - 2)
    times = [
        client.send(command_buffer, name, result=ctypes.c_double)
        for name in ("GPUStartTime", "GPUEndTime")
    ]
    assert 0 < times[0] < times[1]


def _incremented(client, num_buffers, constants, times=1):
    """What INCREMENT, with so many buffers, makes of 5 and 100."""
    buffers = [client.buffer() for _ in range(num_buffers)]
    for buffer, start in zip(buffers, (5, 100)):
        client.array(buffer).view(np.int32)[:] = start
    pipeline = client.pipeline(
        descriptor=client.descriptor(client.function(INCREMENT, constants))
    )
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.bind(encoder, buffers, pipeline, factor=None)
    for _ in range(times):
        client.dispatch(encoder)
    client.end(encoder)
    client.commit(command_buffer)
    client.wait(command_buffer)
    return client.array(buffers[0]).view(np.int32)


def test_plain_kernels_are_found_too(client):
    values = _incremented(client, 2, client.good_constants(), times=2)
    np.testing.assert_array_equal(values, 5 + 2 * (100 - 3))


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_an_argument_of_a_constant_that_is_false_does_not_exist(client, num_buffers):
    constants = client.good_constants(add_one=False)
    values = _incremented(client, num_buffers, constants)
    np.testing.assert_array_equal(values, 5 - 3)


def test_command_buffers_run_in_the_order_of_commit(fake, client):
    queue, pipeline = client.queue(), client.pipeline()
    a, b, c = (client.buffer() for _ in range(3))
    client.array(a)[:] = 1
    first = client.encoded(queue, (a, b), pipeline)
    second = client.encoded(queue, (b, c), pipeline)
    fake.hold(1)
    client.commit(first)
    client.commit(second)
    assert client.status(second) < COMPLETED
    assert np.isnan(client.array(c)).all()  # poisoned until then
    fake.hold(0)
    client.wait(second)
    assert client.status(first) == COMPLETED
    np.testing.assert_array_equal(client.array(c), -2)  # 2·(2·1 - 2) - 2


def test_handlers_run_in_order_on_another_thread(fake, objc, client):
    calls = []
    queue = client.queue()

    def handler(name):
        def function(block, command_buffer):
            with objc.pool():
                calls.append((name, threading.get_ident(), command_buffer))
                calls.append(client.status(command_buffer))

        return function

    pipeline = client.pipeline()
    command_buffers = []
    for name in ("first", "second"):
        command_buffer = client.encoded(queue, pipeline=pipeline)
        block = objc.block(handler(name), ctypes.c_void_p)
        client.send(
            command_buffer, "addCompletedHandler:", ctypes.byref(block), result=None
        )
        command_buffers.append(command_buffer)
    for command_buffer in command_buffers:
        client.commit(command_buffer)
    fake.drain()
    names, threads, arguments = zip(*calls[::2])
    assert names == ("first", "second")
    assert threading.get_ident() not in threads
    assert list(arguments) == command_buffers
    assert calls[1::2] == [COMPLETED, COMPLETED]


def test_a_committed_command_buffer_keeps_what_it_needs(fake, objc):
    with objc.pool():
        client = Client(objc)
        buffers = client.buffer(), client.buffer()
        client.array(buffers[0])[:] = 1
        fake.retain(buffers[1])
        command_buffer = client.encoded(buffers=buffers)
        fake.hold(1)
        client.commit(command_buffer)
        client.close()
    assert fake.is_alive_buffer(buffers[0])
    fake.hold(0)
    fake.drain()
    assert not fake.is_alive_buffer(buffers[0])
    pointer = ctypes.cast(fake.buffer_bytes(buffers[1]), ctypes.POINTER(ctypes.c_float))
    assert pointer[31] == 0.0
    fake.release(buffers[1])
    assert fake.faults() == ""
    assert fake.live_objects() == 0, fake.live_text()


def test_memory_of_the_process_is_used_in_place(client):
    page = mmap.PAGESIZE
    memory = np.empty(3 * page, np.uint8)
    start = -memory.ctypes.data % page
    values = memory[start : start + 2 * page].view(np.float32)
    values[:] = 7
    freed = []
    block = client.objc.block(
        lambda block, pointer, length: freed.append((pointer, length)),
        ctypes.c_void_p,
        ctypes.c_uint64,
    )
    x = client.send(
        client.device,
        "newBufferWithBytesNoCopy:length:options:deallocator:",
        values.ctypes.data,
        2 * page,
        0,
        ctypes.byref(block),
    )
    y = client.buffer()
    with client.objc.pool():
        command_buffer = client.encoded(buffers=(x, y))
        client.commit(command_buffer)
        client.wait(command_buffer)
    assert client.array(y)[31] == 2 * 7 - 2
    client.send(x, "release", result=None)
    assert freed == [(values.ctypes.data, 2 * page)]


def test_blits(fake, client):
    x, y = client.buffer(), client.buffer(options=PRIVATE)
    client.array(x)[:] = 3
    assert client.send(y, "contents") is None
    back = client.buffer()
    command_buffer = client.send(client.queue(), "commandBuffer")
    blit = client.send(command_buffer, "blitCommandEncoder")
    copy = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"
    client.send(blit, copy, x, 0, y, 0, 128, result=None)
    client.send(blit, copy, y, 64, back, 0, 64, result=None)
    client.send(blit, "fillBuffer:range:value:", back, 64, 4, 0, result=None)
    client.end(blit)
    client.commit(command_buffer)
    client.wait(command_buffer)
    assert (client.array(back)[:16] == 3).all()
    assert client.array(back)[16] == 0
    assert np.isnan(client.array(back)[17:]).all()


def test_device_properties(fake, client):
    send, device = client.send, client.device
    fake.set_text("name", "Apple M9")
    assert client.objc.text(send(device, "name")) == "Apple M9"
    fake.set_fact("family", 1008)
    families = [
        send(device, "supportsFamily:", family, result=ctypes.c_bool)
        for family in (1007, 1008, 1009, 3003, 5001)
    ]
    assert families == [True, True, False, True, True]
    assert send(device, "hasUnifiedMemory", result=ctypes.c_bool)
    fake.set_fact("maxThreadgroupMemoryLength", 65536)
    length = send(device, "maxThreadgroupMemoryLength", result=ctypes.c_uint64)
    assert length == 65536
    info = send(client.objc.cls("NSProcessInfo"), "processInfo")
    version = client.objc.text(send(info, "operatingSystemVersionString"))
    assert version.startswith("Version 14")
    fake.set_fact("has_device", 0)
    assert client.objc.library.MTLCreateSystemDefaultDevice() is None


@pytest.fixture
def iokit(fake):
    """IOKit's functions, by name."""
    functions = {}
    for name, result, *arguments in (
        ("IOServiceMatching", ctypes.c_void_p, ctypes.c_char_p),
        ("IOServiceGetMatchingService", ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p),
        (
            *("IORegistryEntryCreateCFProperty", ctypes.c_void_p, ctypes.c_uint),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
        ),
        ("IOObjectRelease", ctypes.c_int, ctypes.c_uint),
    ):
        function = fake.library[name]
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def test_number_of_cores(fake, client, iokit):
    def count(name=b"AGXAccelerator"):
        matching = iokit["IOServiceMatching"](name)
        gpu = iokit["IOServiceGetMatchingService"](0, matching)
        if not gpu:
            return None
        key = client.objc.string("gpu-core-count")
        number = iokit["IORegistryEntryCreateCFProperty"](gpu, key, None, 0)
        assert iokit["IOObjectRelease"](gpu) == 0
        if not number:
            return 0
        client.own(number)
        return client.send(number, "integerValue", result=ctypes.c_int64)

    assert count() == 10
    fake.set_fact("gpu_core_count", 0)
    assert count() == 0
    fake.set_fact("gpu_core_count", -1)
    fake.set_abort(0)
    assert count() == 0
    assert fake.faults() == "unrecognized selector -[NSData integerValue]\n"
    fake.clear_faults()
    fake.set_abort(1)
    assert count(b"IntelAccelerator") is None
    fake.set_fact("has_gpu_service", 0)
    assert count() is None


def test_misuse_of_iokit(fake, client, iokit):
    matching = iokit["IOServiceMatching"](b"AGXAccelerator")
    gpu = iokit["IOServiceGetMatchingService"](0, matching)
    for call, fault in (
        (lambda: iokit["IOServiceMatching"](None), "the name is NULL"),
        (
            lambda: iokit["IOServiceGetMatchingService"](0, matching),
            "but it is a deallocated CFDictionary",
        ),
        (
            lambda: iokit["IORegistryEntryCreateCFProperty"](gpu, matching, None, 0),
            "the key must be a string, but is a deallocated CFDictionary",
        ),
        (lambda: iokit["IOObjectRelease"](gpu), None),
        (lambda: iokit["IOObjectRelease"](gpu), "is no service, or was released"),
        (
            lambda: iokit["IORegistryEntryCreateCFProperty"](gpu, None, None, 0),
            "is no service, or was released before",
        ),
    ):
        call()
        faults = take_faults(fake)
        assert (fault is None) == (faults == "")
        assert fault is None or fault in faults


def test_strings_urls_and_arrays(client):
    objc, send = client.objc, client.send
    alloc = send(objc.cls("NSString"), "alloc")
    string = send(alloc, "initWithCString:encoding:", "grüße".encode(), 4)
    assert string != alloc
    assert objc.text(string) == "grüße"
    assert send(string, "length", result=ctypes.c_uint64) == 5
    assert send(objc.cls("NSString"), "stringWithUTF8String:", b"\xff\xfe") is None
    url = send(objc.cls("NSURL"), "fileURLWithPath:", string)
    assert objc.text(send(url, "path")) == "grüße"
    items = (ctypes.c_void_p * 2)(string, url)
    array = send(objc.cls("NSArray"), "arrayWithObjects:count:", items, 2)
    assert send(array, "count", result=ctypes.c_uint64) == 2
    assert send(array, "objectAtIndex:", 1) == url
    send(string, "release", result=None)  # the array holds it
    assert objc.text(send(array, "objectAtIndex:", 0)) == "grüße"


def test_more_ways_to_strings_and_arrays(client):
    objc, send = client.objc, client.send
    for selector, *arguments in (
        ("init",),
        ("initWithUTF8String:", b"abc"),
        ("initWithBytes:length:encoding:", b"abcd", 3, 4),
        ("initWithBytesNoCopy:length:encoding:freeWhenDone:", b"abcd", 3, 4, False),
    ):
        string = send(send(objc.cls("NSString"), "alloc"), selector, *arguments)
        assert objc.text(string) == ("abc" if arguments else "")
        send(string, "release", result=None)
    assert objc.text(send(objc.cls("NSString"), "string")) == ""
    alloc = send(objc.cls("NSURL"), "alloc")
    assert client.own(send(alloc, "initFileURLWithPath:", objc.string("a/b"))) == alloc
    assert objc.text(send(alloc, "path")) == "a/b"
    for selector, *arguments in (
        ("init",),
        ("initWithObjects:count:", (ctypes.c_void_p * 1)(alloc), 1),
    ):
        array = send(send(objc.cls("NSArray"), "alloc"), selector, *arguments)
        count = send(client.own(array), "count", result=ctypes.c_uint64)
        assert count == bool(arguments)
    empty = send(objc.cls("NSArray"), "array")
    assert send(empty, "count", result=ctypes.c_uint64) == 0


def test_what_every_object_understands(fake, client):
    objc, send = client.objc, client.send
    options = client.options()
    cls = objc.cls("MTLCompileOptions")
    assert send(options, "class") == cls == send(cls, "class")
    for ancestor, expected in ((cls, True), (objc.cls("NSObject"), True)):
        kind = send(options, "isKindOfClass:", ancestor, result=ctypes.c_bool)
        assert kind == expected
    assert not send(
        options, "isKindOfClass:", objc.cls("NSString"), result=ctypes.c_bool
    )
    for receiver, question, known in (
        (options, "respondsToSelector:", "setFastMathEnabled:"),
        (cls, "respondsToSelector:", "alloc"),
        (cls, "instancesRespondToSelector:", "languageVersion"),
    ):
        for selector, expected in ((known, True), ("setMathMode:", False)):
            answer = send(
                receiver, question, objc.selector(selector), result=ctypes.c_bool
            )
            assert answer == expected
    assert objc.library.objc_getClass(b"MTLBuffer") is None  # a protocol
    assert send(options, "retain") == options
    assert send(options, "retainCount", result=ctypes.c_uint64) == 2
    assert fake.references(options) == 2
    assert send(options, "autorelease") == options
    assert fake.references(objc.cls("NSString")) == -1


def test_labels_and_owners(client):
    objc, send = client.objc, client.send
    queue = client.queue()
    command_buffer = send(queue, "commandBuffer")
    encoder = client.encoder(command_buffer)
    descriptor = client.descriptor()
    for thing in (queue, command_buffer, encoder, client.buffer(), descriptor):
        assert send(thing, "label") is None
        send(thing, "setLabel:", objc.string("mine"), result=None)
        assert objc.text(send(thing, "label")) == "mine"
    pipeline = client.pipeline(descriptor=descriptor)
    assert objc.text(send(pipeline, "label")) == "mine"
    for thing in (queue, command_buffer, encoder, pipeline, client.buffer()):
        assert send(thing, "device") == client.device
    assert send(command_buffer, "commandQueue") == queue
    send(encoder, "insertDebugSignpost:", objc.string("here"), result=None)
    send(encoder, "pushDebugGroup:", objc.string("here"), result=None)
    send(encoder, "popDebugGroup", result=None)
    client.end(encoder)
    function = client.function()
    assert objc.text(send(function, "name")) == SCALE
    assert send(function, "functionType", result=ctypes.c_uint64) == 3
    names = send(client.library(), "functionNames")
    assert send(names, "count", result=ctypes.c_uint64) == 2


def test_other_ways_to_pipelines(client):
    send = client.send
    constants = client.constants((INT, 1, ctypes.c_int32(4)))
    one = ctypes.byref(ctypes.c_uint8(1))
    selector = "setConstantValue:type:withName:"
    send(constants, selector, one, BOOL, client.objc.string("add_one"), result=None)
    function = client.function(constants=constants)
    error = ctypes.byref(ctypes.c_void_p())
    selector = "newComputePipelineStateWithFunction:error:"
    pipeline = client.own(send(client.device, selector, function, error))
    selector = "newComputePipelineStateWithFunction:options:reflection:error:"
    assert client.own(send(client.device, selector, function, 0, None, error))
    x, y = client.buffer(), client.buffer()
    client.array(x)[:] = 1
    command_buffer = client.encoded(buffers=(x, y), pipeline=pipeline)
    client.commit(command_buffer)
    client.wait(command_buffer)
    assert (client.array(y) == 2 + 4 + 1).all()

    descriptor = client.descriptor(function)
    most = "setMaxTotalThreadsPerThreadgroup:"
    send(descriptor, most, 256, result=None)
    limited = client.pipeline(descriptor=descriptor)
    get = "maxTotalThreadsPerThreadgroup"
    assert send(limited, get, result=ctypes.c_uint64) == 256
    assert send(pipeline, get, result=ctypes.c_uint64) == 1024
    assert send(pipeline, "threadExecutionWidth", result=ctypes.c_uint64) == 32
    assert send(descriptor, "computeFunction") == function


def test_other_ways_to_encode(client):
    send = client.send
    x, y = client.buffer(256), client.buffer()
    client.array(x, 64)[:] = np.arange(64)
    command_buffer = send(client.queue(), "commandBuffer")
    send(command_buffer, "enqueue", result=None)
    encoder = client.encoder(command_buffer)
    pipeline = client.pipeline()
    send(encoder, "setComputePipelineState:", pipeline, result=None)
    buffers, offsets = (ctypes.c_void_p * 2)(x, y), (ctypes.c_uint64 * 2)(4, 0)
    selector = "setBuffers:offsets:withRange:"
    send(encoder, selector, buffers, offsets, 0, 2, result=None)
    send(encoder, "setBufferOffset:atIndex:", 64, 0, result=None)
    factor = ctypes.byref(ctypes.c_float(1))
    send(encoder, "setBytes:length:atIndex:", factor, 4, 2, result=None)
    send(encoder, "setThreadgroupMemoryLength:atIndex:", 32, 0, result=None)
    send(encoder, "useResource:usage:", x, 1, result=None)
    send(encoder, "useResources:count:usage:", buffers, 2, 3, result=None)
    send(encoder, "memoryBarrierWithResources:count:", buffers, 2, result=None)
    selector = "dispatchThreads:threadsPerThreadgroup:"
    send(encoder, selector, Size(32, 1, 1), Size(16, 1, 1), result=None)
    client.end(encoder)
    called = []
    block = client.objc.block(lambda *_: called.append("scheduled"), ctypes.c_void_p)
    selector = "addScheduledHandler:"
    send(command_buffer, selector, ctypes.byref(block), result=None)
    client.commit(command_buffer)
    send(command_buffer, "waitUntilScheduled", result=None)
    client.wait(command_buffer)
    assert called == ["scheduled"]
    np.testing.assert_array_equal(client.array(y), np.arange(16, 48) - 2)


def test_buffers_of_given_bytes(client):
    data = np.arange(8, dtype=np.float32)
    buffer = client.own(
        client.send(
            client.device,
            "newBufferWithBytes:length:options:",
            data.ctypes.data,
            data.nbytes,
            0,
        )
    )
    np.testing.assert_array_equal(client.array(buffer, 8), data)
    size = client.send(client.device, "currentAllocatedSize", result=ctypes.c_uint64)
    assert size == 32
    for name, expected in (("length", 32), ("resourceOptions", 0), ("storageMode", 0)):
        assert client.send(buffer, name, result=ctypes.c_uint64) == expected
    page = mmap.PAGESIZE
    assert client.send(buffer, "allocatedSize", result=ctypes.c_uint64) == page


def test_nil_receivers_give_zero(fake, objc, client):
    before = fake.nil_calls("length")
    assert client.send(None, "length", result=ctypes.c_uint64) == 0
    assert client.send(None, "GPUStartTime", result=ctypes.c_double) == 0.0
    assert fake.nil_calls("length") == before + 1


# -- Source and archives -------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "log"),
    [
        ('#include "other.h"\n', "program_source:1:10: fatal error: 'other.h' file"),
        ("#include <vector>\n", "'vector' file not found"),
        (SOURCE.replace("void scale(", "void scaled("), "undefined function template"),
        (SOURCE.replace("decltype(scale<float>)", "void"), "expected decltype"),
        (SOURCE + SOURCE, "redefinition of 'scale_float32'"),
        (SOURCE.partition("decltype")[0], "expected ';' after explicit instantiation"),
    ],
)
def test_wrong_source_is_a_compile_error(client, source, log):
    error = ctypes.c_void_p()
    assert client.library(source, error) is None
    assert log in client.error_text(error)
    assert client.send(error.value, "code", result=ctypes.c_int64) == 3


def test_comments_are_not_source(client):
    assert client.library('// #include "x.h"\n/* kernel void no( */\n' + SOURCE)


def test_a_function_that_the_source_has_not(client):
    error = ctypes.c_void_p()
    assert client.function("scale_float16", error=error) is None
    assert "scale_float16 was not found" in client.error_text(error)


def test_the_real_sources_fit_the_software_kernels(fake, client):
    """As the layer sends them: everything flattened, then one instantiation."""
    variants = build.load_variants()
    params = (build.KERNEL_DIR / "attention_params.h").read_text()
    declared = re.findall(r"X\((bool|int), \w+, (\d+)\)", params)
    assert len(declared) > 10
    for variant in variants[:: len(variants) // 6]:
        text = _flattened(build.KERNEL_DIR / f"{variant.source}.metal", set())
        error = ctypes.c_void_p()
        library = client.library(text + variant.instantiation(), error)
        assert library, client.error_text(error)
        constants = client.constants(
            *(
                (BOOL, int(index), ctypes.c_uint8(1))
                if kind == "bool"
                else (INT, int(index), ctypes.c_int32(32))
                for kind, index in declared
            )
        )
        function = client.function(variant.host_name, constants, library, error)
        assert client.pipeline(descriptor=client.descriptor(function), error=error)


def _flattened(path, seen) -> str:
    seen.add(path)

    def include(match):
        inner = path.parent / match[1]
        return "" if inner in seen else _flattened(inner, seen)

    return re.sub(r'^#include "([^"]+)"', include, path.read_text(), flags=re.M)


def test_archives(fake, client, tmp_path):
    send = client.send
    file = tmp_path / "a.metalarchive"
    url = send(
        client.objc.cls("NSURL"), "fileURLWithPath:", client.objc.string(str(file))
    )
    error = ctypes.c_void_p()

    def open_archive(at):
        descriptor = client.own(
            send(client.objc.cls("MTLBinaryArchiveDescriptor"), "new")
        )
        send(descriptor, "setUrl:", at, result=None)
        return client.own(
            send(
                client.device,
                "newBinaryArchiveWithDescriptor:error:",
                descriptor,
                ctypes.byref(error),
            )
        )

    def with_archive(archive, function=None):
        descriptor = client.descriptor(function)
        array = send(client.objc.cls("NSArray"), "arrayWithObject:", archive)
        send(descriptor, "setBinaryArchives:", array, result=None)
        return descriptor

    assert open_archive(url) is None
    assert "Could not open" in client.error_text(error)

    archive = open_archive(None)
    descriptor = with_archive(archive)
    assert client.pipeline(descriptor=descriptor, options=FAIL_ON_MISS) is None
    assert "not found in the binary archives" in client.error_text(_miss(client))
    add = "addComputePipelineFunctionsWithDescriptor:error:"
    assert send(archive, add, descriptor, ctypes.byref(error), result=ctypes.c_bool)
    write = "serializeToURL:error:"
    assert send(archive, write, url, ctypes.byref(error), result=ctypes.c_bool)

    compiled, archived = fake.compiled_pipelines(), fake.archived_pipelines()
    loaded = open_archive(url)
    assert client.pipeline(descriptor=with_archive(loaded), options=FAIL_ON_MISS)
    assert fake.archived_pipelines() == archived + 1
    assert fake.compiled_pipelines() == compiled
    # Other constants, another system: not in it.
    other = client.function(constants=client.good_constants(offset=8))
    assert client.pipeline(descriptor=with_archive(loaded, other))
    fake.set_text("operatingSystemVersionString", "Version 15.0 (Build 24A335)")
    assert client.pipeline(descriptor=with_archive(loaded))
    assert fake.compiled_pipelines() == compiled + 2

    content = bytearray(file.read_bytes())
    content[40] ^= 1
    for damaged in (bytes(content), content[:-5], b"", b"something else"):
        file.write_bytes(damaged)
        assert open_archive(url) is None
        assert "Invalid archive" in client.error_text(error)
    nowhere = client.objc.string(str(tmp_path / "no" / "a"))
    url = send(client.objc.cls("NSURL"), "fileURLWithPath:", nowhere)
    assert not send(archive, write, url, ctypes.byref(error), result=ctypes.c_bool)
    assert "Could not write" in client.error_text(error)


def _miss(client):
    error = ctypes.c_void_p()
    client.pipeline(options=FAIL_ON_MISS, error=error)
    return error


# -- Failures on demand --------------------------------------------------------------


def test_failures_with_and_without_an_error(fake, client):
    selector = "newLibraryWithSource:options:error:"
    fake.fail(selector, 1, 1, fake_metal.ERROR, "program_source:7:1: error: no")
    fake.fail(selector, 0, 1, fake_metal.NIL, None)
    error = ctypes.c_void_p()
    assert client.library(error=error)
    assert client.library(error=error) is None
    assert client.error_text(error) == "program_source:7:1: error: no"
    error = ctypes.c_void_p()
    assert client.library(error=error) is None
    assert error.value is None
    assert client.library(error=error)
    fake.fail(selector, 0, 1, fake_metal.WARNING, "program_source: warning: w")
    assert client.library(error=error)
    assert "warning" in client.error_text(error)
    fake.fail("newCommandQueue", 0, 1, fake_metal.NIL, None)
    assert client.queue() is None


def test_aliases_that_are_none(fake, client):
    memory, address, page = _pages()
    assert memory is not None
    selector = "newBufferWithBytesNoCopy:length:options:deallocator:"

    def wrapped():
        x = _wrap(client, address, page)
        contents = client.send(x, "contents")
        return client.send(x, "length", result=ctypes.c_uint64), contents == address

    fake.fail(selector, 0, 1, fake_metal.EMPTY_ALIAS, None)
    fake.fail(selector, 0, 1, fake_metal.FALSE_ALIAS, None)
    assert [wrapped() for _ in range(3)] == [(0, True), (page, False), (page, True)]


def test_other_objects_for_the_device(fake, client):
    buffer = client.buffer()

    def device():
        found = client.send(buffer, "device")
        return found, client.send(found, "registryID", result=ctypes.c_uint64)

    own, registry_id = device()
    assert own == client.device
    assert registry_id != 0
    fake.fail("device", 0, 1, fake_metal.WRAPPED_DEVICE, None)
    fake.fail("device", 0, 1, fake_metal.OTHER_DEVICE, None)
    wrapped, other = device(), device()
    assert wrapped[0] != own
    assert wrapped[1] == registry_id
    assert other[0] != own
    assert other[1] != registry_id
    assert device() == (own, registry_id)


@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        (fake_metal.RUN_ERROR, 1, "Internal"),
        (fake_metal.RUN_TIMEOUT, 2, "Timeout"),
        (fake_metal.RUN_PAGE_FAULT, 3, "Address Fault"),
        (fake_metal.RUN_OUT_OF_MEMORY, 8, "Insufficient Memory"),
        (fake_metal.RUN_REVOKED, 4, "Ignored"),
        (fake_metal.RUN_NO_ERROR, None, None),
    ],
)
def test_command_buffers_that_fail(fake, client, mode, code, text):
    x, y = client.buffer(), client.buffer()
    fake.fail("commit", 1, 1, mode, None)
    for expected in (COMPLETED, FAILED, COMPLETED):
        command_buffer = client.encoded(buffers=(x, y))
        client.array(y)[:] = 4
        client.commit(command_buffer)
        client.wait(command_buffer)
        assert client.status(command_buffer) == expected
        error = client.send(command_buffer, "error")
        if expected == FAILED:
            assert (client.array(y) == 4).all()  # nothing ran
            assert (error is None) == (code is None)
        if expected == FAILED and error:
            assert client.send(error, "code", result=ctypes.c_int64) == code
            assert text in client.objc.text(client.send(error, "localizedDescription"))
            domain = client.objc.text(client.send(error, "domain"))
            assert domain == "MTLCommandBufferErrorDomain"


def test_memory_limit(fake, client):
    fake.set_memory_limit(1000)
    first = client.buffer(600)
    assert client.buffer(600) is None
    assert fake.new_buffer(600, 1) is None
    second = client.buffer(400)
    assert first and second
    owned = fake.new_buffer(1, 0)
    assert owned is None
    client.send(client.owned.pop(), "release", result=None)
    host = fake.new_buffer(400, 1)
    assert fake.buffer_length(host) == 400
    assert ctypes.string_at(fake.buffer_bytes(host), 400) == b"\xff" * 400
    assert fake.references(host) == 1
    assert "MTLBuffer x 2" in fake.live_text()
    fake.release(host)
    assert not fake.is_alive_buffer(host)


# -- Misuse --------------------------------------------------------------------------
# Each function breaks one rule; the fault must say which, and nothing else may happen.

MISUSES = {}


def misuse(fault: str):
    """Registers a function of (client, fake) and the fault that it must give."""

    def register(function):
        MISUSES[function.__name__] = function, fault
        return function

    return register


@misuse(r"unrecognized selector -\[MTLBuffer size\]")
def unknown_selector(client, fake):
    client.send(client.buffer(), "size")


@misuse(r"unrecognized selector \+\[NSString stringWithText:\]")
def unknown_class_method(client, fake):
    client.send(client.objc.cls("NSString"), "stringWithText:", b"x")


@misuse(r"unrecognized selector -\[MTLComputeCommandEncoder setThreadgroupMemory")
def misspelt_selector(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.send(encoder, "setThreadgroupMemoryLength:index:", 16, 0, result=None)
    client.end(encoder)


@misuse(r"unrecognized selector -\[MTLCompileOptions setMathMode:\]")
def newer_than_macos_14(client, fake):
    client.send(client.options(), "setMathMode:", 0, result=None)


@misuse(r"objc_msgSend got one that sel_registerName never gave")
def unregistered_selector(client, fake):
    name = ctypes.create_string_buffer(b"length")
    client.send(client.buffer(), ctypes.addressof(name))


@misuse(r"message length sent to something that is not an object")
def receiver_is_no_object(client, fake):
    memory = ctypes.create_string_buffer(64)
    client.send(ctypes.addressof(memory), "length")


@misuse(r"message length sent to a deallocated MTLBuffer")
def use_after_dealloc(client, fake):
    buffer = fake.new_buffer(64, 0)
    client.send(buffer, "release", result=None)
    client.send(buffer, "length")


@misuse(r"a MTLBuffer is released more often than it was retained")
def over_release(client, fake):
    buffer = client.buffer()
    command_buffer = client.encoded(buffers=(buffer, client.buffer()))
    fake.retain(command_buffer)
    client.owned.remove(buffer)
    client.send(buffer, "release", result=None)
    client.send(buffer, "release", result=None)  # that reference is the encoder's
    fake.release(command_buffer)


@misuse(r"an autorelease pool releases a deallocated NSString")
def release_of_an_autoreleased_object(client, fake):
    with client.objc.pool():
        client.send(client.objc.string("x"), "release", result=None)


@misuse(r"message UTF8String sent to a deallocated NSString")
def use_after_the_pool(client, fake):
    with client.objc.pool():
        string = client.objc.string("x")
    client.send(string, "UTF8String")


@misuse(r"leaked: no pool: a NSString is autoreleased on a thread without")
def no_pool(client, fake):
    strings = []
    thread = threading.Thread(target=lambda: strings.append(client.objc.string("x")))
    thread.start()
    thread.join()
    fake.release(strings[0])


@misuse(r"-\[MTLDevice name\] on a thread without an autorelease pool")
def metal_without_pool(client, fake):
    thread = threading.Thread(target=lambda: client.send(client.device, "name"))
    thread.start()
    thread.join()


@misuse(r"a thread ends with 1 autorelease pools open")
def pool_never_popped(client, fake):
    push = client.objc.library.objc_autoreleasePoolPush
    thread = threading.Thread(target=push)
    thread.start()
    thread.join()
    for _ in range(1000):  # join() can return before the thread has really ended
        if fake.faults():
            break
        time.sleep(0.01)


@misuse(r"not the innermost pool of this thread")
def pools_out_of_order(client, fake):
    library = client.objc.library
    outer = library.objc_autoreleasePoolPush()
    inner = library.objc_autoreleasePoolPush()
    library.objc_autoreleasePoolPop(outer)
    library.objc_autoreleasePoolPop(inner)
    library.objc_autoreleasePoolPop(outer)


@misuse(
    r"-\[MTLCompileOptions setLanguageVersion:\]: .* allocated, but not initialised"
)
def allocated_only(client, fake):
    options = client.own(client.send(client.objc.cls("MTLCompileOptions"), "alloc"))
    client.send(options, "setLanguageVersion:", 0x30001, result=None)


@misuse(r"\+\[NSError alloc\]: this class makes no objects by itself")
def alloc_of_an_abstract_class(client, fake):
    client.send(client.objc.cls("NSError"), "alloc")


@misuse(r"sel_registerName: the name is NULL")
def null_selector_name(client, fake):
    client.objc.library.sel_registerName(None)


@misuse(r"objc_retain of a deallocated MTLBuffer")
def retain_of_a_dead_object(client, fake):
    buffer = fake.new_buffer(64, 0)
    fake.release(buffer)
    fake.retain(buffer)


@misuse(r"objc_release of a deallocated MTLBuffer")
def release_of_a_dead_object(client, fake):
    buffer = fake.new_buffer(64, 0)
    fake.release(buffer)
    fake.release(buffer)


@misuse(r"unrecognized selector -\[NSPlaceholderString UTF8String\]|not initialised")
def placeholder_kept(client, fake):
    string = client.send(client.objc.cls("NSString"), "alloc")
    client.send(string, "UTF8String")
    fake.release(string)


@misuse(r"message UTF8String sent to a deallocated NSPlaceholderString")
def placeholder_used_after_init(client, fake):
    alloc = client.send(client.objc.cls("NSString"), "alloc")
    client.own(client.send(alloc, "initWithUTF8String:", b"x"))
    client.send(alloc, "UTF8String")


@misuse(r"-\[MTLCompileOptions init\]: it was initialised before")
def init_twice(client, fake):
    client.send(client.options(), "init")


@misuse(r"\+\[NSError new\]: this class makes no objects by itself")
def new_of_an_abstract_class(client, fake):
    fake_error = client.objc.cls("NSError")
    client.send(fake_error, "new")


@misuse(r"stringWithUTF8String:\]: the text is NULL")
def null_text(client, fake):
    client.send(client.objc.cls("NSString"), "stringWithUTF8String:", None)


@misuse(r"encoding 10 is none of")
def strange_encoding(client, fake):
    client.send(client.objc.cls("NSString"), "stringWithCString:encoding:", b"x", 10)


@misuse(r"fileURLWithPath:\]: the path must be a NSString, but got nil")
def nil_path(client, fake):
    client.send(client.objc.cls("NSURL"), "fileURLWithPath:", None)


@misuse(r"fileURLWithPath:\]: the path is empty")
def empty_path(client, fake):
    empty = client.send(client.objc.cls("NSString"), "string")
    client.send(client.objc.cls("NSURL"), "fileURLWithPath:", empty)


@misuse(r"initFileURLWithPath:\]: the path must be a NSString, but got nil")
def nil_path_of_init(client, fake):
    alloc = client.send(client.objc.cls("NSURL"), "alloc")
    assert client.send(alloc, "initFileURLWithPath:", None) is None


@misuse(r"arrayWithObjects:count:\]: the objects are NULL")
def null_objects(client, fake):
    client.send(client.objc.cls("NSArray"), "arrayWithObjects:count:", None, 2)


@misuse(r"objectAtIndex:\]: index 1 of an array of 1")
def index_past_the_array(client, fake):
    array = client.send(
        client.objc.cls("NSArray"), "arrayWithObject:", client.objc.string("x")
    )
    client.send(array, "objectAtIndex:", 1)


@misuse(r"arrayWithObject:\]: object 0 is nil")
def nil_in_array(client, fake):
    client.send(client.objc.cls("NSArray"), "arrayWithObject:", None)


@misuse(r"the source must be a NSString, but got a MTLBuffer")
def wrong_class_of_argument(client, fake):
    selector = "newLibraryWithSource:options:error:"
    client.send(client.device, selector, client.buffer(), client.options(), None)


@misuse(r"the source must be a NSString, but got the class NSString")
def class_instead_of_object(client, fake):
    selector = "newLibraryWithSource:options:error:"
    source = client.objc.cls("NSString")
    client.send(client.device, selector, source, client.options(), None)


@misuse(r"the options must be a MTLCompileOptions, but got nil")
def no_options(client, fake):
    selector = "newLibraryWithSource:options:error:"
    client.send(client.device, selector, client.objc.string(SOURCE), None, None)


def _compile(client, options):
    selector = "newLibraryWithSource:options:error:"
    client.send(client.device, selector, client.objc.string(SOURCE), options, None)


@misuse(r"the language version must be set to 3.1 \(0x30001\), but is not set")
def no_language_version(client, fake):
    _compile(client, client.options(version=None))


@misuse(r"the language version must be set to 3.1 \(0x30001\), but is 196608")
def other_language_version(client, fake):
    _compile(client, client.options(version=0x30000))


@misuse(r"fast math is on")
def fast_math(client, fake):
    _compile(client, client.options(fast=True))


@misuse(r"function constant 'offset' \(index 1\) has no value")
def missing_constant(client, fake):
    client.function(constants=client.constants((BOOL, 0, ctypes.c_uint8(1))))


@misuse(r"'add_one' \(index 0\) has MTLDataType 53, but its value has 29")
def wrong_type_of_constant(client, fake):
    one = (INT, 0, ctypes.c_int32(1))
    client.function(constants=client.constants(one, (INT, 1, ctypes.c_int32(1))))


@misuse(r"'offset' \(index 1\) has MTLDataType 29, but its value has 37")
def short_constant(client, fake):
    one = (BOOL, 0, ctypes.c_uint8(1))
    client.function(constants=client.constants(one, (37, 1, ctypes.c_int16(1))))


@misuse(r"index 65536 is beyond 65535")
def constant_index_too_large(client, fake):
    client.constants((INT, 65536, ctypes.c_int32(1)))


@misuse(r"a bool must be the byte 0 or 1, but got 255")
def strange_bool(client, fake):
    client.constants((BOOL, 0, ctypes.c_uint8(255)))


@misuse(r"58 is no scalar MTLDataType")
def strange_type(client, fake):
    client.constants((58, 0, ctypes.c_int32(1)))


@misuse(r"setConstantValue:type:atIndex:\]: the value is NULL")
def null_constant(client, fake):
    constants = client.constants()
    client.send(constants, "setConstantValue:type:atIndex:", None, INT, 0, result=None)


@misuse(r"the constant values must be a MTLFunctionConstantValues, but got nil")
def nil_constants(client, fake):
    selector = "newFunctionWithName:constantValues:error:"
    client.send(client.library(), selector, client.objc.string(SCALE), None, None)


@misuse(r"'scale_float32' as scale<half>, but the software kernel .* scale<float>")
def other_instantiation(client, fake):
    library = client.library(SOURCE.replace("scale<float>", "scale<half>"))
    client.function(library=library)


@misuse(r"no software kernel for it")
def kernel_of_another_build(client, fake):
    library = client.library(SOURCE.replace(SCALE, "scale_double"))
    client.function("scale_double", library=library)


@misuse(r"has function constants, but was made without their values")
def unspecialised_function(client, fake):
    function = client.send(
        client.library(), "newFunctionWithName:", client.objc.string(SCALE)
    )
    client.pipeline(descriptor=client.descriptor(client.own(function)))


@misuse(r"computeFunction must not be nil")
def pipeline_without_function(client, fake):
    empty = client.send(client.objc.cls("MTLComputePipelineDescriptor"), "new")
    client.pipeline(descriptor=client.own(empty))


@misuse(r"each archive must be a MTLBinaryArchive, but got a NSString")
def array_of_something_else(client, fake):
    text = client.objc.string("x")
    array = client.send(client.objc.cls("NSArray"), "arrayWithObject:", text)
    client.send(client.descriptor(), "setBinaryArchives:", array, result=None)


@misuse(r"the fake has no reflection; options 1")
def reflection(client, fake):
    client.pipeline(options=1)


@misuse(r"a buffer of zero length cannot be created")
def empty_buffer(client, fake):
    client.buffer(0)


@misuse(r"newBufferWithBytes:length:options:\]: the bytes are NULL")
def buffer_of_null_bytes(client, fake):
    client.send(client.device, "newBufferWithBytes:length:options:", None, 16, 0)


@misuse(r"newBufferWithBytes:length:options:\]: a buffer of zero length")
def buffer_of_no_bytes(client, fake):
    data = ctypes.create_string_buffer(16)
    client.send(client.device, "newBufferWithBytes:length:options:", data, 0, 0)


@misuse(r"newCommandQueueWithMaxCommandBufferCount:\]: the count must be positive")
def queue_without_room(client, fake):
    selector = "newCommandQueueWithMaxCommandBufferCount:"
    assert client.own(client.send(client.device, selector, 1))
    client.send(client.device, selector, 0)


@misuse(r"length 1001 must not exceed maxBufferLength 1000")
def buffer_too_long(client, fake):
    fake.set_fact("maxBufferLength", 1000)
    assert client.buffer(1000)
    client.buffer(1001)


@misuse(r"storage mode must be shared or private")
def managed_buffer(client, fake):
    client.buffer(options=0x10)


@misuse(r"options 288: without hazard tracking")
def untracked_buffer(client, fake):
    client.buffer(options=0x120)


@misuse(r"there are no such options")
def strange_options(client, fake):
    client.buffer(options=1 << 12)


def _wrap(client, address, length, options=0, deallocator=None):
    selector = "newBufferWithBytesNoCopy:length:options:deallocator:"
    return client.own(
        client.send(client.device, selector, address, length, options, deallocator)
    )


def _pages(count=2):
    page = mmap.PAGESIZE
    memory = ctypes.create_string_buffer((count + 1) * page)
    address = ctypes.addressof(memory)
    return memory, address + -address % page, page


@misuse(r"the pointer is not aligned to a page")
def unaligned_pointer(client, fake):
    _memory, address, page = _pages()
    _wrap(client, address + 16, page)


@misuse(r"is not a multiple of the page size")
def unaligned_length(client, fake):
    _memory, address, page = _pages()
    _wrap(client, address, page - 16)


@misuse(r"the pointer is not aligned to a page")
def null_memory(client, fake):
    _wrap(client, None, mmap.PAGESIZE)


@misuse(r"are not all memory of this process")
def unmapped_memory(client, fake):
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    arguments = ctypes.c_void_p(address + 2 * page), ctypes.c_size_t(page)
    assert protect(*arguments, 0) == 0
    _wrap(client, address, 4 * page)
    assert protect(*arguments, 3) == 0


@misuse(r"can only be shared, not private")
def private_memory_of_the_process(client, fake):
    _memory, address, page = _pages()
    _wrap(client, address, page, PRIVATE)


@misuse(r"the argument is not a block: its isa")
def deallocator_is_no_block(client, fake):
    _memory, address, page = _pages()
    _wrap(client, address, page, 0, ctypes.create_string_buffer(64))


@misuse(r"did ?modify|the storage mode is not managed")
def did_modify_range(client, fake):
    client.send(client.buffer(), "didModifyRange:", 0, 16, result=None)


@misuse(r"a command encoder is already encoding")
def two_encoders(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    assert client.encoder(command_buffer) is None
    client.end(encoder)


@misuse(r"a command encoder has not ended its encoding")
def commit_with_open_encoder(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.commit(command_buffer)
    client.end(encoder)


@misuse(r"a command encoder is released without endEncoding")
def encoder_left_open(client, fake):
    with client.objc.pool():
        client.encoder(client.send(client.queue(), "commandBuffer"))


@misuse(r"enqueue\]: the command buffer is already enqueued")
def enqueued_twice(client, fake):
    command_buffer = client.encoded()
    client.send(command_buffer, "enqueue", result=None)
    client.send(command_buffer, "enqueue", result=None)
    client.commit(command_buffer)


@misuse(r"2 is no MTLDispatchType")
def strange_dispatch_type(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    client.send(command_buffer, "computeCommandEncoderWithDispatchType:", 2)


@misuse(r"commit of an already committed command buffer")
def second_commit(client, fake):
    command_buffer = client.encoded()
    client.commit(command_buffer)
    client.commit(command_buffer)


@misuse(r"computeCommandEncoder\]: the command buffer is already committed")
def encoder_after_commit(client, fake):
    command_buffer = client.encoded()
    client.commit(command_buffer)
    client.encoder(command_buffer)


@misuse(r"a handler is provided after the commit call")
def handler_after_commit(client, fake):
    command_buffer = client.encoded()
    client.commit(command_buffer)
    block = client.objc.block(lambda block, _: None, ctypes.c_void_p)
    client.send(
        command_buffer, "addCompletedHandler:", ctypes.byref(block), result=None
    )


@misuse(r"addCompletedHandler:\]: the block is nil")
def nil_handler(client, fake):
    client.send(client.encoded(), "addCompletedHandler:", None, result=None)


def _add_broken_handler(client, **fields):
    block = client.objc.block(lambda block, _: None, ctypes.c_void_p)
    for name, value in fields.items():
        setattr(block, name, value)
    client.send(
        client.encoded(), "addCompletedHandler:", ctypes.byref(block), result=None
    )


@misuse(r"addCompletedHandler:\]: the block has no function or no descriptor")
def block_without_function(client, fake):
    _add_broken_handler(client, invoke=None)


@misuse(r"addCompletedHandler:\]: the block's flags do not fit its isa")
def global_block_on_the_stack(client, fake):
    _add_broken_handler(client, flags=1 << 28)


@misuse(r"addCompletedHandler:\]: the block's descriptor has an impossible size")
def block_of_no_size(client, fake):
    block = client.objc.block(lambda block, _: None, ctypes.c_void_p)
    client.objc.kept[-1][1] = 16
    client.send(
        client.encoded(), "addCompletedHandler:", ctypes.byref(block), result=None
    )


@misuse(r"-\[MTLCommandBuffer status\] on a thread without an autorelease pool")
def handler_without_pool(client, fake):
    command_buffer = client.encoded()
    block = client.objc.block(
        lambda block, buffer: client.status(buffer), ctypes.c_void_p
    )
    client.send(
        command_buffer, "addCompletedHandler:", ctypes.byref(block), result=None
    )
    client.commit(command_buffer)
    fake.drain()


@misuse(r"waitUntilCompleted\]: the command buffer is not committed")
def wait_before_commit(client, fake):
    client.wait(client.encoded())


@misuse(r"it would wait for ever: 2 command buffers")
def too_many_command_buffers(client, fake):
    fake.set_fact("maxCommandBufferCount", 2)
    queue = client.queue()
    for _ in range(3):
        client.send(queue, "commandBuffer")


@misuse(r"a buffer that it uses is a deallocated MTLBuffer")
def unretained_buffer_released(client, fake):
    x, y = client.buffer(), client.buffer()
    queue = client.queue()
    command_buffer = client.send(queue, "commandBufferWithUnretainedReferences")
    encoder = client.encoder(command_buffer)
    client.bind(encoder, (x, y))
    client.dispatch(encoder)
    client.end(encoder)
    fake.hold(1)
    client.commit(command_buffer)
    client.owned.remove(x)
    client.send(x, "release", result=None)
    fake.hold(0)
    client.wait(command_buffer)
    assert client.status(command_buffer) == FAILED


def _encoding(client, use, buffers=None, **bind):
    """Calls use(encoder) where a dispatch would be."""
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.bind(encoder, buffers or (client.buffer(), client.buffer()), **bind)
    use(encoder)
    client.end(encoder)


@misuse(r"no compute pipeline state is set")
def dispatch_without_pipeline(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.dispatch(encoder)
    client.end(encoder)


@misuse(r"the pipeline state must be a MTLComputePipelineState, but got nil")
def nil_pipeline(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.send(encoder, "setComputePipelineState:", None, result=None)
    client.end(encoder)


@misuse(r"setBytes:length:atIndex:\]: the encoder has ended its encoding")
def encoder_used_after_its_end(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.end(encoder)
    value = ctypes.byref(ctypes.c_float(1))
    client.send(encoder, "setBytes:length:atIndex:", value, 4, 2, result=None)


@misuse(r"endEncoding\]: the encoder has ended its encoding")
def end_twice(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    encoder = client.encoder(command_buffer)
    client.end(encoder)
    client.end(encoder)


@misuse(r"scale_float32: buffer 'out' at index 1: nothing is bound")
def unbound_buffer(client, fake):
    _encoding(client, client.dispatch, [client.buffer()])


@misuse(r"increment: buffer 'more' at index 1: nothing is bound")
def unbound_buffer_of_a_constant_that_is_true(client, fake):
    _incremented(client, 1, client.good_constants())


@misuse(r"buffer 'factor' at index 2: nothing is bound")
def unbound_bytes(client, fake):
    _encoding(client, client.dispatch, factor=None)


@misuse(r"buffer 'out' at index 1: nothing is bound")
def nil_buffer(client, fake):
    _encoding(client, client.dispatch, (client.buffer(), None))


@misuse(r"the buffer must be a MTLBuffer, but got a NSString")
def binding_of_something_else(client, fake):
    def use(encoder):
        text = client.objc.string("x")
        client.send(encoder, "setBuffer:offset:atIndex:", text, 0, 0, result=None)

    _encoding(client, use)


@misuse(r"the buffer must be a MTLBuffer, but got a deallocated MTLBuffer")
def binding_of_a_dead_buffer(client, fake):
    def use(encoder):
        buffer = fake.new_buffer(64, 0)
        fake.release(buffer)
        client.send(encoder, "setBuffer:offset:atIndex:", buffer, 0, 0, result=None)

    _encoding(client, use)


@misuse(r"offset 128 must be less than the buffer's length 128")
def offset_at_the_end(client, fake):
    def use(encoder):
        buffer = client.buffer(128)
        client.send(encoder, "setBuffer:offset:atIndex:", buffer, 128, 0, result=None)

    _encoding(client, use)


@misuse(r"buffer 'in' at index 0: offset 2 is not a multiple of 4")
def unaligned_offset(client, fake):
    def use(encoder):
        client.send(encoder, "setBufferOffset:atIndex:", 2, 0, result=None)
        client.dispatch(encoder)

    _encoding(client, use)


@misuse(r"setBufferOffset:atIndex:\]: no buffer is bound at index 9")
def offset_of_nothing(client, fake):
    def use(encoder):
        client.send(encoder, "setBufferOffset:atIndex:", 0, 9, result=None)

    _encoding(client, use)


@misuse(r"buffer 'factor' at index 2: it has 2 bytes, but the kernel reads 4")
def too_few_bytes(client, fake):
    def use(encoder):
        value = ctypes.byref(ctypes.c_float(1))
        client.send(encoder, "setBytes:length:atIndex:", value, 2, 2, result=None)
        client.dispatch(encoder)

    _encoding(client, use)


@misuse(r"length 4100 must be at most 4096")
def too_many_bytes(client, fake):
    def use(encoder):
        value = ctypes.create_string_buffer(4100)
        client.send(encoder, "setBytes:length:atIndex:", value, 4100, 2, result=None)

    _encoding(client, use)


@misuse(r"setBytes:length:atIndex:\]: there are no bytes")
def null_bytes(client, fake):
    def use(encoder):
        client.send(encoder, "setBytes:length:atIndex:", None, 4, 2, result=None)

    _encoding(client, use)


@misuse(r"index 31 must be less than 31")
def index_too_large(client, fake):
    def use(encoder):
        buffer = client.buffer()
        client.send(encoder, "setBuffer:offset:atIndex:", buffer, 0, 31, result=None)

    _encoding(client, use)


@misuse(r"length 24 must be a multiple of 16")
def threadgroup_memory_of_odd_length(client, fake):
    def use(encoder):
        selector = "setThreadgroupMemoryLength:atIndex:"
        client.send(encoder, selector, 24, 0, result=None)

    _encoding(client, use)


@misuse(r"32784 bytes of threadgroup memory are more than 32768")
def too_much_threadgroup_memory(client, fake):
    fake.set_fact("staticThreadgroupMemoryLength", 16)

    def use(encoder):
        selector = "setThreadgroupMemoryLength:atIndex:"
        client.send(encoder, selector, 32768, 0, result=None)
        client.dispatch(encoder)

    _encoding(client, use)


@misuse(r"\(32, 33, 1\) has more threads than .* maxTotalThreadsPerThreadgroup, 1024")
def too_many_threads(client, fake):
    _encoding(client, lambda e: client.dispatch(e, threads=(32, 33, 1)))


@misuse(r"more threads than the pipeline's maxTotalThreadsPerThreadgroup, 32")
def more_threads_than_this_pipeline_allows(client, fake):
    fake.set_fact("maxTotalThreadsPerThreadgroup", 32)
    _encoding(client, lambda e: client.dispatch(e, threads=(64, 1, 1)))


@misuse(r"threadgroups \(1, 0, 1\) of threads \(32, 1, 1\): each must be at least 1")
def empty_grid(client, fake):
    _encoding(client, lambda e: client.dispatch(e, groups=(1, 0, 1)))


@misuse(r"48 threads are not a multiple of threadExecutionWidth, as the pipeline's")
def broken_promise_of_the_descriptor(client, fake):
    descriptor = client.descriptor()
    selector = "setThreadGroupSizeIsMultipleOfThreadExecutionWidth:"
    client.send(descriptor, selector, True, result=None)
    pipeline = client.pipeline(descriptor=descriptor)
    _encoding(
        client, lambda e: client.dispatch(e, threads=(48, 1, 1)), pipeline=pipeline
    )


@misuse(r"a grid of \(33, 1, 1\) has threadgroups of different sizes")
def uneven_grid(client, fake):
    def use(encoder):
        selector = "dispatchThreads:threadsPerThreadgroup:"
        sizes = Size(33, 1, 1), Size(32, 1, 1)
        client.send(encoder, selector, *sizes, result=None)

    _encoding(client, use)


@misuse(r"the buffers or offsets are NULL")
def null_buffers(client, fake):
    def use(encoder):
        selector = "setBuffers:offsets:withRange:"
        client.send(encoder, selector, None, None, 0, 1, result=None)

    _encoding(client, use)


@misuse(r"memoryBarrierWithScope:\]: the scope leaves buffers out")
def barrier_of_textures(client, fake):
    _encoding(
        client, lambda e: client.send(e, "memoryBarrierWithScope:", 2, result=None)
    )


@misuse(r"usage 0 is no MTLResourceUsage")
def resource_of_no_use(client, fake):
    def use(encoder):
        client.send(encoder, "useResource:usage:", client.buffer(), 0, result=None)

    _encoding(client, use)


@misuse(r"used by two dispatches of a concurrent encoder without a memory barrier")
def missing_barrier(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    selector = "computeCommandEncoderWithDispatchType:"
    encoder = client.send(command_buffer, selector, 1)
    client.bind(encoder, (client.buffer(), client.buffer()))
    client.dispatch(encoder)
    client.send(encoder, "memoryBarrierWithScope:", 1, result=None)
    client.dispatch(encoder)
    assert fake.faults() == ""
    client.dispatch(encoder)
    client.end(encoder)


@misuse(r"the source: 128 bytes at offset 4 of a buffer of 128")
def blit_past_the_end(client, fake):
    x = client.buffer()
    command_buffer = client.send(client.queue(), "commandBuffer")
    blit = client.send(command_buffer, "blitCommandEncoder")
    copy = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"
    client.send(blit, copy, x, 4, client.buffer(256), 0, 128, result=None)
    client.end(blit)


@misuse(r"offset 0 and size 30 must be multiples of 4")
def blit_of_odd_size(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    blit = client.send(command_buffer, "blitCommandEncoder")
    fill = "fillBuffer:range:value:"
    client.send(blit, fill, client.buffer(), 0, 30, 0, result=None)
    client.end(blit)


@misuse(r"synchronizeResource:\]: the storage mode is not managed")
def synchronize_shared_memory(client, fake):
    command_buffer = client.send(client.queue(), "commandBuffer")
    blit = client.send(command_buffer, "blitCommandEncoder")
    client.send(blit, "synchronizeResource:", client.buffer(), result=None)
    client.end(blit)


@misuse(r"12 is no MTLGPUFamily")
def strange_family(client, fake):
    client.send(client.device, "supportsFamily:", 12, result=ctypes.c_bool)


@misuse(r"a MTLDevice is released more often than it was retained")
def over_release_of_the_device(client, fake):
    fake.retain(client.device)
    for _ in range(2):
        fake.release(client.device)
    assert take_faults(fake) == ""
    fake.release(client.device)
    fake.retain(client.device)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_a_fault(fake, client, name):
    function, expected = MISUSES[name]
    function(client, fake)
    fake.drain()
    faults = take_faults(fake).splitlines()
    assert len(faults) == 1, faults
    assert re.search(expected, faults[0]), faults[0]
    assert faults[0].startswith(("Metal API misuse: ", "unrecognized selector"))


_FAULT_CALL = re.compile(r"\bFault(?:AsIs)?\((.*?)\);", re.DOTALL)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OF_FAULT_ITSELF = ("Metal API misuse: ", "%s\\n")


def test_every_fault_has_a_misuse(fake, objc):
    seen = ""
    for function, _ in MISUSES.values():
        with objc.pool():
            client = Client(objc)
            function(client, fake)
            client.close()
        fake.drain()
        seen += take_faults(fake)
        fake.reset()
        fake.set_abort(0)
    unseen = []
    for path in fake_metal.sources():
        if path.name == "iokit.cc":
            continue  # test_misuse_of_iokit
        for call in _FAULT_CALL.findall(path.read_text()):
            # The compiler joins neighbours, and clang-format splits them.
            text = re.sub(r'"\s*"', "", call)
            longest = max(_LITERAL.findall(text), key=len, default="")
            if longest not in seen and longest not in _OF_FAULT_ITSELF:
                unseen.append(f"{path.name}: {longest}")
    assert not unseen, "\n".join(unseen)


# -- The end of the process ----------------------------------------------------------

PROGRAM = """
import ctypes, sys
from tests.plugin.device import test_fake_metal as t
from tests.support import fake_metal
fake = fake_metal.FakeMetal()
objc = t.ObjectiveC(fake.library)
with objc.pool():
    client = t.Client(objc)
    {statement}
print("still here")
"""


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("client.buffer(0)", "Metal API misuse: -[MTLDevice newBufferWithLength:"),
        (
            'client.send(client.device, "newBuffer")',
            "unrecognized selector -[MTLDevice newBuffer]",
        ),
        ('fake.set_fact("colour", 1)', "fake_metal: no fact named 'colour'"),
    ],
)
def test_faults_end_the_process(statement, message):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement=statement)],
        cwd=build.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -6, done
    assert message in done.stderr
    assert "still here" not in done.stdout
