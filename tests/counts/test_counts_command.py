"""`python -m jax_flash_metal counts`: what it prints, and where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jax_flash_metal import __main__, counts
from tests.checker.checked import library_of

pytestmark = pytest.mark.xdist_group("kernel_counts")

SMALL = ("counts", "--shape", "1", "2", "40", "16")


@pytest.fixture(autouse=True)
def resources(monkeypatch, tmp_path) -> Path:
    """Where the estimates of registers and code would be."""
    path = tmp_path / "kernel_resources.json"
    monkeypatch.setattr(counts, "RESOURCES", path)
    return path


@pytest.fixture
def library(monkeypatch):
    library = counts.CountingLibrary(library_of().library)
    monkeypatch.setattr(counts, "load_library", lambda: library)


def test_the_library_is_that_of_the_checker():
    """Built (or found) by the command itself."""
    library = counts.load_library()
    library.clear()
    assert library.launches() == []


def test_json_has_everything(library, capsys):
    arguments = ("--num-kv-heads", "1", "--q-len", "24", "--causal", "--json")
    assert __main__.main([*SMALL, *arguments, "--form", "A"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["problem"]["is_causal"]
    assert result["problem"]["shape"] == {
        "batch_size": 1, "num_heads": 2, "num_kv_heads": 1, "length": 40,
        "head_dim": 16, "q_len": 24,
    }  # fmt: skip
    kernels = result["kernels"]
    names = (kernel["kernel"].partition("_float32")[0] for kernel in kernels)
    assert list(zip(names, (kernel["pass_"] for kernel in kernels))) == [
        ("attention_forward", "forward"),
        ("attention_delta", "backward"),
        ("attention_backward_dq", "backward"),
        ("attention_backward_dkv", "backward"),
    ]
    forward = kernels[0]
    # Row i of 24 sees the keys up to i + 16.
    assert forward["visible_pairs"] == 2 * sum(range(17, 41))
    assert forward["counts"]["products"] == forward["least_products"] > 0
    assert forward["device_ratio"] == pytest.approx(
        forward["device_bytes"] / sum(forward["least_device_bytes"])
    )
    assert forward["counts"]["buffers"]["4"] == [0, 2 * 24 * 16 * 4]  # out


def rows_of_table(capsys) -> list[list[str]]:
    """The cells of each row of the backward pass but that of delta."""
    assert __main__.main([*SMALL, "--family", "9", "--form", "B"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines if line.startswith(" backward_")]


def test_table_has_a_row_for_each_kernel(library, resources, capsys):
    dkv, product = rows_of_table(capsys)
    assert dkv[0].startswith("backward_dkv_d64_")
    assert product[0].startswith("backward_dq_product_d")
    assert len(dkv) == len(product) == 13
    assert product[1] == product[2]  # products, and the least of them
    assert product[-2:] == ["–", "–"]  # registers, code
    name = product[0].replace("_product_", "_product_float32_")
    estimates = {f"attention_{name}": {"registers": 77, "code_bytes": 5120}}
    resources.write_text(json.dumps({"digest": "", "kernels": estimates}))
    _, again = rows_of_table(capsys)
    assert again == [*product[:-2], "77", "5"]


def test_several_shapes_and_dtypes(library, capsys):
    shapes = ("--shape", "2", "1", "12", "8", "--dtype", "float16", "bfloat16")
    assert __main__.main([*SMALL, *shapes]) == 0
    out = capsys.readouterr().out
    for title in (
        "B1 Hq2 Hkv2 L40 D16 float16 full",
        "B1 Hq2 Hkv2 L40 D16 bfloat16 full",
        "B2 Hq1 Hkv1 L12 D8 float16 full",
        "B2 Hq1 Hkv1 L12 D8 bfloat16 full",
    ):
        assert title in out


def test_short_queries_are_counted_without_a_tiling(library, capsys):
    assert __main__.main([*SMALL, "--q-len", "3", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    short = result["kernels"][0]
    assert short["kernel"].startswith("attention_short_forward_float32")
    assert short["counts"]["products"] > 0
    assert short["device_ratio"] is None
    assert short["least_products"] is None


def test_settings_do_not_outlive_a_count(library):
    attention = counts.load_library().attention
    problem = counts.Problem(counts.AttentionShape(1, 1, 1, 16, 8), "float32")
    before = counts.count(counts.load_library(), problem)
    for family, form in ((9, "A"), (0, "B")):
        counts.count(counts.load_library(), problem, family=family, form=form)
    after = counts.count(counts.load_library(), problem)
    assert [k.kernel for k in after] == [k.kernel for k in before]
    assert attention.device_facts()["name"] == "software Metal device"


def test_an_installed_copy_says_what_it_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(counts, "__file__", str(tmp_path / "jax_flash_metal/counts.py"))
    assert __main__.main([*SMALL]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "counts needs the checker build of the software device, which is made in a "
        "source tree of jax-flash-metal, and this is an installed copy.\n"
    )


def test_without_a_compiler_it_says_what_to_install(monkeypatch, capsys):
    from plugin import build

    def missing():
        raise build.importlib.metadata.PackageNotFoundError("ziglang")

    monkeypatch.setattr(build, "zig_version", missing)
    assert __main__.main([*SMALL]) == 1
    assert capsys.readouterr().err == (
        "counts builds the software device and needs ziglang: pip install ziglang\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1", "0", "8", "8"), "number of at least 1, but is 0"),
        (("--shape", "1", "2", "x", "64"), "--shape: must be a whole number of at lea"),
        (("--q-len", "1" * 5000), "but is " + "1" * 40 + "…"),
        (("--family", "5"), "invalid choice"),
        (("--form", "C"), "invalid choice"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        __main__.main([*SMALL, *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-kv-heads", "3"), "must divide the number of heads, but is 3 of 2."),
        (("--shape", "1", "2", "64", "300"), "of up to 256 in float32, but it is 300."),
        (
            ("--q-len", "3", "--form", "B"),
            "--form B is for more than 8 queries, fewer have kernels of their own, but "
            "--q-len is 3.",
        ),
        (
            ("--shape", "1", "2", "8", "64", "--form", "A"),
            "but this is B1 Hq2 Hkv2 L8 D64.",
        ),
        (("--shape", "1", "2", "1000000", "64"), "at most, but is 1.3e+14."),
        (("--shape", str(10**9), "1", "1", "1"), "may be 4.0e+09 at most, but is 2.6"),
        (("--shape", "1", "1", "9" * 4000, "1"), "at most, but is above 1e+300."),
    ],
)
def test_what_cannot_be_counted(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(counts, "load_library", lambda: pytest.fail("too late"))
    assert __main__.main([*SMALL, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("counts: ") and message in said
    assert said.count("\n") == 1


def test_the_estimates_of_the_package_are_read():
    path = Path(counts.__file__).parent / "kernel_resources.json"
    kernels = counts.kernel_resources(path)
    assert {"registers", "code_bytes"} <= kernels[max(kernels)].keys()
