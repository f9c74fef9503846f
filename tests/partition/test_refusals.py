"""What cannot be run in parts is refused with a sentence; what need not be, is not."""

import re

import pytest

from jax_flash_metal import stablehlo
from jax_flash_metal.partition import (
    HostProfile,
    PartitionError,
    Plan,
    Rewritten,
    Unchanged,
    plan_program,
)
from tests.support.partition_programs import from_text
from tests.support.plan_executor import OPTIONS

TYPE = "tensor<4xf32>"
CONFIG = "{mhlo.backend_config = {}}"
CALL = f"stablehlo.custom_call @t(%x) {CONFIG} : ({TYPE}) -> {TYPE}"


def program(*, attributes="", argument="", result="", body=CALL):
    return f"""
    module @name {attributes} {{
      func.func public @main(%x: {TYPE} {argument}) -> ({TYPE} {result}) {{
        %0 = {body}
        return %0 : {TYPE}
      }}
    }}
    """


def plan(text):
    return plan_program(text.encode(), OPTIONS, HostProfile(), {"t"})


def refuses(text, sentence, code=12):
    with pytest.raises(PartitionError, match=sentence) as error:
        plan(text)
    assert error.value.code == code
    assert error.value.message == str(error.value)
    assert re.fullmatch(r"[\S\s]+\.", error.value.message)


@pytest.mark.parametrize("name", ["mhlo.num_partitions", "mhlo.num_replicas"])
def test_more_than_one_device(name):
    refuses(
        program(attributes=f"attributes {{{name} = 2 : i32}}"),
        f"this program is for 2 devices .{name}., .* run on one device only",
    )
    one = program(attributes=f"attributes {{{name} = 1 : i32}}")
    assert isinstance(plan(one), Plan)


@pytest.mark.parametrize("where", ["argument", "result"])
def test_layouts_and_memories_of_the_signature(where):
    for name, plain, other in (
        ("layout_mode", ("default", "auto", "{0}"), "{0:T(128)}"),
        ("memory_kind", ("device", "unpinned_host"), "pinned_host"),
    ):
        for value in plain:
            text = program(**{where: f'{{mhlo.{name} = "{value}"}}'})
            assert isinstance(plan(text), Plan)
        what = name.split("_")[0]
        refuses(
            program(**{where: f'{{mhlo.{name} = "{other}"}}'}),
            rf"{where} 0 of this program has the {what}.* {re.escape(other)}, .* "
            "row-major arrays in the default memory only",
        )


def test_dynamic_shapes():
    dynamic = "tensor<?xf32>"
    refuses(
        f"""
        func.func public @main(%x: {dynamic}) -> {dynamic} {{
          %0 = stablehlo.custom_call @t(%x) {CONFIG}
            : ({dynamic}) -> {dynamic}
          return %0 : {dynamic}
        }}
        """,
        "the shape of tensor<.xf32> is dynamic",
    )


def test_calls_where_no_host_can_stop():
    body = f""""stablehlo.sort"(%x) <{{dimension = 0 : i64}}> ({{
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.custom_call @t(%a) {CONFIG}
          : (tensor<f32>) -> tensor<f32>
        %d = stablehlo.compare LT, %c, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %d : tensor<i1>
    }}) : ({TYPE}) -> {TYPE}"""
    refuses(program(body=body), "a custom call inside of stablehlo.sort")


def test_functions_that_call_themselves():
    text = f"""
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %0 = {CALL}
      %1 = func.call @main(%0) : ({TYPE}) -> {TYPE}
      return %1 : {TYPE}
    }}
    """
    refuses(text, "main calls itself")


def test_values_that_no_buffer_holds():
    both = f"tuple<{TYPE}, {TYPE}>"
    text = f"""
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %0 = stablehlo.custom_call @t(%x) {CONFIG}
        : ({TYPE}) -> {both}
      %1 = stablehlo.get_tuple_element %0[0] : ({both}) -> {TYPE}
      return %1 : {TYPE}
    }}
    """
    refuses(text, "the type tuple<.*> has no buffer")


def test_what_is_not_a_program():
    for code in (b"t", b"ML\xefR t", from_text(program())[:100]):
        with pytest.raises(PartitionError, match="cannot be read") as error:
            plan_program(code, OPTIONS, HostProfile(stablehlo_version="0.9.0"), {"t"})
        assert error.value.code == 3


# -- What is let through -------------------------------------------------------------


def test_programs_without_our_calls_are_not_even_read():
    assert plan_program(b"anything", b"", HostProfile(), {"t_"}) == Unchanged()
    # Nor refused for what would not matter.
    text = program(attributes="attributes {mhlo.num_partitions = 2 : i32}")
    assert plan_program(text.encode(), OPTIONS, HostProfile(), {"u"}) == Unchanged()


SINE = f"stablehlo.sine %x : {TYPE}"


def test_old_hosts_get_programs_that_they_can_read():
    composite = f"""
    func.func private @inside(%x: {TYPE}) -> {TYPE} {{
      %0 = {SINE}
      return %0 : {TYPE}
    }}
    func.func public @main(%x: {TYPE}) -> {TYPE} {{
      %0 = stablehlo.composite "a.b" %x {{decomposition = @inside}} : ({TYPE}) -> {TYPE}
      return %0 : {TYPE}
    }}
    """
    code = from_text(composite)
    host = HostProfile(legalize_composites=True)
    rewritten = plan_program(code, OPTIONS, host, {"t"})
    assert isinstance(rewritten, Rewritten)
    module, version = stablehlo.parse(rewritten.program)
    assert "composite" not in str(module)
    assert version == stablehlo.artifact_version(code)

    host = HostProfile(stablehlo_version="0.19.0")
    rewritten = plan_program(from_text(program(body=SINE)), OPTIONS, host, {"t"})
    assert isinstance(rewritten, Rewritten)
    assert stablehlo.artifact_version(rewritten.program) == "0.19.0"


def test_plans_for_old_hosts():
    host = HostProfile(
        stablehlo_version="0.19.0", legalize_composites=True, erase_sharding=True
    )
    text = program(body=f"{SINE}\n%1 = {CALL}").replace("return %0", "return %1")
    text = text.replace("@t(%x)", "@t(%0)")
    made = plan_program(from_text(text), OPTIONS, host, {"t"})
    assert isinstance(made, Plan)
    for part in (made.shadow, *made.segments):
        assert stablehlo.artifact_version(part) == "0.19.0"


def test_newer_hosts_get_the_version_that_came():
    code = from_text(program())
    version = stablehlo.artifact_version(code)
    host = HostProfile(stablehlo_version="99.0.0")
    made = plan_program(code, OPTIONS, host, {"t"})
    assert stablehlo.artifact_version(made.shadow) == version
    assert plan_program(code, OPTIONS, host, {"u"}) == Unchanged()


def test_sharding_of_one_device_is_erased():
    sharding = '{mhlo.sharding = "{replicated}"}'
    text = f"""
    func.func public @main(%x: {TYPE} {sharding}) -> {TYPE} {{
      %0 = stablehlo.custom_call @Sharding(%x) {sharding} : ({TYPE}) -> {TYPE}
      %1 = {CALL.replace("%x", "%0")}
      %2 = stablehlo.add %1, %1 : {TYPE}
      return %2 : {TYPE}
    }}
    """
    made = plan(text)
    # Nothing is left between the argument and the call.
    assert [s.kind.name for s in made.blocks[0].steps] == ["CALL", "SEGMENT"]
    assert "harding" not in str(stablehlo.parse(made.segments[0])[0])
