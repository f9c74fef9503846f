"""`python -m jax_flash_metal doctor`: what works on this machine, and what to send us.

Looks at the installation itself and leaves everything that loads native code to
processes of their own (doctor_checks.py): neither a crash nor a hang of theirs keeps
the report from being written. docs/doctor.md describes it for users.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jax_flash_metal import command_options, crashes, hosts
from jax_flash_metal._version import __version__
from jax_flash_metal.benchmark_shapes import SHAPE_SETS
from jax_flash_metal.doctor_report import (
    HOW_TO_REPORT,
    Check,
    Report,
    Status,
    sentence,
)

EXIT_OK, EXIT_FAILED, EXIT_WRONG_OPTIONS = 0, 1, 2
DEFAULT_REPORT = "jax-flash-metal-report.txt"
_DEFAULT_TIME_BUDGET = 30.0
_OLDEST_MACOS = 14


def run_command(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Of a terminal that has no "±": better a "?" than no report.
            stream.reconfigure(errors="replace")
    if options.report is not None:
        try:
            command_options.check_writable("--report", options.report)
        except ValueError as error:
            print(f"doctor: {error}", file=sys.stderr)
            return EXIT_WRONG_OPTIONS
    if options.tune:
        # Here: everything else must work where not even this can be imported.
        from jax_flash_metal import tunings

        if tunings.is_off():
            print(f"doctor: --tune cannot measure: {tunings.OFF}", file=sys.stderr)
            return EXIT_WRONG_OPTIONS
    progress = _Progress()
    report = run(options.shapes, options.time_budget, progress.show, tune=options.tune)
    progress.clear()
    place = _save(report, options.report)
    try:
        print(report.as_json() if options.json else _screen(report), flush=True)
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(_last_words(report, place), file=sys.stderr)
    return EXIT_FAILED if report.status == "fail" else EXIT_OK


def add_command(commands: Any) -> None:
    """Adds `doctor` to the subcommands of argparse."""
    doctor = commands.add_parser(
        "doctor",
        help="test this installation",
        description="Tests this installation: the device, every kernel, the host "
        "plugin, a training step. The exit status is 1 if something failed.",
    )
    doctor.set_defaults(run=run_command)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write everything to FILE, to attach it to an issue (without this option "
        "a file is written only if something failed)",
    )
    doctor.add_argument(
        "--shapes",
        choices=sorted(SHAPE_SETS),
        default="seed",
        help="which sizes are timed (default: seed)",
    )
    doctor.add_argument(
        "--time-budget",
        type=command_options.seconds_or_none,
        default=_DEFAULT_TIME_BUDGET,
        metavar="S",
        help="seconds for the timing table, 0 for none (default: %(default).0f)",
    )
    doctor.add_argument(
        "--tune",
        action="store_true",
        help="measure which kernels are fastest for these sizes and keep that for "
        "later programs; for another --time-budget",
    )


def run(
    shapes: str,
    time_budget: float,
    progress: Callable[[str], None],
    *,
    tune: bool = False,
) -> Report:
    """All checks, in order; those that need what is not there say so."""
    started = time.monotonic()
    report = Report(
        package_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        command=" ".join(("python -m jax_flash_metal", *sys.argv[1:])),
    )
    for look in (check_platform, check_packages, check_host_plugin):
        report.checks.append(_guarded(look))
    with contextlib.suppress(_Interrupted):
        _run_sections(report, shapes, time_budget, progress, tune=tune)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _run_sections(
    report: Report,
    shapes: str,
    time_budget: float,
    progress: Callable[[str], None],
    *,
    tune: bool,
) -> None:
    def run_section(
        name: str, expected: Sequence[str], limit: float, **options: Any
    ) -> None:
        section = _Section(name, expected, progress)
        platform_ = options.get("platform", "cpu")
        environment = {"JAX_PLATFORMS": hosts.JAX_PLATFORMS[platform_]}
        try:
            section.run(limit, options, environment)
        finally:
            report.checks += section.checks

    def skip(name: str, status: Status, reason: str) -> None:
        report.checks.append(Check(name, status, f"Not run: {reason}."))

    _run_self_test(
        report, "kernels", ("jax", "library", "device", "self-test"), progress
    )
    library = report.check("library")
    if library is not None and library.status == "ok":
        _run_self_test(report, "cpu kernels", ("cpu self-test",), progress)
    else:
        skip("cpu self-test", "warn", "it needs the native library, see above")
    self_test, host = report.check("self-test"), report.check("host plugin")
    if self_test is None or not self_test.rows:
        skip("hand-over", "warn", "it needs Metal kernels that run, see above")
        on_cpu = report.check("cpu self-test")
        if on_cpu is not None and on_cpu.rows:
            options = {"platform": "cpu", "has_device": False}
            run_section("training", ("training",), 300, **options)
        else:
            skip("training", "warn", "it needs kernels that run, see above")
        for name in ("tuning", "timing"):
            skip(name, "warn", "it needs Metal kernels that run, see above")
        return
    if host is not None and "path" in host.facts:
        run_section("hand-over", ("hand-over",), 300, platform="flash_metal")
    else:
        skip("hand-over", "warn", "there is no host plugin, see above")
    hand_over = report.check("hand-over")
    works = hand_over is not None and hand_over.status == "ok"
    if hand_over is not None and host is not None and hand_over.status == "fail":
        _try_other_hosts(hand_over, host.facts["name"], progress)
    platform_ = "flash_metal" if works else "cpu"
    run_section("training", ("training",), 300, platform=platform_)
    run_section(
        "tuning",
        ("tuning",),
        time_budget + 300,
        platform=platform_,
        shapes=shapes,
        time_budget=time_budget if tune else 0,
    )
    if time_budget == 0:
        skip("timing", "ok", "--time-budget is 0")
        return
    run_section(
        "timing",
        ("timing",),
        time_budget + 300,
        platform=platform_,
        shapes=shapes,
        time_budget=time_budget,
        device=_device_in_words(report),
    )


def _try_other_hosts(
    hand_over: Check, failed: str, progress: Callable[[str], None]
) -> None:
    """Adds to the failed check which other installed host works, if one does.

    The user has to choose it: platform flash_metal does not go on to the next one.
    """
    tried = hand_over.facts["other_hosts"] = {}
    for host in hosts.fitting():
        if host.name == failed:
            continue
        section = _Section("hand-over", ("hand-over",), progress)
        environment = {
            "JAX_PLATFORMS": hosts.JAX_PLATFORMS["flash_metal"],
            hosts.HOST_SETTING: host.name,
        }
        section.run(300, {"platform": "flash_metal"}, environment)
        check = section.checks[0]
        tried[host.name] = check.message
        if check.status == "ok":
            hand_over.message = (
                f"Over the host plugin {failed} it fails, over {host.name}, which is "
                f"installed too, it works: set {hosts.HOST_SETTING}={host.name}. "
                f"{hand_over.message}"
            )
            return


def _run_self_test(
    report: Report, name: str, expected: Sequence[str], progress: Callable[[str], None]
) -> None:
    """A section of kernels; again without the cases that crashed, to see the rest.

    `expected`: the names of its checks; the last is that of the kernels.
    """
    crashed: list[dict[str, Any]] = []
    while True:
        section = _Section(name, expected, progress)
        options = {"crashes": {crash["case"]: crash["how"] for crash in crashed}}
        try:
            section.run(1800, options, _SELF_TEST_ENVIRONMENT)
        except _Interrupted:
            report.checks += section.checks
            raise
        if section.crash is not None and len(crashed) < _MAX_CRASHES:
            crashed.append(section.crash)
            continue
        report.checks += section.checks
        self_test = report.check(expected[-1])
        if self_test is not None:
            self_test.facts["crashes"] = crashed
        return


_MAX_CRASHES = 8
# The expected results are products of small matrices: more threads only get in the way.
_SELF_TEST_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}


def _device_in_words(report: Report) -> str:
    device = report.check("device")
    facts = device.facts if device else {}
    if facts.get("device") == "software":
        return "software Metal device, which shows nothing of a GPU's speed"
    return str(facts.get("name", ""))


def _guarded(look: Callable[[], Check]) -> Check:
    """The check, or a failed one with its error."""
    started = time.monotonic()
    try:
        check = look()
    # A report must come whatever is broken; the error is in it.
    except Exception as error:
        name = look.__name__.removeprefix("check_").replace("_", " ")
        message = f"{sentence(f'{type(error).__name__}: {error}')} {HOW_TO_REPORT}"
        check = Check(name, "fail", message)
    check.seconds = round(time.monotonic() - started, 3)
    return check


# -- What can be seen without loading anything -----------------------------------------


def check_platform() -> Check:
    """Python and the operating system."""
    facts: dict[str, Any] = {
        "python": sys.version,
        "executable": sys.executable,
        "system": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("JAX_", "XLA_", "JFM_", "MTL_", "METAL_", "AGX_"))
        },
    }
    where = f"{platform.system()} on {platform.machine()}"
    status: Status = "ok"
    advice = ""
    if sys.platform == "darwin":
        facts["sw_vers"] = _output_of("sw_vers")
        facts["chip"] = _output_of("sysctl", "-n", "machdep.cpu.brand_string")
        is_translated = _output_of("sysctl", "-n", "sysctl.proc_translated") == "1"
        version = hosts.macos_version()
        dotted = ".".join(map(str, version))
        where = f"macOS {dotted} on {facts['chip'] or platform.machine()}"
        if is_translated:
            advice = (
                "this Python is for Intel Macs and runs under Rosetta: install a "
                "Python for Apple silicon (arm64), make a new environment with it"
            )
        elif platform.machine() != "arm64":
            advice = (
                "the kernels need Apple silicon; here only implementation='xla' runs"
            )
        elif version[0] < _OLDEST_MACOS:
            advice = f"the kernels need macOS {_OLDEST_MACOS} or newer"
    elif sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        advice = "the kernels need macOS on Apple silicon, or Linux"
    if advice:
        status = "fail"
        advice = f"; {advice}"
    return Check(
        "platform", status, f"Python {platform.python_version()}, {where}{advice}.",
        facts=facts,
    )  # fmt: skip


_PACKAGES = (
    *("jax", "jaxlib", "numpy", "ml_dtypes", "flax", "rich", "ziglang"),
    *("metal-pjrt-core", *(known.name for known in hosts.KNOWN_HOSTS)),
)


def check_packages() -> Check:
    """Versions, and whether they fit each other."""
    versions = {name: _version_of(name) for name in ("jax-flash-metal", *_PACKAGES)}
    plugins = {
        point.name: f"{point.value} ({point.dist.name if point.dist else '?'})"
        for point in importlib.metadata.entry_points(group="jax_plugins")
    }
    facts = {
        "versions": {name: v for name, v in versions.items() if v is not None},
        "jax_plugins": plugins,
        "package": str(Path(__file__).parent),
    }
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    message = f"jax-flash-metal {__version__}, jax {jax}, jaxlib {jaxlib}"
    problem = ""
    status: Status = "fail"
    if jax is None or jaxlib is None:
        problem = "JAX is not installed: pip install jax"
    elif hosts.version_numbers(jax) < hosts.OLDEST_JAX:
        oldest = ".".join(map(str, hosts.OLDEST_JAX))
        problem = f"jax is older than {oldest}: pip install --upgrade jax"
    elif versions["jax-flash-metal"] not in (None, __version__):
        status = "warn"
        problem = (
            f"pip has installed version {versions['jax-flash-metal']} of this package, "
            f"but the one that runs, in {facts['package']}, is {__version__}: "
            "uninstall it and install it again"
        )
    elif "flash_metal" not in plugins:
        status = "warn"
        problem = (
            "JAX does not know platform flash_metal, because the package is not "
            "installed but only found: pip install jax-flash-metal"
        )
    if problem:
        return Check("packages", status, f"{message}; {problem}.", facts=facts)
    return Check("packages", "ok", f"{message}.", facts=facts)


def check_host_plugin() -> Check:
    """The PJRT plugin that platform flash_metal runs over."""
    facts: dict[str, Any] = {"setting": os.environ.get(hosts.HOST_SETTING)}
    found = hosts.jax_metal_conflict()
    conflict = [sentence(found)] if found else []
    try:
        host = hosts.find()
        facts["buffers"] = hosts.buffers()
    except hosts.HostError as error:
        # Nobody needs one who does not ask for the platform.
        status: Status = "fail" if facts["setting"] else "warn"
        message = " ".join((sentence(str(error)), *conflict))
        return Check("host plugin", status, message, facts=facts)
    facts |= {"name": host.name, "path": str(host.path)}
    facts["version"] = version = _version_of(host.name)
    name = f"{host.name} {version}." if version else f"{host.name}."
    status = "warn" if conflict else "ok"
    return Check("host plugin", status, " ".join((name, *conflict)), facts=facts)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip()


# -- Sections in processes of their own ------------------------------------------------

_POLL_SECONDS = 0.05
# Of what a process printed: the end, where the reason is.
_MAX_OUTPUT = 8000


class _Interrupted(Exception):
    """The user has had enough (Ctrl-C); the report comes all the same."""


class _Section:
    """One run of a section of doctor_checks.py, in a process of its own.

    Attributes:
      checks: What it found; one that failed if it crashed, hung or was interrupted
        before it had found everything, a warning if that was at its very end.
      crash: If it crashed at a case of the self-test: which, how, and all else.
    """

    def __init__(
        self, name: str, expected: Sequence[str], progress: Callable[[str], None]
    ) -> None:
        """`expected`: the names of its checks, in order."""
        self._name, self._expected, self._progress = name, expected, progress
        self._doing = f"starting section {name}"
        self._case: int | None = None
        self.checks: list[Check] = []
        self.crash: dict[str, Any] | None = None

    def run(
        self, limit: float, options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """Runs it for `limit` seconds at most.

        Raises:
          _Interrupted: By the user.
        """
        interrupted = False
        how = None
        with tempfile.TemporaryDirectory() as folder:
            events, output = Path(folder, "events"), Path(folder, "output")
            events.touch()
            with events.open() as lines, output.open("wb") as sink:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "jax_flash_metal.doctor_checks"),
                        *(self._name, str(events), json.dumps(dict(options))),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env={**os.environ, **environment},
                )
                try:
                    if not self._follow(process, lines, time.monotonic() + limit):
                        how = f"did not end within {limit:.0f} s"
                except KeyboardInterrupt:
                    interrupted, how = True, "was interrupted"
                finally:
                    process.kill()  # does nothing if it has ended
                    process.wait()
            code = process.returncode
            tail = output.read_bytes()[-_MAX_OUTPUT:].decode(errors="replace")
        if how is None and (code != 0 or not self.checks):
            how = crashes.ending(code)
        if how is not None:
            facts = {"exit_code": code, "doing": self._doing, "output": tail}
            self.checks.append(self._unfinished(how, interrupted, facts))
            if self._case is not None and crashes.is_crash(code):
                self.crash = {"case": self._case, "how": how, **facts}
        if interrupted:
            raise _Interrupted

    def _unfinished(self, how: str, interrupted: bool, facts: dict[str, Any]) -> Check:
        """What is to be said of a process that did not end well."""
        found = {check.name for check in self.checks}
        missing = [name for name in self._expected if name not in found]
        # Nothing follows a check that failed.
        last = self.checks[-1] if self.checks else None
        is_done = not missing or (last is not None and last.status == "fail")
        if is_done and not interrupted:
            message = f"The process {how}, after all its checks. {HOW_TO_REPORT}"
            return Check(f"end of {self._name}", "warn", message, facts=facts)
        message = f"The process {how} while {self._doing}. {HOW_TO_REPORT}"
        name = missing[0] if missing else self._name
        return Check(name, "fail", message, facts=facts)

    def _follow(
        self, process: subprocess.Popen[bytes], lines: TextIO, deadline: float
    ) -> bool:
        """Reads events until the process has ended: True; or until the deadline."""
        begun = ""  # of a line that is being written
        while True:
            ended = process.poll() is not None  # before reading the last lines
            *whole, begun = (begun + lines.read()).split("\n")
            for line in whole:
                event = json.loads(line)
                if "check" in event:
                    self.checks.append(Check(**event["check"]))
                    self._case = None
                else:
                    self._doing, self._case = event["progress"], event.get("case")
                    self._progress(self._doing)
            if ended or time.monotonic() > deadline:
                return ended
            time.sleep(_POLL_SECONDS)


# -- What the user sees ----------------------------------------------------------------


class _Progress:
    """One line on stderr, overwritten; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._is_terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            print(
                f"\r\033[K… {text}"[: columns + 3], end="", file=sys.stderr, flush=True
            )

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _screen(report: Report) -> str:
    width = 100
    if sys.stdout.isatty():
        width = max(60, min(140, os.get_terminal_size(sys.stdout.fileno()).columns))
    return report.as_screen(width)


def _save(report: Report, place: Path | None) -> str:
    """Writes the report if it is asked for or of use; says where it is, or why not."""
    if place is None and report.status != "fail":
        return ""
    candidates = [place] if place else [
        Path(DEFAULT_REPORT),
        Path(tempfile.gettempdir(), DEFAULT_REPORT),
    ]  # fmt: skip
    error = None
    for path in candidates:
        try:
            path.write_text(report.as_file(), encoding="utf-8")
        except OSError as caught:
            error = caught
            continue
        return f"The report is in {path}."
    return f"The report could not be written: {error}."


def _last_words(report: Report, place: str) -> str:
    if report.status == "fail":
        failed = ", ".join(c.name for c in report.checks if c.status == "fail")
        words = f"FAILED: {failed}. {HOW_TO_REPORT}"
    else:
        words = "Everything that was tried works."
    return " ".join(
        part for part in (words, place, f"({report.seconds:.0f} s)") if part
    )
