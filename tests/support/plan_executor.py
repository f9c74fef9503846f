"""Runs plans in Python: segments on jaxlib's CPU, custom calls as NumPy functions.

As strict as the plan allows: a value is dropped when the plan says that it is dead, and
donated inputs are given away, so that a plan which uses one again fails. Where the C++
executor looks whether it holds the only reference, this one copies.
"""

import itertools

import jax
import ml_dtypes
import numpy as np
from jax._src import xla_bridge
from jaxlib import xla_client

from jax_flash_metal import stablehlo
from jax_flash_metal.partition import HostProfile, Plan, plan_program
from jax_flash_metal.plan import NO_VALUE, Array, Scalar, StepKind

# num_replicas = num_partitions = 1 in ExecutableBuildOptions: the least XLA accepts.
OPTIONS = bytes.fromhex("1a0420012801")

NEWEST_HOST = HostProfile()

DTYPES = {
    1: np.bool_,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint8,
    7: np.uint16,
    8: np.uint32,
    9: np.uint64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    15: np.complex64,
    16: ml_dtypes.bfloat16,
    18: np.complex128,
    19: ml_dtypes.float8_e5m2,
    20: ml_dtypes.float8_e4m3fn,
}


def plan(program: bytes, targets, host=NEWEST_HOST, options=OPTIONS) -> Plan:
    """The plan of a program, which must need one."""
    result = plan_program(program, options, host, targets)
    assert isinstance(result, Plan), result
    return result


def attributes(encoded) -> dict:
    """A call's attributes as Python and NumPy values."""
    return {name: _attribute(value) for name, value in encoded}


def _attribute(value):
    if isinstance(value, Scalar):
        return np.frombuffer(value.data, DTYPES[value.dtype])[0]
    if isinstance(value, Array):
        array = np.frombuffer(value.data, DTYPES[value.dtype])
        assert array.size == value.count
        return array
    return value if isinstance(value, str) else attributes(value)


def compile_module(module: bytes):
    """An executable of jaxlib's CPU client."""
    parsed, _ = stablehlo.parse(module)
    backend = xla_bridge.get_backend("cpu")
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    # Half the time to compile, which is most of what these tests take.
    options.env_option_overrides = [("xla_backend_optimization_level", "0")]
    devices = backend.local_devices()[:1]
    if hasattr(backend, "compile_and_load"):
        return backend.compile_and_load(
            parsed, xla_client.DeviceList(tuple(devices)), options
        )
    return backend.compile(str(parsed), options)


def execute(executable, arguments):
    """The results of an executable, as jax's arrays, from NumPy's or jax's."""
    results = executable.execute_sharded([to_device(x) for x in arguments])
    arrays = results.disassemble_into_single_device_arrays()
    return [shards[0] for shards in arrays]


def to_device(x):
    """A jax array; a new one if `x` is not one."""
    return x if isinstance(x, jax.Array) else _copy(x)


def _copy(x):
    # jax makes 64-bit numbers 32-bit ones without the setting; programs contain them.
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        return jax.numpy.array(x, copy=True)
    finally:
        jax.config.update("jax_enable_x64", before)


class PlanExecutor:
    """A plan, loaded.

    Args:
      handlers: By target: function of (attributes, operands, result types as
        (shape, dtype)) to the list of results.
    """

    def __init__(self, plan: Plan, handlers, compiled=None):
        self.plan = plan
        self.handlers = handlers
        self.num_segment_runs = 0
        self.call_log = []
        self._compiled = {} if compiled is None else compiled
        self._constants = {}
        if plan.constants_segment >= 0:
            values = self._run_segment(plan.constants_segment, [])
            self._constants = dict(zip(plan.constants, values, strict=True))
        self.num_segment_runs = 0

    def run(self, *arguments):
        """The results of the program, as NumPy arrays."""
        arrays = [to_device(x) for x in arguments]
        main = self.plan.blocks[0]
        results = [np.asarray(x) for x in self._run_block(0, arrays)]
        for value, array in zip(main.inputs, arrays):
            assert value in main.donated or not array.is_deleted()
        return results

    def _run_block(self, index, arguments):
        block = self.plan.blocks[index]
        env = dict(zip(block.inputs, arguments, strict=True))
        if index == 0:
            env.update(self._constants)
        for step in block.steps:
            inputs = [None if v == NO_VALUE else env[v] for v in step.inputs]
            outputs = self._run_step(step, inputs)
            for value in step.dead:
                env.pop(value, None)
            for value, array in zip(step.outputs, outputs, strict=True):
                assert value not in env
                if value != NO_VALUE and value not in step.dead:
                    assert 0 <= value < block.num_values
                    env[value] = array
        return [env[v] for v in block.outputs]

    def _run_step(self, step, inputs):
        if step.kind is StepKind.CALL:
            return self._run_call(step.index, inputs)
        if step.kind is StepKind.WHILE:
            return self._run_while(step, inputs)
        if step.kind is not StepKind.SEGMENT:
            return self._run_branch(step, inputs)
        outputs = self._run_segment(step.index, inputs)
        for position, array in enumerate(inputs):
            assert array.is_deleted() == (position in step.donated)
        assert {step.inputs[position] for position in step.donated} <= {*step.dead}
        return outputs

    def _run_segment(self, index, inputs):
        self.num_segment_runs += 1
        module = self.plan.segments[index]
        executable = self._compiled.get(module)
        if executable is None:
            executable = self._compiled[module] = compile_module(module)
        return execute(executable, inputs)

    def _run_call(self, index, inputs):
        call = self.plan.calls[index]
        self.call_log.append(call.target)
        # NumPy's view of an array that is to be donated would keep it from that.
        operands = [None if x is None else np.asarray(_copy(x)) for x in inputs]
        for array, tensor in zip(operands, call.operands, strict=True):
            if array is not None:
                assert array.dtype == DTYPES[tensor.dtype]
                assert array.size == np.prod(tensor.dims, dtype=int)
        types = [(t.dims, DTYPES.get(t.dtype)) for t in call.results]
        results = self.handlers[call.target](
            attributes(call.attributes), operands, types
        )
        for array, (dims, dtype) in zip(results, types, strict=True):
            assert array is None or array.dtype == dtype
            assert array is None or array.size == np.prod(dims, dtype=int)
        return [None if x is None else _copy(x) for x in results]

    def _run_while(self, step, inputs):
        condition, body = step.blocks
        captures = inputs[: step.num_captures]
        carry = inputs[step.num_captures :]
        for _ in itertools.count():
            carry = [_copy(x) for x in carry]
            (proceed,) = self._run_block(condition, captures + carry)
            assert proceed.shape == () and proceed.dtype == np.bool_
            if not proceed:
                return carry
            carry = self._run_block(body, captures + carry)

    def _run_branch(self, step, inputs):
        captures = inputs[1:]
        index = int(_copy(inputs[0]))  # a copy, as above
        assert len(captures) == step.num_captures
        if step.kind is StepKind.IF:
            branch = step.blocks[0 if index else 1]
        else:
            in_range = 0 <= index < len(step.blocks)
            branch = step.blocks[index if in_range else -1]
        return [_copy(x) for x in self._run_block(branch, captures)]
