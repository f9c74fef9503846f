"""q_len <= 8: the kernels that split the keys, from one split to the most."""

import pytest

from tests.support import cases, tolerances
from tests.support.kernel_check import check


def _case(**sizes):
    name = "-".join(f"{k.replace('_', '')}{v}" for k, v in sizes.items())
    case = cases.Case(f"short-{name}", **sizes)
    return pytest.param(case, id=case.id)


# The planner gives each split 64 keys at least and makes 64 splits at most.
KEY_LENGTHS = (1, 31, 63, 64, 65, 128, 129, 200, 1000, 4097)


@pytest.mark.parametrize(
    "case",
    [
        _case(dtype=dtype, q_len=q_len, kv_len=kv_len, head_dim=40, batch=(1,))
        for dtype in tolerances.DTYPES
        for q_len, kv_len in zip((1, 2, 3, 4, 5, 6, 7, 8, 1, 3), KEY_LENGTHS)
    ],
)
def test_key_lengths(case, kernels):
    check(kernels, case)


@pytest.mark.parametrize(
    "case",
    [
        _case(q_len=q_len, kv_len=kv_len, is_causal=True, q_offset=offset)
        for q_len, kv_len, offset in [
            (1, 200, 199),  # decoding: every key
            (1, 200, 0),  # only the first key: all other splits are empty
            (7, 200, 193),
            (8, 200, 60),  # the edge crosses from one split to the next
            (8, 200, 120),
            (8, 200, -3),  # rows without keys beside rows with some
            (3, 200, -3),  # no row has a key
            (8, 5, 0),
        ]
    ],
)
def test_causal(case, kernels):
    check(kernels, case)


@pytest.mark.parametrize(
    "case",
    [
        _case(q_len=q_len, kv_len=150, num_heads=heads, num_kv_heads=kv_heads)
        for q_len in (1, 3, 8)
        for heads, kv_heads in [(1, 1), (3, 3), (8, 1), (9, 3), (34, 2)]
    ],
)
def test_groups(case, kernels):
    """Rows of the 8-row tiles are (query, head of the group) pairs."""
    check(kernels, case)


@pytest.mark.parametrize(
    "case",
    [
        _case(dtype=dtype, q_len=3, kv_len=70, head_dim=head_dim, value_head_dim=width)
        for dtype in tolerances.DTYPES
        for head_dim, width in [(1, 1), (64, 64), (65, 3), (128, 127), (3, 256)]
    ],
)
def test_head_dims(case, kernels):
    check(kernels, case)


@pytest.mark.parametrize("q_len", [8, 9])
def test_both_sides_of_the_limit_agree(q_len, kernels):
    """The first q_len that is not short takes other kernels, with the same meaning."""
    check(kernels, cases.Case(f"limit-q{q_len}", q_len=q_len, is_causal=True))
