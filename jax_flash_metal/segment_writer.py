"""Writes the modules of a plan: the segments, each once, and the shadow.

What goes into a segment has been decided by partition.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from jax_flash_metal import call_records
from jax_flash_metal.plan import UNIMPLEMENTED, PartitionError
from jax_flash_metal.program_graph import Graph, Node, functions_by_name
from jax_flash_metal.stablehlo import attribute_names

# Donation and layouts of main's arguments and results say nothing about a segment's.
_DONATION = "tf.aliasing_output"
_KEPT_MODULE_ATTRIBUTES = ("mhlo.num_partitions", "mhlo.num_replicas")


@dataclasses.dataclass
class SegmentBody:
    """What a segment computes.

    Attributes:
      items: Nodes in the order in which they run; an int is a token to make anew.
      inputs: Values that it is given.
      outputs: Values that it gives back.
    """

    items: list[Node | int]
    inputs: list[int]
    outputs: list[int]


class SegmentWriter:
    """Collects modules; equal ones are one."""

    def __init__(
        self, graph: Graph, module: Any, serialize: Callable[[Any], bytes]
    ) -> None:
        self.segments: list[bytes] = []
        self._graph = graph
        self._serialize = serialize
        self._indices: dict[bytes, int] = {}
        attributes = module.operation.attributes
        self._attributes = {
            name: attributes[name]
            for name in _KEPT_MODULE_ATTRIBUTES
            if name in attributes
        }

    def write(self, body: SegmentBody, aliases: Mapping[int, int]) -> int:
        """The index of the segment.

        Args:
          aliases: Positions of outputs by those of the inputs whose memory they take.

        Raises:
          PartitionError: No buffer can hold an input or output.
        """
        for value in (*body.inputs, *body.outputs):
            require_buffer(self._graph, value)
        types = self._graph.types
        module = ir.Module.create()
        for name, attribute in self._attributes.items():
            module.operation.attributes[name] = attribute
        module.operation.attributes["sym_name"] = ir.StringAttr.get("segment")
        inputs = [types[v].mlir for v in body.inputs]
        function = _main(module, inputs, [types[v].mlir for v in body.outputs])
        function.attributes["arg_attrs"] = _argument_attributes(len(inputs), aliases)
        block = function.regions[0].blocks[0]
        values = dict(zip(body.inputs, block.arguments))
        ip = ir.InsertionPoint(block)
        symbols: dict[str, None] = {}
        for item in body.items:
            if isinstance(item, int):
                values[item] = _create("stablehlo.create_token", types[item].mlir, ip)
            else:
                values.update(zip(item.results, _clone(item, values, ip)))
                symbols.update(dict.fromkeys(item.symbols))
        _return([values[v] for v in body.outputs], ip)
        for called in self._graph.functions.closure(symbols):
            called.clone(ip=ir.InsertionPoint(module.body))
        module.operation.verify()
        return self._add(self._serialize(module))

    def _add(self, data: bytes) -> int:
        index = self._indices.setdefault(data, len(self.segments))
        if index == len(self.segments):
            self.segments.append(data)
        return index


def require_buffer(graph: Graph, value: int) -> None:
    """Raises a PartitionError unless a buffer can hold the value."""
    if graph.types[value].tensor is None:
        raise PartitionError(
            UNIMPLEMENTED,
            "this program cannot be cut at its custom calls, because a value would "
            f"have to pass from one part to another and {graph.types[value].reason}.",
        )


def shadow(module: Any) -> Any:
    """A module that looks like `module` from outside and returns zeros."""
    main = functions_by_name(module)["main"]
    new = ir.Module.create()
    _copy_attributes(module.operation, new.operation)
    for op in module.body.operations:
        if op.operation.name != "func.func":  # sdy.mesh
            op.operation.clone(ip=ir.InsertionPoint(new.body))
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    function = _main(new, kind.inputs, kind.results)
    _copy_attributes(main, function)
    ip = ir.InsertionPoint(function.regions[0].blocks[0])
    _return([_zeros(result, ip) for result in kind.results], ip)
    new.operation.verify()
    return new


def _zeros(mlir: Any, ip: Any) -> Any:
    """A broadcast scalar: XLA would lay out a constant in full while compiling."""
    known = call_records.value_type(mlir)
    if known.tensor is None or known.is_token:
        reason = known.reason or "tokens have no buffers"
        raise PartitionError(
            UNIMPLEMENTED,
            f"a program with custom calls cannot return {mlir}: {reason}.",
        )
    element = ir.RankedTensorType(mlir).element_type
    scalar = ir.RankedTensorType.get([], element)
    if str(element).startswith("complex"):
        # The bindings cannot hold a complex constant.
        half = ir.RankedTensorType.get([], ir.ComplexType(element).element_type)
        parts = [_zero(half, ip), _zero(half, ip)]
        constant = _create("stablehlo.complex", scalar, ip, parts)
    else:
        constant = _zero(scalar, ip)
    if not known.tensor.dims:
        return constant
    nowhere = ir.DenseI64ArrayAttr.get([])
    return _create(
        "stablehlo.broadcast_in_dim", mlir, ip, [constant], broadcast_dimensions=nowhere
    )


def _zero(scalar: Any, ip: Any) -> Any:
    element = str(ir.RankedTensorType(scalar).element_type)
    zero = "0" if element.lstrip("u").startswith("i") else "0.0"
    if element == "i1":
        zero = "false"
    value = ir.Attribute.parse(f"dense<{zero}> : {scalar}")
    return _create("stablehlo.constant", scalar, ip, value=value)


def _main(module: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    function = ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get("main"),
            "sym_visibility": ir.StringAttr.get("public"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs)),
        },
        regions=1,
        ip=ir.InsertionPoint(module.body),
    )
    function.regions[0].blocks.append(*inputs)
    return function


def _argument_attributes(count: int, aliases: Mapping[int, int]) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return ir.ArrayAttr.get(
        [
            ir.DictAttr.get(
                {_DONATION: ir.IntegerAttr.get(i32, aliases[i])} if i in aliases else {}
            )
            for i in range(count)
        ]
    )


def _copy_attributes(source: Any, destination: Any) -> None:
    for name in attribute_names(source.attributes):
        destination.attributes[name] = source.attributes[name]


def _create(
    name: str, result: Any, ip: Any, operands: Sequence[Any] = (), **attributes: Any
) -> Any:
    return ir.Operation.create(
        name, results=[result], operands=list(operands), attributes=attributes, ip=ip
    ).results[0]


def _return(values: Sequence[Any], ip: Any) -> None:
    ir.Operation.create("func.return", operands=values, ip=ip)


def _clone(node: Node, values: Mapping[int, Any], ip: Any) -> Any:
    """The results of a copy of the node's operation that uses `values`."""
    op = node.op.clone(ip=ip).operation
    _use(op, node, values)
    return op.results


def _use(op: Any, node: Node, values: Mapping[int, Any]) -> None:
    """Replaces operands, in regions as well, by those in `values`."""
    operands = op.operands
    for index, value in enumerate(node.operands):
        if value in values:
            operands[index] = values[value]
    if not node.captures:
        return
    for region, mirror in zip(op.regions, node.regions):
        *inner_ops, terminator = region.blocks[0].operations
        for inner_op, inner in zip(inner_ops, mirror.nodes):
            _use(inner_op.operation, inner, values)
        operands = terminator.operation.operands
        for index, value in enumerate(mirror.outputs):
            if value in values:
                operands[index] = values[value]
