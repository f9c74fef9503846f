"""Tiny attention problems that tell whether a kernel computes the right numbers.

For the proof of a kernel at its first use (kernel_proof.py) and for `doctor`. NumPy and
the C ABI only, so that it can run while JAX lowers a program. The definition in float64
is written as the formulas are; the tests hold it against their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_flash_metal import kernel_choices
from jax_flash_metal.attention_library import (
    BACKWARD_OPERANDS,
    BACKWARD_RESULTS,
    FORWARD_OPERANDS,
    FORWARD_RESULTS,
    NUMPY_DTYPES,
    RESOURCE_EXHAUSTED,
    STATISTICS,
    Array,
    AttentionError,
    AttentionLibrary,
    CallShape,
    Problem,
    attach_gradient,
    attach_results,
    make_problem,
    sizes_of,
)
from jax_flash_metal.config import DIFFERENTIABLE_OPTIONS, DIMS, Backend
from jax_flash_metal.kernel_choices import Choice
from jax_flash_metal.variant_table import variants

# (atol, rtol) per dtype: those of tests/support/tolerances.py, which a test compares.
TOLERANCES: dict[str, dict[str, tuple[float, float]]] = {
    "float32": {
        "out": (2e-5, 1e-5),
        "gradient": (1e-4, 1e-4),
        "dbias": (2e-4, 1e-4),
        "logsumexp": (1e-5, 1e-5),
    },
    "float16": {
        "out": (1e-3, 1e-3),
        "gradient": (5e-3, 5e-3),
        "dbias": (1e-2, 5e-3),
        "logsumexp": (1e-4, 1e-4),
    },
    "bfloat16": {
        "out": (1e-2, 1e-2),
        "gradient": (3e-2, 2e-2),
        "dbias": (5e-2, 2e-2),
        "logsumexp": (1e-4, 1e-4),
    },
}

# Metal kernels that read what all calls with options have in common are made once more
# for them. As such they are proven by other cases, and have a verdict of their own; so
# has a gradient's kernel for each operand that it is of, and for a bias that is summed
# over queries and heads.
_HAVE_OPTIONS = frozenset(
    f"attention_{name}"
    for name in (
        *("forward", "backward_dq", "backward_dq_product", "backward_dkv"),
        *("short_forward", "short_forward_combine", "short_dq"),
    )
)
# Kernels of one row that all dtypes and head_dims share: the cases of the least row of
# float32 prove them.
_SHARED = frozenset(
    f"attention_{name}"
    for name in ("mask_blocks", "bias_gradient_combine", "sinks_gradient")
)


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One pass over a tiny problem.

    Attributes:
      dtype: Of query, key, value and bias.
      row_head_dim: The head_dim of the rows of the variant table that it runs; of the
        CPU kernels, which have no such rows, about its head_dim.
      which: The pass, among attention_library.PASSES.
      is_short: Few queries: the kernels that split the keys. Of a gradient: of a bias
        that queries and heads share.
      is_aligned: Whole tiles and the full head_dim, every key visible; otherwise no
        length is a whole number of anything and a causal mask cuts through the tiles.
      has_options: With every option and optional operand at once; never aligned.
      of: The operand whose gradient it is; empty for other passes.
      backend: Whose kernels it runs.
      is_grouped: So many query heads for each key-value head that the sums of dK and dV
        are made in parts.
      choice: The kernels that the pass takes instead of those that the planner would
        take for so small a problem, as str(kernel_choices.Choice); empty: those.
    """

    dtype: str
    row_head_dim: int
    which: str
    is_short: bool = False
    is_aligned: bool = False
    has_options: bool = False
    of: str = ""
    backend: Backend = "metal"
    is_grouped: bool = False
    choice: str = ""

    @property
    def shape(self) -> CallShape:
        lengths = _ALIGNED_LENGTHS if self.is_aligned else _LENGTHS
        q_len, kv_len = lengths[self.backend][self.is_short]
        head_dim = value_head_dim = self.row_head_dim
        if not self.is_aligned:
            head_dim = max(1, self.row_head_dim - 3)
            value_head_dim = max(1, self.row_head_dim - 9)
        num_heads = 4
        if self.is_grouped:
            q_len, kv_len, num_heads = _GROUPED_SIZES
        widths = (head_dim, value_head_dim)
        return CallShape(self.dtype, q_len, kv_len, num_heads, 2, *widths)

    @property
    def batch_size(self) -> int:
        return 1 if self.is_grouped else 2  # these have heads enough

    @property
    def q_offset(self) -> int:
        if self.is_aligned:
            return 0
        # Some keys are hidden from all queries. 1: of the keys that a tile of queries
        # sees, the last is the first of a tile of keys. With the CPU's lengths it would
        # hide all of the second block of keys.
        if self.backend == "metal" and not (self.is_short or self.is_grouped):
            return 1
        return self.shape.kv_len - self.shape.q_len - 2

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Those of attention_library.make_problem; scale as it travels."""
        plain = {
            "scale": float(np.float32(self.shape.head_dim**-0.5)),
            "is_causal": not self.is_aligned,
            "q_offset": self.q_offset,
        }
        return plain | _all_options(self) if self.has_options else plain

    def problem(self) -> Problem:
        """For AttentionLibrary.kernels and compile: its memory is gone."""
        names = FORWARD_OPERANDS if self.which == "forward" else BACKWARD_OPERANDS
        sizes, dtype = sizes_of(self.shape), NUMPY_DTYPES[self.dtype]
        empty = {
            name: np.empty(
                (self.batch_size, *(sizes[letter] for letter in DIMS[name])),
                np.float32 if name in STATISTICS else dtype,
            )
            for name in names
        }
        problem = make_problem(empty, backend=self.backend, **self.options)
        if self.which == "gradient":
            attach_gradient(problem, self.of, self.options[self.of])
        else:
            is_forward = self.which == "forward"
            results = FORWARD_RESULTS if is_forward else BACKWARD_RESULTS
            attach_results(problem, empty, results)
        return problem

    def kernels(self, library: AttentionLibrary) -> list[str]:
        """Names of the kernels that it runs."""
        with self.chosen(library):
            return library.kernels(self.problem(), self.which)

    @contextlib.contextmanager
    def chosen(self, library: AttentionLibrary) -> Iterator[None]:
        """The planner takes its choice meanwhile."""
        if not self.choice:
            yield
            return
        shape_class = library.outline(self.problem(), self.which)["class"]
        choice = Choice.parse(self.choice)
        with kernel_choices.forced(library, (shape_class, self.which), choice):
            yield

    def keys(self, library: AttentionLibrary) -> dict[str, str]:
        """What its verdicts are kept under, by the names of the kernels that it runs.

        Which kernels these are says what one of them writes, be it chosen or not.
        """
        names = self.kernels(library)
        is_form_b = has_form_b(names)
        return {name: self._key(name, is_form_b) for name in names}

    def _key(self, name: str, is_form_b: bool) -> str:
        of = f" of {'shared ' * self.is_short}{self.of}"
        if self.backend == "cpu":  # one kernel for all of a pass
            short = " for few queries" if self.is_short else ""
            how = (" with options" if self.has_options else "") + short
            return f"{name}{of if self.of else how}"
        kernel = kernel_of(name)
        if kernel == "attention_bias_gradient":
            return f"{name}{of}"
        how = ""
        if kernel == "attention_backward_dkv":  # what it writes
            how += " of form B" if is_form_b else ""
            how += " in parts" if self.is_grouped else ""
        has_both = kernel in _HAVE_OPTIONS
        options = " with options" if self.has_options and has_both else ""
        return f"{name}{how}{options}"

    def judges(self, name: str) -> bool:
        """Whether it says something of a kernel that it runs."""
        kernel = kernel_of(name)
        if kernel in _SHARED and (self.dtype, self.row_head_dim) != _shared_row():
            return False
        if self.which == "gradient":
            return "gradient" in kernel
        # Forward kernels that are wrong would not be told from a wrong summary.
        return kernel != "attention_mask_blocks" or self.which == "backward"


def has_form_b(names: Iterable[str]) -> bool:
    """Whether a pass of these kernels is a backward pass of form B."""
    return any(kernel_of(name) == "attention_backward_dq_product" for name in names)


def kernel_of_key(key: str) -> str:
    """The kernel's name."""
    return key.partition(" ")[0]


# Lengths of queries and keys of the cases; then of short ones, whose keys are split.
_LENGTHS: dict[Backend, tuple[tuple[int, int], tuple[int, int]]] = {
    # Two tiles of each or more: they are of up to 64 queries and keys.
    "metal": ((69, 75), (5, 149)),
    # Two blocks of each: they are of up to 192 queries (backward 96) and 256 keys.
    "cpu": ((197, 269), (5, 2053)),
}
# Of queries and keys, and the heads of two key-value heads. The least that is cut into
# parts (kMinQueriesPerPart in plan_backward.cc); their numbers of blocks are unequal,
# and a head has several blocks.
_GROUPED_SIZES = (33, 37, 98)
# Of aligned cases.
_ALIGNED_LENGTHS: dict[Backend, tuple[tuple[int, int], tuple[int, int]]] = {
    # 128 is a whole number of every tile of the table.
    "metal": ((128, 128), (8, 192)),
    "cpu": ((192, 256), (8, 2048)),
}


def cases_of(
    dtype: str,
    row_head_dim: int,
    *,
    with_aligned: bool = False,
    backend: Backend = "metal",
) -> list[KernelCase]:
    """The cases that prove the kernels of a row; `with_aligned`: more of the same."""
    make = functools.partial(KernelCase, dtype, row_head_dim, backend=backend)
    shortness = (False, True)
    return [
        *(
            make(which, is_short, is_aligned)
            for is_short in shortness
            for is_aligned in ((False, True) if with_aligned else (False,))
            for which in ("forward", "backward")
        ),
        # Of the CPU kernels nothing depends on it.
        *([make("backward", is_grouped=True)] if backend == "metal" else []),
        *(
            make(which, is_short, has_options=True)
            for is_short in shortness
            for which in ("forward", "backward")
        ),
        *(
            make("gradient", is_short, has_options=True, of=of)
            for of in DIFFERENTIABLE_OPTIONS
            for is_short in shortness
            if of == "bias" or not is_short
        ),
    ]


def every_case(dtype: str, row_head_dim: int) -> list[KernelCase]:
    """As cases_of, for every row of that head_dim, be it a default or not."""
    cases = []
    for case in cases_of(dtype, row_head_dim, with_aligned=True):
        choices = kernel_choices.every_choice(
            case.which, dtype, row_head_dim, for_few_queries=case.is_short
        )
        cases += [
            dataclasses.replace(case, choice=choice)
            for choice in ([str(c) for c in choices] or [""])
        ]
    return cases


@functools.cache
def cpu_cases(dtype: str) -> list[KernelCase]:
    """The cases that prove the CPU kernels of a dtype."""
    return cases_of(dtype, 32, backend="cpu")


def shared_cases() -> list[KernelCase]:
    """Those that prove kernels for all dtypes and head_dims."""
    return cases_of(*_shared_row())


@functools.cache
def _shared_row() -> tuple[str, int]:
    return "float32", min(v.head_dim for v in variants() if v.dtype == "float32")


def kernel_of(name: str) -> str:
    """The first column of the variant table, from the name of a kernel.

    The CPU kernels are not in the table: their own name.
    """
    return next((v.kernel for v in variants() if v.host_name == name), name)


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
    """Runs the case: a verdict for every kernel that it judges, by KernelCase.keys.

    A kernel is judged by the results that it takes part in. One that another's error
    kept from running gets no verdict; nor does one in form B beside a wrong kernel of
    dK and dV, which all results go through.

    Raises:
      AttentionError: No kernels take the case.
    """
    with case.chosen(library):
        return _check(library, case)


def _check(library: AttentionLibrary, case: KernelCase) -> dict[str, Verdict]:
    keys = case.keys(library)
    names = list(keys)

    def blame(names: list[str], verdict: Verdict) -> dict[str, Verdict]:
        return {keys[name]: verdict for name in names}

    try:
        library.compile(case.problem(), case.which)
    except AttentionError as error:
        # The compiler's error names its kernel; others stay with all of the pass.
        blamed = [name for name in names if name in str(error)] or names
        is_transient = error.code == RESOURCE_EXHAUSTED
        verdict = Verdict(None, f"it does not compile: {error}", is_transient)
        return blame(blamed, verdict)
    try:
        results = _measure(library, case)
    except AttentionError:
        # By its documentation Metal also ends what runs beside another's fault, and for
        # want of time or memory. So once more, and never for good.
        try:
            results = _measure(library, case)
        except AttentionError as error:
            verdict = Verdict(None, f"it does not run: {error}", is_transient=True)
            return blame(names, verdict)
    judged = [name for name in names if case.judges(name)]
    if has_form_b(names) and (results["dkey"].failure or results["dvalue"].failure):
        judged = [name for name in judged if "_dkv" in kernel_of(name)]
    return {keys[name]: _judge(kernel_of(name), results) for name in judged}


def _judge(kernel: str, results: dict[str, Verdict]) -> Verdict:
    def ratio(verdict: Verdict) -> float:
        return math.inf if verdict.error is None else verdict.error

    if kernel in ("attention_delta", "attention_mask_blocks"):
        # All depend on it: if one of them is right, so is what they depend on.
        return min(results.values(), key=ratio)
    part = {"_dq": ("dquery",), "_dkv": ("dkey", "dvalue")}
    mine = next((r for ending, r in part.items() if ending in kernel), tuple(results))
    return max((results[r] for r in mine), key=ratio)


# -- Operands --------------------------------------------------------------------------


def _make_inputs(case: KernelCase) -> dict[str, Array]:
    """Operands of the pass by name, residuals as the definition has them."""
    shape = case.shape
    dtype = NUMPY_DTYPES[shape.dtype]
    rng = np.random.default_rng(shape.head_dim)

    def normal(*sizes: int) -> Array:
        sizes = (case.batch_size, *sizes)
        return rng.standard_normal(sizes, np.float32).astype(dtype)

    inputs = {
        "query": normal(shape.q_len, shape.num_heads, shape.head_dim),
        "key": normal(shape.kv_len, shape.num_kv_heads, shape.head_dim),
        "value": normal(shape.kv_len, shape.num_kv_heads, shape.value_head_dim),
    }
    if case.which == "forward":
        return inputs
    # Of the definition, not of the forward kernels: this is about the others.
    out, logsumexp = attention(*inputs.values(), **case.options)
    return inputs | {
        "out": out.astype(dtype),
        "logsumexp": logsumexp.astype(np.float32),
        "dout": normal(*out.shape[1:]),
        "dlogsumexp": np.asarray(rng.standard_normal(logsumexp.shape), np.float32),
    }


def _all_options(case: KernelCase) -> dict[str, Any]:
    """Every option and optional operand; each hides or changes a part of the scores."""
    shape = case.shape
    q_len, kv_len, num_heads = shape.q_len, shape.kv_len, shape.num_heads
    rng = np.random.default_rng(shape.kv_len)
    mask = rng.random((case.batch_size, 1, q_len, kv_len)) < 0.9
    # A whole block of the mask, of which the queries would see some keys.
    if case.is_short:
        mask[..., 96:128] = False
    else:
        mask[..., 32:64, :32] = False
    is_shared = case.of == "bias" and case.is_short
    bias = (1, num_heads, q_len, kv_len)
    if is_shared:
        bias = (case.batch_size, 1, 1, kv_len)
    offsets = case.q_offset + np.array([0, 2])
    q_ids = np.arange(q_len) >= q_len // 2
    kv_ids = np.arange(kv_len) >= kv_len * 2 // 3
    return {
        "sliding_window": (kv_len // 3, None),
        "logits_soft_cap": 3.0,
        "dropout_rate": 0.25,
        "bias": rng.standard_normal(bias).astype(NUMPY_DTYPES[case.dtype]),
        "mask": mask,
        "q_offset": offsets.astype(np.int32),
        "q_segment_ids": q_ids[None].astype(np.int32),
        "kv_segment_ids": kv_ids[None].astype(np.int32),
        "query_seq_lengths": np.array([q_len, q_len - 1], np.int32),
        "key_value_seq_lengths": np.array([kv_len - 10, kv_len], np.int32),
        "sinks": rng.standard_normal((1, num_heads), np.float32),
        "alibi_slopes": np.float32(0.1) * rng.random((1, num_heads), np.float32),
        "dropout_key": np.array([[0x12345678, 0x9ABCDEF0]], np.uint32),
        "dropout_batch_indices": np.arange(case.batch_size, dtype=np.int32),
        "dropout_head_indices": np.arange(num_heads, dtype=np.int32)[None],
    }


# -- Numbers ---------------------------------------------------------------------------


def _measure(library: AttentionLibrary, case: KernelCase) -> dict[str, Verdict]:
    """Each result of the pass against its definition."""
    operands, expected = _make_example(dataclasses.replace(case, choice=""))
    options = case.options
    if case.which == "forward":
        actual = dict(zip(FORWARD_RESULTS, library.run_forward(*operands, **options)))
    elif case.which == "backward":
        actual = dict(zip(BACKWARD_RESULTS, library.run_backward(*operands, **options)))
    else:
        gradient = library.run_gradient(case.of, *operands, **options)
        actual = {f"d{case.of}": gradient}
    tolerances = TOLERANCES[case.dtype]
    return {
        name: _verdict(name, tolerances[_KINDS[name]], result, expected[name])
        for name, result in actual.items()
    }


def difference(
    dtype: str, actual: Mapping[str, Array], expected: Mapping[str, Array]
) -> str | None:
    """How results differ by more than is allowed, as a clause, or None.

    Args:
      dtype: Of query.
      actual: By their names in DIMS.
      expected: Likewise.
    """
    tolerances = TOLERANCES[dtype]
    for name, result in actual.items():
        wanted = expected[name].astype(np.float64)
        verdict = _verdict(name, tolerances[_KINDS[name]], result, wanted)
        if verdict.failure is not None:
            return verdict.failure
    return None


# The last one is kept: `doctor` runs a case with several instruction sets or choices.
@functools.lru_cache(maxsize=1)
def _make_example(case: KernelCase) -> tuple[list[Array], dict[str, Array]]:
    """The operands of a case, and the results that are right, by name."""
    inputs = _make_inputs(case)
    if case.which == "forward":
        operands = [inputs[name] for name in FORWARD_OPERANDS]
        return operands, dict(
            zip(FORWARD_RESULTS, attention(*operands, **case.options))
        )
    operands = [inputs[name] for name in BACKWARD_OPERANDS]
    return operands, attention_gradients(*operands, **case.options)


_KINDS = {
    **{"out": "out", "logsumexp": "logsumexp"},
    **dict.fromkeys(BACKWARD_RESULTS, "gradient"),
    **dict.fromkeys((f"d{of}" for of in DIFFERENTIABLE_OPTIONS), "dbias"),
}


def _verdict(
    name: str, tolerance: tuple[float, float], actual: Array, expected: Array
) -> Verdict:
    atol, rtol = tolerance
    with np.errstate(invalid="ignore"):
        error = np.abs(actual.astype(np.float64) - expected)
        ratio: Array = error / (atol + rtol * np.abs(expected))
    # A row that sees no key has a logsumexp of -inf; any other infinity is wrong.
    ratio = np.where(actual == expected, 0, ratio)
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


@dataclasses.dataclass(frozen=True)
class _Scores:
    """All arrays [batch, heads, q_len, kv_len] but logsumexp, without the last.

    Attributes:
      probs: Before dropout; 0 in a row that sees no key.
      logsumexp: With the sinks; -inf in such a row.
      slope: The derivative of the softcap.
      keep: What dropout multiplies with.
      distance: |i + q_offset - j|.
    """

    probs: Array
    logsumexp: Array
    slope: Array
    keep: Array
    distance: Array


def attention(
    query: Array, key: Array, value: Array, **options: Any
) -> tuple[Array, Array]:
    """out and logsumexp of [batch, rows, heads, width] operands."""
    scores = _scores(query, key, **options)
    value = _per_query_head(value, query)
    out = _product(scores.probs * scores.keep, _by_head(value))
    return _by_head(out), scores.logsumexp


def attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dlogsumexp: Array,
    **options: Any,
) -> dict[str, Array]:
    """Those of all operands that have one, by name; `logsumexp` follows from others."""
    scores = _scores(query, key, **options)
    dout = dout.astype(np.float64)
    num_groups = query.shape[2] // key.shape[2]
    all_keys, all_values = _per_query_head(key, query), _per_query_head(value, query)
    delta = np.einsum("btnh,btnh->bnt", dout, out.astype(np.float64)) - dlogsumexp
    dprobs = _product(_by_head(dout), _by_head(all_values).swapaxes(2, 3))
    dprobs *= scores.keep
    dscores = scores.probs * (dprobs - delta[..., None]) * scores.slope

    def sum_groups(x: Array) -> Array:
        x = _by_head(x)
        batch, rows, heads, width = x.shape
        groups = (batch, rows, heads // num_groups, num_groups, width)
        total: Array = x.reshape(groups).sum(3)
        return total

    scale = options["scale"]
    gradients = {
        "dquery": scale * _by_head(_product(dscores, _by_head(all_keys))),
        "dkey": sum_groups(
            scale * _product(dscores.swapaxes(2, 3), _by_head(query.astype(np.float64)))
        ),
        "dvalue": sum_groups(
            _product((scores.probs * scores.keep).swapaxes(2, 3), _by_head(dout))
        ),
    }
    if options.get("bias") is not None:
        gradients["dbias"] = _sum_to(options["bias"], dscores)
    if options.get("sinks") is not None:
        sinks = options["sinks"].astype(np.float64)
        has_keys = np.isfinite(scores.logsumexp)
        of_sink = np.where(has_keys, sinks[..., None] - scores.logsumexp, -np.inf)
        gradients["dsinks"] = _sum_to(
            options["sinks"], (-np.exp(of_sink) * delta).sum(-1)
        )
    if options.get("alibi_slopes") is not None:
        total = -(dscores * scores.distance).sum((-1, -2))
        gradients["dalibi_slopes"] = _sum_to(options["alibi_slopes"], total)
    return gradients


def _scores(
    query: Array,
    key: Array,
    *,
    scale: float,
    is_causal: bool,
    q_offset: int | Array = 0,
    sliding_window: tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    bias: Array | None = None,
    mask: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    **dropout: Array,
) -> _Scores:
    all_keys = _per_query_head(key, query)
    x = scale * _product(
        _by_head(query.astype(np.float64)), _by_head(all_keys).swapaxes(2, 3)
    )
    rows, columns = np.arange(x.shape[2])[:, None], np.arange(x.shape[3])

    def per_batch(numbers: Any) -> Array:
        return np.asarray(numbers, np.int64).reshape(-1, 1, 1, 1)

    ahead = columns - (rows + per_batch(q_offset))
    left, right = sliding_window or (None, None)
    visible = np.ones_like(x, bool)
    if is_causal:
        visible &= ahead <= 0
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    if bias is not None:
        bias = bias.astype(np.float64)
        visible &= bias != -np.inf
        x = x + np.where(bias == -np.inf, 0, bias)
    if mask is not None:
        visible &= mask
    if q_segment_ids is not None and kv_segment_ids is not None:
        same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
        visible &= same[:, None]
    if query_seq_lengths is not None:
        visible &= rows < per_batch(query_seq_lengths)
    if key_value_seq_lengths is not None:
        visible &= columns < per_batch(key_value_seq_lengths)
    if alibi_slopes is not None:
        x = x - alibi_slopes.astype(np.float64)[..., None, None] * np.abs(ahead)
    slope = np.ones_like(x)
    if logits_soft_cap is not None:
        capped = np.tanh(x / logits_soft_cap)
        x, slope = logits_soft_cap * capped, 1 - capped**2
    has_keys = visible.any(-1)
    largest = np.where(visible, x, -np.inf).max(-1, initial=-np.inf)
    largest = np.where(has_keys, largest, 0)
    weights = np.where(visible, np.exp(x - largest[..., None]), 0)
    total = weights.sum(-1)
    if sinks is not None:
        total += has_keys * np.exp(sinks.astype(np.float64)[..., None] - largest)
    safe = np.where(has_keys, total, 1)
    return _Scores(
        probs=weights / safe[..., None],
        logsumexp=np.where(has_keys, largest + np.log(safe), -np.inf),
        slope=slope,
        keep=_keep(x.shape, dropout_rate, **dropout) if dropout else np.ones_like(x),
        distance=np.abs(ahead),
    )


def _keep(
    shape: tuple[int, ...],
    rate: float,
    dropout_key: Array,
    dropout_batch_indices: Array,
    dropout_head_indices: Array,
) -> Array:
    """Element (i, j) of (b, n) has word j % 2 of threefry(subkey, (i, j // 2))."""
    subkey = _threefry(
        [dropout_key[:, :1], dropout_key[:, 1:]],
        [dropout_batch_indices[:, None], dropout_head_indices],
    )
    words = _threefry(
        [word[..., None, None] for word in subkey],
        [np.arange(shape[2])[:, None], np.arange((shape[3] + 1) // 2)],
    )
    bits = np.stack(words, -1).reshape(*shape[:3], -1)[..., : shape[3]]
    threshold = min(round((1 - rate) * 2**32), 2**32 - 1)
    keep: Array = (bits < threshold) / (1 - rate)
    return keep


def _threefry(key: list[Array], x: list[Array]) -> list[Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011)."""
    low = 2**32 - 1
    keys = [np.asarray(word, np.int64) & low for word in key]
    keys.append(keys[0] ^ keys[1] ^ 0x1BD11BDA)
    x0, x1 = ((np.asarray(a, np.int64) + b) & low for a, b in zip(x, keys))
    for turn in range(20):
        left = (13, 15, 26, 6, 17, 29, 16, 24)[turn % 8]
        x0 = (x0 + x1) & low
        x1 = ((x1 << left) & low | x1 >> (32 - left)) ^ x0
        if turn % 4 == 3:
            i = turn // 4 + 1
            x0 = (x0 + keys[i % 3]) & low
            x1 = (x1 + keys[(i + 1) % 3] + i) & low
    return [x0, x1]


def _sum_to(operand: Array, gradient: Array) -> Array:
    """Summed over the dimensions that the operand was broadcast over."""
    pairs = enumerate(zip(operand.shape, gradient.shape))
    axes = tuple(i for i, (size, full) in pairs if size != full)
    total: Array = gradient.sum(axes, keepdims=True)
    return total


def _by_head(x: Array) -> Array:
    """[batch, rows, heads, width] as [batch, heads, rows, width], or back."""
    swapped: Array = x.swapaxes(1, 2)
    return swapped


_MAX_PRODUCTS = 1 << 18


def _product(x: Array, y: Array) -> Array:
    """Of matrices: much faster than np.einsum.

    In slices so small that OpenBLAS stays on this thread: on a busy machine it waits
    for the others much longer than they save.
    """
    rows, columns = x.shape[-2], y.shape[-1]
    step = max(1, _MAX_PRODUCTS // max(1, x.shape[-1] * columns))
    # Some BLAS set floating-point flags for nothing.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        slices = [x[..., i : i + step, :] @ y for i in range(0, rows, step)]
    return np.concatenate(slices, axis=-2)


def _per_query_head(x: Array, query: Array) -> Array:
    """key or value in float64, a key-value head for every query head."""
    num_groups = query.shape[2] // x.shape[2]
    return np.repeat(x.astype(np.float64), num_groups, axis=2)
