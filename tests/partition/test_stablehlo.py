"""Reading, writing and rewriting StableHLO programs, on what the jax at hand emits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash_metal import stablehlo

try:
    from jax import shard_map
except ImportError:  # jax < 0.6
    from jax.experimental.shard_map import shard_map

OLD = "0.19.4"  # jax-metal's
SHARDING_WORDS = ("sdy", "harding", "SPMD", "all_reduce", "all_gather", "partition_id")


@pytest.fixture(scope="module")
def spread():
    """A sharding over one device: nothing changes, yet the program mentions it."""
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P("x"))


def lower(function, *arguments):
    """The module that jax makes, through bytes as a plugin gets them."""
    lowered = jax.jit(function).lower(*arguments)
    module = lowered.compiler_ir("stablehlo")
    return stablehlo.parse(stablehlo.serialize(module, None))[0]


def run(module, *arguments):
    """Compiles a module as it stands, and runs it on the CPU."""
    device = jax.devices("cpu")[0]
    text = str(module)
    try:
        from jaxlib import _jax

        executable = device.client.compile_and_load(
            text.encode(), _jax.DeviceList((device,)), _jax.CompileOptions()
        )
    except ImportError:  # jaxlib < 0.5
        executable = device.client.compile(text)
    arguments = [jax.device_put(x, device) for x in arguments]
    results = executable.execute_sharded(arguments)
    results = results.disassemble_into_single_device_arrays()
    return [np.asarray(result[0]) for result in results]


def test_versions_compare_by_their_numbers():
    assert stablehlo.newer_than("1.10.0", "1.9.9")
    assert stablehlo.newer_than("0.19.10", OLD)
    assert not stablehlo.newer_than(OLD, OLD)
    assert not stablehlo.newer_than("0.19.4", "1.0.0")


@pytest.mark.parametrize("version", ["0.17.0", OLD, "1.0.0", None])
def test_an_artifact_has_its_version_and_keeps_its_meaning(version):
    module = lower(lambda x: jnp.sin(x) @ x.T, np.ones((3, 5), np.float32))
    program = stablehlo.serialize(module, version)
    again, found = stablehlo.parse(program)
    assert found == stablehlo.artifact_version(program)
    assert version in (None, found)
    assert "\n".join(str(module).split()) == "\n".join(str(again).split())
    assert stablehlo.serialize(again, found) == program


def test_text_and_bytecode_have_no_version():
    module = lower(lambda x: x + 1, np.float32(1))
    for program in (str(module).encode(), stablehlo._bytecode(module)):
        assert stablehlo.artifact_version(program) is None
        again, version = stablehlo.parse(program)
        assert version is None
        assert str(again) == str(module)


@pytest.mark.parametrize("program", [b"", b"ML\xefR\x0dStableHLO_v1.0.0\x00x", b"what"])
def test_what_is_no_program_is_refused(program):
    if program:
        with pytest.raises(stablehlo.StablehloError, match="cannot be read as"):
            stablehlo.parse(program)
    assert stablehlo.artifact_version(b"StableHLO_v1.0.0\x00") is None


def test_an_operation_that_is_too_new_is_named():
    if not hasattr(jax.lax, "DotAlgorithmPreset"):
        pytest.skip("this jax has no operation that is newer than 0.19.4")

    def function(x, y):
        algorithm = jax.lax.DotAlgorithmPreset.F32_F32_F32
        return jax.lax.dot(x, y, precision=algorithm)

    module = lower(function, np.ones((3, 5), np.float32), np.ones((5, 2), np.float32))
    with pytest.raises(stablehlo.StablehloError) as caught:
        stablehlo.serialize(module, OLD)
    assert "StableHLO 0.19.4 has no form of stablehlo.dot_general" in str(caught.value)
    assert "with an algorithm" in str(caught.value)


def test_a_type_that_is_too_new_is_named():
    if not hasattr(jnp, "float8_e4m3"):
        pytest.skip("this jax has no type that is newer than 0.19.4")
    x = np.ones((2, 3), np.float32)
    module = lower(lambda x: jnp.sin(x.astype(jnp.float8_e4m3).astype(x.dtype)), x)
    with pytest.raises(stablehlo.StablehloError) as caught:
        stablehlo.serialize(module, OLD)
    sentence = "stablehlo.convert from (tensor<2x3xf32>) to (tensor<2x3xf8E4M3>)"
    assert sentence in str(caught.value)
    assert "sine" not in str(caught.value)


def test_a_request_for_accuracy_is_left_out_where_there_is_no_form_for_it():
    if not hasattr(jax.lax, "AccuracyMode"):
        pytest.skip("this jax has no accuracies")

    def function(x):
        highest = jax.lax.AccuracyMode.HIGHEST
        return jax.lax.exp(x, accuracy=highest) + jax.lax.tanh(x)

    x = np.linspace(-1, 1, 5, dtype=np.float32)
    module = lower(function, x)
    assert "HIGHEST" in str(module)
    old, _ = stablehlo.parse(stablehlo.serialize(module, OLD))
    assert "HIGHEST" not in str(old)
    assert "HIGHEST" in str(module)
    np.testing.assert_allclose(run(old, x)[0], np.exp(x) + np.tanh(x), rtol=1e-6)


def _current_version():
    from jaxlib.mlir.dialects import stablehlo as dialect

    return dialect.get_current_version()


# -- Sharding over one device --------------------------------------------------------


def spread_functions(sharding):
    def per_device(function, out_specs):
        return shard_map(
            function, mesh=sharding.mesh, in_specs=P("x"), out_specs=out_specs
        )

    def constrained(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), sharding) * 2

    def scanned(x):
        return jax.lax.scan(lambda c, y: (constrained(c) + y, c), x, jnp.ones((3, 1)))

    return {
        "constraint": constrained,
        "constraint in a scan": scanned,
        "arguments": jax.jit(
            lambda x: x + 1, in_shardings=sharding, out_shardings=sharding
        ),
        "psum": per_device(lambda x: jax.lax.psum(x * 2, "x"), P()),
        "axis_index": per_device(lambda x: x + jax.lax.axis_index("x"), P("x")),
        "all_gather": per_device(
            lambda x: jax.lax.all_gather(x, "x", tiled=True) * 3, P("x")
        ),
        "psum_scatter": per_device(
            lambda x: jax.lax.psum_scatter(x, "x", tiled=True) * 3, P("x")
        ),
        "all_to_all": per_device(
            lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True) * 3, P("x")
        ),
        "ppermute": per_device(
            lambda x: jax.lax.ppermute(x, "x", [(0, 0)]) * 3, P("x")
        ),
        "gradient": jax.grad(
            lambda x: per_device(lambda y: jax.lax.psum(y * y, "x"), P())(x).sum()
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("constraint", "constraint in a scan", "arguments", "gradient"),
        *("psum", "axis_index", "all_gather", "psum_scatter", "all_to_all", "ppermute"),
    ],
)
def test_sharding_over_one_device_is_erased(name, spread):
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    function = spread_functions(spread)[name]
    module = lower(function, x)
    expected = jax.tree.leaves(jax.jit(function)(x))

    stablehlo.erase_sharding(module)

    assert module.operation.verify()
    text = str(module)
    assert not [word for word in SHARDING_WORDS if word in text], text
    program = stablehlo.serialize(module, OLD)
    assert b"\0sdy\0" not in program
    for got, want in zip(run(stablehlo.parse(program)[0], x), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


TEXT = """
module attributes {{mhlo.num_partitions = {devices} : i32,
                    mhlo.frontend_attributes = {{xla.sdy.meshes = "m", mine = "1"}}}} {{
  func.func public @main(
      %x: tensor<4xf32> {{mhlo.sharding = "{{replicated}}",
                          tf.aliasing_output = 0 : i32}})
      -> (tensor<4xf32> {{mhlo.sharding = "{{replicated}}"}}) {{
    %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) : (tensor<4xf32>) -> {shard}
    %1 = stablehlo.custom_call @xla.sdy.GlobalToLocalShape(%0) {{
      mhlo.frontend_attributes = {{xla.sdy.in_shardings = "s"}}}} : ({shard}) -> {shard}
    stablehlo.custom_call @xla.sdy.ShardingGroup(%1) {{has_side_effect = true}}
      : ({shard}) -> ()
    %2 = stablehlo.custom_call @mine(%1) {{mhlo.frontend_attributes = {{
      xla.sdy.sharding = "s", other = "2"}}}} : ({shard}) -> {shard}
    %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) : ({shard}) -> tensor<4xf32>
    return %3 : tensor<4xf32>
  }}
}}
"""


def test_annotations_that_are_custom_calls_are_erased_and_nothing_else():
    text = TEXT.format(devices=1, shard="tensor<4xf32>")
    module, _ = stablehlo.parse(text.encode())
    stablehlo.erase_sharding(module)
    text = str(module)
    assert text.count("custom_call") == text.count("custom_call @mine") == 1
    assert 'mhlo.frontend_attributes = {mine = "1"}' in text
    assert 'mhlo.frontend_attributes = {other = "2"}' in text
    assert "tf.aliasing_output" in text
    assert "xla.sdy" not in text
    assert "sharding" not in text


@pytest.mark.parametrize(
    "devices, shard, sentence",
    [
        (1, "tensor<2xf32>", "custom_call makes"),
        (2, "tensor<4xf32>", "mhlo.num_partitions = 2"),
    ],
)
def test_more_than_one_device_is_refused(devices, shard, sentence):
    text = TEXT.format(devices=devices, shard=shard)
    module, _ = stablehlo.parse(text.encode())
    with pytest.raises(stablehlo.StablehloError, match=sentence) as caught:
        stablehlo.erase_sharding(module)
    assert "more than one device" in str(caught.value)


PER_DEVICE = """
module {
  sdy.mesh @mesh = <["x"=1]>
  func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
    %0 = sdy.manual_computation(%x, %y)
        in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
        out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"}
        (%a: tensor<4xf32>, %b: tensor<4xf32>) {
      %1 = stablehlo.add %a, %b : tensor<4xf32>
      sdy.return %1 : tensor<4xf32>
    } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def test_computations_per_device_become_part_of_the_program():
    module, _ = stablehlo.parse(PER_DEVICE.encode())
    stablehlo.erase_sharding(module)
    assert module.operation.verify()
    assert "sdy" not in str(module)
    x, y = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(module, x, y)[0], x + y)


# -- Composites ----------------------------------------------------------------------


def test_composites_become_calls():
    def function(x):
        return jnp.sinh(x), jax.lax.top_k(x, 3), jax.scipy.special.erf(x), jnp.tan(x)

    x = np.linspace(-1, 1, 6, dtype=np.float32)
    module = lower(function, x)
    had_composites = "stablehlo.composite" in str(module)
    assert had_composites or not stablehlo.newer_than(_current_version(), "1.10.0")

    stablehlo.legalize_composites(module)

    assert module.operation.verify()
    text = str(module)
    assert "composite" not in text
    # What compilers of the time before composites know under this name.
    assert "custom_call @mhlo.erf" in text
    assert "chlo.erf" not in text
    program = stablehlo.serialize(module, OLD)
    results = run(stablehlo.parse(program)[0], x)
    expected = jax.tree.leaves(jax.jit(function)(x))
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_composite_of_a_user_becomes_a_call():
    text = """
module {
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.composite "my.double" %x {decomposition = @double, version = 1 : i32,
      composite_attributes = {mine = 1 : i64}} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
  func.func private @double(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %x, %x : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
    module, _ = stablehlo.parse(text.encode())
    stablehlo.legalize_composites(module)
    assert "call @double(%arg0)" in str(module)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(run(module, x)[0], 2 * x)
