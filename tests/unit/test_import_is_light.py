"""Importing the package loads no native library and no Flax."""

import subprocess
import sys

PROGRAM = """
import sys
import jax_flash_metal
assert "flax" not in sys.modules
assert "jax_flash_metal.platforms" not in sys.modules
import jax._src.xla_bridge as bridge
assert not bridge._backends, "a JAX backend was started"
"""


def test_import_is_light():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
