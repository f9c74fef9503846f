"""The examples and the README's Python blocks do what they say, in small sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = sorted([README, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])


def run_example(name: str, *arguments: str, platforms: str = "cpu") -> str:
    """Its standard output; fails with everything it wrote."""
    environment = {**os.environ, "JAX_PLATFORMS": platforms, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_blocks() -> list[tuple[int, str]]:
    """(line, text) of every Python block of the README."""
    text = README.read_text()
    return [
        (text[: match.start(1)].count("\n"), match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    ]


def test_quickstart() -> None:
    assert len((ROOT / "examples/quickstart.py").read_text().splitlines()) <= 15
    output = run_example("quickstart.py")
    assert output.startswith("cpu: ")
    assert "out (2, 200, 8, 64)" in output


@pytest.mark.parametrize("choice", [[], ["--implementation", "metal"]], ids=str)
def test_ring_attention(choice: list[str]) -> None:
    sizes = "--devices 3 --length 120 --batch 1 --head-dim 16"
    output = run_example("ring_attention.py", *sizes.split(), *choice)
    assert "3 devices with 40 of 120 queries and keys each" in output
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert f"{name}: largest difference from one device" in output


def test_decode_with_kv_cache() -> None:
    sizes = "--prompt 40 --tokens 9 --capacity 70"
    output = run_example("decode_with_kv_cache.py", *sizes.split())
    assert "cache: 49 of 70 tokens" in output
    assert "compiled 2 times: [(2, 40, 64), (2, 1, 64)]" in output
    assert "tokens per second" in output


@pytest.mark.parametrize(
    ("platforms", "taken"), [("cpu", "cpu"), ("flash_metal,cpu", "metal")]
)
def test_training_learns_and_agrees_with_the_reference(
    platforms: str, taken: str
) -> None:
    sizes = "--batch 4 --length 40 --width 24 --heads 3 --layers 1 --sample 5"
    steps = "--steps 20 --learning-rate 1e-2 --margin -9"
    output = run_example(
        "train_gpt.py", *sizes.split(), *steps.split(), platforms=platforms
    )
    assert f"attention: {taken}: " in output
    losses = re.findall(rf"^{taken}: step +\d+, ([\d.]+) bits/byte", output, re.M)
    assert float(losses[-1]) < float(losses[0]) - 1
    difference = re.search(r"largest difference from .* ([\d.e-]+) \(allowed", output)
    assert difference is not None
    # Two implementations, not one twice.
    assert 0 < float(difference[1]) <= 1e-3
    assert re.search(rf"^median step: {taken} [\d.]+ ms, xla [\d.]+ ms, ", output, re.M)
    assert "held out: " in output
    assert "    def " in output


def test_training_fails_when_it_does_not_learn() -> None:
    sizes = "--batch 4 --length 40 --width 24 --heads 3 --layers 1 --sample 0"
    with pytest.raises(AssertionError, match="the held-out loss is too high"):
        run_example("train_gpt.py", "--implementation=xla", "--steps=2", *sizes.split())


def test_memory_comparison() -> None:
    output = run_example("compare_memory.py", "--lengths", "3072")
    table = dict(re.findall(r"^ +3072 +(\w+) +\d+ +(\d+) +[\d.]+$", output, re.M))
    cpu, xla = int(table["cpu"]), int(table["xla"])
    # One array of scores is 36 MB; the reference's step holds several, ours none.
    assert xla > 100
    assert cpu < xla / 3
    assert "\ncpu: the native CPU kernels (" in output


@pytest.mark.parametrize(
    ("line", "text"), [pytest.param(*b, id=f"line{b[0] + 1}") for b in python_blocks()]
)
def test_readme_block(line: int, text: str) -> None:
    # Empty lines in front, so that a traceback names the README's own line.
    exec(compile("\n" * line + text, str(README), "exec"), {})


def test_readme_has_blocks() -> None:
    assert len(python_blocks()) >= 3


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_inside_the_project(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), target
