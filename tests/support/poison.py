"""The NaN rule: which results a non-finite input element may change, and which not.

A query row is spoilt when it sees a non-finite key, value or element of the bias, or
sees any key at all and is (or has a cotangent, sink or slope that is) non-finite. A key
is spoilt when a spoilt row sees it, and so is an element of a gradient to which a
spoilt row adds. Everything else must keep its bits. Who sees whom is reference_f64's.
"""

from typing import Any, NamedTuple

import numpy as np

from tests.support import reference_f64
from tests.support.cases import DIFFERENTIABLE, EVERYTHING, Case
from tests.support.compare import assert_identical
from tests.support.inputs import make_arguments, make_inputs
from tests.support.kernel_check import run

QUERY_SIDE = ("query", "dout", "dlogsumexp")
KEY_SIDE = ("key", "value")
COTANGENTS = ("dout", "dlogsumexp")

# Each rule that hides, with what else reads the hidden elements.
RULES = {
    "mask": {"mask": "random"},
    "mask-blocks": {"mask": "blocks", "mask_ones": "n"},
    "mask-keys": {"mask": "random", "mask_ones": "nt"},
    "segments": {"segments": "packed"},
    "segments-mixed": {"segments": "mixed"},
    "kv-lengths": {"kv_lengths": "half"},
    "query-lengths": {"query_lengths": "half"},
    "window": {"sliding_window": (5, 3), "q_offset": 4},
    "window-offsets": {"sliding_window": (9, 2), "traced_offset": True},
    "hidden-bias": {"bias": "float32", "bias_values": "hidden"},
    "hidden-bias-f16": {"bias": "float16", "bias_values": "hidden", "bias_ones": "n"},
    "causal-bias": {"is_causal": True, "bias": "float32", "q_offset": 3},
    "mask-bias-rows": {"mask": "random", "bias": "float32", "bias_ones": "s"},
    "softcap": {"logits_soft_cap": 2.0, "is_causal": True, "q_offset": 3},
    "sinks-slopes": {"sinks": True, "slopes": True, "is_causal": True},
    "dropout": {"dropout_rate": 0.5, "mask": "random"},
    "everything": EVERYTHING,
}


def rule_case(rule, q_len, dtype="float32"):
    """Few keys, so that every rule hides some of them from everybody."""
    return Case(
        f"hidden-by-{rule}-{dtype}-q{q_len}",
        dtype=dtype,
        q_len=q_len,
        kv_len=70,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        **RULES[rule],
    )


class Poison(NamedTuple):
    operand: str
    position: Any  # of a query or key; of the bias (query, key); None: of a head
    value: float
    component: int | None = None  # along the head dim; None = all


class Spoilt(NamedTuple):
    """What a poison may change, as bool arrays."""

    rows: np.ndarray  # [*batch, num_heads, q_len]
    keys: np.ndarray  # [*batch, num_kv_heads, kv_len]
    scores: np.ndarray  # [*batch, num_heads, q_len, kv_len]: of spoilt rows, visible


def check_poison(implementation, case, *poisons):
    """Plants each poison alone in one head of the last batch element that has it.

    Compares with the run without.
    """
    clean, features = make_inputs(case), make_arguments(case)
    expected = run(implementation, clean, **features)
    visible = who_sees_whom(case, features)
    for poison in poisons:
        where = _where(case, poison)
        inputs, arguments = clean, features
        if poison.operand in clean._fields:
            dirty = _planted(getattr(clean, poison.operand), where, poison)
            inputs = clean._replace(**{poison.operand: dirty})
        else:
            if (
                poison.operand == "bias"
            ):  # -inf hides; another number would show the key
                where &= ~np.isneginf(features["bias"])
            dirty = _planted(features[poison.operand], where, poison)
            arguments = features | {poison.operand: dirty}
        actual = run(implementation, inputs, **arguments)
        _compare(case, poison, expected, actual, spoilt(case, poison, where, visible))


def check_hidden(implementation, case, value):
    """Plants `value` wherever nobody sees it, all at once: not a bit may change."""
    clean, features = make_inputs(case), make_arguments(case)
    expected = run(implementation, clean, **features)
    visible = who_sees_whom(case, features)
    inputs, arguments = plant_hidden(case, clean, features, visible, value)
    actual = run(implementation, inputs, **arguments)
    for (name, a), (_, e) in zip(actual.present(), expected.present(), strict=True):
        context = f"{case.context} with {value} in all that is hidden"
        assert_identical(a, e, name=name, context=context)


def plant_hidden(case, inputs, arguments, visible, value):
    """Inputs and arguments with `value` in every element that no pair makes visible."""
    num_groups = case.num_heads // case.num_kv_heads
    pairs = visible.reshape(
        *case.batch, case.num_kv_heads, num_groups, case.q_len, case.kv_len
    )
    seen_keys = np.swapaxes(pairs.any((-3, -2)), -1, -2)[..., None]
    seen_rows = visible.any(-1)
    seeing = np.swapaxes(seen_rows, -1, -2)[..., None]
    seen = {"key": seen_keys, "value": seen_keys, "query": seeing, "dout": seeing}
    seen["dlogsumexp"] = seen_rows
    planted = {
        name: np.where(_any_to(seen[name], (*x.shape[:-1], 1) if x.ndim > seen_rows.ndim
                               else x.shape), x, np.asarray(value, x.dtype))
        for name, x in inputs._asdict().items()
    }  # fmt: skip
    if "bias" in arguments:
        bias = arguments["bias"]
        keep = _any_to(visible, bias.shape) | np.isneginf(bias)
        arguments = arguments | {
            "bias": np.where(keep, bias, np.asarray(value, bias.dtype))
        }
    return inputs._replace(**planted), arguments


def who_sees_whom(case, arguments):
    """bool [*batch, num_heads, q_len, kv_len]."""
    operands = make_inputs(case).operands
    problem = reference_f64.Problem.build(*operands, batch=case.batch, **arguments)
    rows = slice(0, case.q_len)
    visible = problem.visible(rows, problem.distance(rows))
    return visible.reshape(*case.batch, case.num_heads, case.q_len, case.kv_len)


def spoilt(case, poison, where, visible) -> Spoilt:
    if poison.operand in (*KEY_SIDE, *QUERY_SIDE[:2]):
        where = np.swapaxes(where.any(-1), -1, -2)  # [*batch, heads, positions]
    if poison.operand in KEY_SIDE:
        where = np.repeat(where, case.num_heads // case.num_kv_heads, axis=-2)
        rows = (visible & where[..., None, :]).any(-1)
    elif poison.operand == "bias":
        rows = (visible & where).any(-1)
    else:
        if poison.operand in ("sinks", "alibi_slopes"):
            where = where[..., None]
        rows = visible.any(-1) & where
    scores = visible & rows[..., None]
    keys = scores.any(-2).reshape(*case.batch, case.num_kv_heads, -1, case.kv_len)
    return Spoilt(rows, keys.any(-2), scores)


def _compare(case, poison, expected, actual, changed: Spoilt):
    rows, keys, scores = changed
    nothing = np.zeros_like(rows)
    is_value, is_cotangent = poison.operand == "value", poison.operand in COTANGENTS
    forward = nothing if is_cotangent else rows
    # Neither the gradient of value nor the probabilities depend on value.
    may_and_must = {
        "out": (forward, forward),
        "logsumexp": (forward, nothing if is_value else forward),
        "dquery": (rows, rows),
        "dkey": (keys, keys),
        "dvalue": (keys, np.zeros_like(keys) if is_value else keys),
    }
    for name, x in expected.present():
        if name in DIFFERENTIABLE:
            added = scores if name == "dbias" else rows
            added = _any_to(added, x.shape)
            may_and_must[name] = (added, added)
    for name, (may, must) in may_and_must.items():
        context = f"{case.context} with {poison}"
        before, after = getattr(expected, name), getattr(actual, name)
        if name not in ("logsumexp", *DIFFERENTIABLE):
            # to [*batch, head, row, component]
            before, after = np.swapaxes(before, -3, -2), np.swapaxes(after, -3, -2)
        assert_identical(after[~may], before[~may], name=name, context=context)
        # An infinite score may rightly have probability 0, a dropped element does not
        # count; NaN spoils all else that it meets.
        if np.isnan(poison.value) and not case.dropout_rate:
            assert np.isnan(after[must]).all(), (
                f"{name} of {context}: a row that sees the NaN is finite"
            )


def _where(case, poison):
    """bool like the operand: the poisoned elements, of one head of the last batch."""
    where = np.zeros(case.shape(poison.operand), bool)
    if poison.operand == "bias":
        query, key = poison.position
        *batch, heads, rows, columns = where.shape
        last = tuple(size - 1 for size in batch)
        index = (heads // 2, min(query, rows - 1), min(key, columns - 1))
        where[(*last, *index)] = True
    elif poison.operand in ("sinks", "alibi_slopes"):
        where[(*(size - 1 for size in where.shape[:-1]), where.shape[-1] // 2)] = True
    elif poison.operand == "dlogsumexp":
        *batch, heads, _ = where.shape
        where[(*(size - 1 for size in batch), heads // 2, poison.position)] = True
    else:
        *batch, _, heads, _ = where.shape
        last = tuple(size - 1 for size in batch)
        component = slice(None) if poison.component is None else poison.component
        where[(*last, poison.position, heads // 2, component)] = True
    return where


def _planted(array, where, poison):
    return np.where(where, np.asarray(poison.value, array.dtype), array)


def _any_to(x, shape):
    """Which elements of an array of `shape`, broadcast to x, meet a true one."""
    x = x.any(tuple(range(len(shape), x.ndim)))
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1)
    return x.any(axes, keepdims=True)
