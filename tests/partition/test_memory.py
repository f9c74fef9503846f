"""Donation, large constants, last uses, the estimate of intermediate memory."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash_metal import stablehlo
from tests.support.partition_programs import (
    HANDLERS,
    lower_with_calls,
    plan_text,
    run_and_compare,
)
from tests.support.plan_executor import PlanExecutor, plan

CONFIG = "{mhlo.backend_config = {}}"
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def aliases(segment):
    """Of the segment's arguments: the output whose memory is its own, or None."""
    module, _ = stablehlo.parse(segment)
    text = str(module)
    signature = text[text.index("@main(") : text.index("->")]
    arguments = signature.split("%arg")[1:]
    marker = "tf.aliasing_output = "
    return [
        int(a.split(marker)[1].split(" ")[0]) if marker in a else None
        for a in arguments
    ]


def test_donated_arguments_are_reused_and_others_never():
    def step(ops, w, x):
        return w - ops.affine(w + x), x * 2

    for donate in ((), (0,), (1,), (0, 1)):
        made, _ = run_and_compare(step, X, X + 1, donate_argnums=donate)
        main = made.blocks[0]
        assert main.donated == [main.inputs[i] for i in donate]
        given = {s.inputs[p] for s in main.steps for p in s.donated}
        assert given.isdisjoint(set(main.inputs) - set(main.donated))
        # They end in the last segment, which has two outputs of their type.
        assert not donate or given & set(main.donated)
        for s in main.steps:
            if s.kind.name == "SEGMENT":
                found = aliases(made.segments[s.index])
                assert [i for i, a in enumerate(found) if a is not None] == s.donated
                outputs = [a for a in found if a is not None]
                assert len(outputs) == len(set(outputs))


def test_buffer_donor_without_an_output_in_jaxs_eyes():
    kind = "tensor<4xf32>"
    text = f"""
    func.func public @main(%x: {kind} {{jax.buffer_donor = true}}, %y: {kind})
        -> tensor<2xf32> {{
      %0 = stablehlo.add %x, %x : {kind}
      %1 = stablehlo.custom_call @t(%0) {CONFIG} : ({kind}) -> {kind}
      %2 = stablehlo.slice %1 [0:2] : ({kind}) -> tensor<2xf32>
      return %2 : tensor<2xf32>
    }}
    """
    made = plan_text(text, {"t"})
    assert made.blocks[0].donated == [0]
    assert made.blocks[0].steps[0].donated == [0]
    assert aliases(made.segments[0]) == [0]
    assert "jax.buffer_donor" in str(stablehlo.parse(made.shadow)[0])


def test_what_is_used_later_is_not_reused():
    def program(ops, x):
        y = jnp.sin(x)
        z = ops.affine(y)
        w = z * 2
        return ops.affine(w) + y, y  # y: in the last segment, but also an output

    made, _ = run_and_compare(program, X, donate_argnums=0)
    outputs = made.blocks[0].outputs
    for s in made.blocks[0].steps:
        assert not {s.inputs[p] for p in s.donated} & set(outputs)
        assert not set(s.dead) & set(outputs)


def test_a_loops_condition_reuses_nothing():
    def program(ops, x, y):
        def condition(carry):
            # Room for a mistake: an intermediate of the carry's type.
            return ops.affine(jnp.flip(carry[1]) + carry[1]).sum() < 50

        def body(carry):
            return carry[0] + y, ops.affine(carry[1] + 1) + carry[0] + y

        return jax.lax.while_loop(condition, body, (x, x * 2))

    made, _ = run_and_compare(program, X, X + 1)
    (loop,) = [s for s in made.blocks[0].steps if s.kind.name == "WHILE"]
    condition, body = (made.blocks[i] for i in loop.blocks)
    assert len(condition.steps) == 3
    given = {s.inputs[p] for s in condition.steps for p in s.donated}
    assert given.isdisjoint(condition.inputs)
    given = {s.inputs[p] for s in body.steps for p in s.donated}
    # y goes round unchanged.
    kept = set(body.inputs) & set(body.outputs)
    assert given and kept and not given & kept


def test_large_constants_exist_once():
    big = np.arange(2**15, dtype=np.float32)
    number_repeated = np.full(2**15, 7, np.float32)

    def program(ops, x, flag):
        x = ops.affine(x + big)
        x = ops.affine(jnp.cos(x) * big)

        def body(i, x):
            return ops.affine(x) + big - number_repeated

        x = jax.lax.fori_loop(0, 2, body, x)
        return jax.lax.cond(flag, lambda x: ops.affine(x) - big, jnp.sin, x)

    arguments = (np.ones(2**15, np.float32), np.bool_(True))
    made, _ = run_and_compare(program, *arguments)
    assert len(made.constants) == 1
    sizes = sorted(map(len, made.segments))
    assert sizes[-1] > big.nbytes and sizes[-2] < 10_000
    assert len(made.segments[made.constants_segment]) == sizes[-1]
    used = [v for s in made.blocks[0].steps for v in s.inputs]
    dead = [v for s in made.blocks[0].steps for v in s.dead]
    assert made.constants[0] in used and made.constants[0] not in dead


def test_a_large_constant_as_a_result():
    big = np.arange(2**15, dtype=np.float32)
    made, _ = run_and_compare(lambda ops, x: (ops.affine(x), big, big), X)
    assert made.blocks[0].outputs[1:] == 2 * made.constants


def test_large_complex_constants():
    big = (np.arange(2**14) * (1 + 1j)).astype(np.complex64)

    def program(ops, x):
        y = ops.affine(jnp.real(big) + x)
        return ops.affine(y + jnp.imag(big)), big * 2

    made, _ = run_and_compare(program, np.ones(2**14, np.float32))
    assert len(made.constants) >= 1


def test_large_constants_inside_of_what_the_host_runs_stay_there():
    big = np.arange(2**15, dtype=np.float32)

    def program(ops, x):
        x = ops.affine(x)
        return jax.lax.fori_loop(0, x[0].astype(int), lambda i, x: x + big, x)

    made, _ = run_and_compare(program, np.ones(2**15, np.float32))
    assert len(made.segments) == 1 + len(made.constants)


def test_casts_of_weights_wait_for_their_layer():
    """Otherwise all of them are alive together, from the first segment on."""
    num_layers, size = 6, 64

    def program(ops, w, x):
        for i in range(num_layers):
            # To a smaller type, to a larger one, and twice to one of the same size.
            w_i = w[f"w{i}"].astype(jnp.bfloat16).astype(jnp.float32)
            x = ops.affine(x @ jnp.sin(jnp.cos(w_i)))
        return x

    w = {f"w{i}": np.ones((size, size), np.float32) / size for i in range(num_layers)}
    made, executor = run_and_compare(program, w, np.ones((2, size), np.float32))
    assert executor.num_segment_runs == num_layers
    assert made.peak_intermediate_bytes < 4 * 2 * size * 4
    assert len(made.segments) <= 2


def test_what_makes_a_value_small_does_not_wait():
    """Otherwise the large value would be kept for it."""

    def program(ops, x):
        large = jnp.sin(jnp.outer(x, x))
        return ops.affine(large.mean(0)) * large.mean()

    made, _ = run_and_compare(program, np.ones(64, np.float32))
    assert made.peak_intermediate_bytes < 64 * 64 * 4
    segments = [s for s in made.blocks[0].steps if s.kind.name == "SEGMENT"]
    assert len(segments) == 2


def test_intermediates_are_counted_while_they_live():
    kind = "tensor<256xf32>"  # 1 KiB

    def t(result, operand):
        return (
            f"%{result} = stablehlo.custom_call @t(%{operand}) "
            f"{CONFIG} : ({kind}) -> {kind}"
        )

    text = f"""
    func.func public @main(%x: {kind}) -> {kind} {{
      {t("a", "x")}
      {t("b", "a")}
      {t("c", "b")}
      %d = stablehlo.add %c, %b : {kind}
      return %d : {kind}
    }}
    """
    made = plan_text(text, {"t"})
    # b and c; the sum goes into one of them.
    assert made.peak_intermediate_bytes == 2 * 1024
    handler = {"t": lambda attributes, operands, types: [operands[0] + 1]}
    (result,) = PlanExecutor(made, handler).run(np.zeros(256, np.float32))
    assert list(result[:2]) == [5, 5]


def test_planning_is_fast_and_repeatable():
    """A guard against quadratic growth: 300 layers, some thousand operations."""

    def program(ops, x):
        for _ in range(300):
            x = jnp.sin(ops.affine(x) * 2 + 1) / jnp.sqrt((x**2).mean() + 1)
        return x

    code, _ = lower_with_calls(program, X)
    first, second = plan(code, HANDLERS), plan(code, HANDLERS)
    assert first == second
    assert len(first.segments) <= 4
    assert len(first.blocks[0].steps) == 2 * 300
