"""What our kernels do, counted: the least that their algorithms and tilings allow.

For the rows of the variant table that are the defaults of the oldest and the newest GPU
family, in both forms of the backward pass.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jax_flash_metal import counts
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.variant_table import variants

# A library counts one call at a time; the same calls are asked for by several tests.
pytestmark = pytest.mark.xdist_group("kernel_counts")

FAMILIES = (0, 9)
FORMS = ("A", "B")
HEAD_DIMS = (64, 128, 256)
ROWS = {variant.host_name: variant for variant in variants()}
# Of attention_params.h: bias to the blocks of the mask.
OPTIONAL_BUFFERS = set(range(14, 27))
# Products of the kernels of each form: S, dP and dV, dK, and S, dP again and dQ, or dQ.
PRODUCTS = {
    "A": {"attention_backward_dq": 3, "attention_backward_dkv": 4},
    "B": {"attention_backward_dkv": 4, "attention_backward_dq_product": 1},
}


def aligned(head_dim: int, dtype: str = "float32", **options) -> counts.Problem:
    """Whole blocks of every row; grouped heads."""
    return counts.Problem(AttentionShape(1, 2, 1, 64, head_dim), dtype, **options)


def causal(head_dim: int, dtype: str, length: int = 128) -> counts.Problem:
    """Enough blocks that some are hidden, some cut and some whole."""
    shape = AttentionShape(1, 1, 1, length, head_dim)
    return counts.Problem(shape, dtype, is_causal=True)


def with_tails(head_dim: int, dtype: str = "float32", **options) -> counts.Problem:
    """No size is a whole number of blocks or fragments; fewer queries than keys."""
    shape = AttentionShape(2, 1, 1, 75, head_dim - 3, q_len=43)
    return counts.Problem(shape, dtype, **options)


@functools.cache
def counted(
    problem: counts.Problem, family: int, form: str
) -> dict[str, counts.KernelCounts]:
    """By the kernel's template."""
    from tests.checker.checked import library_of

    library = counts.CountingLibrary(library_of().library)
    found = counts.count(library, problem, family=family, form=form)
    return {ROWS[kernel.kernel].kernel: kernel for kernel in found}


def tiled(
    problem: counts.Problem, family: int, form: str
) -> dict[str, counts.KernelCounts]:
    """Of the kernels with products."""
    found = counted(problem, family, form)
    return {name: found[name] for name in ("attention_forward", *PRODUCTS[form])}


KINDS = pytest.mark.parametrize(
    "problem",
    [
        *(aligned(head_dim) for head_dim in HEAD_DIMS),
        causal(64, "float16"),
        with_tails(64, is_causal=True),
        with_tails(128, "float16"),
        *(
            pytest.param(problem, marks=pytest.mark.slow)
            for problem in (
                *(causal(head_dim, "bfloat16", 256) for head_dim in HEAD_DIMS),
                with_tails(256, "bfloat16", is_causal=True),
            )
        ),
    ],
    ids=str,
)
PLANS = pytest.mark.parametrize(
    ("family", "form"), [(family, form) for family in FAMILIES for form in FORMS]
)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [(8, 8), (32, 16), (16, 64)])
def test_blocks_are_visible_if_an_element_is(is_causal: bool, block: tuple[int, int]):
    """The blocks that everything below is in terms of, against the definition."""
    for make in (aligned, with_tails):
        problem = make(64, is_causal=is_causal)
        shape = problem.shape
        visible = np.ones((shape.num_queries, shape.length), bool)
        if is_causal:
            positions = np.arange(shape.num_queries)[:, None] + shape.q_offset
            visible = np.arange(shape.length) <= positions
        cells = [
            visible[i : i + block[0], j : j + block[1]]
            for i in range(0, shape.num_queries, block[0])
            for j in range(0, shape.length, block[1])
        ]
        expected = [cell.shape for cell in cells if cell.any()]
        assert problem.visible_blocks(*block) == expected
        heads = shape.batch_size * shape.num_heads
        assert problem.visible_pairs == heads * visible.sum()


@PLANS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_passes_make_as_few_products_as_their_algorithm(head_dim, family, form):
    found = tiled(aligned(head_dim), family, form)
    products = {name: kernel.products_per_score for name, kernel in found.items()}
    assert products == {"attention_forward": 2} | PRODUCTS[form]


@PLANS
@KINDS
def test_only_visible_blocks_take_products(problem, family, form):
    for name, kernel in tiled(problem, family, form).items():
        assert kernel.counts["products"] == kernel.least_products, name


@PLANS
@KINDS
def test_exp2_is_called_for_visible_scores_alone(problem, family, form):
    found = tiled(problem, family, form)
    for name in PRODUCTS[form]:
        recomputes = name != "attention_backward_dq_product"
        expected = problem.visible_pairs if recomputes else 0
        assert found[name].counts["calls"]["exp2"] == expected, name
    forward = found["attention_forward"]
    variant = ROWS[forward.kernel]
    # Of whole blocks, where hidden scores become 0 by it, and once for each row, by the
    # 4 lanes that share it: what O was multiplied with.
    per_block = variant.block_q * (variant.block_kv + 4)
    assert forward.counts["calls"]["exp2"] == forward.blocks * per_block
    # The maximum of a row in two steps for each block, and the sum at the end.
    heads = problem.shape.batch_size * problem.shape.num_heads
    groups = heads * -(-problem.shape.num_queries // variant.block_q)
    fragments = (forward.blocks + groups) * variant.block_q // 8
    assert forward.counts["shuffles"] == 2 * fragments
    assert forward.counts["calls"]["log2"] == 4 * heads * problem.shape.num_queries


@PLANS
@KINDS
def test_nothing_is_read_or_called_for_options_that_are_off(problem, family, form):
    for name, kernel in counted(problem, family, form).items():
        assert {n for n, calls in kernel.counts["calls"].items() if calls} <= {
            "exp2",
            "log2",
        }, name
        if name in PRODUCTS[form]:
            assert kernel.counts["reductions"] == 0, name
        assert not OPTIONAL_BUFFERS & {int(x) for x in kernel.counts["buffers"]}, name


@PLANS
@KINDS
def test_device_memory_is_read_hardly_more_than_tiling_takes(problem, family, form):
    for name, kernel in counted(problem, family, form).items():
        ratio = kernel.device_ratio
        # Below 1 the least would be wrong: a row that is kept, say, or a tile.
        assert ratio is None or 0.999 < ratio < 1.3, (name, ratio)


@PLANS
@KINDS
def test_threadgroup_memory_leaves_room_for_a_second_threadgroup(problem, family, form):
    for kernel in counted(problem, family, form).values():
        limit = (16 if ROWS[kernel.kernel].head_dim <= 128 else 32) * 1024
        assert kernel.counts["threadgroup_memory_bytes"] <= limit
        if ROWS[kernel.kernel].loads == "device":
            # Of tiles that are not there one element each.
            assert kernel.counts["threadgroup_memory_bytes"] <= 1024 or (
                ROWS[kernel.kernel].roles == 2
            )
