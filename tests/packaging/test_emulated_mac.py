"""The library for macOS, executed in an emulator: as far as one comes without Metal.

The linker's output is loaded and its initialisers run; the C ABI answers as the library
for Linux does; and a pass of attention goes through the Apple layer to a recorder in
place of the Objective-C runtime, by the calling convention of the real CPU. No kernel
runs here: that is for tests/plugin/device/apple, over the software device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_flash_metal import attention_library
from jax_flash_metal.attention_library import AttentionLibrary, CallShape
from plugin import build
from tests.packaging.emulated_mac import PAGE, EmulatedMac, Jump
from tests.support.tolerances import OTHER_CPU

FAMILY = 8  # of the GPU of the emulated Mac

pytestmark = pytest.mark.xdist_group("packaging")

RUNTIME = (
    *("objc_getClass", "sel_registerName", "objc_msgSend", "_NSConcreteStackBlock"),
    *("objc_autoreleasePoolPush", "objc_autoreleasePoolPop"),
    "MTLCreateSystemDefaultDevice",
)


def shape_of(q_len: int, dtype: str = "float32") -> CallShape:
    return CallShape(dtype, q_len, 53, 4, 2, 64, 64)


def make_problem(
    mac: EmulatedMac, which: str, q_len: int, *, has_options: bool = False
) -> int:
    """A causal pass with a batch of 2; its tensors in the emulator's memory."""
    problem, tensors = describe_problem(which, q_len, has_options)
    for name in tensors:
        tensor = getattr(problem, name)
        tensor.data = mac.import_malloc(tensor.size_bytes)
    return mac.put(bytes(problem))


def describe_problem(
    which: str, q_len: int, has_options: bool
) -> tuple[attention_library.Problem, list[str]]:
    """The problem, and the names of its tensors."""
    like_query, like_key = (2, q_len, 4, 64), (2, 53, 2, 64)
    shapes = {"query": like_query, "key": like_key, "value": like_key}
    if which != "forward":
        rows = (2, 4, q_len)
        shapes |= {"out": like_query, "dout": like_query}
        shapes |= {"logsumexp": rows, "dlogsumexp": rows}
    operands = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    optional = options(q_len) if has_options else {}
    problem = attention_library.make_problem(operands, is_causal=True, **optional)
    names = {
        "forward": attention_library.FORWARD_RESULTS,
        "backward": attention_library.BACKWARD_RESULTS,
        "gradient": ("gradient",),
    }[which]
    if which == "gradient":
        attention_library.attach_gradient(problem, "bias", optional["bias"])
    else:
        attention_library.attach_results(problem, operands, names)
    return problem, [*operands, *optional, *names]


def options(q_len: int) -> dict[str, np.ndarray]:
    """Some operands of different types and sizes."""
    return {
        "bias": np.zeros((1, 4, q_len, 53), np.float16),
        "mask": np.zeros((2, 1, 1, 53), bool),
        "key_value_seq_lengths": np.zeros(2, np.int32),
        "sinks": np.zeros((1, 4), np.float32),
    }


def plan_of(
    library: Path,
    which: str,
    q_len: int,
    *,
    has_options: bool = False,
    family: int = FAMILY,
) -> dict[str, Any]:
    """What the library for Linux plans for a GPU."""
    linux = AttentionLibrary(ctypes.CDLL(str(library)))
    problem, _ = describe_problem(which, q_len, has_options)
    linux.set_gpu_family(family)
    try:
        return linux.plan(problem, which)
    finally:
        linux.set_gpu_family(-1)


def kernels_of(
    library: Path, which: str, q_len: int, *, has_options: bool = False
) -> list[str]:
    """Those of the plan."""
    plan = plan_of(library, which, q_len, has_options=has_options)
    return [launch["kernel"] for launch in plan["launches"]]


def text_of(mac: EmulatedMac, name: str, *arguments: int) -> tuple[int, str]:
    """Calls a function of the C ABI that writes a text."""
    size = 1 << 16
    place = mac.import_malloc(size)
    code = mac.call(name, *arguments, place, size)
    return code, mac.text(place)


@pytest.fixture
def mac(dylib: Path) -> EmulatedMac:
    return EmulatedMac(dylib)


def test_versions_are_those_of_the_library_for_linux(
    mac: EmulatedMac, library: Path
) -> None:
    linux = ctypes.CDLL(str(library))
    assert mac.call("jfm_abi_version") == linux.jfm_abi_version()
    for name in ("jfm_version", "jfm_kernel_digest"):
        getattr(linux, name).restype = ctypes.c_char_p
        assert mac.text(mac.call(name)) == getattr(linux, name)().decode()


@pytest.mark.parametrize("number", [0, 1])
def test_the_planner_chooses_the_same_kernels(
    mac: EmulatedMac, library: Path, number: int
) -> None:
    linux = AttentionLibrary(ctypes.CDLL(str(library)))
    mac.call("jfm_set_gpu_family", 0)  # without a device to ask
    for dtype, q_len in itertools.product(attention_library.DTYPES, (5, 37)):
        problem = attention_library.shape_problem(shape_of(q_len, dtype))
        place = mac.put(bytes(problem))
        code, text = text_of(mac, "jfm_attention_plan", place, number)
        plan = linux.plan(problem, attention_library.PASSES[number])
        assert (code, json.loads(text)) == (0, plan)


@pytest.mark.parametrize("q_len", [5, 37])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_planner_chooses_the_same_kernels_for_options(
    mac: EmulatedMac, library: Path, q_len: int, number: int
) -> None:
    which = attention_library.PASSES[number]
    place = make_problem(mac, which, q_len, has_options=True)
    mac.call("jfm_set_gpu_family", 0)
    code, text = text_of(mac, "jfm_attention_plan", place, number)
    plan = plan_of(library, which, q_len, has_options=True, family=0)
    assert (code, json.loads(text)) == (0, plan)
    assert len(plan["launches"]) > 1


def test_wrong_sizes_are_refused_in_words(mac: EmulatedMac) -> None:
    problem = attention_library.shape_problem(shape_of(37))
    problem.num_heads = 3
    place = mac.put(bytes(problem))
    code, text = text_of(mac, "jfm_attention_plan", place, 0)
    assert code == 3
    assert "num_heads=3 and num_kv_heads=2" in text


def test_the_table_of_pjrt_is_filled(mac: EmulatedMac, library: Path) -> None:
    linux = ctypes.CDLL(str(library))
    linux.GetPjrtApi.restype = ctypes.POINTER(ctypes.c_size_t)
    theirs = linux.GetPjrtApi()
    table = mac.call("GetPjrtApi")
    size = mac.word(table)
    assert size == theirs[0]
    # struct_size, extensions; struct_size, extensions and two ints of the version.
    first = 2 + 3
    for i in range(first, size // 8):
        function = mac.word(table + 8 * i)
        assert (function == 0) == (theirs[i] == 0)
        assert function == 0 or function in mac.code


# -- Without Metal -------------------------------------------------------------------


def test_a_system_without_the_libraries_is_an_error(mac: EmulatedMac) -> None:
    code, text = text_of(mac, "jfm_device_facts", 0)
    assert code == 5
    assert text.startswith("Metal cannot be loaded: image not found")
    assert {
        "/usr/lib/libobjc.A.dylib",
        "/System/Library/Frameworks/Metal.framework/Metal",
    } <= set(mac.opened)


def test_a_system_without_the_functions_is_an_error(mac: EmulatedMac) -> None:
    mac.system = {}
    code, text = text_of(mac, "jfm_device_facts", 0)
    assert code == 5
    assert [name for name in RUNTIME if name not in text] == []


# -- The CPU kernels, which need no Metal ----------------------------------------------


def random_options(q_len: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "bias": rng.standard_normal((1, 4, q_len, 53)).astype(np.float16),
        "mask": rng.random((2, 1, 1, 53)) < 0.8,
        "key_value_seq_lengths": np.array([53, 41], np.int32),
        "sinks": rng.standard_normal((1, 4), np.float32),
    }


@pytest.mark.parametrize("dtype", attention_library.NUMPY_DTYPES)
@pytest.mark.parametrize("q_len", [3, 37])
def test_the_cpu_kernels(
    mac: EmulatedMac, library: Path, dtype: str, q_len: int
) -> None:
    """Of aarch64, and as on Linux up to the order of their sums."""
    linux = AttentionLibrary(ctypes.CDLL(str(library)), backend="cpu")
    rng = np.random.default_rng(0)
    shapes = {
        "query": (2, q_len, 4, 64),
        "key": (2, 53, 2, 64),
        "value": (2, 53, 2, 64),
    }
    operands = {
        name: rng.standard_normal(shape).astype(attention_library.NUMPY_DTYPES[dtype])
        for name, shape in shapes.items()
    }
    optional = random_options(q_len)
    arguments: dict[str, Any] = {"is_causal": True, "q_offset": 53 - q_len, **optional}
    out, logsumexp = linux.run_forward(*operands.values(), **arguments)
    operands |= {"out": out, "logsumexp": logsumexp, "dout": out}
    operands["dlogsumexp"] = logsumexp
    gradients = linux.run_backward(*operands.values(), **arguments)
    expected = {
        "forward": dict(zip(attention_library.FORWARD_RESULTS, (out, logsumexp))),
        "backward": dict(zip(attention_library.BACKWARD_RESULTS, gradients)),
        "gradient": {
            "gradient": linux.run_gradient("bias", *operands.values(), **arguments)
        },
    }
    for which, results in expected.items():
        names = attention_library.FORWARD_OPERANDS if which == "forward" else operands
        given = {name: operands[name] for name in names}
        problem = attention_library.make_problem(given, backend="cpu", **arguments)
        if which == "gradient":
            attention_library.attach_gradient(problem, "bias", optional["bias"])
        else:
            attention_library.attach_results(problem, given, tuple(results))
        for name, array in (given | optional).items():
            getattr(problem, name).data = mac.put(array.tobytes())
        for name, array in results.items():
            getattr(problem, name).data = mac.put(b"\xff" * array.nbytes)  # NaN
        place = mac.put(bytes(problem))
        assert text_of(mac, f"jfm_attention_{which}", place) == (0, "")
        for name, array in results.items():
            content = mac.read(getattr(problem, name).data, array.nbytes)
            actual = np.frombuffer(content, array.dtype).reshape(array.shape)
            step = OTHER_CPU[array.dtype]
            close = np.allclose(
                np.float64(actual), np.float64(array), rtol=step, atol=step
            )
            assert close, f"{which}: {name}"
    assert mac.opened == [], "no framework is loaded for them"


def test_facts_of_the_cpu(mac: EmulatedMac) -> None:
    code, text = text_of(mac, "jfm_device_facts", 1)
    assert code == 0
    facts = dict(line.split("=") for line in text.splitlines())
    assert (facts["device"], facts["name"], facts["family"]) == ("cpu", "CPU", "neon")
    assert facts["system"] == "Darwin 23.5.0"
    assert text_of(mac, "jfm_cpu_isas") == (0, "neon\n")


# -- Over a recorder -----------------------------------------------------------------


@dataclasses.dataclass
class Object:
    """What a message may be sent to."""

    cls: str
    references: int = 1
    text: str = ""
    place: int = 0
    size: int = 0


class Recorder:
    """Answers messages as a Mac with an M2 would, and writes them down.

    Attributes:
      log: selector and arguments of the messages that make up the work.
      sources: the texts of libraries.
      live: objects by address, until their last release.
      pools: for each autorelease pool the objects that it will release.
    """

    def __init__(self, mac: EmulatedMac) -> None:
        self.mac = mac
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.live: dict[int, Object] = {}
        self.pools: list[list[int]] = []
        self.handler = 0
        self.sources: list[str] = []
        self.device = self.new("MTLDevice", text="Apple M2")
        names = {name: getattr(self, name.strip("_")) for name in RUNTIME}
        mac.system = names

    def new(self, cls: str, **facts: str | int) -> int:
        """An object with one reference, which is the caller's."""
        address = self.mac.import_malloc(16)
        self.live[address] = Object(cls, **facts)  # type: ignore[arg-type]
        return address

    def temporary(self, cls: str, **facts: str | int) -> int:
        """An object with one reference, which is the innermost pool's."""
        address = self.new(cls, **facts)
        self.pools[-1].append(address)
        return address

    def release(self, address: int) -> int:
        self.live[address].references -= 1
        if self.live[address].references == 0:
            del self.live[address]
        return 0

    def count(self) -> Counter[str]:
        """Living objects by class."""
        return Counter(one.cls for one in self.live.values())

    # The runtime's functions.

    def objc_getClass(self, name: int) -> int:
        return self.new(f"class {self.mac.text(name)}")

    def sel_registerName(self, name: int) -> int:
        return name  # the text itself stands for the selector

    def objc_autoreleasePoolPush(self) -> int:
        self.pools.append([])
        return len(self.pools)

    def objc_autoreleasePoolPop(self, pool: int) -> int:
        assert pool == len(self.pools), "pools end in the order in which they began"
        for address in self.pools.pop():
            self.release(address)
        return 0

    def MTLCreateSystemDefaultDevice(self) -> int:
        return self.device

    def NSConcreteStackBlock(self) -> int:
        raise AssertionError("a class, not a function")

    def objc_msgSend(
        self, receiver: int, selector: int, a: int, b: int, c: int, d: int
    ) -> int | Jump:
        assert self.pools, "a message without an autorelease pool"
        name = self.mac.text(selector)
        arguments = (a, b, c, d)[: name.count(":")]
        target = self.live[receiver]  # KeyError: sent to what is gone
        answer = ANSWERS[name]  # KeyError: not expected of this call
        return answer(self, target, receiver, *arguments)


Answer = Callable[..., "int | Jump"]


def _constant(value: int) -> Answer:
    return lambda recorder, target, receiver, *arguments: value


def _logged(name: str) -> Answer:
    def answer(recorder: Recorder, target: Object, receiver: int, *values: int) -> int:
        recorder.log.append((name, values))
        return 0

    return answer


def _made(cls: str) -> Answer:
    return lambda recorder, target, receiver, *arguments: recorder.new(cls)


def _lent(cls: str, text: str = "") -> Answer:
    return lambda recorder, target, receiver: recorder.temporary(cls, text=text)


def _release(recorder: Recorder, target: Object, receiver: int) -> int:
    return recorder.release(receiver)


def _retain(recorder: Recorder, target: Object, receiver: int) -> int:
    target.references += 1
    return receiver


def _string(
    recorder: Recorder, target: Object, receiver: int, text: int, encoding: int
) -> int:
    assert encoding == 4  # UTF-8
    return recorder.temporary("NSString", text=recorder.mac.text(text))


def _text(recorder: Recorder, target: Object, receiver: int) -> int:
    return recorder.mac.put(target.text.encode() + b"\0")


def _buffer(
    recorder: Recorder, target: Object, receiver: int, size: int, _: int
) -> int:
    place = recorder.mac.import_malloc(size)
    return recorder.new("MTLBuffer", place=place, size=size)


def _alias(
    recorder: Recorder, target: Object, receiver: int, place: int, size: int, *_: int
) -> int:
    assert place % PAGE == 0 and size % PAGE == 0 and size > 0
    return recorder.new("MTLBuffer", place=place, size=size)


def _library(
    recorder: Recorder, target: Object, receiver: int, text: int, *_: int
) -> int:
    recorder.sources.append(recorder.live[text].text)
    return recorder.new("MTLLibrary")


def _set_value(
    recorder: Recorder, target: Object, receiver: int, value: int, kind: int, index: int
) -> int:
    size = {53: 1, 29: 4}[kind]  # bool, int
    number = int.from_bytes(recorder.mac.read(value, size), "little", signed=True)
    recorder.log.append(("constant", (index, kind, number)))
    return 0


def _dispatch(
    recorder: Recorder, target: Object, receiver: int, groups: int, threads: int
) -> int:
    # Structs over 16 bytes are copies in memory, passed by their address.
    sizes = recorder.mac.read(groups, 24) + recorder.mac.read(threads, 24)
    recorder.log.append(("dispatch", struct.unpack("<6Q", sizes)))
    return 0


def _set_handler(recorder: Recorder, target: Object, receiver: int, block: int) -> int:
    # Metal copies the block: descriptor->size bytes of it.
    size = recorder.mac.word(recorder.mac.word(block + 24) + 8)
    recorder.handler = recorder.mac.put(recorder.mac.read(block, size))
    return 0


def _commit(recorder: Recorder, target: Object, receiver: int) -> Jump:
    recorder.log.append(("commit", ()))
    invoke = recorder.mac.word(recorder.handler + 16)
    return Jump(invoke, (recorder.handler, receiver))


ANSWERS: dict[str, Answer] = {
    "alloc": _made("instance"),
    "init": lambda recorder, target, receiver: receiver,
    "retain": _retain,
    "release": _release,
    "stringWithCString:encoding:": _string,
    "UTF8String": _text,
    "name": _lent("NSString", "Apple M2"),
    "processInfo": _lent("NSProcessInfo"),
    "operatingSystemVersionString": _lent("NSString", "Version 14.5 (Build 23F79)"),
    "supportsFamily:": lambda recorder, target, receiver, family: int(family <= 1008),
    "hasUnifiedMemory": _constant(1),
    "maxBufferLength": _constant(9 << 30),
    "maxThreadgroupMemoryLength": _constant(32768),
    "recommendedMaxWorkingSetSize": _constant(16 << 30),
    "newCommandQueue": _made("MTLCommandQueue"),
    "newBufferWithLength:options:": _buffer,
    "newBufferWithBytesNoCopy:length:options:deallocator:": _alias,
    "contents": lambda recorder, target, receiver: target.place,
    "length": lambda recorder, target, receiver: target.size,
    "setLanguageVersion:": _logged("language"),
    "setFastMathEnabled:": _logged("fast math"),
    "newLibraryWithSource:options:error:": _library,
    "setConstantValue:type:atIndex:": _set_value,
    "newFunctionWithName:constantValues:error:": _made("MTLFunction"),
    "setComputeFunction:": _constant(0),
    "newComputePipelineStateWithDescriptor:options:reflection:error:": _made("state"),
    "maxTotalThreadsPerThreadgroup": _constant(1024),
    "threadExecutionWidth": _constant(32),
    "staticThreadgroupMemoryLength": _constant(16000),
    "commandBuffer": _lent("MTLCommandBuffer"),
    "computeCommandEncoder": _lent("MTLComputeCommandEncoder"),
    "setComputePipelineState:": _logged("pipeline"),
    "setBuffer:offset:atIndex:": _logged("buffer"),
    "setBytes:length:atIndex:": _logged("bytes"),
    "dispatchThreadgroups:threadsPerThreadgroup:": _dispatch,
    "endEncoding": _logged("end"),
    "addCompletedHandler:": _set_handler,
    "commit": _commit,
    "status": _constant(4),
}


def test_facts_of_the_device(mac: EmulatedMac) -> None:
    Recorder(mac)
    code, text = text_of(mac, "jfm_device_facts", 0)
    assert code == 0, text
    assert dict(line.split("=") for line in text.splitlines()) == {
        "device": "apple",
        "name": "Apple M2",
        "family": "Apple8",
        "system": "macOS Version 14.5 (Build 23F79)",
        "num_cores": "0",  # no IOKit here: not known, and no error
        "max_threadgroup_memory_bytes": "32768",
        "max_threads_per_threadgroup": "1024",
        "max_buffer_bytes": str(9 << 30),
        "memory_limit_bytes": str(16 << 30),
        "has_unified_memory": "1",
    }


def test_a_forward_pass(mac: EmulatedMac, library: Path) -> None:
    recorder = Recorder(mac)
    (kernel,) = kernels_of(library, "forward", 37)
    (row,) = (row for row in build.load_variants() if row.host_name == kernel)
    problem = make_problem(mac, "forward", 37)
    assert text_of(mac, "jfm_attention_forward", problem) == (0, "")

    words = [word for word, _ in recorder.log]
    values = dict(recorder.log)
    assert values["language"] == (0x30001,)
    assert values["fast math"] == (0,)
    (source,) = recorder.sources
    assert source.endswith(row.instantiation())
    # Before the first dispatch all is bound; nothing is encoded after the end.
    encoding = words[words.index("pipeline") :]
    assert encoding[-3:] == ["dispatch", "end", "commit"]
    assert Counter(encoding[:-3]) == {"pipeline": 1, "buffer": 5, "bytes": 1}
    constants = {v[0]: v[1:] for word, v in recorder.log if word == "constant"}
    assert constants[0] == (53, 1)  # is_causal
    assert constants[3] == (29, 64)  # head_dim
    blocks = -(-37 // row.block_q)
    assert values["dispatch"] == (blocks, 4, 2, 32 * row.num_simdgroups, 1, 1)
    params, _, index = values["bytes"]
    assert index == 0
    # They begin with the query's strides: batch dimensions, head, row.
    strides = struct.unpack("<6q", mac.read(params, 48))
    assert strides == (37 * 4 * 64, 0, 0, 0, 64, 4 * 64)


@pytest.mark.parametrize(
    ("which", "q_len", "has_options"),
    [
        # That with options has its kernels.
        pytest.param("backward", 5, False, marks=pytest.mark.slow),
        ("backward", 37, False),
        ("forward", 37, True),
        ("backward", 5, True),
        ("gradient", 37, True),
    ],
)
def test_a_pass_of_several_kernels(
    mac: EmulatedMac, library: Path, which: str, q_len: int, has_options: bool
) -> None:
    recorder = Recorder(mac)
    kernels = kernels_of(library, which, q_len, has_options=has_options)
    assert len(kernels) > 1
    problem = make_problem(mac, which, q_len, has_options=has_options)
    assert text_of(mac, f"jfm_attention_{which}", problem) == (0, "")
    rows = {row.host_name: row for row in build.load_variants()}
    sources = [rows[kernel].instantiation() for kernel in dict.fromkeys(kernels)]
    assert [s[-len(end) :] for s, end in zip(recorder.sources, sources)] == sources
    threads = [values[3:] for word, values in recorder.log if word == "dispatch"]
    assert threads == [(32 * rows[k].num_simdgroups, 1, 1) for k in kernels]
    assert [word for word, _ in recorder.log].count("commit") == 1


def test_what_is_given_is_bound(mac: EmulatedMac) -> None:
    """And no more: the kernel has no such arguments then."""
    recorder = Recorder(mac)
    problem = make_problem(mac, "forward", 37, has_options=True)
    assert text_of(mac, "jfm_attention_forward", problem) == (0, "")
    words = [word for word, _ in recorder.log]
    # The mask's summary, then the pass: five of its own, three operands of the scores,
    # the summary and the sinks.
    first, second = (i for i, word in enumerate(words) if word == "dispatch")
    encoded = Counter(words[first + 1 : second])
    assert (encoded["buffer"], encoded["bytes"]) == (5 + 3 + 1 + 1, 1)
    constants = [values for word, values in recorder.log if word == "constant"]
    last = {index: (kind, value) for index, kind, value in constants}
    assert last[5] == (53, 1)  # has_bias, a bool
    assert last[6] == (29, 1)  # bias_dtype, an int: float16
    assert {i: last[i][1] for i in range(7, 17)} == {
        **dict.fromkeys((7, 11, 12), 1),  # mask, key-value lengths, sinks
        **dict.fromkeys((8, 9, 10, 13, 14, 15, 16), 0),
    }


def test_a_second_pass_leaves_no_object(mac: EmulatedMac) -> None:
    recorder = Recorder(mac)
    problem = make_problem(mac, "forward", 37)
    assert text_of(mac, "jfm_attention_forward", problem) == (0, "")
    first = recorder.count()
    assert (first["state"], first["MTLCommandBuffer"], first["NSString"]) == (1, 0, 0)
    assert text_of(mac, "jfm_attention_forward", problem) == (0, "")
    assert recorder.count() == first
    assert recorder.pools == []
