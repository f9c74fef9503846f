"""Operation counts against counting, and the named sets."""

import itertools

import pytest

from jax_flash_metal.benchmark_shapes import PASSES, SHAPE_SETS, AttentionShape


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("q_len", [None, 1, 3, 7, 9])
def test_visible_pairs(length, q_len):
    shape = AttentionShape(1, 1, 1, length, 8, q_len)
    rows, offset = shape.num_queries, shape.q_offset
    pairs = itertools.product(range(rows), range(length))
    causal = sum(j <= i + offset for i, j in pairs)
    assert shape.visible_pairs(is_causal=True) == causal
    assert shape.visible_pairs(is_causal=False) == rows * length


def test_operations():
    shape = AttentionShape(2, 6, 3, 5, 16)
    assert shape.operations == 4 * 2 * 6 * 5 * 5 * 16
    both = shape.count_operations("forward+backward", is_causal=True)
    assert both == 14 * 2 * 6 * 15 * 16
    assert shape.count_operations("forward", is_causal=True) == both * 4 / 14


def test_text():
    assert str(AttentionShape(2, 6, 3, 5, 16)) == "B2 Hq6 Hkv3 L5 D16"
    assert str(AttentionShape(2, 6, 3, 5, 16, 1)) == "B2 Hq6 Hkv3 Lq1 L5 D16"


@pytest.mark.parametrize("name", SHAPE_SETS)
def test_sets(name):
    shapes = SHAPE_SETS[name]
    assert len(set(shapes)) == len(shapes) > 1
    for shape in shapes:
        assert shape.num_heads % shape.num_kv_heads == 0
        for pass_ in PASSES:
            assert shape.count_operations(pass_, is_causal=True) > 0
