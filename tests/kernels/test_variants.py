"""Every row of the variant table, at its own head_dim and one below it."""

import pytest

from jax_flash_metal import gpu_counts, variant_table
from tests.support import cases, native, variant_coverage
from tests.support.forced import Forced
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


CHOSEN = [
    row
    for row in variant_table.variants()
    if row.min_family > 0
    or not row.is_default
    or row.kernel in ("attention_backward_dq", "attention_backward_dq_product")
]


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.host_name)
def test_row_by_choice(row):
    """Those that the device would not take, by their names; dQ of either form."""
    is_product = row.kernel == "attention_backward_dq_product"
    case = cases.Case(
        f"row-{row.host_name}",
        dtype=row.dtype,
        batch=(1,),
        q_len=row.block_q + 9,
        kv_len=140 if is_product else 2 * row.block_kv + 6,
        num_heads=2,
        num_kv_heads=1,
        head_dim=row.head_dim,
        value_head_dim=row.head_dim - 5,
        is_causal=True,
        q_offset=30,
    )
    form = "A" if row.kernel == "attention_backward_dq" else "B"
    implementation = Forced(form, limit=1, rows=(row.host_name,))
    which = "forward" if row.kernel == "attention_forward" else "backward"
    launches = implementation.plan(case, which)["launches"]
    assert row.host_name in [launch["kernel"] for launch in launches]
    check(implementation, case)


def test_rows_have_distinct_names():
    names = [
        variant_coverage.host_name(row, dtype)
        for row in variant_coverage.rows()
        for dtype in row["dtypes"]
    ]
    assert len(names) == len(set(names))


# Kernels whose products are those of attention_common.h.
PRODUCTS = [
    row
    for row in variant_table.variants()
    if any(part in row.kernel for part in ("forward", "_dq", "_dkv", "bias_gradient"))
    and "combine" not in row.kernel
]


@pytest.mark.parametrize("row", PRODUCTS, ids=lambda row: row.host_name)
def test_four_products_do_not_wait_for_one_another(row):
    """Of a simdgroup: the sums that a loop adds to before it is at the first again."""
    own = max(1, gpu_counts.row_fragments(row))  # short kernels: 8 rows of each
    others = gpu_counts.other_fragments(row)
    if row.kernel == "attention_backward_dq_product":
        assert own * row.block_d // 8 >= 4
    else:  # S and dP by rows of the other side; what is summed, by columns
        assert own * others >= 4
        assert own * row.block_d // 8 >= 4
