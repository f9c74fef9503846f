"""The FFI node in our API's extension chain, called as C code would call it."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np
import pytest

from tests.plugin.pjrt import custom_calls
from tests.plugin.pjrt.custom_calls import CallError

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
WORD = ctypes.c_size_t
FFI_TYPE = 5


class Node(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("type_register", FUNCTION),
        ("user_data_add", FUNCTION),
        ("register_handler", FUNCTION),
    ]


class Host:
    """A host's node that notes what reaches it: the words of the arguments."""

    def __init__(self):
        self.handlers, self.user_data = [], []

        def note(calls):
            def function(args):
                size = WORD.from_address(args).value
                count = -(-size // 8)
                calls.append(list((WORD * count).from_address(args)))

            return FUNCTION(function)

        self.node = Node(
            ctypes.sizeof(Node),
            FFI_TYPE,
            None,
            note([]),
            note(self.user_data),
            note(self.handlers),
        )


@pytest.fixture(scope="module")
def extension():
    """The node made by the runtime (once per process), and the host's node."""
    host = Host()
    runtime = custom_calls.runtime()
    runtime.jfm_test_extension.restype = ctypes.POINTER(Node)
    runtime.jfm_test_take_error.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    runtime.jfm_test_user_data.restype = ctypes.c_void_p
    runtime.jfm_test_user_data.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    runtime.jfm_test_forget.argtypes = [ctypes.c_void_p]
    node = runtime.jfm_test_extension(ctypes.byref(host.node), 0x1230).contents
    return node, host


def run(function, words, *, size=None):
    """Calls a function of the node; returns the words of the arguments after it."""
    args = (WORD * len(words))(size or 8 * len(words), *words[1:])
    error = function(ctypes.addressof(args))
    custom_calls.check(custom_calls.runtime().jfm_test_take_error, error)
    return list(args)


def span(text):
    """Address and size; the buffer must be kept."""
    data = text.encode()
    buffer = ctypes.create_string_buffer(data)
    return buffer, (ctypes.addressof(buffer), len(data))


def test_chain(extension):
    node, _ = extension
    assert (node.struct_size, node.type, node.next) == (48, FFI_TYPE, 0x1230)


def handler_words(target, platform, *, new_layout):
    keep, (name, name_size) = span(target)
    keep_too, (platform_name, platform_size) = span(platform)
    function = custom_calls.address(custom_calls.handlers().Scale)
    if new_layout:
        words = [0, name, name_size, function, platform_name, platform_size, 1]
    else:
        words = [0, name, name_size, 1, function, platform_name, platform_size]
    return words, (keep, keep_too)


@pytest.mark.parametrize(
    ("new_layout", "size"), [(True, 52), (True, 56), (False, 56), (False, 60)]
)
def test_register_handler(extension, new_layout, size):
    target = f"through_the_node_{new_layout}_{size}"
    words, _keep = handler_words(target, "flash_metal", new_layout=new_layout)
    run(extension[0].register_handler, [*words, 0], size=size)
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    custom_calls.call(target, [x], [y], factor=np.float32(2))
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("new_layout", [True, False])
def test_handlers_of_other_platforms_go_to_the_host(extension, new_layout):
    node, host = extension
    words, _keep = handler_words("hosts_own", "Host", new_layout=new_layout)
    run(node.register_handler, [*words, 0])
    expected, _keep_too = handler_words("hosts_own", "Host", new_layout=True)
    got = host.handlers.pop()
    assert got[0] == 52
    assert (got[3], got[2], got[5]) == (expected[3], expected[2], expected[5])
    assert ctypes.string_at(got[4], got[5]) == b"Host"
    with pytest.raises(CallError, match="target hosts_own"):
        custom_calls.call("hosts_own", [], [])


def test_too_small_arguments(extension):
    node, _ = extension
    for function in (node.register_handler, node.user_data_add, node.type_register):
        with pytest.raises(CallError, match="must have at least"):
            run(function, [0] * 8, size=16)


def test_register_type(extension):
    node, _ = extension
    _keep, name = span("a type of the node")
    old = run(node.type_register, [0, 0, *name, 0])
    type_id = old[4]
    assert type_id > 1 << 32
    info = (WORD * 3)(custom_calls.address(custom_calls.handlers().DeleteCounter))
    new = run(node.type_register, [0, 0, *name, type_id, ctypes.addressof(info)])
    assert new[4] == type_id
    with pytest.raises(CallError, match="a type of the node is registered already"):
        run(node.type_register, [0, 0, *name, type_id + 1])


def test_user_data(extension):
    node, host = extension
    runtime = custom_calls.runtime()
    deleted = []
    deleter = DELETER(deleted.append)
    context, other = 0x5000, 0x6000
    run(node.user_data_add, [0, 0, context, 7, 0x100])
    run(
        node.user_data_add,
        [0, 0, context, 8, 0x200, custom_calls.address(deleter)],
    )
    assert runtime.jfm_test_user_data(context, 7) == 0x100
    assert runtime.jfm_test_user_data(context, 8) == 0x200
    assert runtime.jfm_test_user_data(context, 9) is None
    assert runtime.jfm_test_user_data(other, 7) is None
    assert runtime.jfm_test_user_data(None, 7) is None
    # The host's handlers may want it too; one owner deletes it.
    assert [call[2:] for call in host.user_data] == [
        [context, 7, 0x100, 0],
        [context, 8, 0x200, 0],
    ]
    with pytest.raises(CallError, match="type id 7 is there already"):
        run(node.user_data_add, [0, 0, context, 7, 0x300])
    with pytest.raises(CallError, match="needs an execute context"):
        run(node.user_data_add, [0, 0, 0, 7, 0x300])
    assert deleted == []
    runtime.jfm_test_forget(context)
    runtime.jfm_test_forget(context)
    assert deleted == [0x200]
    assert runtime.jfm_test_user_data(context, 7) is None
