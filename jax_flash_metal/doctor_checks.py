"""The checks of `doctor` that load native code, in processes that it starts for them.

    python -m jax_flash_metal.doctor_checks SECTION EVENTS OPTIONS

Writes what it is at and what it found into the file EVENTS, a JSON object per line, so
that a crash loses nothing and cannot take `doctor` with it. OPTIONS are JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_flash_metal.doctor_report import HOW_TO_REPORT, Check, Status, sentence

# Importing JAX is the first thing that may fail.
if TYPE_CHECKING:
    from jax_flash_metal.config import Backend, Implementation

REINSTALL = "Reinstall jax-flash-metal from where it came (README, Usage)."


class Events:
    """The file that doctor.py reads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._started = time.monotonic()

    def progress(self, text: str, **more: Any) -> None:
        """What is being done now: for the screen, and for the message after a crash."""
        self._write({"progress": text, **more})

    def check(self, check: Check) -> None:
        """A finished check; its time is that since the last one."""
        now = time.monotonic()
        check.seconds, self._started = round(now - self._started, 3), now
        self._write({"check": vars(check)})

    def _write(self, event: dict[str, Any]) -> None:
        print(json.dumps(event), file=self._file, flush=True)


@contextlib.contextmanager
def _failing(events: Events, name: str) -> Iterator[None]:
    """Makes an error a failed check."""
    try:
        yield
    # The one place that must survive anything: an error here is what the user needs.
    except Exception as error:
        events.check(
            Check(
                name,
                "fail",
                f"{sentence(f'{type(error).__name__}: {error}')} {HOW_TO_REPORT}",
                facts={"traceback": traceback.format_exc()},
            )
        )


# -- Library, device, kernels ----------------------------------------------------------


def check_kernels(events: Events, options: dict[str, Any]) -> None:
    """JAX, the native library, its device, every kernel compiled and tested."""
    events.progress("importing JAX")
    try:
        import jax

        from jax_flash_metal import platforms
    except Exception as error:
        message = (
            f"JAX cannot be imported: {type(error).__name__}: {error}; install jax and "
            "jaxlib of one version: pip install --upgrade jax jaxlib."
        )
        facts = {"traceback": traceback.format_exc()}
        events.check(Check("jax", "fail", message, facts=facts))
        return
    events.check(Check("jax", "ok", f"JAX {jax.__version__} can be imported."))

    from jax_flash_metal.attention_library import AttentionError, AttentionLibrary

    events.progress("loading the native library")
    try:
        library = AttentionLibrary(platforms.load_library())
    except platforms.LibraryError as error:
        message = f"{sentence(str(error))} {REINSTALL} {HOW_TO_REPORT}"
        events.check(Check("library", "fail", message))
        return
    digest = library.kernel_digest()
    facts = {
        "path": str(platforms.LIBRARY),
        "kernels": digest,
        "cache_folder": str(platforms.cache_folder()),
    }
    message = f"{platforms.LIBRARY.name} is of this package; kernels {digest[:12]}."
    events.check(Check("library", "ok", message, facts=facts))

    events.progress("opening the device")
    try:
        device = library.device_facts()
    except AttentionError as error:
        why = sentence(f"the kernels have no device to run on: {error}")
        message = f"{why} {HOW_TO_REPORT}"
        events.check(Check("device", "fail", message))
        return
    events.check(Check("device", "ok", _describe(device), facts=dict(device)))
    with _failing(events, "self-test"):
        _check_every_kernel(events, library, options.get("crashes", {}))


def _describe(device: dict[str, str]) -> str:
    known = [device.get("name", ""), device.get("family", "")]
    if int(device.get("num_cores", "0")):
        cores = "GPU cores" if device["device"] == "apple" else "threads"
        known.append(f"{device['num_cores']} {cores}")
    if int(device.get("memory_limit_bytes", "0")):
        known.append(f"{int(device['memory_limit_bytes']) / 2**30:.1f} GiB")
    text = ", ".join(part for part in known if part)
    if device["device"] == "software":
        return f"{text}: a correctness tool, it shows nothing of a GPU's speed."
    return f"{text}; {device.get('system', '')}."


def _check_every_kernel(events: Events, library: Any, crashes: dict[str, str]) -> None:
    """`crashes`: how earlier processes crashed, by the number of their last case."""
    from jax_flash_metal import kernel_cases, kernel_proof
    from jax_flash_metal.kernel_cases import kernel_of_key
    from jax_flash_metal.variant_table import variants

    cases = [
        case
        for dtype, head_dim in sorted({(v.dtype, v.head_dim) for v in variants()})
        for case in kernel_cases.every_case(dtype, head_dim)
    ]
    tested = _Tested()
    for number, case in enumerate(cases):
        tested.add(events, library, case, number, len(cases), crashes)
    # From now on programs go by this.
    kernel_proof.replace("metal", tested.verdicts)
    rows = []
    for v in variants():
        # As it is made for plain calls and for those with options.
        own = (x for k, x in tested.verdicts.items() if kernel_of_key(k) == v.host_name)
        rows.append(
            {
                "name": v.host_name,
                "kernel": v.kernel,
                "compile_ms": round(tested.compile_ms.get(v.host_name, 0), 3),
                **_worst(own),
            }
        )
    compile_ms = sum(tested.compile_ms.values())
    facts = {"cases": len(cases), "compile_ms": round(compile_ms)}
    right = f"All {len(rows)} kernels compile ({compile_ms / 1e3:.1f} s) and are right"
    events.check(_judged("self-test", rows, facts, right))


def check_cpu_kernels(events: Events, options: dict[str, Any]) -> None:
    """The CPU kernels of every instruction set that this machine has.

    Calls take those of the best one only; the others tell more of a fault.
    """
    with _failing(events, "cpu self-test"):
        _check_every_cpu_kernel(events, options.get("crashes", {}))


def _check_every_cpu_kernel(events: Events, crashes: dict[str, str]) -> None:
    """`crashes`: as above."""
    from jax_flash_metal import kernel_cases, kernel_proof, platforms
    from jax_flash_metal.attention_library import DTYPES, AttentionLibrary

    events.progress("loading the native library")
    library = AttentionLibrary(platforms.load_library(), backend="cpu")
    facts: dict[str, Any] = dict(library.device_facts())
    cases = [
        case
        for dtype in DTYPES
        # Wider than the proof's: two tiles of a head.
        for case in kernel_cases.cases_of(dtype, 80, with_aligned=True, backend="cpu")
    ]
    instruction_sets = library.cpu_isas()
    runs = list(itertools.product(cases, instruction_sets))
    tested = _Tested()
    kernels: dict[str, str] = {}  # and their instruction sets
    for number, (case, instruction_set) in enumerate(runs):
        library.set_cpu_isa(instruction_set)
        names = tested.add(events, library, case, number, len(runs), crashes)
        kernels |= dict.fromkeys(names, instruction_set)
    library.set_cpu_isa("")
    kernel_proof.replace("cpu", tested.verdicts)
    rows = [
        {
            "name": name,
            "kernel": instruction_set,
            **_worst(
                verdict
                for key, verdict in tested.verdicts.items()
                if kernel_cases.kernel_of_key(key) == name
            ),
        }
        for name, instruction_set in kernels.items()
    ]
    sets, best = ", ".join(instruction_sets), instruction_sets[-1]
    right = f"All {len(rows)} native CPU kernels ({sets}) are right"
    facts["cases"] = len(runs)
    if any(row["failure"] and row["kernel"] == best for row in rows):
        check = _judged("cpu self-test", rows, facts, right)
    else:
        fate = f"calls here take those of {best}, which are right"
        check = _judged("cpu self-test", rows, facts, right, fate)
    events.check(check)


class _Tested:
    """What the cases say that were run so far.

    Attributes:
      verdicts: The worst ones, by KernelCase.keys.
      compile_ms: By the kernels' names.
    """

    def __init__(self) -> None:
        self.verdicts: dict[str, Any] = {}
        self.compile_ms: dict[str, float] = {}

    def add(
        self,
        events: Events,
        library: Any,
        case: Any,
        number: int,
        total: int,
        crashes: Mapping[str, str],
    ) -> list[str]:
        """Runs a case, unless it has crashed; the names of the kernels it is of."""
        from jax_flash_metal import kernel_cases
        from jax_flash_metal.attention_library import AttentionError
        from jax_flash_metal.kernel_cases import Verdict

        try:
            keys: dict[str, str] = case.keys(library)
        except AttentionError:
            return []  # the table has no row of a kernel of this pass for it
        names = list(keys)
        if not any(case.judges(name) for name in names):
            return []  # of kernels that another row's case proves
        if str(number) in crashes:
            for name in names:
                how = Verdict(None, f"its test {crashes[str(number)]}")
                self._keep(keys[name], how)
            return names
        doing = f"testing {', '.join(names)} (case {number + 1} of {total})"
        events.progress(doing, case=number)
        started = time.perf_counter()
        with contextlib.suppress(AttentionError):  # the run below says it again
            library.compile(case.problem(), case.which)
        # A pass compiles its kernels together.
        share = 1e3 * (time.perf_counter() - started) / len(names)
        for name in names:
            self.compile_ms[name] = self.compile_ms.get(name, 0) + share
        for key, verdict in kernel_cases.check(library, case).items():
            self._keep(key, verdict)
        return names

    def _keep(self, key: str, verdict: Any) -> None:
        others = self.verdicts.get(key, verdict)
        self.verdicts[key] = max(others, verdict, key=_badness)


def _worst(verdicts: Iterable[Any]) -> dict[str, Any]:
    """The columns of a kernel's row that tell whether it is right."""
    from jax_flash_metal.kernel_cases import Verdict

    unjudged = Verdict(None, "it could not be tested, for other kernels failed")
    verdict = max(verdicts, key=_badness, default=unjudged)
    return {"error": verdict.error, "failure": verdict.failure}


def _judged(
    name: str,
    rows: list[dict[str, Any]],
    facts: dict[str, Any],
    right: str,
    fate: str = "calls that need them take the reference",
) -> Check:
    """`right`: what to say if all are; `fate`: what the others mean for calls."""
    wrong = [row for row in rows if row["failure"] is not None]
    if wrong:
        named = "; ".join(f"{row['name']}: {row['failure']}" for row in wrong[:3])
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        message = (
            f"{len(wrong)} of {len(rows)} kernels fail and are disabled, {fate}: "
            f"{named}{more}. {HOW_TO_REPORT}"
        )
        return Check(name, "fail", message, facts=facts, rows=rows)
    largest = max(row["error"] for row in rows)
    message = f"{right}: the largest error is {largest:.2g} of what is allowed."
    return Check(name, "ok", message, facts=facts, rows=rows)


def _badness(verdict: Any) -> tuple[bool, float]:
    error = math.inf if verdict.error is None else verdict.error
    return verdict.failure is not None, error


# -- The platform ----------------------------------------------------------------------


def check_hand_over(events: Events, options: dict[str, Any]) -> None:
    """Platform flash_metal starts; values pass host → kernels → host unchanged.

    So do the arguments of programs without kernels, on what the kernels have written:
    of one that may overwrite its argument, and of one that must not.
    """
    events.progress("starting platform flash_metal")
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_flash_metal
    from jax_flash_metal import pjrt
    from jax_flash_metal.variant_table import max_head_dims

    try:
        devices = jax.devices("flash_metal")
    except RuntimeError as error:
        why = sentence(f"platform flash_metal does not start: {error}")
        message = f"{why} {HOW_TO_REPORT}"
        events.check(Check("hand-over", "fail", message))
        return

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax_flash_metal.flash_attention(
            query, key, value, implementation="metal"
        )

    @jax.jit
    def round_trip(query: Any, key: Any, value: Any) -> Any:
        # The host writes the operand just before the kernels read it, and reads the
        # result just after. One key: the result is the value.
        out = attend(query, key, jnp.flip(value))
        return jnp.flip(out)

    kernels = jax.jit(attend)
    negative = jax.jit(jnp.negative)
    overwriting = jax.jit(jnp.negative, donate_argnums=0)

    def reuse(*operands: Any) -> list[Any]:
        x = kernels(*operands)
        y = negative(x)
        return [negative(y), negative(y), -np.asarray(y), x]

    # Everything that they return must equal the value.
    programs: dict[str, Callable[..., list[Any]]] = {
        "round trip": lambda *operands: [round_trip(*operands)],
        "donating": lambda *operands: [overwriting(overwriting(kernels(*operands)))],
        "reusing": reuse,
    }
    page = os.sysconf("SC_PAGE_SIZE")
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for program, dtype, shape in _hand_overs(page, max_head_dims()):
        batch, heads, width = shape
        value = rng.standard_normal((batch, 1, heads, width)).astype(dtype)
        small = jnp.ones((batch, 1, heads, 1), dtype)
        name = f"{value.nbytes} bytes of {value.dtype}"
        events.progress(f"handing over {name} ({program})")
        started = time.perf_counter()
        results = programs[program](small, small, jnp.asarray(value))
        outs = [np.asarray(result) for result in results]
        seconds = time.perf_counter() - started
        same_shape = all(out.shape == value.shape for out in outs)
        different = sum(int((o != value).sum()) for o in outs) if same_shape else -1
        rows.append(
            {
                "program": program,
                "bytes": value.nbytes,
                "dtype": str(value.dtype),
                "shape": list(shape),
                "seconds": round(seconds, 4),
                "different": different,
            }
        )
    host = pjrt.host_facts()
    facts = {
        "devices": [str(device) for device in devices],
        "host": host,
        "page_bytes": page,
    }
    how = host.get("handover", "")
    wrong = [row for row in rows if row["different"]]
    if wrong:
        named = ", ".join(
            f"{row['bytes']} bytes of {row['dtype']}"
            + (f" ({row['program']})" if row["program"] != "round trip" else "")
            for row in wrong
        )
        message = (
            "Values change on their way from the host plugin to the kernels and back: "
            f"{named}. Results on platform flash_metal cannot be trusted; "
            f"JAX_FLASH_METAL_HOST_BUFFERS=copy may help. {HOW_TO_REPORT}"
        )
        events.check(Check("hand-over", "fail", message, facts=facts, rows=rows))
        return
    sizes = {row["bytes"] for row in rows}
    message = (
        f"{len(sizes)} sizes up to {max(sizes) / 2**20:.0f} MiB "
        f"pass through host plugin and kernels unchanged{f' ({how})' if how else ''}."
    )
    events.check(Check("hand-over", "ok", message, facts=facts, rows=rows))


def _hand_overs(
    page: int, limits: dict[str, int]
) -> list[tuple[str, str, tuple[int, int, int]]]:
    """Program, dtype, (batch, heads, width): empty, tiny, odd, about a page, large."""
    narrow = "float16" if "float16" in limits else "float32"
    count = page // (2 if narrow == "float16" else 4)
    shapes: list[tuple[str, tuple[int, int, int]]] = [
        ("float32", (0, 1, 1)),
        (narrow, (1, 1, 1)),
        ("float32", (1, 1, 1)),
        (narrow, (7, 3, 5)),
        *((narrow, _factored(count + i, limits[narrow])) for i in (-1, 0, 1)),
        ("float32", _factored(1 << 20, limits["float32"])),
    ]
    return [
        *(("round trip", *shape) for shape in shapes),
        *((name, *shapes[i]) for name in ("donating", "reusing") for i in (3, 5)),
    ]


def _factored(count: int, max_width: int) -> tuple[int, int, int]:
    """`count` numbers with the widest heads that there are."""
    width = max(w for w in range(1, max_width + 1) if count % w == 0)
    return 1, count // width, width


# -- Training --------------------------------------------------------------------------

_STEPS = 3
_LOSS_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE = 1e-3  # of the largest gradient


def check_training(events: Events, options: dict[str, Any]) -> None:
    """Steps of a one-layer transformer, with the kernels and with the reference.

    The Metal kernels, if there is a device, on the platform of the options; and the
    CPU kernels on platform cpu.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_flash_metal
    from jax_flash_metal.variant_table import max_head_dims

    events.progress(f"training on platform {options['platform']}")
    width, heads, kv_heads, vocabulary, length = 48, 4, 2, 61, 37
    head_dim = min(20, max_head_dims()["float32"])

    def initial() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        sizes = {
            "embed": (vocabulary, width),
            "query": (width, heads, head_dim),
            "key": (width, kv_heads, head_dim),
            "value": (width, kv_heads, head_dim),
            "out": (heads, head_dim, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        return {
            name: jnp.asarray(
                rng.standard_normal(size) / math.sqrt(size[0]), jnp.float32
            )
            for name, size in sizes.items()
        }

    def loss(params: Any, tokens: Any, implementation: Implementation) -> Any:
        x = params["embed"][tokens[:, :-1]]
        q, k, v = (
            jnp.einsum("btw,wnh->btnh", x, params[name])
            for name in ("query", "key", "value")
        )
        attended = jax_flash_metal.flash_attention(
            q, k, v, is_causal=True, implementation=implementation
        )
        x = x + jnp.einsum("btnh,nhw->btw", attended, params["out"])
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        log_probs = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean()

    def train(implementation: Implementation, platform: str) -> tuple[list[float], Any]:
        with jax.default_device(jax.devices(platform)[0]):
            return train_here(implementation)

    def train_here(implementation: Implementation) -> tuple[list[float], Any]:
        step = jax.jit(
            jax.value_and_grad(
                lambda params, tokens: loss(params, tokens, implementation)
            )
        )
        rng = np.random.default_rng(1)
        params, losses, gradients = initial(), [], None
        for _ in range(_STEPS):
            tokens = jnp.asarray(rng.integers(0, vocabulary, (2, length)), jnp.int32)
            value, gradients = step(params, tokens)
            losses.append(float(value))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return losses, jax.tree.map(np.asarray, gradients)

    programs: list[tuple[Backend, str]] = [("cpu", "cpu")]
    if options.get("has_device", True):
        programs.insert(0, ("metal", options["platform"]))
    facts: dict[str, Any] = {"platform": jax.default_backend()}
    status: Status = "ok"
    sentences = []
    for implementation, platform in programs:
        try:
            losses, gradients = train(implementation, platform)
        except NotImplementedError as error:
            status = "fail"
            sentences.append(sentence(str(error)))
            continue
        expected_losses, expected_gradients = train("xla", platform)
        loss_error = max(abs(a - b) for a, b in zip(losses, expected_losses))
        gradient_error = max(
            float(np.abs(gradients[n] - e).max() / np.abs(e).max())
            for n, e in expected_gradients.items()
        )
        facts[implementation] = {
            "losses": [str(x) for x in losses],  # NaN is no JSON
            "expected_losses": [str(x) for x in expected_losses],
        }
        kernels = {"metal": "Metal", "cpu": "CPU"}[implementation]
        sentences.append(
            f"{_STEPS} steps, {kernels} kernels on platform {platform}: losses differ "
            f"from those of implementation='xla' by {loss_error:.1e} (allowed "
            f"{_LOSS_TOLERANCE:.0e}), gradients by {gradient_error:.1e} (allowed "
            f"{_GRADIENT_TOLERANCE:.0e})."
        )
        # Written so that NaN fails.
        right = loss_error <= _LOSS_TOLERANCE and gradient_error <= _GRADIENT_TOLERANCE
        if not right:
            status = "fail"
    if status == "fail":
        sentences.append(HOW_TO_REPORT)
    events.check(Check("training", status, " ".join(sentences), facts=facts))


# -- Tuning ----------------------------------------------------------------------------


def check_tuning(events: Events, options: dict[str, Any]) -> None:
    """What autotune has stored for this device; measures if there is time for it."""
    from jax_flash_metal import tunings

    events.progress("reading what autotune has stored")
    store = tunings.store()
    before = store.read()
    facts = {"path": str(store.path), "classes": sorted(before)}
    budget = float(options["time_budget"])
    if budget:
        rows, skipped = _tune(events, options, budget)
        failed = [row for row in rows if "failure" in row]
        message = f"{len(rows) - len(failed)} of the shapes measured or known"
        if skipped:
            message += f"; not measured: {_summary(skipped)} (--time-budget gives more)"
        if failed:
            message += f"; not possible: {failed[0]['shape']}: {failed[0]['failure']}"
        facts |= {"not_measured": skipped, "classes": sorted(store.read())}
        status: Status = "ok" if len(rows) > len(failed) else "warn"
        events.check(Check("tuning", status, f"{message}.", facts=facts, rows=rows))
        return
    if tunings.is_off():
        message = f"{tunings.SETTING} says that nothing measured is used."
    elif not before:
        message = (
            "Nothing is measured on this device: calls take the table's kernels; "
            "--tune measures."
        )
    else:
        unfused = [t.unfused for t in before.values() if t.unfused is not None]
        count = sum(u.is_taken_forward for u in unfused)
        message = (
            f"What was measured on this device decides {len(before)} "
            f"class{'es' if len(before) > 1 else ''} of calls, "
            f"{count} of them without our kernels; jax_flash_metal.explain tells."
        )
    events.check(Check("tuning", "ok", message, facts=facts))


def _tune(
    events: Events, options: dict[str, Any], budget: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the shapes that were measured, and those that there was no time for."""
    import jax

    import jax_flash_metal
    from jax_flash_metal.benchmark_shapes import SHAPE_SETS

    deadline = time.perf_counter() + budget
    shapes = sorted(SHAPE_SETS[options["shapes"]], key=lambda s: s.operations)
    rows: list[dict[str, Any]] = []
    struct: Any = jax.ShapeDtypeStruct  # untyped in JAX
    for number, shape in enumerate(shapes):
        left = deadline - time.perf_counter()
        if left <= 0:
            return rows, [str(s) for s in shapes[number:]]
        events.progress(f"measuring the kernels for {shape}")
        lengths = (shape.num_queries, shape.length, shape.length)
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        operands = [
            struct((shape.batch_size, length, n, shape.head_dim), "float32")
            for length, n in zip(lengths, heads)
        ]
        row = {"shape": str(shape)}
        try:
            tuning = jax_flash_metal.autotune(
                *operands,
                implementation="metal",
                platform=options["platform"],
                budget_seconds=left / (len(shapes) - number),
            )
        except Exception as error:  # such as out of memory: the other shapes go on
            rows.append(row | {"failure": f"{type(error).__name__}: {error}"})
            continue
        rows.append(row | {"class": tuning.shape_class, "result": str(tuning)})
    return rows, []


# -- Timing ----------------------------------------------------------------------------

_MIN_ROUNDS, _MAX_ROUNDS = 4, 50
# What the measurements of a row may take of what is left, at most.
_ROW_SHARE = 0.1
# Warming up compiles; then at least _MIN_ROUNDS of fused, unfused, and fused again.
_CALLS_PER_ROW = 3 * _MIN_ROUNDS


def check_timing(events: Events, options: dict[str, Any]) -> None:
    """Fused against unfused, and fused against itself: what is only noise."""
    import jax

    from jax_flash_metal.benchmark_shapes import SHAPE_SETS

    budget = float(options["time_budget"])
    deadline = time.perf_counter() + budget
    # Seconds per operation of the slowest row so far: what the next ones will take.
    pace = 0.0
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    shapes = sorted(SHAPE_SETS[options["shapes"]], key=lambda s: s.operations)
    for shape in shapes:
        for pass_, factor in (("forward", 1.0), ("gradient", 3.5)):
            left = deadline - time.perf_counter()
            if pace * shape.operations * factor * _CALLS_PER_ROW > left or left <= 0:
                skipped.append(f"{shape} {pass_}")
                continue
            events.progress(f"timing {shape} {pass_}")
            row = _time_row(shape, pass_, left * _ROW_SHARE)
            if "fused_ms" in row and shape.operations > 1e6:
                seconds = max(row["fused_ms"], row["unfused_ms"]) / 1e3
                pace = max(pace, seconds / (shape.operations * factor))
            rows.append(row)
    facts = {
        "device": options["device"],
        "platform": jax.default_backend(),
        "time_budget": budget,
        "not_timed": skipped,
    }
    failed = [row for row in rows if "failure" in row]
    timed = len(rows) - len(failed)
    message = f"{timed} of {2 * len(shapes)} rows timed within {budget:.0f} s"
    if skipped:
        message += f"; not timed: {_summary(skipped)} (--time-budget gives more)"
    if failed:
        first = failed[0]
        message += f"; not possible: {first['shape']}: {first['failure']}"
    status: Status = "ok" if timed else "warn"
    events.check(Check("timing", status, f"{message}.", facts=facts, rows=rows))


def _summary(skipped: list[str]) -> str:
    return f"{skipped[0]} and {len(skipped) - 1} larger" if skipped[1:] else skipped[0]


def _time_row(shape: Any, pass_: str, seconds: float) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_flash_metal

    rng = np.random.default_rng(0)
    keys = (shape.length, shape.num_kv_heads)
    operands = [
        jnp.asarray(
            rng.standard_normal((shape.batch_size, length, heads, shape.head_dim)),
            jnp.float32,
        )
        for length, heads in ((shape.num_queries, shape.num_heads), keys, keys)
    ]

    def function(implementation: Implementation) -> Callable[[], None]:
        def forward(query: Any, key: Any, value: Any) -> Any:
            return jax_flash_metal.flash_attention(
                query, key, value, implementation=implementation
            )

        def total(*operands: Any) -> Any:
            return forward(*operands).sum()

        called = forward if pass_ == "forward" else jax.grad(total, argnums=(0, 1, 2))
        compiled = jax.jit(called)
        return lambda: _wait(compiled(*operands))

    row: dict[str, Any] = {"shape": str(shape), "pass": pass_}
    try:
        fused, unfused = function("metal"), function("xla")
        for warm_up in (fused, unfused):
            warm_up()
    except Exception as error:  # such as out of memory: the other rows go on
        return row | {"failure": f"{type(error).__name__}: {error}"}
    once = _seconds(fused) * 2 + _seconds(unfused)
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(seconds / max(once, 1e-9))))
    # In turn, so that whatever slows the machine down slows all of them down.
    samples = [
        (_seconds(fused), _seconds(unfused), _seconds(fused)) for _ in range(rounds)
    ]
    first, reference, second = (statistics.median(s) for s in zip(*samples))
    fused_seconds = statistics.median([s for a, _, b in samples for s in (a, b)])
    return row | {
        "fused_ms": round(1e3 * fused_seconds, 4),
        "unfused_ms": round(1e3 * reference, 4),
        "ratio": round(reference / fused_seconds, 4),
        "noise": round(abs(first - second) / fused_seconds, 4),
        "rounds": rounds,
    }


def _wait(results: Any) -> None:
    import jax

    for leaf in jax.tree.leaves(results):
        leaf.block_until_ready()


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# --------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Events, dict[str, Any]], None]] = {
    "kernels": check_kernels,
    "cpu kernels": check_cpu_kernels,
    "hand-over": check_hand_over,
    "training": check_training,
    "tuning": check_tuning,
    "timing": check_timing,
}


def main() -> None:
    section, path, options = sys.argv[1:]
    events = Events(Path(path))
    with _failing(events, section):
        SECTIONS[section](events, json.loads(options))


if __name__ == "__main__":
    main()
