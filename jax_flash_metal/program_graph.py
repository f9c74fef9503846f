"""A StableHLO program as Python objects: what partition.py decides upon.

`read` changes the module (inlines the functions that contain custom calls of ours, puts
transposes around calls that want another layout, renames functions by their content)
and then mirrors it as nodes whose values are integers. Which operations are cheap is
decided here; what runs when is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from jaxlib.mlir import ir

from jax_flash_metal import call_records
from jax_flash_metal.call_records import ValueType
from jax_flash_metal.plan import UNIMPLEMENTED, PartitionError
from jax_flash_metal.stablehlo import attribute_names

# A constant from this size on, unless it is one number repeated, exists once per
# program instead of once per segment.
LARGE_CONSTANT_BYTES = 64 * 1024

# Operations that the host can drive.
CONTROL_FLOW = frozenset(("stablehlo.while", "stablehlo.case", "stablehlo.if"))
# Where an operation names a function; func.call and composites can be inlined.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
_CALLED_COMPUTATIONS = "called_computations"

_EFFECTS = frozenset(
    f"stablehlo.{name}" for name in ("infeed", "outfeed", "send", "recv")
)
# Costs less to compute again than to keep: made of nothing …
_SOURCES = frozenset(
    f"stablehlo.{name}" for name in ("constant", "iota", "create_token", "after_all")
)
# … or of such values by one of these, …
_FOLDED = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("abs", "add", "and", "broadcast_in_dim", "compare", "concatenate", "convert"),
        *("maximum", "minimum", "multiply", "negate", "not", "or", "pad", "reshape"),
        *("reverse", "select", "slice", "subtract", "transpose", "xor"),
    )
)
# … or a larger or equal form of a value, which compilers fuse into the consumer.
_VIEWS = frozenset(("stablehlo.broadcast_in_dim", "stablehlo.reshape"))
# A longer chain of cheap operations is not cheap.
_MAX_CHEAP_DEPTH = 16


@dataclasses.dataclass(eq=False)
class Node:
    """An operation.

    Attributes:
      captures: Values from outside that its regions use.
      symbols: Functions that it, or an operation in it, names.
      has_target: It is a custom call of ours or contains one.
      has_effect: It must run, once, in the program's order with others of its kind.
      is_free: It is made of constants, at little cost.
      is_view: It is a larger or equal form of its operand.
    """

    op: Any
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...] = ()
    regions: list[Region] = dataclasses.field(default_factory=list)
    captures: tuple[int, ...] = ()
    symbols: tuple[str, ...] = ()
    has_target: bool = False
    has_effect: bool = False
    is_free: bool = False
    is_view: bool = False
    cheap_depth: int = 0

    @property
    def is_cheap(self) -> bool:
        """Whether it is computed again wherever it is needed."""
        return self.is_free or self.is_view


@dataclasses.dataclass(eq=False)
class Region:
    arguments: tuple[int, ...]
    nodes: list[Node]
    outputs: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Graph:
    """A program's main function.

    Attributes:
      types: Of each value.
      producers: The node that each value is a result of; None for arguments.
      constants: Large constants of main and of the regions that the host drives. No
        region has them among its nodes; their values count as main's inputs.
      functions: Those that nodes name.
    """

    main: Region
    types: list[ValueType]
    producers: list[Node | None]
    constants: list[Node]
    functions: Functions


def read(module: Any, targets: Collection[str]) -> Graph:
    """Mirrors `module`, which it changes; call it inside of the module's context.

    Raises:
      PartitionError: A custom call of ours is where no host can make it.
    """
    _Inliner(module, targets).run()
    functions = Functions(module)
    return _Reader(module, targets, functions).read()


def all_operations(root: Any) -> list[Any]:
    """Everything inside of an operation."""
    found: list[Any] = []
    for region in root.regions:
        for block in region.blocks:
            for op in block.operations:
                found.append(op.operation)
                if len(op.operation.regions):
                    found += all_operations(op.operation)
    return found


def functions_by_name(module: Any) -> dict[str, Any]:
    return {
        ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }


# -- Inlining ------------------------------------------------------------------------


class _Inliner:
    """Makes main, and the regions in it, contain every custom call of ours directly."""

    def __init__(self, module: Any, targets: Collection[str]) -> None:
        self._module = module
        self._targets = targets
        self._functions = functions_by_name(module)
        self._contains: dict[str, bool | None] = {}  # None: being looked at

    def run(self) -> None:
        for name in self._functions:
            self._prepare(name)

    def _prepare(self, name: str) -> bool:
        """Whether function `name` contains a target; if so directly from now on."""
        if name in self._contains:
            contains = self._contains[name]
            if contains is None:
                raise PartitionError(
                    UNIMPLEMENTED, f"function {name} calls itself, which XLA has not."
                )
            return contains
        self._contains[name] = None
        found = False
        for op in all_operations(self._functions[name]):
            if op.name == "stablehlo.custom_call":
                if call_records.target_of(op) in self._targets:
                    found = True
                    _use_row_major(op)
            elif op.name in _CALLS:
                callee = ir.FlatSymbolRefAttr(op.attributes[_CALLS[op.name]]).value
                if self._prepare(callee):
                    found = True
                    self._inline(op, self._functions[callee])
        self._contains[name] = found
        return found

    def _inline(self, call: Any, function: Any) -> None:
        # MLIR's own inliner does not know func.call in jaxlib's build.
        copy = function.clone(ip=ir.InsertionPoint(self._module.body)).operation
        block = copy.regions[0].blocks[0]
        for argument, operand in zip(block.arguments, call.operands):
            argument.replace_all_uses_with(operand)
        *body, terminator = [op.operation for op in block.operations]
        for op in body:
            op.move_before(call)
        for result, value in zip(call.results, terminator.operands):
            result.replace_all_uses_with(value)
        call.erase()
        copy.erase()


def _use_row_major(call: Any) -> None:
    """Transposes around a call whose operands or results have another layout.

    The new call's buffers are row-major with the bytes that the old one's layouts ask
    for. Its layout attributes stay: they tell the order of the dimensions.
    """
    operands = call_records.layouts(call, "operand_layouts")
    results = call_records.layouts(call, "result_layouts")
    orders = [
        [call_records.memory_order(layout) for layout in layouts or ()]
        for layouts in (operands, results)
    ]
    if all(order == sorted(order) for side in orders for order in side):
        return
    ip = ir.InsertionPoint(call)
    operand_orders, result_orders = orders
    values = list(call.operands)
    for i, order in enumerate(operand_orders):
        values[i] = _transpose(values[i], order, ip)
    types = [result.type for result in call.results]
    for i, order in enumerate(result_orders):
        types[i] = _transposed_type(types[i], order)
    attributes = {
        name: call.attributes[name] for name in attribute_names(call.attributes)
    }
    new = ir.Operation.create(
        call.name, results=types, operands=values, attributes=attributes, ip=ip
    )
    for i, (old, result) in enumerate(zip(list(call.results), list(new.results))):
        if i < len(result_orders):
            order = result_orders[i]
            result = _transpose(result, [order.index(d) for d in range(len(order))], ip)
        old.replace_all_uses_with(result)
    call.erase()


def _transpose(value: Any, order: Sequence[int], ip: Any) -> Any:
    if list(order) == sorted(order):
        return value
    permutation = ir.DenseI64ArrayAttr.get(list(order))
    return ir.Operation.create(
        "stablehlo.transpose",
        results=[_transposed_type(value.type, order)],
        operands=[value],
        attributes={"permutation": permutation},
        ip=ip,
    ).results[0]


def _transposed_type(mlir: Any, order: Sequence[int]) -> Any:
    if not order:
        return mlir
    ranked = ir.RankedTensorType(mlir)
    shape = [ranked.shape[dimension] for dimension in order]
    return ir.RankedTensorType.get(shape, ranked.element_type)


# -- Functions -----------------------------------------------------------------------


class Functions:
    """The functions other than main, renamed so that equal ones have equal names.

    Segments that are equal but for the numbers in jax's names (_where, _where_3) get
    equal bytes this way.
    """

    def __init__(self, module: Any) -> None:
        self._by_old_name = functions_by_name(module)
        self._new_names: dict[str, str] = {}
        self._ops: dict[str, Any] = {}
        self._named_by: dict[str, tuple[str, ...]] = {}
        self._effects: dict[str, bool] = {}

    def rename_references(self, op: Any) -> tuple[str, ...]:
        """Makes `op` name functions by their new names, which it returns."""
        if op.name in _CALLS:
            attribute = _CALLS[op.name]
            name = self._resolve(ir.FlatSymbolRefAttr(op.attributes[attribute]).value)
            op.attributes[attribute] = ir.FlatSymbolRefAttr.get(name)
            return (name,)
        if op.name != "stablehlo.custom_call":
            return ()
        if _CALLED_COMPUTATIONS not in op.attributes:
            return ()
        names = [
            self._resolve(ir.FlatSymbolRefAttr(each).value)
            for each in ir.ArrayAttr(op.attributes[_CALLED_COMPUTATIONS])
        ]
        op.attributes[_CALLED_COMPUTATIONS] = ir.ArrayAttr.get(
            [ir.FlatSymbolRefAttr.get(name) for name in names]
        )
        return tuple(names)

    def has_effect(self, name: str) -> bool:
        return self._effects[name]

    def closure(self, names: Collection[str]) -> list[Any]:
        """The functions of these names and all that they call, in a fixed order."""
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending.extend(self._named_by[name])
        return [self._ops[name] for name in sorted(found)]

    def _resolve(self, old_name: str) -> str:
        if old_name in self._new_names:
            return self._new_names[old_name]
        op = self._by_old_name[old_name]
        named: dict[str, None] = {}
        effect = False
        for inner in all_operations(op):
            symbols = self.rename_references(inner)
            named.update(dict.fromkeys(symbols))
            effect = effect or has_effect(inner) or any(map(self.has_effect, symbols))
        op.attributes["sym_name"] = ir.StringAttr.get("function")
        # In local scope values are numbered from here, not from the module's start.
        content = op.get_asm(enable_debug_info=False, use_local_scope=True)
        name = f"function_{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        op.attributes["sym_name"] = ir.StringAttr.get(name)
        self._new_names[old_name] = name
        self._ops.setdefault(name, op)
        self._named_by[name] = tuple(named)
        self._effects[name] = effect
        return name


def has_effect(op: Any) -> bool:
    """Whether the operation itself acts on the world."""
    if op.name == "stablehlo.custom_call":
        return call_records.has_side_effect(op)
    return op.name in _EFFECTS


# -- Mirroring -----------------------------------------------------------------------


class _Reader:
    def __init__(
        self, module: Any, targets: Collection[str], functions: Functions
    ) -> None:
        self._module = module
        self._targets = targets
        self._functions = functions
        self._ids: dict[Any, int] = {}
        self._types: list[ValueType] = []
        self._producers: list[Node | None] = []
        self._known_types: dict[Any, ValueType] = {}
        self._constants: dict[Any, Node] = {}

    def read(self) -> Graph:
        main = self._read_region(functions_by_name(self._module)["main"].regions[0])
        self._hoist_constants(main, {}, host_driven=True)
        _finish(main)
        self._keep_copies(main)
        return Graph(
            main=main,
            types=self._types,
            producers=self._producers,
            constants=list(self._constants.values()),
            functions=self._functions,
        )

    def _define(self, value: Any, producer: Node | None) -> int:
        identity = len(self._types)
        self._ids[value] = identity
        mlir = value.type
        known = self._known_types.get(mlir)
        if known is None:
            known = self._known_types[mlir] = call_records.value_type(mlir)
        self._types.append(known)
        self._producers.append(producer)
        return identity

    def _read_region(self, region: Any) -> Region:
        if len(region.blocks) != 1:
            raise PartitionError(
                UNIMPLEMENTED, "a region of several blocks, which StableHLO has not."
            )
        block = region.blocks[0]
        arguments = tuple(self._define(a, None) for a in block.arguments)
        *operations, terminator = [op.operation for op in block.operations]
        nodes = [self._read_operation(op) for op in operations]
        outputs = tuple(self._ids[v] for v in terminator.operands)
        return Region(arguments, nodes, outputs)

    def _read_operation(self, op: Any) -> Node:
        name = op.name
        node = Node(op, name, tuple(self._ids[v] for v in op.operands))
        symbols = dict.fromkeys(self._functions.rename_references(op))
        node.has_effect = has_effect(op) or any(
            map(self._functions.has_effect, symbols)
        )
        node.regions = [self._read_region(region) for region in op.regions]
        for inner in (inner for region in node.regions for inner in region.nodes):
            symbols.update(dict.fromkeys(inner.symbols))
            node.has_effect = node.has_effect or inner.has_effect
            node.has_target = node.has_target or inner.has_target
        node.symbols = tuple(symbols)
        if node.has_target and name not in CONTROL_FLOW:
            raise PartitionError(
                UNIMPLEMENTED,
                f"a custom call inside of {name}: the host cannot be stopped there; "
                "only loops and conditionals may contain one.",
            )
        if name == "stablehlo.custom_call":
            node.has_target = call_records.target_of(op) in self._targets
        node.results = tuple(self._define(v, node) for v in op.results)
        self._judge_cost(node)
        return node

    def _judge_cost(self, node: Node) -> None:
        producers = [self._producers[v] for v in node.operands]
        depth = 1 + max((p.cheap_depth for p in producers if p), default=0)
        if node.has_effect or depth > _MAX_CHEAP_DEPTH:
            return
        if node.name == "stablehlo.constant":
            node.is_free = not self._is_large(node)
        elif node.name in _SOURCES or node.name in _FOLDED:
            node.is_free = all(p is not None and p.is_free for p in producers)
        if node.name in _VIEWS and not node.is_free:
            before = self._types[node.operands[0]].num_bytes
            after = self._types[node.results[0]].num_bytes
            node.is_view = after >= before
        node.cheap_depth = depth if node.is_cheap else 0

    def _keep_copies(self, region: Region) -> None:
        """Views of the operand's own size that need a buffer are not made twice.

        A reshaped query that a forward and a backward call take is the usual case: its
        one buffer serves both, and the operand need not be kept for the second.
        """
        buffers = [*region.outputs]
        for node in region.nodes:
            if node.has_target:
                buffers += node.operands
                for inner in node.regions:
                    self._keep_copies(inner)
        for value in buffers:
            producer = self._producers[value]
            if producer is not None and producer.is_view:
                before = self._types[producer.operands[0]].num_bytes
                if self._types[value].num_bytes < 2 * before:
                    producer.is_view = False

    def _hoist_constants(
        self, region: Region, renamed: dict[int, int], *, host_driven: bool
    ) -> None:
        """Takes large constants out of a region and of those in it.

        Only where the host goes from step to step: what is inside of a segment is
        there once already.
        """
        nodes = []
        for node in region.nodes:
            if host_driven and node.name == "stablehlo.constant" and not node.is_free:
                first = self._constants.setdefault(_constant_key(node), node)
                renamed[node.results[0]] = first.results[0]
                continue
            node.operands = tuple(renamed.get(v, v) for v in node.operands)
            for inner in node.regions:
                self._hoist_constants(inner, renamed, host_driven=node.has_target)
            nodes.append(node)
        region.nodes = nodes
        region.outputs = tuple(renamed.get(v, v) for v in region.outputs)

    def _is_large(self, constant: Node) -> bool:
        if self._types[constant.results[0]].num_bytes < LARGE_CONSTANT_BYTES:
            return False
        # Elided in the text is every long constant but a number repeated; to ask the
        # attribute itself does not work for complex numbers.
        return "__elided__" in constant.op.get_asm(large_elements_limit=1)


def _constant_key(node: Node) -> Any:
    """Equal for equal constants, where the bindings can tell."""
    try:
        return node.op.attributes["value"]
    except (RuntimeError, TypeError):  # complex numbers
        return node.results[0]


def _finish(region: Region) -> None:
    """Drops what nothing uses, and notes the captures, in regions the host drives."""
    for node in region.nodes:
        if node.has_target:
            for inner in node.regions:
                _finish(inner)
        _set_captures(node)
    live = set(region.outputs)
    kept = []
    for node in reversed(region.nodes):
        if node.has_effect or not live.isdisjoint(node.results):
            live.update(node.operands)
            live.update(node.captures)
            kept.append(node)
    region.nodes = kept[::-1]


def _set_captures(node: Node) -> None:
    used: dict[int, None] = {}
    defined: set[int] = set()
    for region in node.regions:
        defined.update(region.arguments)
        for inner in region.nodes:
            if inner.regions and not inner.captures:
                _set_captures(inner)
            used.update(dict.fromkeys(inner.operands))
            used.update(dict.fromkeys(inner.captures))
            defined.update(inner.results)
        used.update(dict.fromkeys(region.outputs))
    node.captures = tuple(v for v in used if v not in defined)
