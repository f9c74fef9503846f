"""The processes of `bench` that run an implementation, one process for one problem.

    python -m jax_flash_metal.bench_worker SETTINGS

bench_measure.py starts them and tells them what to do: JSON objects, one a line, on
standard input; an answer for each on standard output. A subject is what a process
measures; `serve` is all that another program needs to measure something else.

JAX, PyTorch and MLX are imported by the subject that needs them, after the settings
(threads, memory) have been made.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal.bench_measure import Case, case_from_json
from jax_flash_metal.benchmark_shapes import AttentionShape

# The largest `row_error` of a result. Loose: they tell a wrong result from a right one,
# not a good one from a better one.
TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}

RESULTS = {
    "forward": ("out",),
    "forward+backward": ("out", "dquery", "dkey", "dvalue"),
}


class Subject:
    """What a worker measures."""

    def load(self) -> dict[str, str]:
        """Imports what it needs; returns the versions."""
        return {}

    def prepare(self, case: Any) -> dict[str, Any]:
        """Gets everything ready, so that `call` can be timed.

        Returns facts: of those that bench_measure.Series has, and for `error` also
        `tolerance`.
        """
        raise NotImplementedError

    def call(self) -> Any:
        """What is timed: does it once, and waits for the end."""
        raise NotImplementedError


# -- The conversation ------------------------------------------------------------------


def main() -> None:
    settings = json.loads(sys.argv[1])
    serve(lambda: subject(settings["subject"]), settings)


def serve(make: Callable[[], Subject], settings: dict[str, Any]) -> None:
    """Answers requests until standard input ends.

    Args:
      make: Makes the subject, after the settings have been made.
      settings: `cpus`: those that it may use, None: as it is; `memory_bytes`: what it
        may allocate, None: no limit.
    """
    # The libraries print what they like, so the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if settings.get("cpus") is not None:
        os.sched_setaffinity(0, settings["cpus"])
    if settings.get("memory_bytes") is not None:
        # An allocation fails then, before the system has to kill somebody.
        limit = int(settings["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    worker = _Worker(make())
    requests: dict[str, Callable[..., dict[str, Any]]]
    requests = {"load": worker.load, "prepare": worker.prepare, "turn": worker.turn}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = requests[request.pop("do")](**request)
        # Whatever it is, the others go on and the user sees it.
        except Exception as error:
            answer = {"failure": _one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


def _one_line(error: Exception) -> str:
    first = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_QUIET_SECONDS = 0.01


class _Worker:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def load(self) -> dict[str, Any]:
        return {"versions": self._subject.load()}

    def prepare(self, case: Any) -> dict[str, Any]:
        facts = self._subject.prepare(case)
        gc.collect()
        gc.disable()
        return facts

    def turn(self, calls: int, warm_up: bool = False) -> dict[str, Any]:
        """Mean seconds of `calls` calls in a row."""
        call = self._subject.call
        if warm_up:
            call()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - started) / calls
        _wait_for_quiet()
        return {"seconds": seconds}


def _wait_for_quiet() -> None:
    """Returns when this process' threads have gone to sleep.

    Thread pools spin for a while when their work is done, OpenMP's for 4 ms or, with
    other settings, 200. That is their right, since it makes their next call faster; but
    it must not happen on the time of the next process.
    """
    for _ in range(100):
        before = time.process_time()
        time.sleep(_QUIET_SECONDS)
        if time.process_time() - before < 0.2 * _QUIET_SECONDS:
            return


# -- Memory ----------------------------------------------------------------------------


def peak_memory(call: Callable[[], Any]) -> tuple[Any, int | None]:
    """What the call returns, and bytes of its peak resident memory above that before.

    Linux only, None elsewhere. Memory that was free but still the process' own would
    hide what the call needs, so it goes back to the system first.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident_bytes("VmRSS")
    if before is None:
        return call(), None
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return call(), None
    result = call()
    peak = _resident_bytes("VmHWM")
    return result, None if peak is None else peak - before


def _resident_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith(f"{field}:"))
    return next((int(words[1]) * 1024 for words in found), None)


# -- Inputs and what must come out -----------------------------------------------------


def inputs(case: Case) -> dict[str, Any]:
    """query, key, value and, for a backward pass, dout: the same in every process.

    NumPy arrays [batch, length, heads, head_dim], which have the case's dtype.
    """
    import ml_dtypes
    import numpy as np

    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    shape = case.shape
    q_shape = (shape.batch_size, shape.num_queries, shape.num_heads, shape.head_dim)
    kv_shape = (shape.batch_size, shape.length, shape.num_kv_heads, shape.head_dim)
    shapes = {"query": q_shape, "key": kv_shape, "value": kv_shape}
    if case.pass_ != "forward":
        shapes["dout"] = q_shape
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(sizes, np.float32).astype(dtype)
        for name, sizes in shapes.items()
    }


# Bytes of a block of scores, and operations of a whole comparison, at most.
_SCORES_BYTES = 1 << 26
_EXPECTED_OPERATIONS = 5e10


class Expected(Subject):
    """The reference implementation, in float32 and over blocks of queries.

    So it needs little memory at any length. Of a large problem only some heads are
    computed, the first and the last among them.
    """

    def load(self) -> dict[str, str]:
        return _jax_versions()

    def prepare(self, case: Any) -> dict[str, Any]:
        """Writes the results to the file case["expected"]."""
        import numpy as np

        problem = case_from_json(case)
        heads = checked_heads(problem)
        arrays = {n: a.astype(np.float32) for n, a in inputs(problem).items()}
        run = _reference(problem)
        results = [_results_of_head(run, problem, arrays, *head) for head in heads]
        files: dict[str, Any] = {
            name: np.stack([result[name] for result in results])
            for name in RESULTS[problem.pass_]
        }
        np.savez(case["expected"], **files, heads=np.array(heads))
        return {"heads": len(heads)}


def _reference(case: Case) -> Callable[..., Any]:
    """Results for a block of queries: (query, key, value, dout or None, q_offset)."""
    import jax

    import jax_flash_metal

    @jax.jit
    def run(query: Any, key: Any, value: Any, dout: Any, offset: Any) -> Any:
        def attend(query: Any, key: Any, value: Any) -> Any:
            return jax_flash_metal.flash_attention(
                query,
                key,
                value,
                is_causal=case.is_causal,
                q_offset=offset if case.is_causal else None,
                implementation="xla",
            )

        if dout is None:
            return (attend(query, key, value),)
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    return run


def _results_of_head(
    run: Callable[..., Any], case: Case, arrays: dict[str, Any], b: int, kv_head: int
) -> dict[str, Any]:
    """Of one batch element and key-value head, [rows, heads, head_dim]."""
    import numpy as np

    shape = case.shape
    groups = shape.num_heads // shape.num_kv_heads
    q_heads = slice(kv_head * groups, (kv_head + 1) * groups)
    key, value = (
        arrays[name][b, :, kv_head : kv_head + 1] for name in ("key", "value")
    )
    block = max(1, _SCORES_BYTES // (4 * groups * shape.length))
    rows: list[list[Any]] = []
    for start in range(0, shape.num_queries, block):
        query, dout = (
            arrays[name][b, start : start + block, q_heads] if name in arrays else None
            for name in ("query", "dout")
        )
        offset = np.int32(start + shape.q_offset)
        rows.append([np.asarray(r) for r in run(query, key, value, dout, offset)])
    columns = list(zip(*rows))
    # Rows of queries follow each other; gradients of keys and values are sums.
    combine = (np.concatenate, np.concatenate, sum, sum)
    names = RESULTS[case.pass_]
    return {name: combine[i](columns[i]) for i, name in enumerate(names)}


def checked_heads(case: Case) -> list[tuple[int, int]]:
    """(batch element, key-value head) of those that are compared."""
    shape = case.shape
    heads = [(b, h) for b in range(shape.batch_size) for h in range(shape.num_kv_heads)]
    affordable = max(1, int(_EXPECTED_OPERATIONS * len(heads) / (case.operations + 1)))
    if affordable >= len(heads):
        return heads
    if affordable == 1:
        return heads[-1:]
    step = (len(heads) - 1) / (affordable - 1)
    return [heads[round(i * step)] for i in range(affordable)]


def compare(case: Case, results: dict[str, Any], expected: Path) -> float:
    """The largest `row_error` of the results, [batch, rows, heads, head_dim]."""
    import numpy as np

    groups = case.shape.num_heads // case.shape.num_kv_heads
    error = 0.0
    with np.load(expected) as right:
        for name in RESULTS[case.pass_]:
            of_queries = name in ("out", "dquery")
            for (b, head), wanted in zip(right["heads"], right[name]):
                width = groups if of_queries else 1
                heads = slice(head * width, (head + 1) * width)
                error = max(error, row_error(results[name][b, :, heads], wanted))
    return error


def row_error(found: Any, wanted: Any) -> float:
    """The largest error of a row, |found - wanted| / (|wanted| + its mean over rows).

    By rows, since those of a causal problem have very different lengths, and one wrong
    row of thousands must show; with the mean, since some are 0 but for rounding.
    """
    import numpy as np

    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return math.inf
    if not wanted.size:
        return 0.0
    lengths = np.linalg.norm(wanted, axis=-1)
    scale = lengths + np.sqrt(np.mean(lengths**2)) + np.finfo(np.float32).tiny
    return float((np.linalg.norm(found - wanted, axis=-1) / scale).max())


# -- Implementations of attention ------------------------------------------------------


class Attention(Subject):
    """A subject: an implementation, on one problem."""

    _run: Callable[[], Sequence[Any]]

    def build(self, case: Case) -> Callable[[], Sequence[Any]]:
        """A function that runs it once and waits; it returns RESULTS[case.pass_]."""
        raise NotImplementedError

    def to_numpy(self, result: Any) -> Any:
        """Of a result, [batch, rows, heads, head_dim] in float32."""
        raise NotImplementedError

    def describe(self, case: Case) -> str:
        """What runs, if there is something to say."""
        return ""

    def prepare(self, case: Any) -> dict[str, Any]:
        """Compiles, measures the memory of the first call, compares its results."""
        problem = case_from_json(case)
        self._warm_up(problem)
        self._run = self.build(problem)
        results, peak = peak_memory(self._run)
        memory = None
        if peak is not None:
            # Without the results. Below 0 is the noise of counting pages.
            memory = max(0, peak - _result_bytes(problem))
        named = {
            name: self.to_numpy(result)
            for name, result in zip(RESULTS[problem.pass_], results)
        }
        return {
            "memory_bytes": memory,
            "error": compare(problem, named, Path(case["expected"])),
            "tolerance": TOLERANCES[problem.dtype],
            "runs": self.describe(problem),
        }

    def call(self) -> Any:
        return self._run()

    def _warm_up(self, case: Case) -> None:
        """Runs a tiny problem: what a first call loads is no memory of a call."""
        shape = case.shape
        length = min(16, shape.length)
        q_len = None if shape.q_len is None else min(length, shape.q_len)
        tiny = AttentionShape(
            1, shape.num_heads, shape.num_kv_heads, length, shape.head_dim, q_len
        )
        run = self.build(Case(tiny, case.dtype, case.is_causal, case.pass_))
        run()
        run()


def _result_bytes(case: Case) -> int:
    shape = case.shape
    of_queries = shape.num_queries * shape.num_heads
    of_keys = shape.length * shape.num_kv_heads
    rows = of_queries if case.pass_ == "forward" else 2 * (of_queries + of_keys)
    item = 4 if case.dtype == "float32" else 2
    return shape.batch_size * rows * shape.head_dim * item


def _jax_versions() -> dict[str, str]:
    import jax

    jax.devices()
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


class _Jax(Attention):
    """`implementation`: that of flash_attention, or "jax.nn"."""

    def __init__(self, implementation: str) -> None:
        self._implementation = implementation

    def load(self) -> dict[str, str]:
        return _jax_versions()

    def build(self, case: Case) -> Callable[[], Sequence[Any]]:
        import jax
        import jax.numpy as jnp

        attend = self._attend(case)
        wait: Any = jax.block_until_ready  # untyped in JAX

        def run(query: Any, key: Any, value: Any, dout: Any = None) -> Any:
            if dout is None:
                return (attend(query, key, value),)
            out, pullback = jax.vjp(attend, query, key, value)
            return (out, *pullback(dout))

        arrays = [jnp.asarray(array) for array in inputs(case).values()]
        compiled = jax.jit(run).lower(*arrays).compile()

        def call() -> Sequence[Any]:
            results: Sequence[Any] = wait(compiled(*arrays))
            return results

        return call

    def _attend(self, case: Case) -> Callable[..., Any]:
        import jax
        import numpy as np

        import jax_flash_metal

        if self._implementation != "jax.nn":
            return lambda query, key, value: jax_flash_metal.flash_attention(
                *(query, key, value), **self._options(case)
            )
        options: dict[str, Any] = {"is_causal": case.is_causal}
        if case.is_causal and case.shape.q_offset:  # jax.nn counts from the first key
            options = {"mask": _causal_mask(case.shape)[np.newaxis, np.newaxis]}
        return lambda query, key, value: jax.nn.dot_product_attention(
            query, key, value, implementation="xla", **options
        )

    def _options(self, case: Case) -> dict[str, Any]:
        return {
            "is_causal": case.is_causal,
            "q_offset": case.shape.q_offset if case.is_causal else None,
            "implementation": self._implementation,
        }

    def to_numpy(self, result: Any) -> Any:
        import numpy as np

        return np.asarray(result, np.float32)

    def describe(self, case: Case) -> str:
        if self._implementation == "jax.nn":
            return "jax.nn.dot_product_attention(implementation='xla')"
        import jax

        import jax_flash_metal

        struct: Any = jax.ShapeDtypeStruct  # untyped in JAX
        structs = [struct(a.shape, a.dtype) for a in inputs(case).values()]
        return str(jax_flash_metal.explain(*structs[:3], **self._options(case)))


def _causal_mask(shape: AttentionShape) -> Any:
    """bool [num_queries, length], True: is seen."""
    import numpy as np

    return np.tri(shape.num_queries, shape.length, shape.q_offset, dtype=np.bool_)


class _Torch(Attention):
    """PyTorch's flash kernel for the CPU; no other of its kernels stands in for it."""

    def load(self) -> dict[str, str]:
        import torch

        if hasattr(os, "sched_getaffinity"):
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        return {"torch": torch.__version__}

    def build(self, case: Case) -> Callable[[], Sequence[Any]]:
        import numpy as np
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def tensor(array: Any) -> Any:
            # [batch, heads, length, head_dim], dense: the layout PyTorch documents.
            array = np.ascontiguousarray(array.swapaxes(1, 2))
            if case.dtype == "bfloat16":  # which NumPy has from another package
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        query, key, value, *dout = (tensor(array) for array in inputs(case).values())
        options: dict[str, Any] = {"is_causal": case.is_causal}
        if case.is_causal and case.shape.q_offset:  # PyTorch counts from the first key
            options = {"attn_mask": torch.from_numpy(_causal_mask(case.shape))}
        options["enable_gqa"] = case.shape.num_heads != case.shape.num_kv_heads

        def forward() -> Sequence[Any]:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
                return (scaled_dot_product_attention(query, key, value, **options),)

        def forward_and_backward() -> Sequence[Any]:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = scaled_dot_product_attention(query, key, value, **options)
                gradients = torch.autograd.grad(out, (query, key, value), dout[0])
            return (out.detach(), *gradients)

        if case.pass_ == "forward":
            return forward
        for differentiable in (query, key, value):
            differentiable.requires_grad_()
        return forward_and_backward

    def to_numpy(self, result: Any) -> Any:
        return result.float().numpy().swapaxes(1, 2)

    def describe(self, case: Case) -> str:
        return "scaled_dot_product_attention, SDPBackend.FLASH_ATTENTION"


class _Mlx(Attention):
    """MLX's fast attention, on its default device."""

    def load(self) -> dict[str, str]:
        import mlx.core as mx

        mx.eval(mx.zeros(1) + 1)
        return {"mlx": importlib.metadata.version("mlx")}

    def build(self, case: Case) -> Callable[[], Sequence[Any]]:
        import mlx.core as mx
        import numpy as np

        def array(values: Any) -> Any:
            dense = np.ascontiguousarray(values.swapaxes(1, 2), np.float32)
            return mx.array(dense).astype(getattr(mx, case.dtype))

        query, key, value, *dout = (array(values) for values in inputs(case).values())
        mx.eval(query, key, value, *dout)
        # A causal mask of MLX is aligned to the last key, as ours is here.
        mask = "causal" if case.is_causal else None
        scale = 1 / math.sqrt(case.shape.head_dim)

        def attend(query: Any, key: Any, value: Any) -> Any:
            return mx.fast.scaled_dot_product_attention(
                query, key, value, scale=scale, mask=mask
            )

        def forward() -> Sequence[Any]:
            out = attend(query, key, value)
            mx.eval(out)
            return (out,)

        def forward_and_backward() -> Sequence[Any]:
            out, gradients = mx.vjp(attend, [query, key, value], dout)
            mx.eval(out, gradients)
            return (*out, *gradients)

        return forward if case.pass_ == "forward" else forward_and_backward

    def to_numpy(self, result: Any) -> Any:
        import mlx.core as mx
        import numpy as np

        return np.array(result.astype(mx.float32)).swapaxes(1, 2)

    def describe(self, case: Case) -> str:
        import mlx.core as mx

        return f"mlx.core.fast.scaled_dot_product_attention on {mx.default_device()}"


class Tune(_Jax):
    """Measures which Metal kernels are fastest for a case, see docs/autotune.md."""

    def __init__(self) -> None:
        super().__init__("metal")

    def prepare(self, case: Any) -> dict[str, Any]:
        """`tuning`: what was found, in words."""
        import jax

        import jax_flash_metal

        problem = case_from_json(case)
        struct: Any = jax.ShapeDtypeStruct  # untyped in JAX
        structs = [struct(a.shape, a.dtype) for a in inputs(problem).values()]
        tuning = jax_flash_metal.autotune(*structs[:3], **self._options(problem))
        return {"tuning": str(tuning)}


# -- The machine -----------------------------------------------------------------------

_PEAK_REPEATS = 3


class Machine(Subject):
    """What the native library says of this machine."""

    def load(self) -> dict[str, str]:
        return _jax_versions()

    def prepare(self, case: Any) -> dict[str, Any]:
        """`peak`: FMA limit of one thread by dtype, operations a second."""
        from jax_flash_metal import platforms
        from jax_flash_metal.attention_library import AttentionLibrary

        library = AttentionLibrary(platforms.load_library(), backend="cpu")
        # The limit is what is possible: other processes only slow it down.
        peak = {
            dtype: max(library.measure_cpu_peak(dtype) for _ in range(_PEAK_REPEATS))
            for dtype in ("float32", "bfloat16")
        }
        return {"peak": peak, "isas": library.cpu_isas()}


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "cpu": lambda: _Jax("cpu"),
    "metal": lambda: _Jax("metal"),
    "xla": lambda: _Jax("xla"),
    "jax.nn": lambda: _Jax("jax.nn"),
    "torch": _Torch,
    "mlx": _Mlx,
    "expected": Expected,
    "tune": Tune,
    "machine": Machine,
}


def subject(name: str) -> Subject:
    return SUBJECTS[name]()


if __name__ == "__main__":
    main()
