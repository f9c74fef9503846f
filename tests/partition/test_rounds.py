"""Golden listings: which operation goes into which segment, and in what order."""

import functools
import random
import textwrap

import numpy as np

from jax_flash_metal import stablehlo
from tests.support import plan_executor
from tests.support.partition_programs import plan_text
from tests.support.plan_executor import PlanExecutor

HANDLERS = {
    "t": lambda attributes, operands, types: [operands[0] + 10],
    "u": lambda attributes, operands, types: [operands[0] * operands[1]],
}

TYPE = "tensor<3xf32>"
CONFIG = "{mhlo.backend_config = {}}"


def t(result, operand):
    return (
        f"%{result} = stablehlo.custom_call @t(%{operand}) {CONFIG}"
        f" : ({TYPE}) -> {TYPE}"
    )


def u(result, a, b):
    return (
        f"%{result} = stablehlo.custom_call @u(%{a}, %{b}) {CONFIG}"
        f" : ({TYPE}, {TYPE}) -> {TYPE}"
    )


def add(result, a, b):
    return f"%{result} = stablehlo.add %{a}, %{b} : {TYPE}"


def main(arguments, *lines, returns):
    signature = ", ".join(f"%{name}: {TYPE}" for name in arguments.split())
    results = returns.split()
    types = ", ".join([TYPE] * len(results))
    values = ", ".join(f"%{name}" for name in results)
    body = "\n".join(lines)
    return (
        f"func.func public @main({signature}) -> ({types}) "
        f"{{\n{body}\nreturn {values} : {types}\n}}"
    )


def check(text, listing, arguments, expected):
    plan = plan_executor.plan(text.encode(), HANDLERS)
    assert str(plan) == textwrap.dedent(listing).strip()
    results = PlanExecutor(plan, HANDLERS).run(
        *(np.full(3, x, np.float32) for x in arguments)
    )
    assert [list(x) for x in results] == [[x] * 3 for x in expected]
    return plan


def test_independent_calls_share_the_rounds():
    # Two chains of different length: three segments, not five.
    text = main(
        "x y",
        add("a", "x", "x"),
        t("b", "a"),
        add("c", "b", "x"),
        t("d", "c"),
        add("e", "y", "y"),
        t("f", "e"),
        add("g", "f", "d"),
        returns="g f",
    )
    check(
        text,
        """
        main: v0 v1 -> v8 v5
          segment 0: v0 v1 -> v2 v3 dead v1
          call t: v2 -> v4 dead v2
          call t: v3 -> v5 dead v3
          segment 1: v4 v0 -> v6 reuses v4 dead v4 v0
          call t: v6 -> v7 dead v6
          segment 2: v5 v7 -> v8 reuses v7 dead v7
        """,
        (1, 2),
        (37, 14),
    )


def test_calls_that_follow_calls_need_no_segment_between():
    text = main("x", t("a", "x"), t("b", "a"), u("c", "a", "b"), returns="c")
    plan = check(
        text,
        """
        main: v0 -> v3
          call t: v0 -> v1 dead v0
          call t: v1 -> v2
          call u: v1 v2 -> v3 dead v1 v2
        """,
        (1,),
        (11 * 21,),
    )
    assert len(plan.calls) == 2  # equal calls are one


def test_an_operation_waits_for_its_use():
    # x + y is not kept while the call runs; x * x + y, of a new value, neither, as its
    # operands are inputs.
    text = main(
        "x y",
        add("a", "x", "y"),
        add("b", "a", "y"),
        t("c", "x"),
        add("d", "c", "b"),
        returns="d",
    )
    check(
        text,
        """
        main: v0 v1 -> v3
          call t: v0 -> v2
          segment 0: v0 v1 v2 -> v3 reuses v2 dead v0 v1 v2
        """,
        (1, 2),
        (16,),
    )


def test_cheap_operations_are_made_where_they_are_needed():
    text = f"""
    func.func public @main(%x: {TYPE}, %s: tensor<f32>) -> ({TYPE}, {TYPE}) {{
      %one = stablehlo.constant dense<1.0> : tensor<f32>
      %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<f32>) -> {TYPE}
      %wide = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> {TYPE}
      %a = stablehlo.custom_call @u(%x, %wide) {CONFIG}
        : ({TYPE}, {TYPE}) -> {TYPE}
      %b = stablehlo.add %a, %wide : {TYPE}
      %c = stablehlo.add %b, %ones : {TYPE}
      %d = stablehlo.custom_call @u(%c, %wide) {CONFIG}
        : ({TYPE}, {TYPE}) -> {TYPE}
      return %d, %ones : {TYPE}, {TYPE}
    }}
    """
    plan = plan_text(text, HANDLERS)
    assert (
        str(plan)
        == textwrap.dedent("""
        main: v0 v1 -> v7 v6
          segment 0: v1 -> v2
          call u: v0 v2 -> v3 dead v0 v2
          segment 1: v3 v1 -> v4 v5 v6 reuses v3 dead v3 v1
          call u: v4 v5 -> v7 dead v4 v5
    """).strip()
    )
    x, s = np.full(3, 2, np.float32), np.float32(3)
    results = PlanExecutor(plan, HANDLERS).run(x, s)
    assert [list(r) for r in results] == [[30] * 3, [1] * 3]


def test_cheap_values_are_made_inside_of_loops_not_captured():
    scalar = "tensor<i32>"
    text = f"""
    func.func public @main(%x: {TYPE}, %n: {scalar}, %s: tensor<f32>) -> {TYPE} {{
      %zero = stablehlo.constant dense<0> : {scalar}
      %one = stablehlo.constant dense<1> : {scalar}
      %wide = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> {TYPE}
      %r:2 = stablehlo.while(%i = %zero, %y = %x) : {scalar}, {TYPE}
        cond {{
          %p = stablehlo.compare LT, %i, %n : ({scalar}, {scalar}) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }} do {{
          %z = stablehlo.custom_call @u(%y, %wide) {CONFIG}
            : ({TYPE}, {TYPE}) -> {TYPE}
          %j = stablehlo.add %i, %one : {scalar}
          stablehlo.return %j, %z : {scalar}, {TYPE}
        }}
      return %r#1 : {TYPE}
    }}
    """
    plan = plan_text(text, HANDLERS)
    assert (
        str(plan)
        == textwrap.dedent("""
        main: v0 v1 v2 -> v5
          segment 2: () -> v3
          while: v1 v2 v3 v0 -> v4 v5 dead v1 v2 v3 v0 v4
            condition: v0 v1 v2 v3 -> v4
              segment 0: v2 v0 -> v4 dead v2 v0
            body: v0 v1 v2 v3 -> v4 v6
              segment 1: v2 v1 -> v4 v5 reuses v2 dead v2 v1
              call u: v3 v5 -> v6 dead v3 v5
    """).strip()
    )
    x = np.full(3, 2, np.float32)
    for n in (0, 3):
        (result,) = PlanExecutor(plan, HANDLERS).run(x, np.int32(n), np.float32(3))
        assert list(result) == [2 * 3**n] * 3


def test_equal_segments_are_one():
    # Twice the same function, under two names, with different numbers around.
    function = f"""
    func.func private @NAME(%x: {TYPE}) -> {TYPE} {{
      %0 = stablehlo.sine %x : {TYPE} loc("SOME/PLACE")
      return %0 : {TYPE}
    }}
    """
    text = "\n".join(
        [
            function.replace("NAME", "a").replace("SOME", "here"),
            function.replace("NAME", "b").replace("SOME", "there"),
            main(
                "x",
                f"%a = func.call @a(%x) : ({TYPE}) -> {TYPE}",
                t("b", "a"),
                f"%c = func.call @b(%b) : ({TYPE}) -> {TYPE}",
                t("d", "c"),
                f"%e = func.call @a(%d) : ({TYPE}) -> {TYPE}",
                t("f", "e"),
                returns="f",
            ),
        ]
    )
    plan = plan_text(text, HANDLERS)
    # The first is not given its operand's memory, the others are.
    assert [s.index for s in plan.blocks[0].steps if s.index >= 0][::2] == [0, 1, 1]
    assert len(plan.segments) == 2
    assert len(plan.calls) == 1
    assert b"SOME" not in b"".join(plan.segments)


def test_only_what_is_called_goes_into_a_segment():
    function = f"""
    func.func private @NAME(%x: {TYPE}) -> {TYPE} {{
      %0 = BODY
      return %0 : {TYPE}
    }}
    """
    text = "\n".join(
        [
            function.replace("NAME", "leaf").replace(
                "BODY", f"stablehlo.sine %x : {TYPE}"
            ),
            function.replace("NAME", "middle").replace(
                "BODY", f"func.call @leaf(%x) : ({TYPE}) -> {TYPE}"
            ),
            function.replace("NAME", "other").replace(
                "BODY", f"stablehlo.cosine %x : {TYPE}"
            ),
            main(
                "x",
                f"%a = func.call @middle(%x) : ({TYPE}) -> {TYPE}",
                t("b", "a"),
                f"%c = func.call @other(%b) : ({TYPE}) -> {TYPE}",
                returns="c",
            ),
        ]
    )
    plan = plan_text(text, HANDLERS)
    first, second = (str(stablehlo.parse(s)[0]) for s in plan.segments)
    assert "sine" in first and "cosine" not in first
    assert first.count("func.func") == 3
    assert "cosine" in second and second.count("func.func") == 2
    (result,) = PlanExecutor(plan, HANDLERS).run(np.ones(3, np.float32))
    np.testing.assert_allclose(result, np.cos(np.sin(1) + 10), rtol=1e-5)


def test_what_nothing_uses_is_dropped():
    text = main("x y", t("a", "y"), add("b", "a", "y"), add("c", "x", "x"), returns="c")
    check(
        text,
        """
        main: v0 v1 -> v2
          segment 0: v0 -> v2 dead v0
        """,
        (1, 2),
        (2,),
    )


def test_results_that_are_arguments_and_no_operation_at_all():
    text = main("x y", t("a", "x"), returns="y a y")
    check(
        text,
        """
        main: v0 v1 -> v1 v2 v1
          call t: v0 -> v2 dead v0
        """,
        (1, 2),
        (2, 11, 2),
    )


def test_a_composite_with_a_call_inside_is_taken_apart():
    text = f"""
    func.func private @inside(%x: {TYPE}) -> {TYPE} {{
      {t("0", "x")}
      return %0 : {TYPE}
    }}
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %0 = stablehlo.composite "a.b" %x {{decomposition = @inside}} : ({TYPE}) -> {TYPE}
      return %0 : {TYPE}
    }}
    """
    check(text, "main: v0 -> v1\n  call t: v0 -> v1 dead v0", (1,), (11,))


def test_a_reshaped_operand_of_two_calls_has_one_buffer():
    flat = "tensor<3x1xf32>"
    text = f"""
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %0 = stablehlo.sine %x : {TYPE}
      %1 = stablehlo.reshape %0 : ({TYPE}) -> {flat}
      %2 = stablehlo.custom_call @t(%1) {CONFIG} : ({flat}) -> {flat}
      %3 = stablehlo.sine %2 : {flat}
      %4 = stablehlo.custom_call @u(%1, %3) {CONFIG} : ({flat}, {flat}) -> {flat}
      %5 = stablehlo.reshape %4 : ({flat}) -> {TYPE}
      return %5 : {TYPE}
    }}
    """
    plan = plan_text(text, HANDLERS)
    assert (
        str(plan)
        == textwrap.dedent("""
        main: v0 -> v5
          segment 0: v0 -> v1 dead v0
          call t: v1 -> v2
          segment 1: v2 -> v3 reuses v2 dead v2
          call u: v1 v3 -> v4 dead v1 v3
          segment 2: v4 -> v5 dead v4
    """).strip()
    )


def random_program(rng):
    """(text, {value: (kind, operands)}, outputs): a DAG of 8 to 24 operations."""
    values = {"x": ("argument", ()), "y": ("argument", ())}
    lines = []
    for i in range(rng.randint(8, 24)):
        # Near ones more often, so that chains get long.
        names = list(values)[-3:] if rng.random() < 0.8 else list(values)
        a, b, name = rng.choice(names), rng.choice(names), f"v{i}"
        kind = rng.choice(["add", "add", "t", "t", "u", "constant", "view"])
        operands = {"t": (a,), "constant": (), "view": ()}.get(kind, (a, b))
        if kind == "add":
            lines.append(add(name, a, b))
        elif kind == "t":
            lines.append(t(name, a))
        elif kind == "u":
            lines.append(u(name, a, b))
        elif kind == "constant":
            value = f"dense<[{i}.0, 1.0, 2.0]> : {TYPE}"
            lines.append(f"%{name} = stablehlo.constant {value}")
        else:
            kinds = f"(tensor<f32>) -> {TYPE}"
            lines.append(f"%{name}s = stablehlo.constant dense<{i}.0> : tensor<f32>")
            lines.append(
                f"%{name} = stablehlo.broadcast_in_dim %{name}s, dims = [] : {kinds}"
            )
        values[name] = (kind, operands)
    outputs = [*list(values)[-1:], rng.choice(list(values))]
    return main("x y", *lines, returns=" ".join(outputs)), values, outputs


def evaluate(values, outputs, arguments):
    done = dict(arguments)
    for name, (kind, operands) in values.items():
        given = [done[operand] for operand in operands]
        if kind == "add":
            done[name] = given[0] + given[1]
        elif kind in HANDLERS:
            (done[name],) = HANDLERS[kind]({}, given, None)
        elif kind == "constant":
            done[name] = np.array([float(name[1:]), 1, 2], np.float32)
        elif kind == "view":
            done[name] = np.full(3, float(name[1:]), np.float32)
    return [done[name] for name in outputs]


def longest_chain(values, outputs):
    """Pure stretches in the chain of dependent operations that has most of them."""

    @functools.cache
    def chains(name):
        # Every chain that ends here, as text: p a pure stretch, b barriers.
        kind, operands = values[name]
        if kind == "argument":
            return {""}
        letter = "b" if kind in HANDLERS else "p"
        before = {""}.union(*(chains(operand) for operand in operands))
        return {chain if chain[-1:] == letter else chain + letter for chain in before}

    return max(chain.count("p") for output in outputs for chain in chains(output))


def test_as_many_segments_as_the_longest_chain_needs():
    most = 0
    compiled = {}
    for seed in range(60):
        text, values, outputs = random_program(random.Random(seed))
        if "custom_call" not in text:
            continue
        plan = plan_executor.plan(text.encode(), HANDLERS)
        kinds = [step.kind.name for step in plan.blocks[0].steps]
        wanted = longest_chain(values, outputs)
        assert kinds.count("SEGMENT") == wanted, f"seed {seed}"
        most = max(most, wanted)
        if seed < 15:
            given = {name: np.full(3, 2.0, np.float32) for name in "xy"}
            executor = PlanExecutor(plan, HANDLERS, compiled)
            results = executor.run(given["x"], given["y"])
            np.testing.assert_allclose(results, evaluate(values, outputs, given), 1e-5)
    assert most >= 4
