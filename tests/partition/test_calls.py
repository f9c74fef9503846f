"""What a call's record says: attributes, layouts, aliases, which calls are ours."""

import numpy as np
import pytest

from jax_flash_metal.partition import (
    HostProfile,
    PartitionError,
    Unchanged,
    plan_program,
)
from jax_flash_metal.plan import Array, Scalar, Tensor
from tests.support import plan_executor
from tests.support.partition_programs import from_text, plan_text
from tests.support.plan_executor import OPTIONS, PlanExecutor

F32, S32 = 11, 4


def program(attributes, *, kind="tensor<2x3xf32>", result=None):
    return f"""
    func.func public @main(%x: {kind}) -> {result or kind} {{
      %0 = stablehlo.custom_call @t(%x) {{{attributes}}} : ({kind}) -> {result or kind}
      return %0 : {result or kind}
    }}
    """


def call_of(attributes, **options):
    # As text: old artifacts have no form of some attributes.
    text = program(attributes, **options)
    (call,) = plan_executor.plan(text.encode(), {"t"}).calls
    return call


def attribute(text):
    call = call_of(f"mhlo.backend_config = {{a = {text}}}")
    ((name, value),) = call.attributes
    assert name == "a"
    return value


@pytest.mark.parametrize(
    ("text", "dtype", "value"),
    [
        ("true", 1, np.bool_(True)),
        ("false", 1, np.bool_(False)),
        ("-5 : i8", 2, np.int8(-5)),
        ("-300 : i16", 3, np.int16(-300)),
        ("-70000 : i32", 4, np.int32(-70000)),
        ("-5000000000 : i64", 5, np.int64(-5000000000)),
        ("200 : ui8", 6, np.uint8(200)),
        ("60000 : ui16", 7, np.uint16(60000)),
        ("4000000000 : ui32", 8, np.uint32(4000000000)),
        ("18446744073709551615 : ui64", 9, np.uint64(2**64 - 1)),
        ("1.5 : f16", 10, np.float16(1.5)),
        ("0.1 : f32", 11, np.float32(0.1)),
        ("0.1 : f64", 12, np.float64(0.1)),
    ],
)
def test_scalars(text, dtype, value):
    assert attribute(text) == Scalar(dtype, value.tobytes())


def test_bfloat16_scalar():
    bfloat16 = plan_executor.DTYPES[16]
    assert attribute("-3.140625 : bf16") == Scalar(16, bfloat16(-3.140625).tobytes())


@pytest.mark.parametrize(
    ("text", "dtype", "value"),
    [
        ("array<i1: true, false>", 1, np.array([True, False])),
        ("array<i8: 1, -2>", 2, np.array([1, -2], np.int8)),
        ("array<i16: 1, -2>", 3, np.array([1, -2], np.int16)),
        ("array<i32: 1, -2>", 4, np.array([1, -2], np.int32)),
        ("array<i64: 1, -2>", 5, np.array([1, -2])),
        ("array<i64>", 5, np.array([], np.int64)),
        ("array<f32: 0.1, 2.0>", 11, np.array([0.1, 2], np.float32)),
        ("array<f64: 0.1, 2.0>", 12, np.array([0.1, 2])),
        ("dense<[1, -2]> : tensor<2xi32>", 4, np.array([1, -2], np.int32)),
        ("dense<7> : tensor<3xi64>", 5, np.array([7, 7, 7])),
        ("dense<> : tensor<0xi16>", 3, np.array([], np.int16)),
        ("dense<[[1, 2], [3, 4]]> : tensor<2x2xui8>", 6, np.arange(1, 5, dtype="u1")),
        ("dense<[1, 2]> : tensor<2xui64>", 9, np.array([1, 2], np.uint64)),
        ("dense<[true, false, true]> : tensor<3xi1>", 1, np.array([1, 0, 1], bool)),
        ("dense<true> : tensor<9xi1>", 1, np.ones(9, bool)),
        ("dense<[0.5, 1.5]> : tensor<2xf16>", 10, np.array([0.5, 1.5], np.float16)),
        ("dense<0.1> : tensor<2xf32>", 11, np.array([0.1, 0.1], np.float32)),
        ("dense<[0.1, 2.0]> : tensor<2xf64>", 12, np.array([0.1, 2])),
    ],
)
def test_arrays(text, dtype, value):
    assert attribute(text) == Array(dtype, value.size, value.tobytes())


def test_strings_and_dictionaries():
    assert attribute('"text"') == "text"
    # Any bytes are a string for XLA.
    assert attribute(r'"a\FFb\00"').encode("utf-8", "surrogateescape") == b"a\xffb\0"
    one = Scalar(S32, np.int32(1).tobytes())
    nested = attribute('{z = 1 : i32, b = {}, aa = {s = "x"}, Z = 1 : i32}')
    # In the order of the bytes, as handlers search for names.
    assert nested == (("Z", one), ("aa", (("s", "x"),)), ("b", ()), ("z", one))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("unit", "unit"),
        ("[1 : i64]", r"\[1\]"),
        ("1.0 : f8E4M3FN", "f8E4M3FN"),
        ("1 : i4", "i4"),
        ("dense<[1.0, 2.0]> : tensor<2xbf16>", "bf16"),
        ("dense<(1.0, 2.0)> : tensor<2xcomplex<f32>>", "complex numbers"),
        ("i32", "i32"),
    ],
)
def test_attributes_without_a_type_in_ffi(text, what):
    with pytest.raises(PartitionError, match=f"custom call t: attribute .*{what}") as e:
        attribute(text)
    assert e.value.code == 12


def test_both_ways_to_write_a_typed_call():
    one = (("one", Scalar(S32, np.int32(1).tobytes())),)
    for attributes, expected in (
        ("mhlo.backend_config = {one = 1 : i32}", one),
        ('mhlo.backend_config = {one = 1 : i32}, backend_config = ""', one),
        ("api_version = 4 : i32, backend_config = {one = 1 : i32}", one),
        ("api_version = 4 : i32, backend_config = {}", ()),
        ("api_version = 4 : i32", ()),
    ):
        text = program(attributes)
        (call,) = plan_executor.plan(text.encode(), {"t"}).calls
        assert call.attributes == expected


@pytest.mark.parametrize(
    "attributes",
    ["", 'backend_config = "x"', 'api_version = 2 : i32, backend_config = "x"'],
)
def test_untyped_calls_are_refused(attributes):
    with pytest.raises(PartitionError, match="only typed FFI custom calls") as e:
        plan_text(program(attributes), {"t"})
    assert e.value.code == 12


def test_other_targets_are_left_to_the_host():
    code = from_text(program("mhlo.backend_config = {}"))
    assert plan_program(code, OPTIONS, HostProfile(), {"tt", "u"}) == Unchanged()
    # The name occurs, but not as a target.
    text = program('mhlo.backend_config = {}, u = "x"').encode()
    assert plan_program(text, OPTIONS, HostProfile(), {"u"}) == Unchanged()


def test_operands_and_results():
    call = call_of(
        "mhlo.backend_config = {}, has_side_effect = true",
        kind="tensor<0x5xi32>",
        result="tensor<f32>",
    )
    assert call.operands == (Tensor(S32, (0, 5)),)
    assert call.results == (Tensor(F32, ()),)
    assert call.has_side_effect


def test_layouts_other_than_row_major():
    kind, other = "tensor<2x3x4xf32>", "tensor<4x2xf32>"
    text = f"""
    func.func public @main(%x: {kind}, %y: {other}) -> ({kind}, {other}) {{
      %0:2 = stablehlo.custom_call @t(%x, %y) {{
        mhlo.backend_config = {{}},
        operand_layouts = [dense<[1, 0, 2]> : tensor<3xindex>,
                           dense<[1, 0]> : tensor<2xindex>],
        result_layouts = [dense<[0, 2, 1]> : tensor<3xindex>,
                          dense<[0, 1]> : tensor<2xindex>]
      }} : ({kind}, {other}) -> ({kind}, {other})
      return %0#0, %0#1 : {kind}, {other}
    }}
    """
    plan = plan_text(text, {"t"})
    (call,) = plan.calls
    sizes = (Tensor(F32, (2, 3, 4)), Tensor(F32, (4, 2)))
    assert call.operands == call.results == sizes

    def handler(attributes, operands, types):
        # Dimensions from the fastest in memory: x 1, 0, 2; results 0, 2, 1 and 0, 1.
        x = operands[0].ravel().reshape(4, 2, 3).transpose(1, 2, 0)
        np.testing.assert_array_equal(x, values)
        first = (x * 2).transpose(1, 2, 0)
        second = operands[1].reshape(4, 2).T
        return [np.ascontiguousarray(a) for a in (first, second)]

    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y = np.arange(8, dtype=np.float32).reshape(4, 2)
    results = PlanExecutor(plan, {"t": handler}).run(values, y)
    np.testing.assert_array_equal(results[0], values * 2)
    np.testing.assert_array_equal(results[1], y)


def test_row_major_layouts_need_no_segment():
    plan = plan_text(
        program(
            "mhlo.backend_config = {}, "
            "operand_layouts = [dense<[1, 0]> : tensor<2xindex>], "
            "result_layouts = [dense<[1, 0]> : tensor<2xindex>]"
        ),
        {"t"},
    )
    assert plan.segments == []


def test_aliases():
    alias = "#stablehlo.output_operand_alias<output_tuple_indices = [{}], "
    alias += "operand_index = {}, operand_tuple_indices = []>"
    one = f"output_operand_aliases = [{alias.format('', 0)}]"
    assert call_of(f"mhlo.backend_config = {{}}, {one}").aliases == ((0, 0),)
    kind = "tensor<2xf32>"
    both = ", ".join([alias.format(0, 1), alias.format(1, 0)])
    text = f"""
    func.func public @main(%x: {kind}, %y: {kind}) -> ({kind}, {kind}) {{
      %0:2 = stablehlo.custom_call @t(%x, %y) {{
        mhlo.backend_config = {{}}, output_operand_aliases = [{both}]
      }} : ({kind}, {kind}) -> ({kind}, {kind})
      return %0#0, %0#1 : {kind}, {kind}
    }}
    """
    assert plan_text(text, {"t"}).calls[0].aliases == ((1, 0), (0, 1))
