"""Side effects and tokens: once, in the program's order, whatever the rounds are."""

import numpy as np
import pytest

from jax_flash_metal import stablehlo
from jax_flash_metal.partition import PartitionError
from jax_flash_metal.plan import NO_VALUE
from tests.support import plan_executor
from tests.support.partition_programs import plan_text
from tests.support.plan_executor import PlanExecutor

TYPE = "tensor<2xf32>"
TOKEN = "!stablehlo.token"
CONFIG = "{mhlo.backend_config = {}}"
EFFECT = "{mhlo.backend_config = {}, has_side_effect = true}"


def effect(target, operand):
    types = f"({TYPE}) -> tensor<i32>"
    return f"stablehlo.custom_call @{target}(%{operand}) {EFFECT} : {types}"


def host_effect(operand):
    """A side effect that stays in a segment."""
    return (
        f"stablehlo.custom_call @host_print(%{operand}) {{api_version = 2 : i32, "
        f"has_side_effect = true}} : ({TYPE}) -> ()"
    )


class Log:
    """Handlers that note their operands in the order of the calls."""

    def __init__(self, *targets):
        self.entries = []
        self.handlers = {target: self._handler(target) for target in targets}

    def _handler(self, target):
        def handler(attributes, operands, types):
            given = [x for x in operands if x is not None]
            self.entries.append((target, *(float(x.ravel()[0]) for x in given)))
            return [
                None if dtype is None else np.full(dims, len(self.entries), dtype)
                for dims, dtype in types
            ]

        return handler


def test_effects_with_unused_results_keep_their_order():
    # By the operands alone, b could run before a: a is in a later round.
    text = f"""
    func.func public @main(%x: {TYPE}, %y: {TYPE}) -> {TYPE} {{
      %0 = stablehlo.add %x, %x : {TYPE}
      %1 = stablehlo.custom_call @t(%0) {CONFIG} : ({TYPE}) -> {TYPE}
      %2 = stablehlo.add %1, %y : {TYPE}
      %a = {effect("a", "2")}
      %b = {effect("b", "y")}
      %3 = stablehlo.add %y, %y : {TYPE}
      %c = {effect("a", "3")}
      return %x : {TYPE}
    }}
    """
    plan = plan_text(text, {"t", "a", "b"})
    log = Log("t", "a", "b")
    PlanExecutor(plan, log.handlers).run(np.full(2, 1, "f4"), np.full(2, 5, "f4"))
    assert log.entries == [("t", 2.0), ("a", 6.0), ("b", 5.0), ("a", 10.0)]
    assert sum(call.has_side_effect for call in plan.calls) == 2


def test_effects_of_segments_and_of_calls_keep_their_order():
    text = f"""
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      {host_effect("x")}
      %a = {effect("a", "x")}
      {host_effect("x")}
      {host_effect("x")}
      %b = {effect("a", "x")}
      {host_effect("x")}
      return %x : {TYPE}
    }}
    """
    plan = plan_text(text, {"a"})
    steps = plan.blocks[0].steps
    assert [s.kind.name for s in steps] == [
        "SEGMENT",
        "CALL",
        "SEGMENT",
        "CALL",
        "SEGMENT",
    ]
    counts = [
        str(stablehlo.parse(plan.segments[s.index])[0]).count("@host_print")
        for s in steps[::2]
    ]
    assert counts == [1, 2, 1]
    # The first and the last are the same, and the values between are not lost.
    assert steps[0].index == steps[4].index and steps[0].outputs == []


def test_effects_in_functions_and_loops():
    scalar = "tensor<i32>"
    text = f"""
    func.func private @talk(%x: {TYPE}) {{
      {host_effect("x")}
      return
    }}
    func.func private @call(%x: {TYPE}) -> {TYPE} {{
      %0 = {effect("a", "x")}
      %1 = stablehlo.add %x, %x : {TYPE}
      return %1 : {TYPE}
    }}
    func.func public @main(%x: {TYPE}, %n: {scalar}) -> {TYPE} {{
      func.call @talk(%x) : ({TYPE}) -> ()
      %zero = stablehlo.constant dense<0> : {scalar}
      %one = stablehlo.constant dense<1> : {scalar}
      %r:2 = stablehlo.while(%i = %zero, %y = %x) : {scalar}, {TYPE}
        cond {{
          %p = stablehlo.compare LT, %i, %n : ({scalar}, {scalar}) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }} do {{
          func.call @talk(%x) : ({TYPE}) -> ()
          %z = func.call @call(%y) : ({TYPE}) -> {TYPE}
          %j = stablehlo.add %i, %one : {scalar}
          stablehlo.return %j, %z : {scalar}, {TYPE}
        }}
      %last = {effect("a", "x")}
      return %x : {TYPE}
    }}
    """
    plan = plan_text(text, {"a"})
    # Nothing uses the loop's results, but it has effects.
    kinds = [step.kind.name for step in plan.blocks[0].steps]
    assert kinds == ["SEGMENT", "WHILE", "CALL"]
    body = plan.blocks[plan.blocks[0].steps[1].blocks[1]]
    assert [step.kind.name for step in body.steps] == ["SEGMENT", "CALL"]


def test_tokens_order_and_have_no_values():
    text = f"""
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %t0 = stablehlo.create_token : {TOKEN}
      %0:2 = stablehlo.custom_call @a(%x, %t0) {EFFECT}
        : ({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})
      %1 = stablehlo.add %x, %x : {TYPE}
      %2:2 = stablehlo.custom_call @a(%1, %0#1) {EFFECT}
        : ({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})
      %t3 = stablehlo.after_all %2#1, %0#1 : {TOKEN}
      %3:2 = stablehlo.custom_call @b(%x, %t3) {EFFECT}
        : ({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})
      return %0#0 : {TYPE}
    }}
    """
    plan = plan_text(text, {"a", "b"})
    first = plan.blocks[0].steps[0]
    assert first.kind.name == "CALL"  # a new token needs no segment
    assert first.inputs[1] == first.outputs[1] == NO_VALUE
    assert plan.calls[first.index].operands[1].dtype == 17
    log = Log("a", "b")
    PlanExecutor(plan, log.handlers).run(np.full(2, 3, "f4"))
    assert log.entries == [("a", 3.0), ("a", 6.0), ("b", 3.0)]


def test_a_segment_makes_the_token_that_it_needs():
    host = (
        "{api_version = 4 : i32, backend_config = {}, has_side_effect = true} : "
        f"({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})"
    )
    text = f"""
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %t0 = stablehlo.create_token : {TOKEN}
      %0:2 = stablehlo.custom_call @a(%x, %t0) {EFFECT}
        : ({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})
      %1:2 = stablehlo.custom_call @host(%0#0, %0#1) {host}
      %2:2 = stablehlo.custom_call @host(%1#0, %1#1) {host}
      return %2#0 : {TYPE}
    }}
    """
    plan = plan_text(text, {"a"})
    (segment,) = plan.segments
    module, _ = stablehlo.parse(segment)
    assert str(module).count("stablehlo.create_token") == 1
    assert plan.blocks[0].steps[1].outputs == plan.blocks[0].outputs


def test_tokens_through_loops_and_branches():
    scalar = "tensor<i32>"
    text = f"""
    func.func public @main(%x: {TYPE}, %n: {scalar}) -> {TYPE} {{
      %t = stablehlo.create_token : {TOKEN}
      %zero = stablehlo.constant dense<0> : {scalar}
      %one = stablehlo.constant dense<1> : {scalar}
      %r:3 = stablehlo.while(%i = %zero, %u = %t, %y = %x) : {scalar}, {TOKEN}, {TYPE}
        cond {{
          %p = stablehlo.compare LT, %i, %n : ({scalar}, {scalar}) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }} do {{
          %z:2 = "stablehlo.case"(%i) ({{
            %a:2 = stablehlo.custom_call @a(%y, %u) {EFFECT}
              : ({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})
            stablehlo.return %a#0, %a#1 : {TYPE}, {TOKEN}
          }}, {{
            %w = stablehlo.add %y, %y : {TYPE}
            stablehlo.return %w, %u : {TYPE}, {TOKEN}
          }}) : ({scalar}) -> ({TYPE}, {TOKEN})
          %j = stablehlo.add %i, %one : {scalar}
          stablehlo.return %j, %z#1, %z#0 : {scalar}, {TOKEN}, {TYPE}
        }}
      %last:2 = stablehlo.custom_call @b(%r#2, %r#1) {EFFECT}
        : ({TYPE}, {TOKEN}) -> ({TYPE}, {TOKEN})
      return %last#0 : {TYPE}
    }}
    """
    plan = plan_text(text, {"a", "b"})
    log = Log("a", "b")
    (result,) = PlanExecutor(plan, log.handlers).run(np.full(2, 7, "f4"), np.int32(3))
    assert log.entries == [("a", 7.0), ("b", 4.0)]
    assert list(result) == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "results", "value"),
    [(f", %t: {TOKEN}", "", ""), ("", f", {TOKEN}", ", %u")],
)
def test_tokens_of_main_are_refused(arguments, results, value):
    text = f"""
    func.func public @main(%x: {TYPE}{arguments}) -> ({TYPE}{results}) {{
      %u = stablehlo.create_token : {TOKEN}
      %a = {effect("a", "x")}
      return %x{value} : {TYPE}{results}
    }}
    """
    with pytest.raises(PartitionError, match="token") as error:
        plan_executor.plan(text.encode(), {"a"})
    assert error.value.code == 12
