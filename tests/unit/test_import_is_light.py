"""Importing the package loads no native library and no Flax; the plugin's entry point,
which JAX imports in every process, loads next to nothing.
"""

from tests.support.processes import output_of

PROGRAM = """
import sys
import jax_flash_metal
jax_flash_metal.flash_attention
assert "flax" not in sys.modules
for name in ("platforms", "kernel_proof", "attention_library", "doctor"):
    assert f"jax_flash_metal.{name}" not in sys.modules
assert "rich" not in sys.modules
import jax._src.xla_bridge as bridge
assert not bridge._backends, "a JAX backend was started"
"""

ENTRY_POINT_PROGRAM = """
import sys
import jax
before = set(sys.modules)
import jax_flash_metal.pjrt
jax_flash_metal.pjrt.initialize()
ours = {
    "jax_flash_metal", "jax_flash_metal._version", "jax_flash_metal.pjrt",
}
assert set(sys.modules) - before <= ours, set(sys.modules) - before
"""


# A broken JAX must not keep it from saying so.
DOCTOR_PROGRAM = """
import sys
import jax_flash_metal.doctor
assert not {"jax", "jaxlib", "numpy", "rich"} & set(sys.modules)
"""


def test_import_is_light():
    assert output_of(PROGRAM) == ""


def test_doctor_is_light():
    assert output_of(DOCTOR_PROGRAM) == ""


def test_entry_point_is_light():
    assert output_of(ENTRY_POINT_PROGRAM) == ""
