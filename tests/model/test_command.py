"""`bench --model`, and docs/model.md, which is what the model says."""

import argparse

import pytest

from jax_flash_metal import bench, gpu_report
from tests.support import model_tables


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_command(parser.add_subparsers())
    options = parser.parse_args(["bench", *arguments])
    return options.run(options)


def test_prints_a_line_for_each_case_and_chip(capsys):
    arguments = (
        "--length",
        "512",
        "--causal",
        "--pass",
        "forward",
        "--dtype",
        "float16",
    )
    assert run("--model", "M1", "M4 Max", *arguments) == 0
    note, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["chip", "problem"]
    assert [row[:6].strip() for row in rows] == ["M1", "M4 Max"]
    assert all("causal" in row and "ms" in row for row in rows)
    assert note == gpu_report.NOTE and "not a measurement" in note


def test_default_chips(capsys):
    assert run("--model", "--set", "short", "--full", "--pass", "forward") == 0
    out = capsys.readouterr().out
    rows = out.splitlines()[2:]
    assert {row.split()[0] for row in rows} == set(gpu_report.DEFAULT_CHIPS)


def test_short_queries_are_not_modelled(capsys):
    assert run("--model", "M4", "--set", "decode", "--pass", "forward") == 0
    out = capsys.readouterr().out
    assert out.count("not modelled") == out.count(gpu_report.WHY_NOT_MODELLED) == 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--head-dim", "300"), "take a head_dim of up to 256 in float32, but it is 3"),
        (("--length", "100000000"), "may be 4.0e+12 at most, but is 5.1e+18."),
        (("--length", "1" + "0" * 400), "is above 1e+300."),
        (("--num-heads", "1000000000"), "is too large: the model goes through every"),
        (("--json", "a.json"), "--json is not for --model, which measures nothing"),
        (("--plot", "a.png"), "--plot is not for --model"),
        (("--tune",), "--tune is not for --model"),
        (("--baseline", "a.json"), "--baseline is not for --model"),
        (("--threads", "1"), "--threads is not for --model"),
        (("--rounds", "21"), "--rounds is not for --model"),
        (("--time-budget", "9"), "--time-budget is not for --model"),
        (("--platform", "cpu"), "--platform is not for --model"),
        (("--implementations", "cpu"), "--implementations is not for --model"),
    ],
)
def test_what_the_model_does_not_take(arguments, sentence, capsys):
    assert run("--model", "M4", *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("bench: ") and sentence in said.err
    assert said.err.count("\n") == 1


def test_unknown_chips_are_refused(capsys):
    with pytest.raises(SystemExit):
        run("--model", "M0")
    assert "M0" in capsys.readouterr().err


def test_the_documentation_is_up_to_date():
    current = model_tables.FILE.read_text()
    assert current == model_tables.text(current), (
        "run `python -m tests.support.model_tables`"
    )


def test_the_documentation_has_every_table_and_names_every_source():
    text = model_tables.FILE.read_text()
    for name in model_tables.TABLES:
        assert f"<!-- table: {name} -->" in text
    for source in model_tables.SOURCES:
        assert source in text
