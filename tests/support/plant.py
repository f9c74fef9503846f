"""Cuts any program at arbitrary places: plants custom calls that return their operand.

Partitioning then meets real programs instead of those that we thought of.
"""

import random

from jaxlib.mlir import ir

from jax_flash_metal import call_records
from jax_flash_metal.program_graph import CONTROL_FLOW, functions_by_name

TARGET = "jfm_test_identity"
_CALLEES = {"func.call": "callee", "stablehlo.composite": "decomposition"}


def identity(attributes, operands, types):
    """The handler, for PlanExecutor."""
    return list(operands)


def plant(module, rng: random.Random, probability: float, target: str = TARGET) -> int:
    """Plants calls after operations of every function, regions that the host can drive
    included; changes `module` and returns how many.

    Args:
      rng: Decides after which operations.
      probability: Of a call after each result.
      target: The calls' name: a typed FFI call without attributes, one operand and one
        result of the same type.
    """
    functions = functions_by_name(module)
    out_of_reach = _called_from_bodies(functions)
    with module.context, ir.Location.unknown():
        return sum(
            _plant_in_block(function.regions[0].blocks[0], rng, probability, target)
            for name, function in functions.items()
            if name not in out_of_reach
        )


def _plant_in_block(block, rng, probability, target):
    planted = 0
    *operations, _ = [op.operation for op in block.operations]
    for op in operations:
        if op.name in CONTROL_FLOW:
            for region in op.regions:
                planted += _plant_in_block(region.blocks[0], rng, probability, target)
        for result in op.results:
            known = call_records.value_type(result.type)
            if known.tensor is None or known.is_token or rng.random() >= probability:
                continue
            _plant_after(op, result, target)
            planted += 1
    return planted


def _plant_after(op, result, target):
    call = ir.Operation.create(
        "stablehlo.custom_call",
        results=[result.type],
        operands=[result],
        attributes={
            "call_target_name": ir.StringAttr.get(target),
            "mhlo.backend_config": ir.DictAttr.get({}),
        },
        ip=ir.InsertionPoint(op),
    )
    call.move_after(op)
    for use in list(result.uses):
        user = use.owner.operation
        # The body of a sort and the like may capture constants, and nothing else.
        if user != call and not _in_a_body(user):
            user.operands[use.operand_number] = call.results[0]


def _in_a_body(op):
    parent = op.parent
    while parent is not None and parent.name != "func.func":
        if parent.name not in CONTROL_FLOW:
            return True
        parent = parent.operation.parent
    return False


def _called_from_bodies(functions):
    """Functions that a reduction, a sort or the like calls: no host can stop there."""
    found, pending = set(), []

    def visit(op, *, inside):
        name = op.operation.name
        if inside and name in _CALLEES:
            callee = op.operation.attributes[_CALLEES[name]]
            pending.append(ir.FlatSymbolRefAttr(callee).value)
        inside = inside or (name != "func.func" and name not in CONTROL_FLOW)
        for region in op.operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner, inside=inside)

    for function in functions.values():
        visit(function, inside=False)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            for op in functions[name].regions[0].blocks[0].operations:
                visit(op, inside=True)
    return found
