"""The formulas of gpu_counts.py, against plain loops over the elements of a problem."""

import dataclasses
import itertools
import math

import pytest

from jax_flash_metal import gpu_counts, gpu_planner
from jax_flash_metal.benchmark_shapes import AttentionShape
from jax_flash_metal.variant_table import Variant

# Sizes differ from one another, from tiles' and from multiples of 8.
SHAPES = (
    AttentionShape(2, 6, 3, 96, 64),
    AttentionShape(1, 4, 2, 133, 72),
    AttentionShape(3, 2, 1, 200, 128, q_len=57),
)


def row(kernel, block_q, block_kv, simdgroups, **others):
    return Variant(
        f"attention_{kernel}",
        "float16",
        128,
        block_q,
        block_kv,
        64,
        simdgroups,
        **others,
    )


FORWARD = row("forward", 64, 32, 4)
DQ = row("backward_dq", 32, 24, 4)
DKV = row("backward_dkv", 16, 32, 4)
PAIRED = row("backward_dkv", 24, 32, 4, roles=2)
PRODUCT = row("backward_dq_product", 64, 32, 2, loads="device")


def sees(shape, query, key, is_causal):
    if query >= shape.num_queries or key >= shape.length:
        return False
    return not is_causal or key <= query + shape.q_offset


def blocks_with_a_visible_element(shape, block_q, block_kv, is_causal):
    """Of one head, and how many of them have a hidden element or are cut."""
    found = edges = 0
    for first_q in range(0, shape.num_queries, block_q):
        for first_k in range(0, shape.length, block_kv):
            elements = [
                sees(shape, q, k, is_causal)
                for q in range(first_q, first_q + block_q)
                for k in range(first_k, first_k + block_kv)
            ]
            found += any(elements)
            edges += any(elements) and not all(elements)
    return found, edges


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "variant", "products"),
    [
        (gpu_counts.forward, FORWARD, 2),
        (gpu_counts.backward_dq, DQ, 3),
        (gpu_counts.backward_dkv, DKV, 4),
        (gpu_counts.backward_dkv, PAIRED, 4),
    ],
    ids=["forward", "dq", "dkv", "dkv-paired"],
)
def test_products_are_those_of_the_visible_blocks(
    kernel, variant, products, shape, is_causal
):
    launch = kernel(shape, variant, is_causal)
    visible, edges = blocks_with_a_visible_element(
        shape, variant.block_q, variant.block_kv, is_causal
    )
    heads = shape.batch_size * shape.num_heads
    fragments = variant.block_q * variant.block_kv // 64
    columns = math.ceil(shape.head_dim / 8)
    assert launch.total().products == heads * visible * fragments * products * columns
    assert sum(blocks * n for blocks, _, n in launch.groups) == heads * visible
    assert sum(cut * n for _, cut, n in launch.groups) == heads * edges


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_dq_are_those_of_eight_keys_at_a_time(shape, is_causal):
    chunk = gpu_planner.Chunk(shape.batch_size, shape.num_kv_heads, 0, shape.length)
    launch = gpu_counts.dq_product(shape, PRODUCT, is_causal, chunk)
    rows = 8 * gpu_counts.row_fragments(PRODUCT)
    visible, _ = blocks_with_a_visible_element(shape, rows, 8, is_causal)
    heads = shape.batch_size * shape.num_heads
    columns = math.ceil(shape.head_dim / 8)
    assert launch.total().products == pytest.approx(
        heads * visible * rows // 8 * columns
    )


@pytest.mark.parametrize("limit", [1 << 14, 1 << 16, 1 << 18, 1 << 30])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_cover_the_scores_once_and_keep_to_the_limit(shape, limit):
    chunks = list(gpu_planner.chunks(shape, DKV, limit))
    covered = sum(
        c.num_batches * c.num_kv_heads * (c.end_key - c.first_key) for c in chunks
    )
    assert covered == shape.batch_size * shape.num_kv_heads * shape.length
    groups = shape.num_heads // shape.num_kv_heads
    for chunk in chunks:
        keys = chunk.end_key - chunk.first_key
        size = chunk.num_batches * chunk.num_kv_heads * groups * 2
        size *= math.ceil(shape.num_queries / 8) * 8 * math.ceil(keys / 8) * 8
        assert size <= limit or keys <= 128


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_parts_do_the_work_of_the_whole(shape, is_causal):
    whole = gpu_counts.backward_dkv(shape, DKV, is_causal).total()
    products = sum(
        gpu_counts.backward_dkv(shape, DKV, is_causal, chunk).total().products
        for chunk in gpu_planner.chunks(shape, DKV, 1 << 15)
    )
    assert products == whole.products


def test_form_b_has_five_products_and_form_a_seven():
    shape = AttentionShape(1, 4, 4, 256, 64)
    rows = gpu_planner.Rows(FORWARD, row("delta", 4, 8, 4), DKV, DQ, PRODUCT, None, "A")
    for form, products in (("A", 7), ("B", 5)):
        launches = gpu_counts.launches(
            shape, dataclasses.replace(rows, form=form), "backward", False
        )
        total = sum(launch.total().products for launch in launches)
        # Scores come in fragments of 64; DQ's 24 keys do not divide 256.
        least = 4 * 256 * 256 // 64 * products * 8
        assert least <= total <= least * 1.02


def test_threadgroup_memory_is_what_the_kernel_declares():
    # Two tiles of 32 rows of 64 + 8 halves, and the weights of two pairs.
    paired = dataclasses.replace(PAIRED, block_q=32)
    launch = gpu_counts.backward_dkv(SHAPES[0], paired, False)
    assert launch.threadgroup_bytes == 2 * 32 * 72 * 2 + 2 * 16 * 32 * 4


def test_rows_that_stay_in_registers_are_read_once(monkeypatch):
    shape = AttentionShape(1, 1, 1, 256, 64)
    variant = dataclasses.replace(FORWARD, head_dim=64, block_d=64)
    query_bytes = 256 * 64 * 2
    once = gpu_counts.forward(shape, variant, False).total().device_read
    monkeypatch.setattr(gpu_counts, "_KEEP_LIMIT", 0)
    again = gpu_counts.forward(shape, variant, False).total().device_read
    assert again - once == query_bytes * (256 // 32 - 1)


@pytest.mark.parametrize(
    ("kernel", "variant"),
    [(gpu_counts.forward, FORWARD), (gpu_counts.backward_dkv, DKV)],
)
def test_a_tile_in_threadgroup_memory_is_read_from_memory_once(kernel, variant):
    """What it saves over device loads: all simdgroups but one, and further products."""
    shape = AttentionShape(1, 2, 2, 256, 128)
    device = dataclasses.replace(variant, loads="device")
    shared, direct = (kernel(shape, v, False).total() for v in (variant, device))
    assert shared.products == direct.products
    assert shared.threadgroup_read == direct.shared_read
    assert direct.threadgroup_read == direct.barriers == 0
    assert shared.device_read < direct.device_read


def test_the_compilers_numbers_replace_the_formulas(monkeypatch):
    shape = AttentionShape(1, 2, 2, 256, 64)
    variant = dataclasses.replace(FORWARD, head_dim=64, block_d=64)
    monkeypatch.setattr(gpu_counts, "compiled_resources", dict)
    by_formula = gpu_counts.forward(shape, variant, False)
    per_simdgroup = by_formula.block.products / 4
    round_ = {"products": per_simdgroup, "float_alu": 100, "threadgroup_loads": 7}
    loop = {"registers": 77, "every_round": round_}
    resources = {"registers": 80, "hot_loop": loop}
    monkeypatch.setattr(
        gpu_counts,
        "compiled_resources",
        lambda: {variant.host_name: {"plain": resources}},
    )
    launch = gpu_counts.forward(shape, variant, False)
    assert launch.registers == by_formula.registers
    assert launch.block.alu == 4 * 100
    copied = 2 * (2 * 32 * 64 / (4 * 32))  # loads and stores of both tiles
    assert launch.block.loads == 4 * 7 + copied
    # What halves cost there that come from device memory, they do not here.
    round_ |= {"device_loads": 32, "integer_alu": 40}
    launch = gpu_counts.forward(shape, variant, False)
    assert launch.block.loads == 4 * (7 + 32) + copied
    assert launch.block.alu == 4 * (100 + 40 - 32)
    # A loop that is not one block's says nothing of a block.
    round_["products"] += 1
    assert gpu_counts.forward(shape, variant, False).block.alu == by_formula.block.alu


def test_default_rows_follow_family_and_head_dim():
    rows = [
        dataclasses.replace(FORWARD, head_dim=64),
        dataclasses.replace(FORWARD, head_dim=128),
        dataclasses.replace(FORWARD, head_dim=64, min_family=9, loads="device"),
        dataclasses.replace(FORWARD, head_dim=64, min_family=9, is_default=False),
    ]
    choose = gpu_planner.default_variant
    for family, head_dim in itertools.product((0, 7, 8), (8, 64)):
        assert choose("attention_forward", "float16", head_dim, family, rows) is rows[0]
    assert choose("attention_forward", "float16", 72, 9, rows) is rows[1]
    assert choose("attention_forward", "float16", 64, 10, rows) is rows[2]
    with pytest.raises(LookupError, match="head_dim 136"):
        choose("attention_forward", "float16", 136, 9, rows)
