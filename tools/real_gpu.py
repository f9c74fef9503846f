"""Runs the Metal kernels on an NVIDIA GPU: at large sizes, and under its sanitizers.

    python -m tools.real_gpu build [--only PART ...]   makes build/real_gpu/kit; no GPU
    python -m tools.real_gpu run [--steps STEP ...] [--output FOLDER]   with that kit
    python -m tools.real_gpu document FOLDER ...       what runs found, into docs

The two machines need not be one: `run` wants this source tree, the kit, NumPy,
ml_dtypes, PyTorch (for references of large sizes) and a driver for CUDA 13. How and
why: docs/real-gpu.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "real_gpu"
KIT = BUILD / "kit"
WHEELS = {
    "ptxas": "nvidia-cuda-nvcc==13.0.88",
    # Earlier ones have no initcheck of threadgroup memory.
    "sanitizer": "nvidia-cuda-sanitizer-api==13.5.25",
}
_GLIBCS = (17, 25, 27, 28)


# -- Building ------------------------------------------------------------------------


def download(requirement: str) -> Path:
    """The wheel of a package for the GPU's machine, in build/real_gpu/wheels."""
    folder = BUILD / "wheels"
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in _GLIBCS]
        command = [
            *(sys.executable, "-m", "pip", "download", "-qq", "--no-deps"),
            *("--disable-pip-version-check", "--only-binary=:all:"),
            *("--python-version", "3.12", "--implementation", "cp", *platforms),
            *("--platform", "manylinux2014_x86_64", "-d", str(folder), requirement),
        ]
        subprocess.run(command, check=True)
    return next(folder.glob(pattern))


def ptxas() -> Path:
    """NVIDIA's assembler, from its wheel."""
    found = sorted((BUILD / "nvcc").rglob("bin/ptxas"))
    if not found:
        with zipfile.ZipFile(download(WHEELS["ptxas"])) as wheel:
            for member in wheel.namelist():
                if member.endswith("bin/ptxas"):
                    wheel.extract(member, BUILD / "nvcc")
        found = sorted((BUILD / "nvcc").rglob("bin/ptxas"))
        found[0].chmod(0o755)
    return found[0]


@dataclasses.dataclass(frozen=True)
class Built:
    """A kernel as PTX, and as a cubin if it was assembled here."""

    ptx: Path
    threads: int
    cubin: Path | None = None


def build_kernels(
    kernel_dir: Path, only: Sequence[str] = (), assemble: bool = True
) -> dict[str, Built]:
    """The rows of a variant table whose host names have one of `only`.

    Args:
      assemble: Makes cubins; otherwise takes those that were made before.
    """
    from plugin import build, kernel_sources
    from plugin.nvptx import compile as nvptx

    rows = kernel_sources.load_variants(kernel_dir)
    rows = [r for r in rows if not only or any(part in r.host_name for part in only)]
    threads = {row.host_name: 32 * row.num_simdgroups for row in rows}
    cache = build.Cache(BUILD / "cache")
    cache.folder.mkdir(parents=True, exist_ok=True)
    tool = ptxas()
    version = nvptx.ptxas_version(tool)

    def to_ptx(unit: Any) -> dict[str, str]:
        translation = nvptx.translate(unit, kernel_dir, cache)
        ir = nvptx.to_ir(nvptx.with_entries(translation), cache)
        ir, _ = nvptx.place_threadgroup_variables(ir)
        ptx = nvptx.to_ptx(nvptx.constants_in_device_memory(ir), cache)
        return nvptx.split_entries(ptx, threads)

    def to_cubin(ptx: str) -> Path | None:
        key = build.digest(version, ptx)
        place = cache.folder / key[:2] / f"{key[2:34]}.cubin"
        if not assemble and not place.exists():
            return None
        source = cache.text(ptx, ".ptx")
        return cache.get(
            key, ".cubin", lambda new: discard(nvptx.assemble(source, tool, new))
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        units = pool.map(to_ptx, build.kernel_units(rows))
        texts = {name: ptx for unit in units for name, ptx in unit.items()}
        cubins = dict(zip(texts, pool.map(to_cubin, texts.values())))
    return {
        name: Built(cache.text(ptx, ".ptx"), threads[name], cubins[name])
        for name, ptx in texts.items()
    }


def discard(_: object) -> None:
    """A result that nobody wants."""


# -- The kit -------------------------------------------------------------------------


def build_kit(only: Sequence[str], assemble: bool, bugs: bool) -> Path:
    """Everything that the GPU's machine needs beside the source tree."""
    from plugin import build, kernel_sources
    from tests.real_gpu import bugs as planted

    KIT.mkdir(parents=True, exist_ok=True)
    # For its planner. Its own kernels take minutes to compile: one is enough.
    library = build.build(
        only=["attention_mask_blocks"], output=KIT / "libjax_flash_metal.so"
    )
    kernels = build_kernels(kernel_sources.KERNEL_DIR, only, assemble)
    manifest: dict[str, Any] = {
        "digest": kernel_digest(library),
        "kernels": {name: kernel.threads for name, kernel in kernels.items()},
        "bugs": {},
    }
    files = {f"kernels/{name}": kernel for name, kernel in kernels.items()}
    missing = {row.host_name for row in kernel_sources.load_variants()} - {*kernels}
    if missing and not only:
        raise AssertionError(f"no PTX of {sorted(missing)}")
    for bug in planted.bugs() if bugs else ():
        with tempfile.TemporaryDirectory() as folder:
            copy = bug.copy_of_kernels(Path(folder))
            for name, kernel in build_kernels(copy, bug.rows(), assemble).items():
                files[f"{bug.id}/{name}"] = kernel
        manifest["bugs"][bug.id] = [n for n in files if n.startswith(f"{bug.id}/")]
    with tarfile.open(KIT / "kernels.tar.xz", "w:xz", preset=1) as archive:
        for name, kernel in files.items():
            path, suffix = (
                (kernel.cubin, "cubin") if kernel.cubin else (kernel.ptx, "ptx")
            )
            archive.add(path, f"{name}.{suffix}")
    (KIT / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with tarfile.open(KIT / "source.tar.xz", "w:xz", preset=1) as archive:
        for path in source_files():
            archive.add(path, str(path.relative_to(ROOT)))
    wheel = download(WHEELS["sanitizer"])
    for old in KIT.glob("*.whl"):
        old.unlink()
    shutil.copy2(wheel, KIT / wheel.name)
    return KIT


def source_files() -> list[Path]:
    """What `run` imports and reads: the tree may change before it runs."""
    patterns = (
        *("tools/*.py", "plugin/*.py", "plugin/nvptx/*", "jax_flash_metal/*.py"),
        *(
            "plugin/device/software/frontend/*.*",
            "metal_kernels/*",
            "tests/__init__.py",
        ),
        *("tests/support/*.py", "tests/real_gpu/*.py"),
    )
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if path.is_file()]


def kernel_digest(library: Path) -> str:
    """The hash of the kernels that a library has."""
    import ctypes

    function = ctypes.CDLL(str(library)).jfm_kernel_digest
    function.restype = ctypes.c_char_p
    digest: bytes = function()
    return digest.decode()


# -- Running -------------------------------------------------------------------------

TOOLS = {  # options of compute-sanitizer
    "memcheck": ("--padding", "256"),
    "racecheck": (),
    "initcheck": ("--initcheck-address-space", "all"),
    "synccheck": (),
}
_FINDING = 99  # the exit status that a tool is told to give
_TIMEOUT = -1
_SUMMARY = re.compile(
    r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?).*", re.IGNORECASE
)
# Lines of a report that say what and where.
_WHAT = re.compile(
    r"=+ *(Invalid .*|Uninitialized .*|Barrier error.*|Error: .*|Warning: .*"
    r"|Host API uninit.*|Divergent.*)"
)
_WHERE = re.compile(r" (?:in|at) \S*?((?:\w+\.(?:metal|h)):\d+)")
STEPS = ("rows", "defaults", "features", "large", "sanitizers", "bugs")
_SHARDS = {"rows": 10, "defaults": 8, "features": 6, "sanitizers": 12}


def unpack(folder: Path) -> dict[str, Path]:
    """The kit's kernels by name, in a folder; assembles those that are not yet."""
    from plugin.nvptx import compile as nvptx

    with tarfile.open(KIT / "kernels.tar.xz") as archive:
        archive.extractall(folder, filter="data")

    def assembled(path: Path) -> tuple[str, Path]:
        name = str(path.relative_to(folder).with_suffix(""))
        if path.suffix == ".ptx":
            nvptx.assemble(path, "ptxas", path.with_suffix(".cubin"))
        return name, path.with_suffix(".cubin")

    paths = sorted(p for p in folder.rglob("*") if p.suffix in (".ptx", ".cubin"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(assembled, paths))


def load(folder: Path, bug: str = "", poison: bool = True) -> Any:
    """The implementation that runs on the GPU, with the kernels of unpack()."""
    import ctypes

    from tests.real_gpu.battery import ChosenRows

    kernels = {path.stem: path for path in (folder / "kernels").glob("*.cubin")}
    if bug:
        kernels |= {path.stem: path for path in (folder / bug).glob("*.cubin")}
    library = ctypes.CDLL(str(KIT / "libjax_flash_metal.so"))
    return ChosenRows(library, kernels, poison=poison)


def shard(arguments: argparse.Namespace) -> int:
    """A part of a set of runs in this process; a line of JSON says what came of it."""
    from tests.real_gpu import battery

    gpu = load(arguments.kernels, arguments.bug, not arguments.no_poison)
    start = time.perf_counter()
    if arguments.set == "large":
        lines, wrong = battery.run_large(gpu, arguments.seconds)
        count = len(battery.large_calls())
    else:
        runs = list(battery.SETS[arguments.set]())
        if arguments.bug:
            runs = battery.runs_of_rows(
                p.stem for p in (arguments.kernels / arguments.bug).glob("*.cubin")
            )
        part, parts = map(int, arguments.part.split("/"))
        runs = runs[part::parts]
        lines, wrong, count = [], battery.check_runs(gpu, runs), len(runs)
    seconds = time.perf_counter() - start
    result = {"runs": count, "wrong": wrong, "lines": lines, "used": gpu.used}
    print("RESULT " + json.dumps(result | {"seconds": seconds}), flush=True)
    return 1 if wrong else 0


def first_report(output: str) -> str:
    """What the first report of a tool says, and the line of the kernels it names."""
    what = _WHAT.search(output)
    if what is None:
        return ""
    where = _WHERE.search(output, what.start())
    # Without the kernel and the address in it.
    text = re.sub(r" at \w+\+0x[0-9a-f]+", "", what[1].strip())
    return text if where is None or where[1] in text else f"{text} {where[1]}"


@dataclasses.dataclass
class Outcome:
    """What came of a process: its shard's result, and its tool's findings."""

    result: dict[str, Any]
    findings: int
    first: str  # what the tool's first report says, and where
    output: str
    seconds: float
    status: int


def run_shard(
    folder: Path, name: str, part: str, *, bug: str = "", tool: str = "",
    sanitizer: Path | None = None, timeout: float = 400, options: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """A shard in a process of its own, under a tool or not."""
    command = [sys.executable, "-m", "tools.real_gpu", "shard", str(folder), name]
    command += ["--part", part, *(["--bug", bug] if bug else []), *options]
    if tool:
        # Memory that was filled is initialised: this tool sees results unwritten.
        command += ["--no-poison"] if tool == "initcheck" else []
        command = [
            *(str(sanitizer), "--tool", tool, "--error-exitcode", str(_FINDING)),
            *(*TOOLS[tool], *command),
        ]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            # Large calls say how far they are.
            stderr=None if name == "large" else subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        output = text if isinstance(text, str) else text.decode(errors="replace")
        output, status = output + f"\ntimeout after {timeout} s", _TIMEOUT
    results = re.findall(r"^RESULT (.*)$", output, re.MULTILINE)
    result = json.loads(results[-1]) if results else {}
    summaries = [int(match[1]) for match in _SUMMARY.finditer(output)]
    first = first_report(output)
    # Of racecheck, warnings are findings too: they are lines, not errors.
    findings = max([*summaries, len(_WHAT.findall(output)) if tool else 0])
    seconds = time.perf_counter() - start
    return Outcome(result, findings, first, output, seconds, status)


class Report:
    """What a run found: for people while it runs, and as JSON at the end."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.data: dict[str, Any] = {"wrong": []}
        self._start = time.perf_counter()
        self._log = (output / "log.txt").open("w")

    def say(self, text: str) -> None:
        """A line with the time since the start."""
        line = f"[{time.perf_counter() - self._start:5.0f} s] {text}"
        print(line, flush=True)
        print(line, file=self._log, flush=True)

    def keep(self, name: str, outcome: Outcome) -> None:
        """The whole output of a process that went wrong."""
        text = outcome.output
        if len(text) > 20000:
            text = text[:10000] + "\n…\n" + text[-10000:]
        print(f"=== {name}\n{text}", file=self._log, flush=True)

    def wrong(self, text: str) -> None:
        """Something that must not be."""
        self.data["wrong"].append(text)
        self.say(f"WRONG {text[:600]}")

    def save(self) -> None:
        """Writes what was found so far."""
        (self.output / "results.json").write_text(json.dumps(self.data, indent=1))


def run(arguments: argparse.Namespace) -> int:
    """All steps, on the machine with the GPU."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.output)
    manifest = json.loads((KIT / "manifest.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kernels = unpack(folder)
        report.say(f"{len(kernels)} kernels unpacked")
        with zipfile.ZipFile(next(KIT.glob("*sanitizer*.whl"))) as wheel:
            wheel.extractall(folder / "wheel")
        sanitizer = next(
            (folder / "wheel").rglob("compute-sanitizer/compute-sanitizer")
        )
        for path in sanitizer.parent.iterdir():
            path.chmod(0o755)
        report.data |= {"digest": manifest["digest"], **machine(sanitizer)}
        report.say(json.dumps(machine(sanitizer)))
        steps: dict[str, Any] = {
            "large": lambda: run_large_step(folder, report, arguments.large_seconds),
            "sanitizers": lambda: run_sanitizers(folder, sanitizer, report),
            "bugs": lambda: run_bugs(folder, sanitizer, manifest["bugs"], report),
        }
        for name in ("rows", "defaults", "features"):
            steps[name] = lambda name=name: run_numbers(folder, name, report)
        # The large calls keep the GPU busy, the others the CPUs: side by side.
        with ThreadPoolExecutor(1) as beside:
            large = (
                [beside.submit(steps["large"])] if "large" in arguments.steps else []
            )
            for name in arguments.steps:
                if name != "large":
                    steps[name]()
                    report.save()
            for future in large:
                future.result()
        check_all_ran({*manifest["kernels"]}, report)
    report.save()
    report.say(f"done, {len(report.data['wrong'])} wrong")
    return 1 if report.data["wrong"] else 0


def check_all_ran(kernels: set[str], report: Report) -> None:
    """No kernel may be missing from the numbers, nor from what a tool has seen."""
    data = report.data
    sets = {}
    if {"rows", "defaults", "features"} <= {*data}:
        sets["compared with float64"] = [
            data["rows"],
            data["defaults"],
            data["features"],
        ]
    for tool, joined in data.get("sanitizers", {}).items():
        sets[f"under {tool}"] = [joined]
    for what, runs in sets.items():
        for kernel in sorted(kernels.difference(*(run["used"] for run in runs))):
            report.wrong(f"no call {what} has run {kernel}")


def machine(sanitizer: Path) -> dict[str, str]:
    """What it ran on."""
    query = "name,driver_version"
    gpu = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    version = subprocess.run(
        [sanitizer, "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": gpu,
        "sanitizer": version.splitlines()[-1] if version else "?",
    }


def run_numbers(folder: Path, name: str, report: Report) -> None:
    """A set of small calls, compared with float64 in NumPy."""
    parts = _SHARDS[name]
    with ThreadPoolExecutor(parts) as pool:
        outcomes = list(
            pool.map(lambda i: run_shard(folder, name, f"{i}/{parts}"), range(parts))
        )
    report.data[name] = _joined(name, outcomes, report)


def _joined(name: str, outcomes: Sequence[Outcome], report: Report) -> dict[str, Any]:
    used: dict[str, int] = {}
    runs = 0
    for index, outcome in enumerate(outcomes):
        if not outcome.result:
            report.keep(f"{name} {index}", outcome)
            report.wrong(
                f"{name} {index}: ended with {outcome.status}, without a result"
            )
            continue
        runs += outcome.result["runs"]
        for wrong in outcome.result["wrong"]:
            report.wrong(f"{name}: {wrong}")
        for kernel, count in outcome.result["used"].items():
            used[kernel] = used.get(kernel, 0) + count
    seconds = max(outcome.seconds for outcome in outcomes)
    report.say(
        f"{name}: {runs} calls, {len(used)} kernels, {sum(used.values())} launches, "
        f"{seconds:.0f} s"
    )
    return {"runs": runs, "used": used, "seconds": seconds}


def run_large_step(folder: Path, report: Report, seconds: float) -> None:
    """Large calls, one after the other; none is begun after some seconds."""
    outcome = run_shard(
        folder, "large", "0/1", options=["--seconds", str(seconds)], timeout=500
    )
    report.data["large"] = _joined("large", [outcome], report)
    report.data["large"]["lines"] = outcome.result.get("lines", [])
    if not outcome.result or outcome.result["wrong"]:
        report.keep("large", outcome)


def run_sanitizers(folder: Path, sanitizer: Path, report: Report) -> None:
    """Every kernel under the four tools: no findings, and right results too."""
    parts = _SHARDS["sanitizers"]
    jobs = [(tool, i) for tool in TOOLS for i in range(parts)]

    def job(item: tuple[str, int]) -> Outcome:
        tool, part = item
        return run_shard(
            folder, "sanitizers", f"{part}/{parts}", tool=tool, sanitizer=sanitizer
        )

    with ThreadPoolExecutor(parts) as pool:
        outcomes = dict(zip(jobs, pool.map(job, jobs)))
    report.data["sanitizers"] = {}
    for tool in TOOLS:
        own = [outcomes[tool, i] for i in range(parts)]
        joined = _joined(tool, own, report)
        joined["findings"] = sum(outcome.findings for outcome in own)
        for index, outcome in enumerate(own):
            if outcome.findings or "SUMMARY" not in outcome.output:
                report.keep(f"{tool} {index}", outcome)
                report.wrong(
                    f"{tool} {index}: {outcome.findings} findings, status "
                    f"{outcome.status}: {outcome.first}"
                )
        report.data["sanitizers"][tool] = joined


def run_bugs(
    folder: Path, sanitizer: Path, built: Mapping[str, Sequence[str]], report: Report
) -> None:
    """Each planted bug, in the program alone and under the tool that must find it."""
    from tests.real_gpu.bugs import bugs

    def job(bug: Any) -> tuple[Outcome, Outcome]:
        plain = run_shard(folder, "rows", "0/1", bug=bug.id, timeout=25)
        if bug.tool not in TOOLS:
            return plain, plain
        return plain, run_shard(
            folder, "rows", "0/1", bug=bug.id, tool=bug.tool, sanitizer=sanitizer,
            timeout=60,
        )  # fmt: skip

    planted = [bug for bug in bugs() if bug.id in built]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(job, planted))
    report.data["bugs"] = []
    for bug, (plain, under_tool) in zip(planted, outcomes):
        wrong, runs = plain.result.get("wrong"), plain.result.get("runs")
        numbers = "no result" if wrong is None else f"{len(wrong)} of {runs}"
        if plain.status == _TIMEOUT:
            numbers = "hangs"
        is_found = {
            "numbers": bool(wrong),
            "hang": plain.status == _TIMEOUT,
        }.get(bug.tool, under_tool.findings > 0)
        report.data["bugs"].append(
            {
                "id": bug.id,
                "tool": bug.tool,
                "found": is_found,
                "findings": under_tool.findings,
                "first": under_tool.first,
                "numbers": numbers,
            }
        )
        report.say(json.dumps(report.data["bugs"][-1]))
        if not is_found:
            report.keep(bug.id, under_tool)
            report.wrong(f"the planted bug {bug.id} was not found by {bug.tool}")


# -- The documentation ---------------------------------------------------------------

DOCUMENT = ROOT / "docs" / "real-gpu.md"
_BEGIN, _END = "<!-- results: begin -->", "<!-- results: end -->"


def markdown(data: Mapping[str, Any]) -> str:
    """The section of the documentation that a run writes."""
    lines = [
        f"Run on {data['date']}: {data['gpu']}; {data['sanitizer']}; "
        f"kernels {data['digest'][:12]}.",
        "",
        "| calls | number | kernels | launches | seconds |",
        "|---|---|---|---|---|",
    ]
    for name in ("rows", "defaults", "features", "large"):
        if name in data:
            d = data[name]
            lines.append(
                f"| {name} | {d['runs']} | {len(d['used'])} | "
                f"{sum(d['used'].values())} | {d['seconds']:.0f} |"
            )
    for tool, d in data.get("sanitizers", {}).items():
        lines.append(
            f"| {tool}: {d['findings']} findings | {d['runs']} | {len(d['used'])} | "
            f"{sum(d['used'].values())} | {d['seconds']:.0f} |"
        )
    if "large" in data:
        lines += [
            "",
            "Large calls: the largest error, and its share of the tolerance.",
            "",
            "| call | scores | out | logsumexp | dquery | dkey | dvalue |",
            "|---|---|---|---|---|---|---|",
            *data["large"]["lines"],
        ]
    if "bugs" in data:
        lines += [
            "",
            "| planted bug | tool | findings | first | calls with wrong numbers |",
            "|---|---|---|---|---|",
        ]
        for bug in data["bugs"]:
            count = bug["findings"] if bug["tool"] in TOOLS else ""
            lines.append(
                f"| {bug['id']} | {bug['tool']}{'' if bug['found'] else ' **missed**'} "
                f"| {count} | {bug['first']} | {bug['numbers']} |"
            )
    lines += ["", f"Wrong: {len(data['wrong'])}."]
    lines += [f"- {text.splitlines()[0][:200]}" for text in data["wrong"][:20]]
    return "\n".join(lines)


def document(folders: Sequence[Path]) -> Path:
    """Puts the results of a run, or of runs of some steps, into the documentation."""
    data: dict[str, Any] = {"wrong": []}
    for folder in folders:
        part = json.loads((folder / "results.json").read_text())
        if data.get("digest", part["digest"]) != part["digest"]:
            raise ValueError(f"{folder}: a run of other kernels than the first.")
        data |= part | {"wrong": data["wrong"] + part["wrong"]}
    section = markdown(data)
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    DOCUMENT.write_text(f"{before}{_BEGIN}\n{section}\n{_END}{after}")
    return DOCUMENT


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="tools.real_gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build")
    command.add_argument("--only", nargs="*", default=[], metavar="PART")
    command.add_argument("--assemble-there", action="store_true")
    command.add_argument("--no-bugs", action="store_true")
    command = commands.add_parser("run")
    command.add_argument("--steps", nargs="*", default=STEPS, choices=STEPS)
    command.add_argument("--output", type=Path, default=BUILD / "results")
    command.add_argument("--large-seconds", type=float, default=math.inf)
    command = commands.add_parser("shard")  # a process of `run`
    command.add_argument("kernels", type=Path)
    command.add_argument("set")
    command.add_argument("--part", default="0/1")
    command.add_argument("--bug", default="")
    command.add_argument("--no-poison", action="store_true")
    command.add_argument("--seconds", type=float, default=math.inf)
    command = commands.add_parser("document")
    command.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    if arguments.command == "build":
        print(
            build_kit(
                arguments.only, not arguments.assemble_there, not arguments.no_bugs
            )
        )
        return 0
    if arguments.command == "document":
        print(document(arguments.folders))
        return 0
    return run(arguments) if arguments.command == "run" else shard(arguments)


if __name__ == "__main__":
    sys.exit(main())
