"""The command line: which cases, tables, JSON, the plot, and a tiny real run."""

import argparse
import json
import sys

import pytest

from jax_flash_metal import __main__ as command_line
from jax_flash_metal import bench, bench_report
from jax_flash_metal.bench_measure import Case, Comparison, Series
from jax_flash_metal.benchmark_shapes import SHAPE_SETS, AttentionShape


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_command(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def cases_of(*arguments):
    return bench.cases_of(parse(*arguments))


# -- Options ---------------------------------------------------------------------------


def test_default_cases():
    cases = cases_of()
    assert len(cases) == 2 * 2 * len(SHAPE_SETS["lengths"])
    assert {case.dtype for case in cases} == {"float32"}
    assert cases[0] == Case(SHAPE_SETS["lengths"][0], "float32", True, "forward")


def test_sizes_replace_those_of_the_set():
    options = ("--length", "8", "16", "--num-heads", "4", "--head-dim", "32", "128")
    cases = cases_of(*options, "--full", "--pass", "forward", "--dtype", "bfloat16")
    assert [case.shape for case in cases] == [
        AttentionShape(1, 4, 4, length, dim) for length in (8, 16) for dim in (32, 128)
    ]
    assert {(c.dtype, c.is_causal, c.pass_) for c in cases} == {
        ("bfloat16", False, "forward")
    }


def test_kv_heads_stay_where_they_are_fewer():
    cases = cases_of("--set", "gqa", "--num-heads", "16", "--causal")
    assert {case.shape.num_kv_heads for case in cases} == {1, 2, 8}
    assert {case.shape.num_heads for case in cases} == {16}


def test_one_query_needs_no_mask():
    masks = {c.is_causal for c in cases_of("--q-len", "1")}
    assert masks == {False}
    assert {c.is_causal for c in cases_of("--q-len", "1", "--causal")} == {True}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--set", "huge"),
        ("--length", "0"),
        ("--dtype", "float64"),
        ("--implementations", "magic"),
        ("--time-budget", "0"),
        ("--time-budget", "nan"),
        ("--time-budget", "soon"),
        ("--threads", "many"),
    ],
    ids=str,
)
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.main(["bench", *arguments])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: " in said
    assert "invalid _" not in said  # names of functions are nobody's business
    if "--time-budget" in arguments:
        assert "must be a number of seconds above 0, but is " in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--num-heads", "6", "--num-kv-heads", "4"), "must be a multiple of num_kv"),
        (("--threads", "100000"), "--threads 100000: there are "),
        (("--baseline", "/no/such/file"), "No such file"),
        (("--json", "/no/such/folder/a.json"), "--json /no/such/folder/a.json cannot"),
        (("--json", "/"), "--json / cannot be written"),
        (("--plot", "/no/such/folder/a.png"), "--plot /no/such/folder/a.png cannot"),
        (("--plot", "a.xyz"), "--plot a.xyz must end in one of .png, "),
    ],
)
def test_what_cannot_be_done(arguments, sentence, capsys):
    assert command_line.main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_plot_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert command_line.main(["bench", "--plot", "a.png"]) == 2
    assert "pip install 'jax-flash-metal[bench]'" in capsys.readouterr().err


def test_implementations(monkeypatch):
    monkeypatch.setattr(
        bench.importlib.util, "find_spec", lambda name: name == "torch" or None
    )
    assert bench.implementations_of(parse()) == ["cpu", "jax.nn", "xla", "torch"]
    on_metal = bench.implementations_of(parse("--platform", "flash_metal"))
    assert on_metal == ["metal", "jax.nn", "xla", "torch"]
    asked = parse("--implementations", "xla", "cpu", "xla")
    assert bench.implementations_of(asked) == ["xla", "cpu"]


def test_default_platform(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "flash_metal,cpu")
    assert bench.platform_of(parse()) == "flash_metal"
    assert bench.platform_of(parse("--platform", "cpu")) == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert bench.platform_of(parse()) == "cpu"


# -- The report ------------------------------------------------------------------------


def make_report():
    report = bench_report.Report(
        package_version="1.2.3",
        created="2026-01-01T00:00:00+00:00",
        command="a command",
        machine={
            "cpu": "a CPU",
            "threads": 2,
            "peak": {"float32": 1e11, "bfloat16": 2e11},
            "isas": ["plain", "fast"],
            "versions": {"jax": "1"},
        },
    )
    for length in (128, 256):
        case = Case(AttentionShape(1, 8, 8, length, 64), "float32", False, "forward")
        seconds = case.operations / 1e11  # half of the limit of two threads
        ours = Series("cpu", [seconds] * 3, 4, 2_000_000, 1e-6)
        theirs = Series("torch", [2 * seconds] * 3, 4, 3_000_000, 1e-6)
        broken = Series("mlx", failure="there is none")
        again = Series("cpu", [1.5 * seconds] * 3)
        report.results.append((case, Comparison([ours, theirs, broken], again)))
    return report


def row_of(screen, name):
    """The words of the first row of an implementation."""
    rows = (
        line.split() for line in screen.splitlines() if "implementation" not in line
    )
    return next(row for row in rows if name in row)


def test_screen():
    report = make_report()
    report.warnings.append("Something was odd.")
    report.not_timed = [report.results[0][0]] * 3
    screen = bench_report.as_screen(report, 120)
    assert "NOTE: Something was odd." in screen
    assert "a CPU, 2 thread(s), fast, float32 limit 100 GFLOP/s a thread" in screen
    assert "float32, full, forward" in screen
    ours, theirs, broken = (row_of(screen, name) for name in ("cpu", "torch", "mlx"))
    row = "B1 Hq8 Hkv8 L128 D64 cpu 336 µs ± 0% 1.00 ± 0.50 100 50% 2.0"
    assert " ".join(ours) == row
    assert " ".join(theirs) == "torch 671 µs ± 0% 2.00 – 50 25% 3.0"
    assert broken[:2] == ["mlx", "failed"]
    assert "there is none." in screen
    assert "B1 Hq8 Hkv8 L128 D64 float32 full forward and 2 more" in screen


def test_json_and_baseline(tmp_path):
    report = make_report()
    report.results[0][1].series[0].error = float("inf")
    file = tmp_path / "before.json"
    file.write_text(report.as_json())
    content = json.loads(file.read_text())
    assert content["schema"] == bench_report.SCHEMA
    assert len(content["rows"]) == 2 * 4
    row = content["rows"][0]
    assert row["case"]["shape"]["length"] == 128 and row["error"] is None
    assert row["samples"] == [row["seconds"]] * 3 and row["calls"] == 4
    assert row["operations_per_second"] == pytest.approx(1e11)
    assert row["share_of_limit"] == pytest.approx(0.5)
    assert content["rows"][2]["failure"] == "there is none"
    assert [r["is_again"] for r in content["rows"]] == 2 * [False, False, False, True]
    assert content["machine"]["cpu"] == "a CPU"

    later = make_report()
    later.baseline = bench_report.read_baseline(file)
    assert len(later.baseline.seconds) == 4
    assert later.baseline.differences(later.machine) == []
    assert later.baseline.differences(
        later.machine | {"threads": 1, "platform": "flash_metal"}
    ) == [
        "The baseline was measured with threads 2 (now 1), platform None (now "
        "flash_metal)."
    ]
    for _, comparison in later.results:
        comparison.series[0].samples = [s / 2 for s in comparison.series[0].samples]
    screen = bench_report.as_screen(later, 120)
    assert "× before" in screen and row_of(screen, "cpu")[-1] == "0.50"


def test_the_limit_is_of_what_runs_on_the_cpu():
    report = make_report()
    case = report.results[0][0]
    assert report.limit(case, "cpu") == report.limit(case, "torch") == 2e11
    assert report.limit(case, "metal") is None and report.limit(case, "mlx") is None
    assert report.limit(case, "jax.nn") == 2e11
    report.machine["platform"] = "flash_metal"
    assert report.limit(case, "jax.nn") is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"schema": 0}', '{"schema": 1, "rows": [1], "machine": {}}'),
        '{"schema": 1, "checks": []}',  # of doctor
        '{"schema": 1, "rows": [{"seconds": 1, "is_again": false}], "machine": {}}',
    ],
)
def test_a_baseline_that_is_none(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not a file of bench --json"):
        bench_report.read_baseline(file)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123 s"), (1.5, "1.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 µs")],
)
def test_duration(seconds, text):
    assert bench_report.duration(seconds) == text


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    bench_report.save_plot(make_report(), file)
    assert file.read_bytes().startswith(b"\x89PNG")


# -- A real run ------------------------------------------------------------------------


def test_run(tmp_path, capsys):
    """The seam of all parts; the native library says what this machine is."""
    file = tmp_path / "a.json"
    arguments = ("--length", "16", "--num-heads", "2", "--head-dim", "8", "--causal")
    status = command_line.main(
        [
            *("bench", *arguments, "--rounds", "5", "--json", str(file)),
            *("--implementations", "jax.nn", "xla", "--pass", "forward+backward"),
        ]
    )
    said = capsys.readouterr()
    assert status == 0, said.out
    assert "float32, causal, forward+backward" in said.out
    assert "B1 Hq2 Hkv2 L16 D8 float32 causal forward+backward: jax.nn " in said.err
    content = json.loads(file.read_text())
    assert [row["name"] for row in content["rows"]] == ["jax.nn", "xla", "jax.nn"]
    for row in content["rows"]:
        assert len(row["samples"]) == 5 and row["failure"] is None
        assert row["seconds"] > 0 and row["error"] < 1e-3
    assert content["machine"]["versions"]["jax"]
    assert content["machine"]["peak"]["float32"] > 0
    assert content["machine"]["isas"]
    if sys.platform == "linux":
        assert content["rows"][0]["memory_bytes"] is not None


def test_time_budget(capsys):
    """One case is always measured."""
    options = ("--implementations", "xla", "--time-budget", "1e-9", "--rounds", "1")
    arguments = ("--length", "16", "24", "--causal", "--pass", "forward")
    assert command_line.main(["bench", *arguments, *options]) == 0
    said = capsys.readouterr().out
    assert "Not timed within the time budget: B1 Hq8 Hkv8 L24" in said
