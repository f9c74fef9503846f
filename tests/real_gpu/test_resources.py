"""The estimates of registers and code size: on PTX that can be read, and the file."""

import json

import pytest

from jax_flash_metal import variant_table
from plugin.nvptx import resources
from tools import kernel_resources

# A sum over a row in device memory, eight products a round.
LOOP = """
.visible .entry sum(
	.param .u64 sum_param_0
)                                       // @sum
{
	.reg .b32 %r<9>;
// %bb.0:
	ld.param.u64 	%rd1, [sum_param_0];
	ld.const.u32 	%r1, [%rd1+8];
	mov.u32 	%r2, %tid.x;
	mul.wide.u32 	%rd2, %r2, 4;
	add.s64 	%rd3, %rd1, %rd2;
	add.s64 	%rd4, %rd3, 64;
	mov.u32 	%r3, 0;
	mov.f32 	%f1, 0f00000000;
	mov.f32 	%f2, 0f00000000;
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
	ld.global.f32 	%f3, [%rd3];
	ld.global.f32 	%f4, [%rd4+4];
	// begin inline asm
	jfm.product {%f1, %f2}, {%f3, %f4}, {%f3, %f4}, {%f1, %f2};
	// end inline asm
	setp.gt.f32 	%p1, %f1, 0f00000000;
	@%p1 bra 	$L__BB0_3;
// %bb.2:
	jfm.exp2 %f1, %f2;
	bra.uni 	$L__BB0_3;
$L__BB0_3:
	add.s32 	%r3, %r3, 1;
	setp.lt.u32 	%p2, %r3, %r1;
	@%p2 bra 	$L__BB0_1;
	st.global.f32 	[%rd3], %f1;
	ret;
}
"""


def estimate(ptx):
    (blocks,) = resources.kernels(ptx).values()
    return resources.estimate(blocks)


def test_loop():
    kernel = estimate(LOOP)
    # Live at the product: %f1 … %f4, %r3 and the address: 5 + 2; the row's length is
    # uniform, and %rd4 differs from %rd3 by a constant.
    assert kernel.registers == 7
    assert kernel.uniform_registers == 3  # the address of 64 bits, and the length
    loop = kernel.hot_loop
    assert loop.registers == 7
    assert loop.every_round == {
        "branches": 2,
        "device_loads": 2,
        "float_alu": 1,
        "integer_alu": 2,
        "products": 1,
    }
    # One more for each branch that is not taken in every round.
    assert loop.code_bytes == 8 * (8 + 2)


def test_conditional_result_keeps_the_old_one():
    ptx = LOOP.replace("@%p1 bra 	$L__BB0_3;", "@%p1 mov.b32 %f2, %f3;")
    (blocks,) = resources.kernels(ptx).values()
    conditional = next(i for block in blocks for i in block if i.predicated)
    assert conditional.defines == ("%f2",)
    assert set(conditional.uses) == {"%f3", "%p1"}
    assert resources.estimate(blocks).registers == 7


@pytest.mark.parametrize(
    ("line", "registers"),
    [("ld.global.b16 %rs1, [%rd3];", 8), ("ld.global.u64 %rd9, [%rd3];", 9)],
)
def test_widths(line, registers):
    """Half a register more is one more; 64 bits are two."""
    used = line.split()[1].rstrip(",")
    ptx = LOOP.replace("$L__BB0_1:", f"\t{line}\n$L__BB0_1:")
    ptx = ptx.replace("\tret;", f"\tst.global.x [%rd3], {used};\n\tret;")
    assert estimate(ptx).registers == registers


def test_threads_positions_are_not_uniform():
    (blocks,) = resources.kernels(LOOP).values()
    uniform = resources.uniform_registers(blocks)
    assert {"%rd1", "%r1"} <= uniform
    assert not uniform & {"%r2", "%rd2", "%rd3", "%r3", "%f1"}


def test_nested_loops_are_told_apart():
    inner = "\tjfm.shuffle %r4, %r3, %r3;\n\tsetp.eq.s32 %p3, %r4, 0;\n"
    ptx = LOOP.replace(
        "$L__BB0_3:", f"$L__BB0_3:\n$L__BB0_4:\n{inner}\t@%p3 bra $L__BB0_4;\n"
    )
    loop = estimate(ptx).hot_loop
    assert "shuffles" not in loop.every_round
    assert loop.inner_loops == [{"branches": 1, "integer_alu": 1, "shuffles": 1}]


def test_kernel_without_products_has_no_hot_loop():
    ptx = LOOP.replace("jfm.product {%f1, %f2}, {%f3, %f4}, {%f3, %f4}, {%f1, %f2}",
                       "add.f32 %f1, %f3, %f4")  # fmt: skip
    assert estimate(ptx).hot_loop is None


def test_file_has_every_kernel():
    kernels = json.loads(kernel_resources.OUTPUT.read_text())["kernels"]
    assert list(kernels) == [v.host_name for v in variant_table.variants()]
    for name, cases in kernels.items():
        expected = {"registers", "code_bytes", *kernel_resources.cases(_kernel(name))}
        assert set(cases) == expected, name
        assert cases["registers"] >= cases["plain"]["registers"] > 0


def test_file_is_of_these_kernels():
    digest = json.loads(kernel_resources.OUTPUT.read_text())["digest"]
    assert digest == kernel_resources.kernel_digest(), (
        "run: python -m tools.kernel_resources"
    )


@pytest.mark.slow
def test_file_is_up_to_date():
    found = kernel_resources.estimate()
    text = kernel_resources.as_json(found, kernel_resources.kernel_digest())
    assert kernel_resources.OUTPUT.read_text() == text, (
        "run: python -m tools.kernel_resources"
    )


def _kernel(host_name):
    by_name = {v.host_name: v.kernel for v in variant_table.variants()}
    return by_name[host_name]
