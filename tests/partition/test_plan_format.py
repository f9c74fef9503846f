"""The bytes of a plan, its shadow, options and fingerprint."""

import concurrent.futures
import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash_metal import compile_options, stablehlo
from jax_flash_metal.partition import encode
from jax_flash_metal.plan import Array, Call, Scalar, Tensor
from tests.support import plan_executor
from tests.support.partition_programs import (
    CALLS,
    HANDLERS,
    lower_with_calls,
    plan_text,
)
from tests.support.plan_reader import decode

X = np.ones((2, 3), np.float32)
CONFIG = "{mhlo.backend_config = {}}"


def every_kind_of_step(ops, x, n):
    big = jnp.asarray(np.arange(2**15, dtype=np.float32))
    x = ops.affine(x) + big[:3]
    x = jax.lax.fori_loop(0, n, lambda i, x: ops.affine(x) + ops.affine(big)[0], x)
    return jax.lax.cond(n > 0, ops.affine, lambda x: x * 2, x), ops.pair(x, x)


def test_bytes_round_trip():
    code, _ = lower_with_calls(every_kind_of_step, X, jnp.int32(3), donate_argnums=0)
    made = plan_executor.plan(code, HANDLERS)
    kinds = {step.kind.name for block in made.blocks for step in block.steps}
    assert kinds >= {"SEGMENT", "CALL", "WHILE"} and kinds & {"CASE", "IF"}
    assert made.constants_segment >= 0
    data = encode(made)
    assert decode(data) == made
    assert encode(decode(data)) == data
    for end in (0, 7, 8, len(data) // 2, len(data) - 1):
        with pytest.raises((AssertionError, struct.error)):
            decode(data[:end])


def test_every_kind_of_attribute_round_trips():
    made = plan_text(
        """
        func.func public @main(%x: tensor<f32>) -> tensor<f32> {
          %0 = stablehlo.custom_call @t(%x) {mhlo.backend_config = {}}
            : (tensor<f32>) -> tensor<f32>
          return %0 : tensor<f32>
        }
        """,
        {"t"},
    )
    made.calls[0] = Call(
        target="t",
        attributes=(
            ("array", Array(11, 2, b"12345678")),
            ("dictionary", (("a", Scalar(1, b"\1")), ("b", ()))),
            ("scalar", Scalar(12, b"12345678")),
            ("string", "é\udcff"),
        ),
        operands=(Tensor(11, (2, 0)), Tensor(17, ())),
        results=(),
        aliases=((0, 1), (1, 0)),
        has_side_effect=True,
    )
    assert decode(encode(made)) == made


def test_first_bytes():
    """Fixed by the format, for whoever writes another reader."""
    code, _ = lower_with_calls(lambda ops, x: ops.affine(x), X)
    made = plan_executor.plan(code, HANDLERS)
    data = encode(made)
    assert data[:8] == (1).to_bytes(8, "little")
    assert data[8:16] == (64).to_bytes(8, "little")
    assert data[16:80] == made.fingerprint.encode()
    assert data[80:88] == len(code).to_bytes(8, "little")
    assert data[88 : 88 + len(code)] == code == made.program


def test_fingerprint():
    code, _ = lower_with_calls(lambda ops, x: ops.affine(x), X)
    other, _ = lower_with_calls(lambda ops, x: ops.affine(x, 3.0), X)
    prints = {
        plan_executor.plan(code, HANDLERS).fingerprint,
        plan_executor.plan(code, set(HANDLERS)).fingerprint,
        plan_executor.plan(other, HANDLERS).fingerprint,
        plan_executor.plan(code, HANDLERS, options=b"").fingerprint,
    }
    assert len(prints) == 3


# -- The shadow ----------------------------------------------------------------------


def signature(code):
    module, _ = stablehlo.parse(code)
    text = str(module)
    start = text.index("module")
    return text[start : text.index("{\n", text.index("@main"))]


def test_shadow_looks_like_the_program_and_returns_zeros():
    def program(ops, x, unused):
        y = ops.affine(x)
        return {"a": y, "b": y > 0, "c": (y * 100).astype(jnp.int8), "d": y * 1j}, x[0]

    code, kept = lower_with_calls(program, X, X, donate_argnums=0, keep_unused=True)
    made = plan_executor.plan(code, HANDLERS)
    assert signature(made.shadow) == signature(code)
    module, _ = stablehlo.parse(made.shadow)
    assert "custom_call" not in str(module)
    shadow = plan_executor.compile_module(made.shadow)
    results = plan_executor.execute(shadow, kept)
    wanted = jax.eval_shape(functools.partial(program, CALLS), X, X)
    for result, expected in zip(results, jax.tree.leaves(wanted), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert not np.any(np.asarray(result))


@pytest.mark.parametrize(
    "element",
    [
        *("i1", "i4", "i8", "i16", "i32", "i64", "ui4", "ui8", "ui16", "ui32", "ui64"),
        *("f16", "bf16", "f32", "f64", "f8E4M3FN", "f8E5M2", "f8E4M3FNUZ"),
        *("f8E5M2FNUZ", "f8E4M3B11FNUZ", "complex<f32>", "complex<f64>"),
    ],
)
@pytest.mark.parametrize("shape", ["", "2x3x", "0x"])
def test_zeros_of_every_type(element, shape):
    kind = f"tensor<{shape}{element}>"
    text = f"""
    func.func public @main(%x: {kind}) -> {kind} {{
      %0 = stablehlo.custom_call @t(%x) {CONFIG} : ({kind}) -> {kind}
      return %0 : {kind}
    }}
    """
    made = plan_text(text, {"t"})
    assert made.calls[0].operands == made.calls[0].results
    assert signature(made.shadow) == signature(text.encode())


def test_large_zeros_are_small_programs():
    kind = "tensor<1000x1000x1000xf32>"
    text = f"""
    func.func public @main(%x: {kind}) -> {kind} {{
      %0 = stablehlo.custom_call @t(%x) {CONFIG} : ({kind}) -> {kind}
      return %0 : {kind}
    }}
    """
    assert len(plan_text(text, {"t"}).shadow) < 1000


# -- Compile options -----------------------------------------------------------------


def varint(value):
    low = bytes([value & 0x7F | (0x80 if value > 0x7F else 0)])
    return low + varint(value >> 7) if value > 0x7F else low


def field(number, payload):
    if isinstance(payload, int):
        return varint(number << 3) + varint(payload)
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def test_options_that_speak_of_the_signature_are_dropped():
    kept = [field(1, 7), field(3, b"debug" * 60), field(4, 1), field(300, 1)]
    dropped = [field(2, b"layout"), field(12, b"\1"), field(12, 1), field(18, b"\0\1")]
    inner = kept[0] + dropped[0] + kept[1] + dropped[1] + b"".join(kept[2:])
    inner += dropped[2] + dropped[3]
    options = field(1, b"shape") + field(2, 1) + field(3, inner) + field(1, b"other")
    options += field(7, b"env") + b"\x4d1234" + b"\x5112345678"
    assert compile_options.for_segments(options) == (
        field(2, 1)
        + field(3, b"".join(kept))
        + field(7, b"env")
        + b"\x4d1234"
        + b"\x5112345678"
    )


def test_options_of_jax_come_through():
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[0]]))
    build = options.executable_build_options
    filtered = []
    for propagation in ([False], [True, False]):
        build.allow_spmd_sharding_propagation_to_output = propagation
        code = options.SerializeAsString()
        filtered.append(compile_options.for_segments(code))
        assert len(filtered[-1]) < len(code)
    assert filtered[0] == filtered[1]
    back = xla_client.CompileOptions.ParseFromString(filtered[0])
    assert back.num_replicas == back.num_partitions == 1
    assert compile_options.for_segments(filtered[0]) == filtered[0]


@pytest.mark.parametrize("options", [b"\x0a\x05ab", b"\xff", b"\x1b", b"\x08"])
def test_broken_options(options):
    with pytest.raises(ValueError, match="compile options"):
        compile_options.for_segments(options)


def test_plans_are_made_on_foreign_threads_at_once():
    code, _ = lower_with_calls(every_kind_of_step, X, jnp.int32(3))
    wanted = encode(plan_executor.plan(code, HANDLERS))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(plan_executor.plan, code, HANDLERS) for _ in range(12)]
        assert all(encode(job.result()) == wanted for job in jobs)


def test_canonical_options_do_not_depend_on_the_order_of_maps():
    def field(number, payload):
        return bytes((number << 3 | 2, len(payload))) + payload

    def options(entries):
        debug = b"".join(field(5, entry) for entry in entries)
        return b"\x08\x01" + field(3, b"\x20\x01" + field(3, debug))

    canonical = compile_options.canonical
    assert canonical(options([b"a1", b"b2"])) == canonical(options([b"b2", b"a1"]))
    assert canonical(options([b"a1", b"b2"])) != canonical(options([b"a1", b"b3"]))
