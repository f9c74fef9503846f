"""The NaN rule: which results a non-finite input element may change, and which not.

A query row is spoilt when it sees a non-finite key or value, or sees any key at all and
is (or has a cotangent that is) non-finite itself. A key is spoilt when a spoilt row
sees it. Everything else must keep its bits.
"""

from typing import NamedTuple

import numpy as np

from tests.support.compare import assert_identical
from tests.support.inputs import make_inputs
from tests.support.kernel_check import run

QUERY_SIDE = ("query", "dout", "dlogsumexp")


class Poison(NamedTuple):
    operand: str
    position: int  # query or key position
    value: float
    component: int | None = None  # along the head dim; None = all


def check_poison(implementation, case, poison):
    """Poisons one head of one batch element, compares with the run without."""
    clean = make_inputs(case)
    batch = tuple(size - 1 for size in case.batch)
    head = (case.num_heads if poison.operand in QUERY_SIDE else case.num_kv_heads) // 2
    dirty = clean._replace(
        **{
            poison.operand: _poisoned(
                getattr(clean, poison.operand), batch, head, poison
            )
        }
    )
    expected = run(implementation, clean, **case.options)
    actual = run(implementation, dirty, **case.options)

    rows, keys = spoilt(case, batch, head, poison)
    forward_rows = np.zeros_like(rows) if poison.operand in QUERY_SIDE[1:] else rows
    # The gradient of value does not depend on value.
    value_keys = np.zeros_like(keys) if poison.operand == "value" else keys
    # The probabilities, and with them logsumexp, do not depend on value either.
    lse_rows = np.zeros_like(rows) if poison.operand == "value" else forward_rows
    may_and_must = {
        "out": (forward_rows, forward_rows),
        "logsumexp": (forward_rows, lse_rows),
        "dquery": (rows, rows),
        "dkey": (keys, keys),
        "dvalue": (keys, value_keys),
    }
    for name, (may, must) in may_and_must.items():
        context = f"{case.context} with {poison}"
        before, after = getattr(expected, name), getattr(actual, name)
        if name != "logsumexp":  # to [*batch, head, row, component]
            before, after = np.swapaxes(before, -3, -2), np.swapaxes(after, -3, -2)
        assert_identical(after[~may], before[~may], name=name, context=context)
        # An infinite score may rightly have probability 0; NaN spoils all it meets.
        if np.isnan(poison.value):
            assert np.isnan(after[must]).all(), (
                f"{name} of {context}: a row that sees the NaN is finite"
            )


def spoilt(case, batch, head, poison):
    """bool [*batch, num_heads, q_len] and [*batch, num_kv_heads, kv_len]."""
    visible = np.ones((case.q_len, case.kv_len), bool)
    if case.is_causal:
        visible = np.tril(visible, case.q_offset)
    rows = np.zeros((*case.batch, case.num_heads, case.q_len), bool)
    keys = np.zeros((*case.batch, case.num_kv_heads, case.kv_len), bool)
    num_groups = case.num_heads // case.num_kv_heads
    if poison.operand in QUERY_SIDE:
        kv_head = head // num_groups
        rows[(*batch, head, poison.position)] = visible[poison.position].any()
        spoilt_rows = rows[(*batch, head)]
    else:
        kv_head = head
        heads = slice(head * num_groups, (head + 1) * num_groups)
        spoilt_rows = visible[:, poison.position]
        rows[(*batch, heads)] = spoilt_rows
    keys[(*batch, kv_head)] = visible[spoilt_rows].any(0)
    return rows, keys


def _poisoned(array, batch, head, poison):
    array = array.copy()
    if poison.operand == "dlogsumexp":
        array[(*batch, head, poison.position)] = poison.value
    else:
        row = array[(*batch, poison.position, head)]
        row[slice(None) if poison.component is None else poison.component] = (
            poison.value
        )
    return array
