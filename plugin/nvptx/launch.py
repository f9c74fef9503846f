"""Runs plans of the library's planner on an NVIDIA GPU, with kernels of compile.py.

What is run, in which grids and on which parts of the operands is what the library would
do on a Metal device (jfm_attention_plan). Needs NumPy and the library; not JAX.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal.attention_library import (
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    AttentionLibrary,
    Problem,
)
from plugin.nvptx.cuda import DeviceMemory, Gpu, Module

NUM_BUFFERS = 31  # of gpu_shim.h's argument of an entry point
NUM_FUNCTION_CONSTANTS = 32
_PASS_RESULTS = {
    "forward": FORWARD_RESULTS,
    "backward": BACKWARD_RESULTS,
    "gradient": ("gradient",),
}
# The member of Problem where the operand has another name.
_MEMBERS = {"q_offset": "q_offsets"}
_PARAMS_BUFFER = 0
# A kernel that has nothing to read still gets a buffer, as in attention.cc.
_MIN_BYTES = 16


def constants_bytes(constants: Sequence[int]) -> bytes:
    """The table of function constants: 32-bit integers by index, 0 for the rest."""
    if len(constants) > NUM_FUNCTION_CONSTANTS:
        raise ValueError(
            f"at most {NUM_FUNCTION_CONSTANTS} function constants fit, but got "
            f"{len(constants)}."
        )
    padding = [0] * (NUM_FUNCTION_CONSTANTS - len(constants))
    return struct.pack(f"<{NUM_FUNCTION_CONSTANTS}i", *constants, *padding)


def buffer_table(
    launch: Mapping[str, Any],
    addresses: Mapping[str, int],
    element_bytes: Mapping[str, int],
    params: int,
) -> list[int]:
    """The addresses of a launch's buffers by index; 0 where the kernel has none.

    Args:
      launch: Of a plan.
      addresses: Of operands and scratch by name.
      element_bytes: Of the operands by name; scratch has no offsets.
      params: The address of the launch's parameters.
    """
    table = [0] * NUM_BUFFERS
    table[_PARAMS_BUFFER] = params
    for index, name, offset in launch["buffers"]:
        table[index] = addresses[name] + offset * element_bytes.get(name, 0)
    return table


class GpuAttention(AttentionLibrary):
    """The passes of a library, run on an NVIDIA GPU.

    Args:
      library: Its planner is asked.
      kernels: The cubin that has each kernel, by host name.
      poison: Whether scratch is filled with NaN before a run. Not under a tool that
        reports reads of memory that nobody wrote.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        kernels: Mapping[str, Path],
        *,
        gpu: Gpu | None = None,
        poison: bool = True,
    ) -> None:
        super().__init__(library)
        self.gpu = gpu or Gpu()
        self.used: dict[str, int] = {}  # launches of each kernel
        self._kernels = kernels
        self._modules: dict[Path, Module] = {}
        self._poison = poison

    def run(self, problem: Problem, which: str) -> None:
        """Plans, copies the operands, launches and copies the results back."""
        plan = self.plan(problem, which)
        memory: dict[str, DeviceMemory] = {}
        try:
            for name in dict.fromkeys(_bound(plan)):
                memory[name] = self._memory(name, problem, which, plan)
            self._launch(plan, problem, memory)
            for name in _PASS_RESULTS[which]:
                tensor = _tensor(problem, name)
                if tensor.size_bytes and name in memory:
                    memory[name].copy_to(tensor.data, tensor.size_bytes)
        finally:
            for allocation in memory.values():
                allocation.free()

    def _memory(
        self, name: str, problem: Problem, which: str, plan: Mapping[str, Any]
    ) -> DeviceMemory:
        if name in plan["scratch_bytes"]:
            size = max(plan["scratch_bytes"][name], _MIN_BYTES)
            memory = DeviceMemory(self.gpu, size)
            if self._poison:
                memory.fill(0xFF)
            return memory
        tensor = _tensor(problem, name)
        memory = DeviceMemory(self.gpu, max(tensor.size_bytes, _MIN_BYTES))
        # A result's memory was filled with NaN by who made it.
        is_result = name in _PASS_RESULTS[which]
        if tensor.size_bytes and (self._poison or not is_result):
            memory.copy_from(tensor.data, tensor.size_bytes)
        return memory

    def _launch(
        self,
        plan: Mapping[str, Any],
        problem: Problem,
        memory: Mapping[str, DeviceMemory],
    ) -> None:
        addresses = {name: allocation.address for name, allocation in memory.items()}
        element_bytes = _element_bytes(problem)
        params = []
        try:
            for launch in plan["launches"]:
                data = bytes.fromhex(launch["params"])
                params.append(DeviceMemory(self.gpu, len(data)))
                pointer = ctypes.create_string_buffer(data, len(data))
                params[-1].copy_from(ctypes.addressof(pointer), len(data))
            for launch, own_params in zip(plan["launches"], params):
                table = buffer_table(
                    launch, addresses, element_bytes, own_params.address
                )
                argument = (ctypes.c_uint64 * NUM_BUFFERS)(*table)
                module = self._module(launch["kernel"])
                # In order with the launches: all are in the default stream.
                module.write_global(
                    "jfm_function_constants", constants_bytes(launch["constants"])
                )
                self.gpu.launch(
                    module.function(launch["kernel"]),
                    launch["grid"],
                    launch["threads"],
                    argument,
                )
                count = self.used.get(launch["kernel"], 0)
                self.used[launch["kernel"]] = count + 1
            self.gpu.synchronize()
        finally:
            for allocation in params:
                allocation.free()

    def _module(self, kernel: str) -> Module:
        path = self._kernels[kernel]
        if path not in self._modules:
            self._modules[path] = Module(self.gpu, path.read_bytes())
        return self._modules[path]


def _bound(plan: Mapping[str, Any]) -> Iterator[str]:
    for launch in plan["launches"]:
        for _, name, _ in launch["buffers"]:
            yield name


def _tensor(problem: Problem, name: str) -> Any:
    return getattr(problem, _MEMBERS.get(name, name))


def _element_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of an element of each operand."""
    sizes = dict.fromkeys(
        ("query", "key", "value", "out", "dout", "dquery", "dkey", "dvalue"),
        4 if problem.dtype == 0 else 2,
    )
    sizes["bias"] = 4 if problem.bias_dtype == 0 else 2
    sizes["mask"] = 1
    is_bias_gradient = problem.gradient_of == 0
    sizes["gradient"] = sizes["bias"] if is_bias_gradient else 4
    others = (
        *("q_offset", "q_segment_ids", "kv_segment_ids", "query_seq_lengths"),
        *("key_value_seq_lengths", "sinks", "alibi_slopes", "dropout_key"),
        *("dropout_batch_indices", "dropout_head_indices", "logsumexp", "dlogsumexp"),
    )
    return sizes | dict.fromkeys(others, 4)
