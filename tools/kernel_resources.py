"""Estimates registers and code size of the kernels: kernel_resources.json.

    python -m tools.kernel_resources                  writes the file
    python -m tools.kernel_resources --show PART ...  prints a table of kernels whose
                                                      names have a PART; writes nothing

How they are made and what they mean: plugin/nvptx/resources.py and docs/real-gpu.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plugin import build, kernel_sources
from plugin.kernel_sources import KERNEL_DIR, BuildError
from plugin.nvptx import compile as nvptx
from plugin.nvptx import resources

OUTPUT = build.ROOT / "jax_flash_metal" / "kernel_resources.json"

# The calls that estimates are for: function constants that are not 0, by their names.
# Lengths are multiples of the blocks; head_dim is the row's.
CASES = {"plain": {}, "causal": {"is_causal": 1}}
_ALIGNED = {"aligned_q": 1, "aligned_kv": 1}
# Of kernels that do not run without.
_NEEDS = {
    "attention_bias_gradient": {"has_bias": 1, "sums_rows": 1},
    "attention_mask_blocks": {"has_mask": 1},
    "attention_sinks_gradient": {"has_sinks": 1},
}
# What else a kernel is for: a case of its own.
_MORE_CASES = {
    "attention_backward_dkv": {
        "scratch": {"writes_score_gradient": 1},
        "scratch_causal": {"writes_score_gradient": 1, "is_causal": 1},
    }
}


def cases(kernel: str) -> dict[str, dict[str, int]]:
    """Names of the cases of a kernel, and its function constants in them."""
    needs = _ALIGNED | _NEEDS.get(kernel, {})
    return {
        name: needs | constants
        for name, constants in (CASES | _MORE_CASES.get(kernel, {})).items()
    }


def of_unit(
    unit: build.KernelUnit, kernel_dir: Path, cache: build.Cache
) -> dict[str, dict[str, resources.KernelResources]]:
    """The resources of a unit's kernels, by host name and case."""
    translation = nvptx.translate(unit, kernel_dir, cache)
    text = nvptx.with_entries(translation)
    index = {constant.name: constant.index for constant in translation.constants}
    kernel_of = {variant.host_name: variant.kernel for variant in unit.variants}
    found: dict[str, dict[str, resources.KernelResources]] = {}
    for kernel in dict.fromkeys(kernel_of.values()):
        for case, constants in cases(kernel).items():
            head_dims = dict.fromkeys(("head_dim", "value_head_dim"), unit.head_dim)
            values = {index[k]: v for k, v in (constants | head_dims).items()}
            ir = nvptx.to_ir(text, cache, estimate=values)
            ir, _ = nvptx.place_threadgroup_variables(ir)
            ptx = nvptx.to_ptx(ir, cache, estimate=True)
            for host_name, blocks in resources.kernels(ptx).items():
                if kernel_of[host_name] == kernel:
                    found.setdefault(host_name, {})[case] = resources.estimate(blocks)
    return found


def estimate(
    kernel_dir: Path = KERNEL_DIR,
    cache: build.Cache | None = None,
    parts: Sequence[str] = (),
) -> dict[str, dict[str, resources.KernelResources]]:
    """The resources of every kernel whose name has one of `parts`, in table order."""
    variants = [
        v
        for v in kernel_sources.load_variants(kernel_dir)
        if not parts or any(part in v.host_name for part in parts)
    ]
    cache = cache or build.default_cache()
    cache.folder.mkdir(parents=True, exist_ok=True)
    units = build.kernel_units(variants)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda unit: of_unit(unit, kernel_dir, cache), units)
    found = {name: kernel for result in results for name, kernel in result.items()}
    return {v.host_name: found[v.host_name] for v in variants}


def kernel_digest(kernel_dir: Path = KERNEL_DIR) -> str:
    """The hash of the kernels that the library names (jfm_kernel_digest)."""
    digest: str = json.loads(kernel_sources.headers(kernel_dir)["kernel_digest.inc"])
    return digest


def as_json(
    found: Mapping[str, Mapping[str, resources.KernelResources]], digest: str
) -> str:
    """The file: a line per kernel and case."""
    lines = []
    for host_name, by_case in found.items():
        entries = []
        for case, kernel in by_case.items():
            fields = json.dumps(dataclasses.asdict(kernel))
            entries.append(f'    "{case}": {fields}')
        most = {
            field: max(getattr(kernel, field) for kernel in by_case.values())
            for field in ("registers", "code_bytes")
        }
        entries.insert(0, f"    {json.dumps(most)[1:-1]}")
        lines.append(f'  "{host_name}": {{\n' + ",\n".join(entries) + "}")
    return f'{{"digest": "{digest}",\n "kernels": {{\n' + ",\n".join(lines) + "}}\n"


def table(
    found: Mapping[str, Mapping[str, resources.KernelResources]],
) -> Iterable[str]:
    """Lines for people; ! marks what is above what the kernels aim at."""
    for host_name, by_case in found.items():
        for case, kernel in by_case.items():
            loop = kernel.hot_loop
            line = f"{host_name} {case}: {_flag(kernel.registers, 'registers')}, "
            line += f"{kernel.uniform_registers} uniform, {kernel.code_bytes} bytes"
            if loop:
                mix: dict[str, Any] = loop.every_round
                words = ", ".join(f"{kind} {count}" for kind, count in mix.items())
                line += f"; loop: {loop.registers} registers, "
                line += f"{_flag(loop.code_bytes, 'bytes')}; round: {words}"
                for inner in loop.inner_loops:
                    words = ", ".join(f"{k} {n}" for k, n in inner.items())
                    line += f"; inner: {words}"
            yield line


_LIMITS = {
    "registers": resources.MOST_REGISTERS,
    "bytes": resources.INSTRUCTION_CACHE_BYTES,
}


def _flag(value: int, unit: str) -> str:
    return f"{value} {unit}" + (" (!)" if value > _LIMITS[unit] else "")


def main() -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="tools.kernel_resources", description=__doc__)
    parser.add_argument("--show", nargs="*", metavar="PART")
    parser.add_argument("--kernel-dir", type=Path, default=KERNEL_DIR)
    arguments = parser.parse_args()
    kernel_dir = arguments.kernel_dir.resolve()
    try:
        found = estimate(kernel_dir, parts=arguments.show or ())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.show is not None:
        print("\n".join(table(found)))
    else:
        OUTPUT.write_text(as_json(found, kernel_digest(kernel_dir)))
        print(OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
