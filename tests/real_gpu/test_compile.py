"""Metal kernels to PTX: entry points, threadgroup memory, function constants."""

import re

import pytest

from plugin import build, kernel_sources
from plugin.nvptx import compile as nvptx

# What every part of the shim has a use for: the names are MSL's, the kernel nobody's.
SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant bool doubles [[function_constant(3)]];

template <typename T, int N>
[[kernel]] void pieces(
    device const T* in [[buffer(1)]], device float* out [[buffer(2)]],
    device const float* more [[buffer(5), function_constant(doubles)]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint3 group [[threadgroup_position_in_grid]]) {
  threadgroup T shared[N];
  threadgroup float sums[4];
  shared[simdgroup * 32 + lane] = in[group.x * N + simdgroup * 32 + lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<T, 8, 8> a;
  simdgroup_matrix<float, 8, 8> b = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(a, shared, 8);
  simdgroup_multiply_accumulate(b, a, a, b);
  float x = simd_sum(b.thread_elements()[0]) + simd_shuffle_xor(float(lane), ushort(1));
  x = simd_any(x > 3.0f) ? exp2(x) : simd_max(x);
  simdgroup_barrier(mem_flags::mem_none);
  if (lane == 0) sums[simdgroup] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (doubles) x *= more[lane];
  out[simdgroup * 32 + lane] = x + sums[3 - simdgroup];
}
"""
ROWS = """
template [[host_name("pieces_float")]] [[kernel]] decltype(pieces<float, 128>) pieces<float, 128>;
template [[host_name("pieces_half")]] [[kernel]] decltype(pieces<half, 128>) pieces<half, 128>;
"""  # noqa: E501
THREADS = {"pieces_float": 128, "pieces_half": 128}


class Unit:
    """A build.KernelUnit of a source of its own."""

    name = "pieces"

    def text(self):
        return SOURCE + ROWS


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return build.Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def text(cache):
    return nvptx.with_entries(nvptx.translate(Unit(), kernel_sources.KERNEL_DIR, cache))


@pytest.fixture(scope="module")
def ptx(text, cache):
    ir, sizes = nvptx.place_threadgroup_variables(nvptx.to_ir(text, cache))
    assert sizes == {"pieces_float": 128 * 4 + 16, "pieces_half": 128 * 2 + 16}
    return nvptx.to_ptx(nvptx.constants_in_device_memory(ir), cache)


def test_module_per_kernel(ptx):
    modules = nvptx.split_entries(ptx, THREADS | {"pieces_half": 64})
    assert list(modules) == ["pieces_float", "pieces_half"]
    for name, module in modules.items():
        assert re.findall(r"\.entry (\w+)", module) == [name]
        threads = re.findall(r"^\.maxntid (\d+), 1, 1$", module, re.MULTILINE)
        assert threads == [{"pieces_float": "128", "pieces_half": "64"}[name]]
        assert "jfm_function_constants[128]" in module
        assert module.count("\n}\n") == 1


def test_operations_become_the_gpus(ptx):
    module = nvptx.split_entries(ptx, THREADS)["pieces_float"]
    assert module.count("bar.sync \t0") + module.count("bar.sync 	0") == 2 * 2
    # A matrix product: of 8 rows 4 pairs of a, 8 of b, of two elements each; the sum 5;
    # the maximum 5; and the one that is asked for.
    assert module.count("shfl.sync.idx") == 2 * (4 + 8) + 5 + 5 + 1
    assert module.count("vote.") >= 1
    assert module.count("ex2.approx") == 1
    # A barrier without memory orders nothing.
    assert "bar.warp" not in module


def test_half_operands_are_shuffled_in_pairs(ptx):
    module = nvptx.split_entries(ptx, THREADS)["pieces_half"]
    assert module.count("shfl.sync.idx") == 4 + 8 + 5 + 5 + 1


def test_constant_buffers_are_device_memory(ptx):
    assert "ld.const" not in ptx and "ld.global.nc.u32" in ptx


def test_estimate_has_one_line_per_operation(text, cache):
    by_value = {}
    for value in (0, 1):
        ir = nvptx.to_ir(text, cache, estimate={3: value})
        ir, _ = nvptx.place_threadgroup_variables(ir)
        by_value[value] = nvptx.to_ptx(ir, cache, estimate=True)
        for name, count in {
            "product": 2,
            "exp2": 2,
            "shuffle": 2,
            "vote": 2,
            "reduction": 4,
            "threadgroup_barrier": 4,
            "simdgroup_barrier": 2,
        }.items():
            assert by_value[value].count(f"jfm.{name}") == count, name
    # The function constant is known: the buffer that it stands for is read, or not.
    loads = [by_value[value].count("ld.global") for value in (0, 1)]
    assert loads[1] == loads[0] + 2


def test_unknown_threadgroup_variables_are_left_alone():
    ir = "define void @k() {\n  call void @f()\n}\n"
    assert nvptx.place_threadgroup_variables(ir) == (f"{ir.strip()}\n", {"k": 0})


def test_facts_of_ptxas():
    log = (
        "ptxas info    : 128 bytes gmem\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas info    : Function properties for k\n"
        "    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 183 registers, used 1 barriers, 4624 bytes smem\n"
    )
    assert nvptx.cubin_facts(log) == {
        "registers": 183,
        "spilled_bytes": 4,
        "threadgroup_bytes": 4624,
    }
    assert nvptx.cubin_facts(log.replace(", 4624 bytes smem", ""))[
        "threadgroup_bytes"
    ] == 0  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", build.kernel_units(kernel_sources.load_variants()), ids=lambda u: u.name
)
def test_every_kernel_becomes_ptx(unit):
    cache = build.default_cache()
    translation = nvptx.translate(unit, kernel_sources.KERNEL_DIR, cache)
    ir = nvptx.to_ir(nvptx.with_entries(translation), cache)
    ir, _ = nvptx.place_threadgroup_variables(ir)
    ptx = nvptx.to_ptx(nvptx.constants_in_device_memory(ir), cache)
    threads = {v.host_name: 32 * v.num_simdgroups for v in unit.variants}
    modules = nvptx.split_entries(ptx, threads)
    assert list(modules) == [v.host_name for v in unit.variants]
    for module in modules.values():
        # Everything is inlined: nothing is left for a linker.
        assert ".extern" not in module and "call" not in module
