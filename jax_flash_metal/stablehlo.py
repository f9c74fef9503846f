"""StableHLO programs as bytes and as MLIR modules, and rewrites for modest hosts.

Reads what JAX hands to a PJRT plugin, writes it at the version that the host reads,
and takes out what a host with one device or with an old compiler does not know. Knows
nothing of custom calls of ours: that is partition.py, which calls this.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

# MLIR's Python classes have no type hints in every jaxlib.
Module: TypeAlias = Any
Operation: TypeAlias = Any

# The producer string at the head of a portable artifact (a fixed part of the format).
_PRODUCER = re.compile(rb"StableHLO_v(\d+\.\d+\.\d+)\x00")
_PRODUCER_END = 64  # bytes
_BYTECODE_MAGIC = b"ML\xefR"

# Custom calls that only say how a value is spread over devices.
_SHARDING_TARGETS = frozenset(
    ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
)
_SHARDING_TARGET_PREFIX = "xla.sdy."
_SHARDING_ATTRIBUTES = frozenset(
    ("mhlo.sharding", "sdy.sharding", "sdy.sharding_rule", "xla.sdy.sharding")
)
_FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"

# On one device these return their operands, when the types agree.
_COLLECTIVES = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("all_gather", "all_reduce", "all_to_all"),
        *("collective_broadcast", "reduce_scatter"),
    )
)
_ACCURACY = "result_accuracy"
_DEVICE_IDS = frozenset(("stablehlo.partition_id", "stablehlo.replica_id"))
_ONE_DEVICE = "so it is for more than one device, and this platform has one."


class StablehloError(ValueError):
    """A program that cannot be read, or not be written as asked."""


# -- Bytes ---------------------------------------------------------------------------


def parse(program: bytes) -> tuple[Module, str | None]:
    """The module, in a context of its own, and the StableHLO version it came in.

    Args:
      program: a portable artifact, MLIR bytecode or MLIR text.

    Returns:
      The module and "X.Y.Z"; None for a program that is not a portable artifact.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    version = artifact_version(program)
    context = _make_context()
    try:
        with context:
            if version is None:
                return ir.Module.parse(program), None
            return stablehlo.deserialize_portable_artifact(context, program), version
    except (ir.MLIRError, ValueError, SystemError) as error:  # jaxlib 0.4: the last
        form = "MLIR" if version is None else f"a StableHLO {version} artifact"
        raise StablehloError(f"the program cannot be read as {form}: {error}") from None


def artifact_version(program: bytes) -> str | None:
    """ "X.Y.Z" of a portable artifact, None for anything else."""
    if not program.startswith(_BYTECODE_MAGIC):
        return None
    match = _PRODUCER.search(program, 0, _PRODUCER_END)
    return match[1].decode() if match else None


def serialize(module: Module, version: str | None) -> bytes:
    """The module as a portable artifact of StableHLO `version`.

    Requests for an accuracy, which XLA may ignore, are left out where that version has
    no form for them.

    Args:
      module: left as it is.
      version: "X.Y.Z"; None = the newest that the installed jaxlib writes.

    Raises:
      StablehloError: an operation did not exist at that version; its name is given.
    """
    from jaxlib.mlir.dialects import stablehlo

    if version is None:
        version = stablehlo.get_current_version()
    program = _bytecode(module)
    try:
        return _write(program, version)
    except (ValueError, RuntimeError):
        module, _ = parse(program)
        _drop_accuracies(module)
    try:
        return _write(_bytecode(module), version)
    except (ValueError, RuntimeError) as error:
        culprits = _not_writable(module, version)
        reason = (
            f"StableHLO {version} has no form of {', '.join(culprits)}"
            if culprits
            else f"it cannot be written as StableHLO {version}: {error}"
        )
        raise StablehloError(
            f"the host's compiler cannot take this program: {reason}."
        ) from None


def newer_than(a: str, b: str) -> bool:
    """Whether version `a` ("X.Y.Z") is newer than version `b`."""
    return _numbers(a) > _numbers(b)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _make_context() -> Any:
    """A fresh context with every dialect that a program from JAX may use."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    context = ir.Context()
    # Otherwise each context starts threads of its own, for work of milliseconds.
    context.enable_multithreading(False)
    registry = ir.DialectRegistry()
    _upstream_dialects().register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    sdy.register_dialect(context)
    return context


def _upstream_dialects() -> Any:
    """jaxlib's module that registers MLIR's own dialects, func among them."""
    libraries = "jaxlib.mlir._mlir_libs"
    try:
        return importlib.import_module(f"{libraries}._jax_mlir_ext")
    except ImportError:  # old jaxlib
        return importlib.import_module(f"{libraries}.register_jax_dialects")


def _bytecode(module: Module) -> bytes:
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


def _write(bytecode: bytes, version: str) -> bytes:
    """XLA's own writer: it legalises what stablehlo's Python function refuses."""
    try:
        from jaxlib._jax import mlir
    except ImportError:  # jaxlib < 0.6
        from jaxlib.xla_extension import mlir

    mixed_dialects = True  # sdy may be left where the host understands it
    try:
        return bytes(
            mlir.serialize_portable_artifact(bytecode, version, mixed_dialects)
        )
    except TypeError:  # jaxlib < 0.7 does so unasked
        return bytes(mlir.serialize_portable_artifact(bytecode, version))


def _drop_accuracies(module: Module) -> None:
    for op in _operations(module.operation):
        if _ACCURACY in op.operation.attributes:
            del op.operation.attributes[_ACCURACY]


def _not_writable(module: Module, version: str) -> list[str]:
    """The operations that did not exist at `version`, each form of them once."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    culprits: dict[str, None] = {}
    tried: set[tuple[str, str]] = set()
    for op in _operations(module.operation):
        form = (_describe(op), str(op.operation.attributes))
        is_ours = op.operation.name.startswith(("stablehlo.", "chlo."))
        if not is_ours or _num_regions(op) or form in tried:
            continue
        tried.add(form)
        with module.context, ir.Location.unknown():
            alone = _bytecode(_module_of(op))
        # What cannot be written at any version only cannot stand alone.
        newest = stablehlo.get_current_version()
        if _is_writable(alone, newest) and not _is_writable(alone, version):
            culprits[_describe(op)] = None
    return list(culprits)


def _is_writable(bytecode: bytes, version: str) -> bool:
    try:
        _write(bytecode, version)
    except (ValueError, RuntimeError):
        return False
    return True


def _module_of(op: Operation) -> Module:
    """A module with one function: `op` of its arguments."""
    from jaxlib.mlir import ir

    module = ir.Module.create()
    operands = [value.type for value in op.operation.operands]
    results = [value.type for value in op.operation.results]
    function = ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get("main"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(operands, results)),
        },
        regions=1,
        ip=ir.InsertionPoint(module.body),
    )
    block = function.regions[0].blocks.append(*operands)
    clone = op.operation.clone(ip=ir.InsertionPoint(block))
    for i, argument in enumerate(block.arguments):
        clone.operation.operands[i] = argument
    ir.Operation.create(
        "func.return",
        operands=list(clone.operation.results),
        ip=ir.InsertionPoint(block),
    )
    return module


def _describe(op: Operation) -> str:
    operation = op.operation
    name: str = operation.name
    if name == "stablehlo.dot_general" and "algorithm" in operation.attributes:
        return f"{name} with an algorithm ({operation.attributes['algorithm']})"
    # Else it may be the types that are new.
    operands, results = (
        ", ".join(str(value.type) for value in values)
        for values in (operation.operands, operation.results)
    )
    return f"{name} from ({operands}) to ({results})"


# -- Rewrites ------------------------------------------------------------------------


def erase_sharding(module: Module) -> None:
    """Takes out, in place, everything that says how values are spread over devices.

    On one device all of it is the identity, collectives included.

    Raises:
      StablehloError: the program is for more than one device.
    """
    from jaxlib.mlir import ir

    with module.context, ir.Location.unknown():
        _require_one_device(module)
        for op in list(_operations(module.operation)):
            if _erases(op):
                _replace_by_operands(op)
            elif op.operation.name in _DEVICE_IDS:
                _replace_by_zero(op)
        for op in _operations(module.operation):
            _erase_sharding_attributes(op)


def device_counts(module: Module) -> dict[str, int]:
    """How many devices a program is for: the attributes of it that say so."""
    from jaxlib.mlir import ir

    attributes = module.operation.attributes
    return {
        name: ir.IntegerAttr(attributes[name]).value
        for name in ("mhlo.num_partitions", "mhlo.num_replicas")
        if name in attributes
    }


def _require_one_device(module: Module) -> None:
    for name, count in device_counts(module).items():
        if count != 1:
            raise StablehloError(f"the program has {name} = {count}, {_ONE_DEVICE}")


def _erases(op: Operation) -> bool:
    from jaxlib.mlir import ir

    name: str = op.operation.name
    if name.startswith("sdy."):
        # The terminator goes with the operation around it.
        return name != "sdy.return"
    if name == "stablehlo.custom_call":
        target = _string(op, "call_target_name")
        return target in _SHARDING_TARGETS or target.startswith(_SHARDING_TARGET_PREFIX)
    if name == "stablehlo.collective_permute":
        # Without a pair (0, 0) nobody sends, and the result is zeros: left to the host.
        return (
            len(ir.DenseElementsAttr(op.operation.attributes["source_target_pairs"]))
            > 0
        )
    return name in _COLLECTIVES


def _replace_by_operands(op: Operation) -> None:
    """Erases an operation; its results become its operands, or its body's results."""
    operation = op.operation
    name = operation.name
    values = list(operation.operands)
    if name.startswith("sdy.") and _num_regions(op) == 1:
        # manual_computation, named_computation: the body on the operands.
        block = operation.regions[0].blocks[0]
        for argument, value in zip(block.arguments, values):
            _require_same_type(name, value, argument)
            argument.replace_all_uses_with(value)
        *body, terminator = list(block.operations)
        for inner in body:
            inner.operation.move_before(operation)
        values = list(terminator.operation.operands)
    for result, value in zip(operation.results, values):
        _require_same_type(name, value, result)
        result.replace_all_uses_with(value)
    operation.erase()


def _require_same_type(name: str, before: Any, after: Any) -> None:
    if before.type != after.type:
        raise StablehloError(
            f"{name} makes {after.type} of {before.type}, {_ONE_DEVICE}"
        )


def _replace_by_zero(op: Operation) -> None:
    from jaxlib.mlir import ir

    result_type = op.operation.results[0].type
    element = ir.IntegerAttr.get(ir.RankedTensorType(result_type).element_type, 0)
    zero = ir.Operation.create(
        "stablehlo.constant",
        results=[result_type],
        attributes={"value": ir.DenseElementsAttr.get_splat(result_type, element)},
        ip=ir.InsertionPoint(op),
    )
    op.operation.results[0].replace_all_uses_with(zero.results[0])
    op.operation.erase()


def _erase_sharding_attributes(op: Operation) -> None:
    from jaxlib.mlir import ir

    operation = op.operation
    attributes = operation.attributes
    own = {
        name: attributes[name]
        for name in attribute_names(attributes)
        # The only "value" is a constant's: never a sharding, and one of complex numbers
        # is an error to touch.
        if name != "value"
    }
    kept = _without_sharding(own)
    for name in own:
        if name not in kept:
            del attributes[name]
        elif kept[name] is not own[name]:
            attributes[name] = kept[name]
    if operation.name != "func.func":
        return
    for which in ("arg_attrs", "res_attrs"):
        if which in own:
            attributes[which] = ir.ArrayAttr.get(
                [
                    ir.DictAttr.get(_without_sharding(_items(ir.DictAttr(each))))
                    for each in ir.ArrayAttr(own[which])
                ]
            )


def _without_sharding(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that say nothing about sharding; the others' objects unchanged."""
    from jaxlib.mlir import ir

    kept = {
        name: value
        for name, value in attributes.items()
        if name not in _SHARDING_ATTRIBUTES
    }
    if _FRONTEND_ATTRIBUTES in kept:
        frontend = _items(ir.DictAttr(kept[_FRONTEND_ATTRIBUTES]))
        other = {
            name: value
            for name, value in frontend.items()
            if not name.startswith(_SHARDING_TARGET_PREFIX)
        }
        if not other:
            del kept[_FRONTEND_ATTRIBUTES]
        elif len(other) < len(frontend):
            kept[_FRONTEND_ATTRIBUTES] = ir.DictAttr.get(other)
    return kept


def legalize_composites(module: Module) -> None:
    """Replaces, in place, every composite by a call of its decomposition.

    An error function keeps a name of its own, the custom call by which JAX said it
    before composites and which compilers of that time know.
    """
    from jaxlib.mlir import ir

    unused: set[str] = set()
    with module.context, ir.Location.unknown():
        composites = [
            op
            for op in _operations(module.operation)
            if op.operation.name == "stablehlo.composite"
        ]
        for op in composites:
            operation = op.operation
            decomposition = operation.attributes["decomposition"]
            name, attributes = "func.call", {"callee": decomposition}
            if _string(op, "name") == "chlo.erf":
                name, attributes = "stablehlo.custom_call", _legacy_call("mhlo.erf")
                unused.add(ir.FlatSymbolRefAttr(decomposition).value)
            call = ir.Operation.create(
                name,
                results=[result.type for result in operation.results],
                operands=list(operation.operands),
                attributes=attributes,
                loc=operation.location,
                ip=ir.InsertionPoint(op),
            )
            for old, new in zip(operation.results, call.results):
                old.replace_all_uses_with(new)
            operation.erase()
        for op in list(module.body.operations):
            if _string(op, "sym_name") in unused:
                op.operation.erase()


def _legacy_call(target: str) -> dict[str, Any]:
    from jaxlib.mlir import ir

    return {
        "call_target_name": ir.StringAttr.get(target),
        "mhlo.attributes": ir.DictAttr.get({}),
        "mhlo.version": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1),
    }


# -- What differs between versions of MLIR's bindings --------------------------------


def _operations(root: Operation) -> Iterator[Operation]:
    """`root` and every operation inside it, those in an operation before itself."""
    for region in root.operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield from _operations(op)
    yield root


def _num_regions(op: Operation) -> int:
    return len(op.operation.regions)


def attribute_names(attributes: Any) -> list[str]:
    """Names of an operation's attributes: iterating gave NamedAttributes once."""
    return [
        each if isinstance(each, str) else str(each.name) for each in list(attributes)
    ]


def _items(dictionary: Any) -> dict[str, Any]:
    return {
        each.name: each.attr
        for each in (dictionary[index] for index in range(len(dictionary)))
    }


def _string(op: Operation, name: str) -> str:
    """A string attribute's value; "" when there is no such attribute."""
    from jaxlib.mlir import ir

    attributes = op.operation.attributes
    return ir.StringAttr(attributes[name]).value if name in attributes else ""
