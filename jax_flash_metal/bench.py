"""`python -m jax_flash_metal bench`: implementations of attention side by side.

The command: options, one case after the other, what is printed and saved. Measuring is
in bench_measure.py, the figures in bench_report.py. For users: docs/bench.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal import (
    bench_measure,
    bench_report,
    command_options,
    gpu_report,
)
from jax_flash_metal._version import __version__
from jax_flash_metal.bench_measure import (
    Case,
    Comparison,
    Contender,
    Series,
    Settings,
    WorkerError,
)
from jax_flash_metal.benchmark_shapes import (
    DTYPES,
    PASSES,
    SHAPE_SETS,
    AttentionShape,
)
from jax_flash_metal.gpu_chips import CHIPS

IMPLEMENTATIONS = ("cpu", "metal", "jax.nn", "xla", "torch", "mlx")
PLATFORMS = ("cpu", "flash_metal")
EXIT_OK, EXIT_FAILED = 0, 1

SOFTWARE_DEVICE = (
    '"metal" ran on the software Metal device here, a tool for correctness: its times '
    "are no measure of a GPU."
)


def add_command(commands: Any) -> None:
    """Adds `bench` to the subcommands of argparse."""
    parser = commands.add_parser(
        "bench",
        help="time implementations of attention side by side",
        description="Times implementations of attention side by side. Options for "
        "sizes replace those of every shape of the set. The exit status is 1 if "
        "the first implementation failed.",
    )
    parser.set_defaults(run=run_command)
    add = parser.add_argument
    sizes = parser.add_argument_group("problems")
    sizes.add_argument(
        "--set",
        choices=sorted(SHAPE_SETS),
        default="lengths",
        help="named shapes (default: %(default)s)",
    )
    for option, meaning in _SIZE_OPTIONS.items():
        sizes.add_argument(
            f"--{option}",
            type=command_options.count,
            nargs="+",
            metavar="N",
            help=meaning,
        )
    sizes.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=["float32"], help="(float32)"
    )
    sizes.add_argument(
        "--pass",
        choices=(*PASSES, "both"),
        default="both",
        dest="pass_",
        help="(default: both)",
    )
    sizes.add_argument("--causal", action="store_true", help="only with a causal mask")
    sizes.add_argument("--full", action="store_true", help="only without a mask")
    add(
        "--implementations",
        choices=IMPLEMENTATIONS,
        nargs="+",
        help="what is compared, with the first one; jax.nn is JAX's own attention, xla "
        "this package's reference (default: ours for the platform, and those that are "
        "installed)",
    )
    add(
        "--platform",
        choices=PLATFORMS,
        help=f"of the implementations in JAX (default here: {_default_platform()})",
    )
    add(
        "--threads",
        type=command_options.count,
        metavar="N",
        help="CPUs for every process (all)",
    )
    add(
        "--rounds",
        type=command_options.count,
        metavar="N",
        help=f"samples, at most (default: {Settings.rounds})",
    )
    add(
        "--time-budget",
        type=command_options.seconds,
        metavar="S",
        help="seconds for everything; cases that do not fit are listed",
    )
    add("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    add("--plot", type=Path, metavar="FILE", help="time and memory as a picture (.png)")
    add(
        "--tune",
        action="store_true",
        help="first measure which Metal kernels are fastest for these problems, and "
        "keep that for later programs (docs/autotune.md)",
    )
    add(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="compare with a file of --json from an earlier run",
    )
    add(
        "--model",
        nargs="*",
        choices=CHIPS,
        metavar="CHIP",
        help="measure nothing: print what a model predicts for Apple's GPUs "
        f"({', '.join(CHIPS)}; default: {', '.join(gpu_report.DEFAULT_CHIPS)})",
    )


_SIZE_OPTIONS = {
    "batch-size": "batch elements",
    "num-heads": "heads of query",
    "num-kv-heads": "heads of key and value (as many, where the set has as many)",
    "length": "of keys and values, and of queries",
    "q-len": "of queries, if it is another one",
    "head-dim": "width of a head",
}


def _default_platform() -> str:
    first = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    return first if first in PLATFORMS else "cpu"


# -- What is asked for -----------------------------------------------------------------


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The problems of the options, every one once.

    Raises:
      ValueError: num_heads is no multiple of num_kv_heads.
    """
    shapes = [
        replaced
        for shape in SHAPE_SETS[options.set]
        for replaced in _replace_sizes(shape, options)
    ]
    passes = PASSES if options.pass_ == "both" else (options.pass_,)
    masks = [True] * options.causal + [False] * options.full or [True, False]
    cases = [
        Case(shape, dtype, is_causal, pass_)
        for dtype, is_causal, pass_, shape in itertools.product(
            options.dtype, masks, passes, shapes
        )
        # The last query sees every key: a single one has no need of a mask.
        if not is_causal or shape.num_queries > 1 or options.causal
    ]
    return list(dict.fromkeys(cases))


def _replace_sizes(
    shape: AttentionShape, options: argparse.Namespace
) -> list[AttentionShape]:
    """The shape with every combination of the sizes that the options name."""
    given = {
        name: values
        for name in (option.replace("-", "_") for option in _SIZE_OPTIONS)
        if (values := getattr(options, name)) is not None
    }
    shapes = []
    for combination in itertools.product(*given.values()):
        sizes = dict(zip(given, combination))
        if "num_heads" in sizes and shape.num_heads == shape.num_kv_heads:
            sizes.setdefault("num_kv_heads", sizes["num_heads"])
        replaced = dataclasses.replace(shape, **sizes)
        if replaced.num_heads % replaced.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, but the shapes have "
                f"{replaced}."
            )
        shapes.append(replaced)
    return shapes


def implementations_of(options: argparse.Namespace) -> list[str]:
    """Those that are asked for, or that this machine has; the first is ours."""
    if options.implementations:
        return list(dict.fromkeys(options.implementations))
    ours = "metal" if platform_of(options) == "flash_metal" else "cpu"
    others = [name for name in ("torch", "mlx") if importlib.util.find_spec(name)]
    return [ours, "jax.nn", "xla", *others]


def platform_of(options: argparse.Namespace) -> str:
    """The one that is asked for, or that JAX takes here."""
    return options.platform or _default_platform()


def _cpus_of(options: argparse.Namespace) -> tuple[int, ...] | None:
    """Raises ValueError: there are not so many, or they cannot be chosen."""
    if options.threads is None:
        return None
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("--threads needs Linux: elsewhere CPUs cannot be chosen.")
    cpus = sorted(os.sched_getaffinity(0))
    if options.threads > len(cpus):
        raise ValueError(f"--threads {options.threads}: there are {len(cpus)} CPUs.")
    return tuple(cpus[: options.threads])


# Of pictures that matplotlib can write everywhere.
_PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def _check_files(options: argparse.Namespace) -> None:
    """Raises ValueError: what is measured could not be written."""
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None:
            command_options.check_writable(option, path)
    if options.plot and options.plot.suffix not in _PLOT_SUFFIXES:
        endings = ", ".join(_PLOT_SUFFIXES)
        raise ValueError(f"--plot {options.plot} must end in one of {endings}.")


# What is about measuring.
_NOT_WITH_MODEL = (
    *("implementations", "platform", "threads", "rounds", "time_budget", "json"),
    *("plot", "tune", "baseline"),
)
# Ten seconds or so for each case and chip.
_MAX_MODEL_WORK = 4 * 10**12


def _check_model(options: argparse.Namespace, cases: Sequence[Case]) -> None:
    """Raises ValueError: --model does not go with these options, or sizes."""
    for name in _NOT_WITH_MODEL:
        if getattr(options, name) not in (None, False):
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} is not for --model, which measures nothing and prints a "
                "table."
            )
    for case in cases:
        why = "the model goes through every block of queries"
        command_options.check_size(case.shape, _MAX_MODEL_WORK, why)
        command_options.check_head_dim(case.shape, case.dtype)


# -- The run ---------------------------------------------------------------------------


def run_command(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    try:
        cases = cases_of(options)
        if options.model is not None:
            _check_model(options, cases)
            print_model(options.model or gpu_report.DEFAULT_CHIPS, cases)
            return EXIT_OK
        cpus = _cpus_of(options)
        baseline = (
            bench_report.read_baseline(options.baseline) if options.baseline else None
        )
        _check_files(options)
        names = implementations_of(options)
        if options.tune and "metal" not in names:
            raise ValueError(
                "--tune is about the Metal kernels: it needs metal among the "
                "--implementations, or --platform flash_metal."
            )
        if options.tune:
            from jax_flash_metal import tunings  # not above: it imports JAX

            if tunings.is_off():
                raise ValueError(f"--tune cannot measure: {tunings.OFF}")
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "--plot needs matplotlib: pip install 'jax-flash-metal[bench]'."
            )
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    settings = Settings(
        options.rounds or Settings.rounds, platform=platform_of(options)
    )
    report = bench_report.Report(
        package_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        command=" ".join(("python -m jax_flash_metal", *sys.argv[1:])),
        machine=machine_facts(cpus, settings.platform),
        baseline=baseline,
    )
    if baseline is not None:
        report.warnings += baseline.differences(report.machine)
    if "metal" in names and sys.platform != "darwin":
        report.warnings.append(SOFTWARE_DEVICE)
    try:
        if options.tune:
            report.machine["tunings"] = tune(cases, cpus, settings)
        run(report, cases, names, cpus, settings, options.time_budget, options.json)
    except KeyboardInterrupt:
        report.warnings.append("The run was interrupted.")
    print(bench_report.as_screen(report, _screen_width()), end="", flush=True)
    if options.json:
        _save_json(report, options.json)
    if options.plot:
        bench_report.save_plot(report, options.plot)
    # Another implementation may be out of memory, which is a result.
    ours = [comparison.series[0] for _, comparison in report.results]
    worked = ours and all(series.failure is None for series in ours)
    return EXIT_OK if worked else EXIT_FAILED


def print_model(chips: Sequence[str], cases: Sequence[Case]) -> None:
    """Prints the model's predictions of the cases."""
    each = [(case.shape, case.dtype, case.is_causal, case.pass_) for case in cases]
    for line in gpu_report.lines(chips, each):
        print(line)


def run(
    report: bench_report.Report,
    cases: Sequence[Case],
    names: Sequence[str],
    cpus: tuple[int, ...] | None,
    settings: Settings,
    time_budget: float | None = None,
    json_file: Path | None = None,
) -> None:
    """Measures the cases; adds each to the report, and the report to the file."""
    started = time.monotonic()
    load = Load()
    with tempfile.TemporaryDirectory() as folder, Progress(len(cases)) as progress:
        for number, case in enumerate(cases):
            left = None
            if time_budget is not None:
                left = time_budget - (time.monotonic() - started)
                if number and left <= 0:  # one case is always measured
                    report.not_timed = list(cases[number:])
                    break
            limited = settings
            if left is not None:
                share = max(0.0, left) / (len(cases) - number)
                seconds = min(settings.seconds, share)
                limited = dataclasses.replace(settings, seconds=seconds)
            expected = Path(folder, "expected.npz")
            show = progress.of(str(case))
            comparison = measure_case(case, names, cpus, limited, expected, show)
            report.results.append((case, comparison))
            for series in comparison.series:
                report.machine["versions"] |= series.versions
            progress.finish(case, comparison)
            if json_file:
                _save_json(report, json_file)
    others = load.of_others()
    report.machine["cpus_used_by_others"] = others
    if others is not None and others > _MAX_OTHERS:
        report.warnings.append(
            f"Other programs used {others:.1f} of this machine's CPUs meanwhile: do "
            "not trust these figures."
        )


# CPUs, on average.
_MAX_OTHERS = 0.15


def tune(
    cases: Sequence[Case], cpus: tuple[int, ...] | None, settings: Settings
) -> list[str]:
    """Has the kernels of the cases measured, in a process of its own; what it says.

    Later processes, those of the benchmark too, go by what is found.
    """
    said = []
    with bench_measure.start_worker("tune", cpus, settings.platform) as worker:
        worker.ask("load", settings.limit)
        # A class of calls has both passes.
        for case in {(c.shape, c.dtype, c.is_causal): c for c in cases}.values():
            try:
                request = case.as_json()
                found = worker.ask("prepare", settings.limit, case=request)["tuning"]
            except WorkerError as error:
                found = f"{case}: {error}"
            print(found, file=sys.stderr, flush=True)
            said.append(found)
    return said


def measure_case(
    case: Case,
    names: Sequence[str],
    cpus: tuple[int, ...] | None,
    settings: Settings,
    expected: Path,
    progress: Callable[[str], None],
) -> Comparison:
    """Has the right results computed, then measures; `expected` is overwritten."""
    progress("computing the right results")
    try:
        request = bench_measure.with_expected(case, expected, settings)
    except WorkerError as error:
        why = f"there is nothing to compare it with: the reference: {error}"
        series = [Series(name, failure=why) for name in names]
        return Comparison(series, Series(names[0], failure=why))
    contenders = [Contender(name, name, request, cpus) for name in names]
    return bench_measure.measure(contenders, settings, progress)


def _save_json(report: bench_report.Report, path: Path) -> None:
    path.write_text(report.as_json() + "\n", encoding="utf-8")


def _screen_width() -> int:
    if not sys.stdout.isatty():
        return 120
    return max(100, os.get_terminal_size(sys.stdout.fileno()).columns)


class Progress:
    """A bar on a terminal; elsewhere a line for each case that is done."""

    def __init__(self, num_cases: int) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        self._is_terminal = console.is_terminal
        self._bar = progress.Progress(
            progress.MofNCompleteColumn(),
            progress.BarColumn(20),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            # Drawing must not take much of the CPUs that are measured.
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("", total=num_cases)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def of(self, what: str) -> Callable[[str], None]:
        """Shows what is being done with it."""

        def show(doing: str) -> None:
            self._bar.update(self._task, description=f"{what}: {doing}")

        return show

    def finish(self, case: Case, comparison: Comparison) -> None:
        self._bar.advance(self._task)
        if not self._is_terminal:
            times = ", ".join(
                f"{series.name} "
                + (
                    bench_report.duration(series.seconds)
                    if series.samples
                    else "failed"
                )
                for series in comparison.series
            )
            print(f"{case}: {times}", file=sys.stderr, flush=True)


# -- The machine -----------------------------------------------------------------------


def machine_facts(cpus: tuple[int, ...] | None, jax_platform: str) -> dict[str, Any]:
    """What the figures depend on."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": len(cpus) if cpus else num_cpus(),
        "num_cpus": os.cpu_count(),
        "platform": jax_platform,
        "versions": {},
    }
    try:
        with bench_measure.start_worker("machine", cpus) as worker:
            worker.ask("load", Settings.limit)
            facts |= worker.ask("prepare", Settings.limit, case={})
    except WorkerError as error:
        facts["library"] = str(error)
    return facts


def num_cpus() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    if sys.platform == "darwin":
        command = ("sysctl", "-n", "machdep.cpu.brand_string")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    return next(names, platform.machine()).strip()


class Load:
    """How much of the machine other programs use, from here on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._others = _cpu_seconds_of_others()

    def of_others(self) -> float | None:
        """CPUs, on average; None: not known. All processes of ours have ended."""
        now = _cpu_seconds_of_others()
        if now is None or self._others is None:
            return None
        elapsed = max(1e-3, time.monotonic() - self._started)
        return max(0.0, (now - self._others) / elapsed)


def _cpu_seconds_of_others() -> float | None:
    try:
        with Path("/proc/stat").open() as lines:
            words = lines.readline().split()
    except OSError:  # not Linux
        return None
    user, nice, system, _, _, irq, soft_irq, steal = map(int, words[1:9])
    busy = user + nice + system + irq + soft_irq + steal
    own = os.times()
    ours = own.user + own.system + own.children_user + own.children_system
    return float(busy / os.sysconf("SC_CLK_TCK") - ours)
