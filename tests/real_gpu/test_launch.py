"""Plans on a GPU that is played by host memory: what is copied, bound and launched."""

import ctypes
import struct

import numpy as np
import pytest

from jax_flash_metal.attention_library import (
    FORWARD_RESULTS,
    AttentionLibrary,
    attach_results,
    make_problem,
)
from plugin.nvptx import launch
from tests.support import native


class HostGpu:
    """The calls of cuda.Gpu on memory of the host; notes the launches."""

    def __init__(self):
        self.memory = {}
        self.globals = {}
        self.launches = []
        self.on_launch = lambda kernel, table: None

    def call(self, function, *arguments):
        getattr(self, function)(*arguments)

    def cuMemAlloc_v2(self, address, size):
        buffer = (ctypes.c_char * size.value)()
        address._obj.value = ctypes.addressof(buffer)
        self.memory[address._obj.value] = buffer

    def cuMemFree_v2(self, address):
        del self.memory[address.value]

    def cuMemsetD8_v2(self, address, byte, size):
        ctypes.memset(address.value, byte.value, size.value)

    def cuMemcpyHtoD_v2(self, address, source, size):
        if isinstance(source, bytes):
            self.globals[address.value] = source
        else:
            ctypes.memmove(address.value, source.value, size.value)

    def cuMemcpyDtoH_v2(self, target, address, size):
        ctypes.memmove(target.value, address.value, size.value)

    def cuModuleLoadData(self, module, image):
        self.image = image

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = int(name.decode().rpartition("_s")[2][0])

    def cuModuleGetGlobal_v2(self, address, size, module, name):
        assert name == b"jfm_function_constants"
        address._obj.value, size._obj.value = 8, 128

    def launch(self, function, grid, num_threads, argument):
        table = list(argument)
        params = ctypes.string_at(table[0], 16)
        constants = struct.unpack("<32i", self.globals[8])
        self.launches.append((list(grid), num_threads, table, params, constants))
        self.on_launch(len(self.launches) - 1, table)

    def synchronize(self):
        pass


class AnyFile:
    """A cubin for every kernel."""

    def __getitem__(self, kernel):
        return self

    def read_bytes(self):
        return b"cubin"


@pytest.fixture
def gpu():
    return HostGpu()


@pytest.fixture
def forward():
    """A problem with its operands and results, which a plan looks at."""
    rng = np.random.default_rng(0)
    operands = {
        "query": rng.standard_normal((2, 40, 4, 32)).astype(np.float16),
        "key": rng.standard_normal((2, 50, 2, 32)).astype(np.float16),
        "value": rng.standard_normal((2, 50, 2, 32)).astype(np.float16),
    }
    problem = make_problem(operands, is_causal=True)
    return operands, problem, attach_results(problem, operands, FORWARD_RESULTS)


def test_runs_a_plan(gpu, forward):
    operands, problem, results = forward
    plan = AttentionLibrary(native.load()).plan(problem, "forward")
    (planned,) = plan["launches"]

    def kernel(index, table):
        buffers = {name: table[i] for i, name, _ in planned["buffers"]}
        for name, x in operands.items():
            assert ctypes.string_at(buffers[name], x.nbytes) == x.tobytes(), name
        out = ctypes.string_at(buffers["out"], results["out"].nbytes)
        assert np.isnan(np.frombuffer(out, np.float16)).all()
        ctypes.memset(buffers["out"], 1, results["out"].nbytes)
        ctypes.memset(buffers["logsumexp"], 2, results["logsumexp"].nbytes)

    gpu.on_launch = kernel
    attention = launch.GpuAttention(native.load(), AnyFile(), gpu=gpu)
    attention.run(problem, "forward")
    ((grid, threads, table, params, constants),) = gpu.launches
    assert (grid, threads) == (planned["grid"], planned["threads"])
    assert params == bytes.fromhex(planned["params"])[:16]
    assert list(constants[: len(planned["constants"])]) == planned["constants"]
    assert not any(constants[len(planned["constants"]) :])
    bound = {i for i, _, _ in planned["buffers"]} | {0}
    assert {i for i, address in enumerate(table) if address} == bound
    assert set(results["out"].tobytes()) == {1}
    assert set(results["logsumexp"].tobytes()) == {2}
    assert attention.used == {planned["kernel"]: 1}
    assert gpu.memory == {}  # everything was given back


def test_nothing_is_initialised_for_a_tool_that_looks_for_it(gpu, forward):
    operands, problem, _ = forward
    seen = {}

    def kernel(index, table):
        seen["out"] = ctypes.string_at(table[4], 64)
        seen["query"] = ctypes.string_at(table[1], 64)

    gpu.on_launch = kernel
    launch.GpuAttention(native.load(), AnyFile(), gpu=gpu, poison=False).run(
        problem, "forward"
    )
    assert seen["out"] == bytes(64)  # as allocated here; not the NaN of the host
    assert seen["query"] == operands["query"].tobytes()[:64]


def test_memory_is_given_back_after_an_error(gpu, forward):
    _, problem, _ = forward

    def kernel(index, table):
        raise RuntimeError("launch failed")

    gpu.on_launch = kernel
    attention = launch.GpuAttention(native.load(), AnyFile(), gpu=gpu)
    with pytest.raises(RuntimeError, match="launch failed"):
        attention.run(problem, "forward")
    assert gpu.memory == {}


def test_offsets_are_in_elements():
    plan = {"buffers": [[1, "query", 10], [14, "bias", 7], [8, "delta", 0]]}
    addresses = {"query": 1000, "bias": 5000, "delta": 9000}
    table = launch.buffer_table(plan, addresses, {"query": 2, "bias": 4}, params=42)
    assert (table[0], table[1], table[14], table[8]) == (42, 1020, 5028, 9000)
    assert sum(map(bool, table)) == 4


def test_too_many_function_constants():
    assert launch.constants_bytes([5, -1]) == struct.pack("<32i", 5, -1, *[0] * 30)
    with pytest.raises(ValueError, match="at most 32 function constants"):
        launch.constants_bytes([0] * 33)
