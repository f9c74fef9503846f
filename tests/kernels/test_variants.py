"""Every row of the variant table, at its own head_dim and one below it."""

import pytest

from tests.support import cases, native, variant_coverage
from tests.support.kernel_check import check

HEAD_DIMS = sorted({row["head_dim"] for row in variant_coverage.rows()})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("q_len", [40, 6])
def test_row(q_len, head_dim, dtype):
    for below in (0, 1):
        case = cases.Case(
            f"row-{dtype}-d{head_dim - below}-q{q_len}",
            dtype=dtype,
            batch=(1,),
            q_len=q_len,
            kv_len=70,
            num_heads=2,
            num_kv_heads=1,
            head_dim=head_dim - below,
            is_causal=True,
            q_offset=30,
        )
        check(native, case)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("q_len", [40, 6])
def test_row_with_every_feature(q_len, head_dim, dtype):
    case = cases.Case(
        f"row-features-{dtype}-d{head_dim}-q{q_len}",
        dtype=dtype,
        q_len=q_len,
        kv_len=70,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        value_head_dim=max(1, head_dim - 3),
        **cases.EVERYTHING,
    )
    check(native, case)


def test_rows_have_distinct_names():
    names = [
        variant_coverage.host_name(row, dtype)
        for row in variant_coverage.rows()
        for dtype in row["dtypes"]
    ]
    assert len(names) == len(set(names))
