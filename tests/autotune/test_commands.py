"""`doctor`, `doctor --tune` and `bench --tune`: what they measure and say."""

import contextlib
import sys

import pytest

from jax_flash_metal import __main__ as command_line
from jax_flash_metal import bench, bench_worker, doctor, doctor_checks, tunings
from jax_flash_metal.bench_measure import Case, Settings, WorkerError
from jax_flash_metal.benchmark_shapes import AttentionShape
from tests.autotune.fake_library import library
from tests.autotune.test_store import CLASS, tuning

__all__ = ["library"]  # a fixture


class Events:
    def __init__(self):
        self.said, self.checks = [], []

    def progress(self, text, **more):
        self.said.append(text)

    def check(self, check):
        self.checks.append(check)


def check_tuning(**options):
    events = Events()
    defaults = {"platform": "cpu", "shapes": "small", "time_budget": 0}
    doctor_checks.check_tuning(events, defaults | options)
    (check,) = events.checks
    return check


def test_doctor_says_that_nothing_is_stored(library):
    check = check_tuning()
    assert (check.name, check.status) == ("tuning", "ok")
    assert check.message == (
        "Nothing is measured on this device: calls take the table's kernels; --tune "
        "measures."
    )
    assert check.facts["path"].startswith(str(tunings.platforms.cache_folder()))


def test_doctor_says_what_is_stored(library, monkeypatch):
    tunings.keep(tuning())
    check = check_tuning()
    assert check.message.startswith(
        "What was measured on this device decides 1 class of calls, "
    )
    assert check.facts["classes"] == [CLASS]
    monkeypatch.setenv(tunings.SETTING, "off")
    assert check_tuning().message == (
        "JAX_FLASH_METAL_AUTOTUNE says that nothing measured is used."
    )


def measured(*operands, **options):
    """In the place of autotune."""
    query = operands[0]
    if query.shape[3] == 128:
        raise RuntimeError("it does not run")
    assert options["implementation"] == "metal"
    return tuning(f"{query.dtype} {query.shape}")


def test_doctor_measures_the_shapes_that_it_times(library, monkeypatch):
    monkeypatch.setattr(sys.modules["jax_flash_metal"], "autotune", measured)
    check = check_tuning(time_budget=1000.0)
    assert check.status == "ok"
    assert check.message == (
        "2 of the shapes measured or known; not possible: B2 Hq8 Hkv2 L128 D128: "
        "RuntimeError: it does not run."
    )
    assert [row.get("class") for row in check.rows] == [
        *("float32 (2, 8, 8, 64)", "float32 (2, 64, 8, 64)", None),
    ]
    check = check_tuning(time_budget=1e-9)
    assert check.status == "warn"
    assert "not measured: B2 Hq8 Hkv8 L8 D64 and 2 larger (--time" in check.message


def test_doctor_has_the_option(monkeypatch):
    asked = []

    def run(shapes, time_budget, progress, *, tune):
        asked.append(tune)
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", run)
    for arguments in ([], ["--tune"]):
        with contextlib.suppress(KeyboardInterrupt):
            command_line.main(["doctor", *arguments])
    assert asked == [False, True]


# -- bench -----------------------------------------------------------------------------

SHAPE = AttentionShape(1, 4, 2, 16, 64)
CASES = [
    Case(SHAPE, "float16", is_causal, pass_)
    for is_causal in (True, False)
    for pass_ in ("forward", "forward+backward")
]


def test_bench_needs_metal_kernels_to_tune(capsys):
    options = ("--tune", "--implementations", "cpu", "jax.nn")
    assert command_line.main(["bench", *options]) == 2
    assert "bench: --tune is about the Metal kernels: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options"),
    [("bench", ["--implementations", "metal"]), ("doctor", [])],
    ids=["bench", "doctor"],
)
def test_commands_refuse_to_tune_where_that_is_off(
    monkeypatch, capsys, command, options
):
    """At the start, before anything else has taken its time."""

    def run(*arguments, **more):
        raise AssertionError

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(doctor, "run", run)
    monkeypatch.setenv(tunings.SETTING, "off")
    assert command_line.main([command, "--tune", *options]) == 2
    assert capsys.readouterr().err == (
        f"{command}: --tune cannot measure: JAX_FLASH_METAL_AUTOTUNE says that nothing "
        "measured is used; unset it.\n"
    )


class Worker:
    def __init__(self):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, do, limit, **request):
        self.asked.append((do, request.get("case")))
        if do == "prepare" and not request["case"]["is_causal"]:
            raise WorkerError("it does not run")
        return {"tuning": "what was found"}


def test_bench_measures_every_class_once(monkeypatch, capsys):
    worker = Worker()
    started = []

    def start_worker(*arguments):
        started.append(arguments)
        return worker

    monkeypatch.setattr(bench.bench_measure, "start_worker", start_worker)
    said = bench.tune(CASES, None, Settings(platform="flash_metal"))
    assert started == [("tune", None, "flash_metal")]
    assert [do for do, _ in worker.asked] == ["load", "prepare", "prepare"]
    assert said == ["what was found", f"{CASES[3]}: it does not run"]
    assert capsys.readouterr().err.splitlines() == said


def test_the_process_of_bench_that_measures(monkeypatch):
    asked = []

    def autotune(*operands, **options):
        asked.append((operands, options))
        return "what was found"

    monkeypatch.setattr(sys.modules["jax_flash_metal"], "autotune", autotune)
    subject = bench_worker.subject("tune")
    assert subject.prepare(CASES[0].as_json()) == {"tuning": "what was found"}
    ((operands, options),) = asked
    assert [x.shape for x in operands] == [(1, 16, n, 64) for n in (4, 2, 2)]
    assert {x.dtype.name for x in operands} == {"float16"}
    assert options == {"is_causal": True, "q_offset": 0, "implementation": "metal"}


@pytest.mark.parametrize("arguments", [[], ["--tune"]], ids=str)
def test_bench_has_the_option(monkeypatch, arguments):
    tuned = []
    monkeypatch.setattr(bench, "tune", lambda *a: tuned.append(a) or ["found"])
    monkeypatch.setattr(bench, "run", lambda *a: None)
    monkeypatch.setattr(bench, "machine_facts", lambda *a: {"threads": 1})
    options = ("--implementations", "metal", "--set", "small")
    command_line.main(["bench", *options, *arguments])
    assert len(tuned) == len(arguments)
