"""What is run on the real GPU: every row of the table, in small and large calls.

Imported where the GPU is, by tools/real_gpu.py: needs NumPy and ml_dtypes, and PyTorch
for the references of large calls; not JAX, not pytest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jax_flash_metal import variant_table
from plugin.nvptx.launch import GpuAttention
from tests.support import cases, kernel_check, tolerances
from tests.support.cases import Case

FAMILIES = (0, 7, 9)  # of Apple GPUs: whose rows the planner takes
FORMS = ("A", "B")

# -- Small calls ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A case and what the planner is told for it.

    Attributes:
      rows: Host names that the passes named in `passes` must use; none: the table's
        own choice.
      form: Of the backward pass; "": the table's own choice.
    """

    case: Case
    family: int = 0
    rows: tuple[str, ...] = ()
    form: str = ""

    @property
    def id(self) -> str:
        """For people."""
        words = [self.case.id, f"family {self.family}"]
        return ", ".join([*words, *([f"form {self.form}"] if self.form else [])])


# With tails on all sides, blocks that are wholly visible, and such that are partly.
_SIZES: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}
_TILED = {"batch": (1,), "q_len": 70, "kv_len": 101, "is_causal": True, "q_offset": 31}
_SHORT = {"batch": (2,), "q_len": 6, "kv_len": 150, "is_causal": True, "q_offset": 145}
_TILED_KERNELS = {  # the pass that a row is chosen in, and its forms
    "attention_forward": ("",),
    "attention_backward_dq": ("A",),
    "attention_backward_dkv": FORMS,
    "attention_backward_dq_product": ("B",),
}
_SHORT_KERNELS = ("attention_short_forward", "attention_short_dq")


def row_runs() -> Iterator[Run]:
    """Every row that a choice can name: as it is, and narrower with every feature."""
    for v in variant_table.variants():
        forms = _TILED_KERNELS.get(v.kernel, ("",) * (v.kernel in _SHORT_KERNELS))
        sizes = _SIZES | (_SHORT if v.kernel in _SHORT_KERNELS else _TILED)
        for form in forms:
            name = f"{v.host_name}{form and '-'}{form}"
            plain = Case(name, dtype=v.dtype, head_dim=v.head_dim, **sizes)
            features = Case(
                f"{name}-features",
                dtype=v.dtype,
                head_dim=v.head_dim - 3,
                value_head_dim=v.head_dim - 6,
                **{**sizes, **cases.EVERYTHING, "batch": (2,)},
            )
            for case in (plain, features):
                yield Run(case, v.min_family, (v.host_name,), form)


def default_runs() -> Iterator[Run]:
    """What the table chooses on each family, in both forms of the backward pass."""
    for dtype in tolerances.DTYPES:
        for head_dim in sorted({v.head_dim for v in variant_table.variants()}):
            for family in FAMILIES:
                for form in FORMS:
                    name = f"default-{dtype}-d{head_dim}"
                    yield Run(
                        Case(name, dtype=dtype, head_dim=head_dim, **_SIZES | _TILED),
                        family,
                        form=form,
                    )
    # One kv head and many queries: dK and dV in parts, by several query heads.
    for dtype in tolerances.DTYPES:
        for form in FORMS:
            case = Case(
                f"few-kv-heads-{dtype}",
                dtype=dtype,
                batch=(1,),
                q_len=520,
                kv_len=40,
                num_heads=6,
                num_kv_heads=1,
                head_dim=64,
            )
            yield Run(case, 9, form=form)


def feature_runs() -> Iterator[Run]:
    """The suite's own cases: shapes, adversarial values, every feature, sharing."""
    everything = [*cases.CURATED, *cases.VALUES, *cases.FEATURES, *cases.SHARED]
    for index, case in enumerate(everything):
        form = FORMS[index % 2] if case.q_len > 8 else ""
        yield Run(case, FAMILIES[index % 3], form=form)


def sanitizer_runs() -> Iterator[Run]:
    """Fewer, for the tools: every row with tails, and every feature once."""
    yield from row_runs()
    for run in default_runs():
        if run.case.id.startswith("few-kv-heads"):
            yield run
    wanted = ("bias-", "mask-", "segments", "sinks", "slopes", "dropout", "lengths")
    for run in feature_runs():
        if run.case.id.startswith(wanted) and run.case.id.endswith(("q37", "q5")):
            yield run


SETS = {
    "rows": row_runs,
    "defaults": default_runs,
    "features": feature_runs,
    "sanitizers": sanitizer_runs,
}


class ChosenRows(GpuAttention):
    """Runs with the rows and the form of a Run, and fails if they were not used."""

    def choose(self, run: Run | None) -> None:
        """For the calls from now on; None: as the table says."""
        self._run = run
        self.set_kernel_choices("")
        self.set_gpu_family(run.family if run else 0)

    def plan(self, problem: Any, which: str) -> dict[str, Any]:
        """The plan after the choice of the class that the problem is in."""
        self.set_kernel_choices("")
        plan = super().plan(problem, which)
        run = self._run
        if run is None or which == "gradient" or not (run.rows or run.form):
            return plan
        kernel = run.rows[0].split("_float")[0].split("_bfloat")[0] if run.rows else ""
        of_forward = kernel.endswith("forward")
        if run.rows and of_forward != (which == "forward"):
            return plan
        form = run.form if which == "backward" and run.form else "-"
        names = [*run.rows] or [
            k
            for k in _kernels(plan)
            if k.startswith("attention_backward_dkv_") and "combine" not in k
        ]
        if not names:
            return plan  # nothing to choose: an empty call
        line = f"{plan['class']}\t{which}\t{form}\t{','.join(names)}"
        self.set_kernel_choices(line)
        plan = super().plan(problem, which)
        missing = {*run.rows} - {*_kernels(plan)}
        if missing or (form != "-" and plan["form"] != form):
            raise AssertionError(
                f"{run.id}: not as chosen by {line!r}: {plan['form']}, {_kernels(plan)}"
            )
        return plan


def _kernels(plan: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(launch["kernel"] for launch in plan["launches"]))


def check_runs(gpu: ChosenRows, runs: Sequence[Run]) -> list[str]:
    """Runs and compares with float64; what is wrong, a line each."""
    wrong = []
    for run in runs:
        gpu.choose(run)
        try:
            kernel_check.check(gpu, run.case)
        except Exception as error:
            wrong.append(f"{run.id}: {type(error).__name__}: {error}")
    return wrong


# -- Large calls ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Large:
    """A call of a size that no CPU compares in time; q_offset = kv_len - q_len."""

    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    is_causal: bool
    family: int = 9
    form: str = ""

    @property
    def id(self) -> str:
        """For people."""
        causal = " causal" if self.is_causal else ""
        return (
            f"{self.dtype} b{self.batch} n{self.num_heads}/{self.num_kv_heads} "
            f"q{self.q_len} k{self.kv_len} d{self.head_dim}{causal} "
            f"family {self.family}{' form ' if self.form else ''}{self.form}"
        )

    @property
    def num_scores(self) -> int:
        """Score elements of the call."""
        return self.batch * self.num_heads * self.q_len * self.kv_len


def large_calls() -> list[Large]:
    """L = 16384, over 2^31 scores, hundreds of (batch, head), long caches."""
    found = [
        Large("float16", 1, 9, 3, 16384, 16384, 64, True, 9, "A"),
        Large("float32", 24, 16, 4, 509, 517, 64, True, 9, "A"),
        Large("bfloat16", 24, 16, 16, 512, 512, 128, False, 9, "B"),
        Large("float16", 4, 32, 8, 1, 65536, 128, False),
        Large("float32", 4, 32, 8, 7, 65521, 64, True),
    ]
    places = itertools.cycle([(9, "B"), (7, "A"), (7, "B"), (9, "A"), (0, "B")])
    found += [
        Large(dtype, 1, 2, 1, 16384, 16384, head_dim, is_causal, *next(places))
        for head_dim in (64, 128)
        for is_causal in (True, False)
        for dtype in tolerances.DTYPES
    ]
    found += [
        Large("bfloat16", 1, 9, 3, 16381, 16383, 128, True, 7, "B"),
        Large("float32", 1, 9, 3, 16384, 16384, 64, False, 9, "B"),
        Large("float16", 32, 12, 12, 256, 1021, 256, True, 9, "A"),
        Large("bfloat16", 1, 1, 1, 70000, 40000, 64, False, 9, "B"),
    ]
    return found


def check_large(
    gpu: ChosenRows, call: Large, repeats: int = 1
) -> dict[str, dict[str, float]]:
    """Runs forward and backward and compares every element with float64 on the GPU.

    Args:
      repeats: Runs, which must all give the same bits.

    Returns:
      Per result the largest "error", and the largest "share" of the tolerance that an
      element takes.
    """
    import torch

    generator = torch.Generator("cuda").manual_seed(call.num_scores % 2**31)

    def normal(*shape: int) -> Any:
        x = torch.randn(shape, generator=generator, device="cuda")
        return x.to(getattr(torch, call.dtype))

    rows, columns = (call.batch, call.q_len), (call.batch, call.kv_len)
    query = normal(*rows, call.num_heads, call.head_dim)
    key, value = (normal(*columns, call.num_kv_heads, call.head_dim) for _ in range(2))
    dout = normal(*rows, call.num_heads, call.head_dim)
    dlogsumexp = torch.randn(
        (call.batch, call.num_heads, call.q_len), generator=generator, device="cuda"
    )
    operands = [_to_numpy(x) for x in (query, key, value)]
    options: dict[str, Any] = {
        "scale": float(np.float32(call.head_dim**-0.5)),
        "is_causal": call.is_causal,
        "q_offset": call.kv_len - call.q_len,
    }
    gpu.choose(
        Run(Case("large"), call.family, form=call.form if call.q_len > 8 else "")
    )
    names = ("out", "logsumexp", "dquery", "dkey", "dvalue")
    first: list[np.ndarray] = []
    for repeat in range(repeats):
        out, logsumexp = gpu.run_forward(*operands, **options)
        gradients = gpu.run_backward(
            *operands, out, logsumexp, _to_numpy(dout), _to_numpy(dlogsumexp), **options
        )
        results = [out, logsumexp, *gradients]
        for name, x, y in zip(names, results, first or results):
            if x.tobytes() != y.tobytes():
                raise AssertionError(
                    f"{call.id}: {name} of run {repeat} has other bits"
                )
        first = results
    errors = _Errors(call, dict(zip(names, first)))
    for b in range(call.batch):
        for kv_head in range(call.num_kv_heads):
            _compare_head(
                call, errors, options["scale"], b, kv_head,
                query, key, value, dout, dlogsumexp,
            )  # fmt: skip
    return errors.found


class _Errors:
    def __init__(self, call: Large, results: Mapping[str, np.ndarray]) -> None:
        self._results = {name: _to_torch(x) for name, x in results.items()}
        self._dtype = tolerances.DTYPES[call.dtype]
        rows_per_key = call.q_len * call.num_heads / call.num_kv_heads / call.kv_len
        size = tolerances.score_gradient_size(
            call.head_dim**-0.5, call.head_dim, max(1.0, rows_per_key)
        )
        self._sizes = {"dkey": size, "dvalue": math.sqrt(max(1.0, rows_per_key))}
        self.found: dict[str, dict[str, float]] = {}

    def compare(self, name: str, index: Any, expected: Any) -> None:
        """Part `index` of a result with float64."""
        import torch

        actual = self._results[name][index].double()
        kind = kernel_check.KIND[name]
        atol, rtol = tolerances.CEILING[self._dtype][kind]
        error = torch.where(actual == expected, 0.0, (actual - expected).abs())
        error = torch.nan_to_num(error, nan=torch.inf)
        finite = torch.nan_to_num(expected, posinf=0.0, neginf=0.0)
        allowed = self._sizes.get(name, 1.0) * atol + rtol * finite.abs()
        entry = self.found.setdefault(name, {"error": 0.0, "share": 0.0})
        entry["error"] = max(entry["error"], error.max().item())
        entry["share"] = max(entry["share"], (error / allowed).max().item())


def _compare_head(
    call: Large, errors: _Errors, scale: float, b: int, kv_head: int,
    query: Any, key: Any, value: Any, dout: Any, dlogsumexp: Any,
) -> None:  # fmt: skip
    """The results of the query heads of one kv head, from their formulas."""
    import torch

    k, v = (x[b, :, kv_head].double() for x in (key, value))
    dkey, dvalue = torch.zeros_like(k), torch.zeros_like(v)
    columns = torch.arange(call.kv_len, device="cuda")
    groups = call.num_heads // call.num_kv_heads
    step = max(1, 2**26 // call.kv_len)
    for head in range(kv_head * groups, (kv_head + 1) * groups):
        for start in range(0, call.q_len, step):
            rows = slice(start, min(call.q_len, start + step))
            q, do = (x[b, rows, head].double() for x in (query, dout))
            scores = scale * (q @ k.T)
            if call.is_causal:
                last = torch.arange(rows.start, rows.stop, device="cuda")
                last = last + call.kv_len - call.q_len
                scores.masked_fill_(columns > last[:, None], -torch.inf)
            logsumexp = torch.logsumexp(scores, -1)
            p = torch.exp(scores - logsumexp[:, None]).nan_to_num_(0.0)
            del scores
            out = p @ v
            dvalue += p.T @ do
            delta = (do * out).sum(-1) - dlogsumexp[b, head, rows].double()
            ds = p.mul_((do @ v.T).sub_(delta[:, None]))
            errors.compare("out", (b, rows, head), out)
            errors.compare("logsumexp", (b, head, rows), logsumexp)
            errors.compare("dquery", (b, rows, head), scale * (ds @ k))
            dkey += scale * (ds.T @ q)
    errors.compare("dkey", (b, slice(None), kv_head), dkey)
    errors.compare("dvalue", (b, slice(None), kv_head), dvalue)


def _to_numpy(x: Any) -> np.ndarray:
    import torch

    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray = x.cpu().numpy()
    return array


def _to_torch(x: np.ndarray) -> Any:
    import torch

    if x.dtype == tolerances.BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def run_large(
    gpu: ChosenRows, seconds: float = math.inf
) -> tuple[list[str], list[str]]:
    """Every large call: lines of what was found, and of what is wrong.

    Args:
      seconds: After which no call is begun.
    """
    lines, wrong = [], []
    begin = time.perf_counter()
    for call in large_calls():
        start = time.perf_counter()
        if start - begin > seconds:
            wrong.append(f"{call.id}: not run, no time was left")
            continue
        repeats = 5 if call.q_len == 16384 and call.num_heads == 2 else 1
        try:
            found = check_large(gpu, call, repeats)
        except Exception as error:
            wrong.append(f"{call.id}: {type(error).__name__}: {error}")
            continue
        errors = found
        line = f"| {call.id} | {call.num_scores:.1e} | " + " | ".join(
            f"{errors[n]['error']:.1e} ({errors[n]['share']:.2f})" for n in errors
        )
        lines.append(f"{line} |")
        print(line, f"{time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        wrong += [
            f"{call.id}: {name} takes {e['share']:.2f} of its tolerance"
            for name, e in errors.items()
            if not e["share"] <= 1
        ]
    return lines, wrong


def runs_of_rows(rows: Iterator[str]) -> list[Run]:
    """The runs that show a bug in these rows: their own, or with every feature."""
    wanted = set(rows)
    found = [run for run in row_runs() if wanted.issuperset(run.rows)]
    # Kernels that no choice names run in every call of their pass. With features, the
    # last rows see no key.
    plain = Case("plain", head_dim=61, **_SIZES | _TILED)
    features = Case("features", head_dim=61, **_SIZES | _TILED | cases.EVERYTHING)
    return found or [Run(plain), Run(dataclasses.replace(features, batch=(2,)))]
