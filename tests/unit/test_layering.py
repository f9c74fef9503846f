"""Imports go one way: a module may import only modules to the right of it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jax_flash_metal"

# From the public functions down. `platforms`, `kernel_proof` and `tunings` are imported
# by `lowering` when a program with custom calls is lowered; they read its table.
LAYERS = [
    ("__init__", "__main__"),
    ("doctor", "bench", "counts"),
    ("doctor_checks", "bench_worker"),
    ("doctor_report", "bench_report"),
    ("bench_measure",),
    ("flax", "export", "autotuner"),
    ("api",),
    ("checks", "support", "autodiff"),
    ("primitives",),
    ("pjrt",),
    ("partition",),
    ("segment_writer",),
    ("program_graph",),
    ("call_records", "compile_options"),
    ("stablehlo",),
    ("tunings",),
    ("kernel_proof",),
    ("kernel_cases",),
    ("platforms",),
    ("lowering",),
    ("sharding", "reference", "kernel_choices"),
    ("gpu_report", "gpu_published", "command_options"),
    ("gpu_model",),
    ("gpu_counts",),
    ("gpu_planner",),
    ("command_options",),
    ("attention_library", "variant_table", "benchmark_shapes", "gpu_chips"),
    ("config", "hosts", "plan", "crashes", "_jax_compat", "_version"),
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def imports(path, *, only_top_level):
    tree = ast.parse(path.read_text())
    nodes = tree.body if only_top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_layer():
    assert set(MODULES) <= set(RANK)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_downwards(module):
    for name in imports(PACKAGE / f"{module}.py", only_top_level=True):
        parts = name.split(".")
        if parts[0] == "jax_flash_metal" and len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] > RANK[module], f"{module} imports {parts[1]}"


@pytest.mark.parametrize("module", MODULES)
def test_only_jax_compat_looks_inside_jax(module):
    if module == "_jax_compat":
        return
    names = list(imports(PACKAGE / f"{module}.py", only_top_level=False))
    assert not [name for name in names if name.startswith("jax._src")]
    assert not [n for n in names if n.startswith("flax")] or module == "flax"
