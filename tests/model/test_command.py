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
    header, *rows, note = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["chip", "problem"]
    assert [row[:6].strip() for row in rows] == ["M1", "M4 Max"]
    assert all("causal" in row and "ms" in row for row in rows)
    assert note == gpu_report.NOTE and "not a measurement" in note


def test_default_chips(capsys):
    assert run("--model", "--set", "short", "--full", "--pass", "forward") == 0
    out = capsys.readouterr().out
    rows = out.splitlines()[1:-1]
    assert {row.split()[0] for row in rows} == set(gpu_report.DEFAULT_CHIPS)


def test_short_queries_are_not_modelled(capsys):
    assert run("--model", "M4", "--set", "decode", "--pass", "forward") == 0
    assert capsys.readouterr().out.count("not modelled") == 5


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
