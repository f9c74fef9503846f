"""Counts of copies of our kernels: waste that is planted is seen, options cost nothing.

A copy takes tens of seconds to build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jax_flash_metal import counts
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.variant_table import variants
from tests.checker.checked import library_of
from tests.checker.planted import Bug, copy_of_kernels

pytestmark = pytest.mark.slow

PROBLEM = counts.Problem(AttentionShape(1, 2, 1, 96, 60), "float32", is_causal=True)
KERNELS = (
    "attention_mask_blocks",
    *("attention_forward", "attention_delta"),
    *("attention_backward_dq", "attention_backward_dkv"),
)
ROWS = {variant.host_name: variant.kernel for variant in variants()}


def counted(kernel_dir: Path) -> dict[str, counts.KernelCounts]:
    """Of each kernel, by its template."""
    library = counts.CountingLibrary(library_of(kernel_dir, KERNELS).library)
    return {ROWS[k.kernel]: k for k in counts.count(library, PROBLEM, form="A")}


def barriers(kernel_dir: Path) -> list[dict[str, Any]]:
    """Those of the backward pass above."""
    return library_of(kernel_dir, KERNELS).barriers()


def cut_out_options(kernel_dir: Path) -> None:
    """Makes the constants that say which options there are literals, all off."""
    params = (kernel_dir / "attention_params.h").read_text()
    names = re.findall(r"X\((?:bool|int), (has_\w+|bias_dtype), \d+\)", params)
    assert len(names) > 8
    common = kernel_dir / "attention_common.h"
    text = common.read_text()
    for name in names:
        # In place of the declaration by the list.
        params = re.sub(rf"X\((bool|int), {name}, \d+\)", "", params)
    (kernel_dir / "attention_params.h").write_text(params)
    literals = "".join(f"constant constexpr int {name} = 0;\n" for name in names)
    declared = "JFM_FUNCTION_CONSTANTS(JFM_DECLARE_CONSTANT)\n"
    assert text.count(declared) == 1
    common.write_text(text.replace(declared, declared + literals))
    for path in kernel_dir.iterdir():
        text = path.read_text()
        path.write_text(re.sub(r", function_constant\(has_\w+\)", "", text))


def test_options_that_are_off_cost_nothing(tmp_path: Path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "cut").mkdir()
    plain, cut = copy_of_kernels(tmp_path / "plain"), copy_of_kernels(tmp_path / "cut")
    cut_out_options(cut)
    expected, found = counted(cut), counted(plain)
    assert found.keys() == expected.keys()
    for name, kernel in found.items():
        # A compiler reads constant memory as often as it likes.
        own, other = (
            {n: value for n, value in k.counts.items() if n != "constant_bytes_read"}
            for k in (kernel, expected[name])
        )
        assert own == other, name


def test_work_on_hidden_blocks_is_seen(tmp_path: Path):
    kernel_dir = copy_of_kernels(tmp_path)
    Bug(
        "no-skip", "attention_scores.h",
        "Range range = {first.begin, last.end};", "Range range = {0, 96};",
    ).plant(kernel_dir)  # fmt: skip
    for name, kernel in counted(kernel_dir).items():
        if name in counts.TILINGS:
            assert kernel.counts["products"] > kernel.least_products, name


def test_a_redundant_barrier_is_seen(tmp_path: Path):
    kernel_dir = copy_of_kernels(tmp_path)
    first = "Fragment dk[kRows * kDims];"
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    path = kernel_dir / "attention_backward_dkv.metal"
    text = path.read_text()
    assert text.count(first) == 1
    path.write_text(text.replace(first, f"{barrier} {first}"))
    line = text[: text.index(first)].count("\n") + 1
    counted(kernel_dir)
    redundant = {
        (b["kernel"], b["line"]) for b in barriers(kernel_dir) if not b["is_needed"]
    }
    assert {(ROWS[kernel], number) for kernel, number in redundant} == {
        ("attention_backward_dkv", line)
    }
