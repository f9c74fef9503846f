"""Tiny attention problems that tell whether a kernel computes the right numbers.

For the proof of a kernel at its first use (kernel_proof.py) and for `doctor`. NumPy and
the C ABI only, so that it can run while JAX lowers a program. The definition in float64
is written as the formulas are; the tests hold it against their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_flash_metal.attention_library import (
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    NUMPY_DTYPES,
    RESOURCE_EXHAUSTED,
    Array,
    AttentionError,
    AttentionLibrary,
    CallShape,
    Problem,
    shape_problem,
)

# (atol, rtol) per dtype: those of tests/support/tolerances.py, which a test compares.
TOLERANCES: dict[str, dict[str, tuple[float, float]]] = {
    "float32": {
        "out": (2e-5, 1e-5),
        "gradient": (1e-4, 1e-4),
        "logsumexp": (1e-5, 1e-5),
    },
    "float16": {
        "out": (1e-3, 1e-3),
        "gradient": (5e-3, 5e-3),
        "logsumexp": (1e-4, 1e-4),
    },
    "bfloat16": {
        "out": (1e-2, 1e-2),
        "gradient": (3e-2, 2e-2),
        "logsumexp": (1e-4, 1e-4),
    },
}


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One pass over a tiny problem.

    Attributes:
      dtype: Of query, key and value.
      row_head_dim: The head_dim of the rows of the variant table that it runs.
      is_short: Few queries: the kernels that split the keys.
      is_aligned: Whole tiles and the full head_dim, every key visible; otherwise no
        length is a whole number of anything and a causal mask cuts through the tiles.
      backward: Which pass.
    """

    dtype: str
    row_head_dim: int
    is_short: bool
    is_aligned: bool
    backward: bool

    @property
    def shape(self) -> CallShape:
        if self.is_aligned:
            # 96 is a whole number of every tile of the table.
            q_len, kv_len = (8 if self.is_short else 96), (192 if self.is_short else 96)
            head_dim = value_head_dim = self.row_head_dim
        else:
            # Short: more than one split of the keys. Otherwise two tiles of each.
            q_len, kv_len = (5, 149) if self.is_short else (37, 43)
            head_dim = max(1, self.row_head_dim - 3)
            value_head_dim = max(1, self.row_head_dim - 9)
        return CallShape(self.dtype, q_len, kv_len, 4, 2, head_dim, value_head_dim)

    @property
    def q_offset(self) -> int:
        if self.is_aligned:
            return 0
        # Some keys are hidden from all queries. 1: of the keys that a tile of queries
        # sees, the last is the first of a tile of keys.
        return self.shape.kv_len - self.shape.q_len - 2 if self.is_short else 1

    @property
    def options(self) -> dict[str, Any]:
        """scale as it travels, is_causal and q_offset."""
        return {
            "scale": float(np.float32(self.shape.head_dim**-0.5)),
            "is_causal": not self.is_aligned,
            "q_offset": self.q_offset,
        }

    def problem(self) -> Problem:
        """Without memory, for AttentionLibrary.kernels and compile."""
        is_causal = not self.is_aligned
        return shape_problem(self.shape, is_causal=is_causal, q_offset=self.q_offset)

    def kernels(self, library: AttentionLibrary) -> list[str]:
        """Names of the kernels that it runs."""
        return library.kernels(self.problem(), self.backward)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a case says of one kernel.

    Attributes:
      error: The largest error as a part of what is allowed; None: no number.
      failure: What is wrong, as a clause; None: nothing.
      is_transient: The failure may not be the kernel's: it is not held against it in
        other processes.
    """

    error: float | None
    failure: str | None = None
    is_transient: bool = False


def check(library: AttentionLibrary, case: KernelCase) -> dict[str, Verdict]:
    """Runs the case: a verdict for every kernel that it judges.

    A kernel is judged by the results that it takes part in. One that another's error
    kept from running gets no verdict.

    Raises:
      AttentionError: No kernels take the case.
    """
    names = case.kernels(library)
    try:
        library.compile(case.problem(), case.backward)
    except AttentionError as error:
        # The compiler's error names its kernel; others stay with all of the pass.
        blamed = [name for name in names if name in str(error)] or names
        is_transient = error.code == RESOURCE_EXHAUSTED
        verdict = Verdict(None, f"it does not compile: {error}", is_transient)
        return dict.fromkeys(blamed, verdict)
    try:
        results = _measure(library, case)
    except AttentionError:
        # By its documentation Metal also ends what runs beside another's fault, and for
        # want of time or memory. So once more, and never for good.
        try:
            results = _measure(library, case)
        except AttentionError as error:
            verdict = Verdict(None, f"it does not run: {error}", is_transient=True)
            return dict.fromkeys(names, verdict)
    return {name: _judge(name, results) for name in names}


def _judge(name: str, results: dict[str, Verdict]) -> Verdict:
    def ratio(verdict: Verdict) -> float:
        return math.inf if verdict.error is None else verdict.error

    if name.startswith("attention_delta"):
        # Both depend on it: if one of them is right, so is delta.
        return min(results["dquery"], results["dkey"], key=ratio)
    part = {"_dq": ("dquery",), "_dkv": ("dkey", "dvalue")}
    mine = next((r for kernel, r in part.items() if f"{kernel}_" in name), None)
    return max((results[r] for r in mine or FORWARD_RESULTS), key=ratio)


# -- Numbers ---------------------------------------------------------------------------

_BATCH_SIZE = 2


def _measure(library: AttentionLibrary, case: KernelCase) -> dict[str, Verdict]:
    """Each result of the pass against its definition."""
    shape, options = case.shape, case.options
    dtype = NUMPY_DTYPES[shape.dtype]
    rng = np.random.default_rng(shape.head_dim)

    def normal(*sizes: int) -> Array:
        return rng.standard_normal((_BATCH_SIZE, *sizes)).astype(dtype)

    query = normal(shape.q_len, shape.num_heads, shape.head_dim)
    key = normal(shape.kv_len, shape.num_kv_heads, shape.head_dim)
    value = normal(shape.kv_len, shape.num_kv_heads, shape.value_head_dim)
    if not case.backward:
        actual = library.run_forward(query, key, value, **options)
        expected = attention(query, key, value, **options)
        return _compare(case, FORWARD_RESULTS, actual, expected)
    # Of the definition, not of the forward kernels: this is about the backward ones.
    out, logsumexp = attention(query, key, value, **options)
    saved = (out.astype(dtype), logsumexp.astype(np.float32))
    dout = normal(*out.shape[1:])
    dlogsumexp = np.asarray(rng.standard_normal(logsumexp.shape), np.float32)
    operands = (query, key, value, *saved, dout, dlogsumexp)
    return _compare(
        case,
        BACKWARD_RESULTS,
        library.run_backward(*operands, **options),
        attention_gradients(*operands, **options),
    )


def _compare(
    case: KernelCase,
    names: Sequence[str],
    actual: Sequence[Array],
    expected: Sequence[Array],
) -> dict[str, Verdict]:
    return {
        name: _verdict(name, TOLERANCES[case.dtype][_KINDS.get(name, "gradient")], a, e)
        for name, a, e in zip(names, actual, expected)
    }


_KINDS = {"out": "out", "logsumexp": "logsumexp"}


def _verdict(
    name: str, tolerance: tuple[float, float], actual: Array, expected: Array
) -> Verdict:
    atol, rtol = tolerance
    error: Array = np.abs(actual.astype(np.float64) - expected)
    ratio = error / (atol + rtol * np.abs(expected))
    if not np.isfinite(ratio).all():
        count = int((~np.isfinite(ratio)).sum())
        return Verdict(
            None, f"{count} of {ratio.size} numbers of its {name} are not finite"
        )
    worst = float(ratio.max())
    if worst <= 1:
        return Verdict(worst)
    at = np.unravel_index(ratio.argmax(), ratio.shape)
    return Verdict(
        worst,
        f"its {name} is wrong: {float(actual[at]):.6g} where {expected[at]:.6g} is "
        f"right, {worst:.3g} times the allowed error",
    )


# -- The definition, in float64 --------------------------------------------------------


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float,
    is_causal: bool,
    q_offset: int,
) -> tuple[Array, Array]:
    """out and logsumexp of [batch, rows, heads, width] operands."""
    probs, logsumexp = _probs(query, key, scale, is_causal, q_offset)
    value = _per_query_head(value, query)
    return np.einsum("bnts,bsnh->btnh", probs, value), logsumexp


def attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    *,
    scale: float,
    is_causal: bool,
    q_offset: int,
) -> tuple[Array, Array, Array]:
    """dquery, dkey, dvalue; `out` and `logsumexp` follow from the operands."""
    probs, _ = _probs(query, key, scale, is_causal, q_offset)
    dout = dout.astype(np.float64)
    num_groups = query.shape[2] // key.shape[2]
    all_keys, all_values = _per_query_head(key, query), _per_query_head(value, query)
    exact_out = np.einsum("bnts,bsnh->btnh", probs, all_values)
    delta = np.einsum("btnh,btnh->bnt", dout, exact_out) - dlogsumexp
    dprobs = np.einsum("btnh,bsnh->bnts", dout, all_values)
    dscores = scale * probs * (dprobs - delta[..., None])

    def sum_groups(x: Array) -> Array:
        batch, rows, heads, width = x.shape
        groups = (batch, rows, heads // num_groups, num_groups, width)
        total: Array = x.reshape(groups).sum(3)
        return total

    return (
        np.einsum("bnts,bsnh->btnh", dscores, all_keys),
        sum_groups(np.einsum("bnts,btnh->bsnh", dscores, query.astype(np.float64))),
        sum_groups(np.einsum("bnts,btnh->bsnh", probs, dout)),
    )


def _probs(
    query: Array, key: Array, scale: float, is_causal: bool, q_offset: int
) -> tuple[Array, Array]:
    """[batch, heads, q_len, kv_len] and logsumexp; every row must see a key."""
    all_keys = _per_query_head(key, query)
    scores = scale * np.einsum("btnh,bsnh->bnts", query.astype(np.float64), all_keys)
    if is_causal:
        position = np.arange(query.shape[1])[:, None] + q_offset
        hidden = np.arange(key.shape[1]) > position
        scores = np.where(hidden, -np.inf, scores)
    largest = scores.max(-1)
    logsumexp = largest + np.log(np.exp(scores - largest[..., None]).sum(-1))
    return np.exp(scores - logsumexp[..., None]), logsumexp


def _per_query_head(x: Array, query: Array) -> Array:
    """key or value in float64, a key-value head for every query head."""
    num_groups = query.shape[2] // x.shape[2]
    return np.repeat(x.astype(np.float64), num_groups, axis=2)
