"""The formulas against what the software device counts, launch by launch."""

import functools

import pytest

from jax_flash_metal import counts, gpu_counts, gpu_planner
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.variant_table import variants

# The checker build takes minutes where it is not cached; it counts one call at a time.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kernel_counts")]

ROWS = {variant.host_name: variant for variant in variants()}
FAMILIES = (0, 9)
FORMS = ("A", "B")


@functools.cache
def counted(problem, family, form):
    """(what was counted, what the formulas say) by kernel, over its launches."""
    from tests.checker.checked import library_of

    library = counts.CountingLibrary(library_of().library)
    found = counts.count(library, problem, family=family, form=form)
    by_kernel = {ROWS[kernel.kernel].kernel: kernel for kernel in found}
    row = {name: ROWS[kernel.kernel] for name, kernel in by_kernel.items()}
    rows = gpu_planner.Rows(
        row["attention_forward"],
        row["attention_delta"],
        row["attention_backward_dkv"],
        row.get("attention_backward_dq"),
        row.get("attention_backward_dq_product"),
        row.get("attention_backward_dkv_combine"),
        form,
    )
    launches = gpu_counts.launches(
        problem.shape, rows, "forward+backward", problem.is_causal
    )
    return {
        name: (kernel, [launch for launch in launches if launch.kernel == name])
        for name, kernel in by_kernel.items()
    }


def totals(launches):
    total = gpu_counts.Work()
    for launch in launches:
        total.add(launch.total())
    return total


def problem(head_dim, dtype, *, length=128, is_causal=False):
    return counts.Problem(AttentionShape(1, 4, 2, length, head_dim), dtype, is_causal)


ALIGNED = [(64, "float16"), (64, "float32"), (128, "bfloat16"), (256, "float32")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("head_dim", "dtype"), ALIGNED)
def test_equal_where_nothing_is_hidden(head_dim, dtype, family, form):
    for name, (kernel, launches) in counted(
        problem(head_dim, dtype), family, form
    ).items():
        counted_, total = kernel.counts, totals(launches)
        assert launches, name
        assert total.products == pytest.approx(counted_["products"]), name
        assert 32 * total.exp2 == counted_["calls"]["exp2"], name
        assert total.shuffles == counted_["shuffles"], name
        assert total.barriers == counted_["threadgroup_barriers"], name
        for bytes_ in ("threadgroup", "device"):
            for verb, way in (("read", "read"), ("write", "written")):
                assert getattr(total, f"{bytes_}_{verb}") == pytest.approx(
                    counted_[f"{bytes_}_bytes_{way}"]
                ), (name, bytes_, way)
        groups = sum(launch.num_threadgroups for launch in launches)
        assert groups == counted_["threadgroups"], name
        memory = max(launch.threadgroup_bytes for launch in launches)
        # The compiler aligns and orders what is declared.
        assert abs(memory - counted_["threadgroup_memory_bytes"]) <= 64, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_near_with_a_causal_mask(dtype, family, form):
    case = problem(64, dtype, length=256, is_causal=True)
    for name, (kernel, launches) in counted(case, family, form).items():
        counted_, total = kernel.counts, totals(launches)
        assert total.products == pytest.approx(counted_["products"]), name
        assert total.barriers == counted_["threadgroup_barriers"], name
        assert total.threadgroup_read == counted_["threadgroup_bytes_read"], name
        # Hidden elements need no exp2 in the backward pass.
        assert 32 * total.exp2 >= counted_["calls"]["exp2"], name
        # dq_product leaves out fragments that nobody wrote, which is not modelled.
        assert total.device_read == pytest.approx(
            counted_["device_bytes_read"], rel=0.05
        ), name
        assert total.device_write == counted_["device_bytes_written"], name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_and_barriers_with_tails(family, form):
    case = counts.Problem(AttentionShape(2, 2, 1, 75, 61, q_len=43), "float32", True)
    for name, (kernel, launches) in counted(case, family, form).items():
        counted_, total = kernel.counts, totals(launches)
        assert total.products == pytest.approx(counted_["products"]), name
        assert total.barriers == counted_["threadgroup_barriers"], name
