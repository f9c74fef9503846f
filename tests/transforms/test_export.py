"""jax.export: written in one process, run in another, with the checks that it needs."""

import pytest

from tests.support.processes import output_of, run_python

COMMON = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jax.export
import jax_flash_metal, jax_flash_metal.export
from jax_flash_metal import flash_attention

numbers = np.random.default_rng(0).standard_normal
x = jnp.asarray(numbers((2, 9, 4, 16)), jnp.float32)
bias = jnp.asarray(numbers((1, 1, 9, 9)), jnp.float32)
path = {path!r}

def loss(implementation, x, bias):
    out = flash_attention(
        x, x, x, bias, sinks=jnp.ones(4), is_causal=True, implementation=implementation
    )
    return jnp.sum(out ** 2)

def save(exported):
    with open(path, "wb") as file:
        file.write(exported.serialize(vjp_order=1))

def load():
    with open(path, "rb") as file:
        return jax.export.deserialize(file.read())
"""

WRITE = """
import functools
function = jax.jit(functools.partial(loss, {implementation!r}))
try:
    jax.export.export(function)(x, bias)
except ValueError as error:
    assert "no compatibility guarantees" in str(error), error
else:
    raise AssertionError("exported without the checks disabled")
checks = jax_flash_metal.export.DISABLED_CHECKS
exported = jax.export.export(function, disabled_checks=checks)(x, bias)
text = exported.mlir_module()
assert "jax_flash_metal_forward_v3" in text
save(exported)
"""

RUN = """
exported = load()
try:
    exported.call(x, bias)
except Exception as error:
    assert "jax_flash_metal_forward_v3" in str(error), error
else:
    raise AssertionError("ran without our handlers")
jax_flash_metal.export.register_kernels()
results = [jax.jit(exported.call)(x, bias)]
results += jax.grad(lambda *a: exported.call(*a), argnums=(0, 1))(x, bias)
expected = [loss("xla", x, bias)]
expected += jax.grad(lambda *a: loss("xla", *a), argnums=(0, 1))(x, bias)
for result, want in zip(results, expected):
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)
print("same")
"""

# For platforms with kernels and without, and on four devices.
OTHERS = """
import functools
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
checks = jax_flash_metal.export.DISABLED_CHECKS
names = ("cpu", "cuda", "tpu")
for implementation, has_kernels in ((None, True), ("xla", False)):
    function = jax.jit(functools.partial(loss, implementation))
    # The reference needs no check disabled.
    exported = jax.export.export(
        function, platforms=names, disabled_checks=checks if has_kernels else ()
    )(x, bias)
    assert ("jax_flash_metal_forward_v3" in exported.mlir_module()) == has_kernels
    save(exported)
    result = load().call(x, bias)
    np.testing.assert_allclose(result, loss("xla", x, bias), rtol=1e-5)
# For a platform without kernels alone it has none.
exported = jax.export.export(
    jax.jit(functools.partial(loss, None)), platforms=("cuda",)
)(x, bias)
assert "jax_flash_metal_forward_v3" not in exported.mlir_module()
for implementation in ("metal", "cpu"):
    demanded = jax.jit(functools.partial(loss, implementation))
    try:
        jax.export.export(demanded, platforms=("cpu", "cuda"))(x, bias)
    except NotImplementedError as error:
        print(error)

mesh = Mesh(np.array(jax.devices()), ("heads",))
specs = (P(None, None, "heads"), P())
split = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, bias), specs)]
exported = jax.export.export(demanded, disabled_checks=checks)(*split)
assert exported.nr_devices == 4
save(exported)
result = jax.jit(load().call)(*split)
np.testing.assert_allclose(result, loss("xla", x, bias), rtol=1e-5)
"""


@pytest.fixture
def common(tmp_path):
    return COMMON.replace("{path!r}", repr(str(tmp_path / "exported")))


@pytest.fixture(autouse=True)
def can_serialize():
    pytest.importorskip("flatbuffers", reason="jax.export wants it to serialize")


@pytest.mark.parametrize("implementation", ["metal", None])
def test_round_trip(common, implementation):
    write = WRITE.replace("{implementation!r}", repr(implementation))
    output_of(common + write, JAX_PLATFORMS="cpu")
    assert output_of(common + RUN, JAX_PLATFORMS="cpu") == "same"


def test_other_platforms_and_several_devices(common):
    done = run_python(
        common + OTHERS,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"implementation={implementation!r} needs platform {places}, but this program "
        "is compiled for 'cuda'; implementation=None or 'xla' runs everywhere."
        for implementation, places in (
            ("metal", "'cpu' or 'flash_metal'"),
            ("cpu", "'cpu'"),
        )
    ]
