"""The build driver: its table, its cache, its messages. Compiles next to nothing."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from plugin import build, kernel_sources

pytestmark = pytest.mark.xdist_group("packaging")

ROW = """
[[variant]]
kernel = "attention_forward"
dtypes = ["float32", "bfloat16"]
head_dim = 64
block_q = 32
block_kv = 16
num_simdgroups = 4
"""


def write_table(folder: Path, text: str) -> Path:
    (folder / "variants.toml").write_text(text)
    return folder


def test_a_row_becomes_table_lines_and_instantiations(tmp_path: Path) -> None:
    rows = build.load_variants(write_table(tmp_path, ROW))
    assert rows[0].table_line() == (
        '{"attention_forward", Dtype::kFloat32, 64, 32, 16, 64, 4, '
        "Loads::kThreadgroup, 1, 0, true, "
        '"attention_forward_float32_d64_q32_k16_b64_s4"},\n'
    )
    (unit,) = build.kernel_units(rows)
    assert unit.text().splitlines() == [
        '#include "attention_forward.metal"',
        'template [[host_name("attention_forward_float32_d64_q32_k16_b64_s4")]] '
        "[[kernel]] decltype(attention_forward<float, 64, 32, 16, 64, 4, 0, 1>) "
        "attention_forward<float, 64, 32, 16, 64, 4, 0, 1>;",
        'template [[host_name("attention_forward_bfloat16_d64_q32_k16_b64_s4")]] '
        "[[kernel]] decltype(attention_forward<bfloat, 64, 32, 16, 64, 4, 0, 1>) "
        "attention_forward<bfloat, 64, 32, 16, 64, 4, 0, 1>;",
    ]


def test_the_optional_columns_of_a_row(tmp_path: Path) -> None:
    row = ROW + 'block_d = 32\nloads = "device"\nroles = 2\nmin_family = 9\n'
    rows = build.load_variants(write_table(tmp_path, row + "is_default = false\n"))
    name = "attention_forward_float32_d64_q32_k16_b32_s4_device_paired"
    assert rows[0].table_line() == (
        '{"attention_forward", Dtype::kFloat32, 64, 32, 16, 32, 4, '
        f'Loads::kDevice, 2, 9, false, "{name}"}},\n'
    )
    instance = "attention_forward<float, 64, 32, 16, 32, 4, 1, 2>"
    assert rows[0].instantiation() == (
        f'template [[host_name("{name}")]] [[kernel]] decltype({instance}) '
        f"{instance};\n"
    )


FORM = """
[[backward_form]]
form = "B"
dtypes = ["float16"]
head_dim = 128
min_family = 9
min_scores = 4096
"""


def test_a_backward_form_becomes_a_table_line(tmp_path: Path) -> None:
    (tmp_path / "attention_forward.metal").write_text("")
    headers = kernel_sources.headers(write_table(tmp_path, ROW + FORM))
    assert headers["backward_forms.inc"] == "{Dtype::kFloat16, 128, 9, 4096, 'B'},\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"variants.toml: expected at least one \[\[variant\]\] row, got none"),
        ("[[variant\n", r"variants.toml: .*line 1"),
        (ROW + "colour = 1\n", r"variants.toml:2: .*unknown fields \['colour'\]"),
        (ROW.replace("block_q = 32\n", ""), r"toml:2: missing fields \['block_q'\]"),
        (ROW.replace("64", "-1"), r"toml:2: head_dim must be a positive .* got -1"),
        (ROW.replace("bfloat16", "float64"), r"toml:2: dtypes .* got 'float64'"),
        (ROW + "roles = 3\n", r"toml:2: roles must be among \[1, 2\], got 3"),
        (ROW + 'loads = "disk"\n', r"toml:2: loads must be among .* got 'disk'"),
        (ROW + "min_family = -1\n", r"toml:2: min_family must be .* got -1"),
        (ROW + ROW, r"toml:10: attention_forward_float32.* already .* at line 2"),
    ],
)
def test_a_wrong_table_names_file_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(build.BuildError, match=message):
        build.load_variants(write_table(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FORM.replace('"B"', '"C"'), r"toml:10: form must be A or B, got 'C'"),
        (FORM.replace("float16", "int8"), r"toml:10: dtypes .* got 'int8'"),
        (FORM.replace("head_dim = 128\n", ""), r"toml:10: missing fields \['head_dim'"),
    ],
)
def test_a_wrong_form_names_file_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(build.BuildError, match=message):
        kernel_sources.load_backward_forms(write_table(tmp_path, ROW + text))


def test_the_units_hold_every_row_of_the_real_table_once() -> None:
    rows = build.load_variants()
    units = build.kernel_units(rows)
    assert sorted(row.host_name for unit in units for row in unit.variants) == sorted(
        row.host_name for row in rows
    )


def test_a_rebuild_without_a_change_runs_no_compiler(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: list[str], **_: object) -> str:
        raise AssertionError(f"zig was run: {arguments}")

    monkeypatch.setattr(build, "run_zig", refuse)
    before = library.stat().st_mtime_ns
    start = time.perf_counter()
    build.build()
    assert time.perf_counter() - start < 1
    assert library.stat().st_mtime_ns == before


def test_only_builds_the_chosen_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_unit = build.compile_unit
    compiled: list[build.Variant] = []

    def record(request: build.Request, unit: build.KernelUnit) -> object:
        compiled.extend(unit.variants)
        return compile_unit(request, unit)

    monkeypatch.setattr(build, "compile_unit", record)
    build.build(only=["attention_forward"], head_dims=[64], output=tmp_path / "one.so")
    assert {(row.kernel, row.head_dim) for row in compiled} == {
        ("attention_forward", 64)
    }


def test_only_rejects_an_unknown_kernel(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=r"no kernel of the table: \['fast'\]"):
        build.build(only=["fast"], output=tmp_path / "none.so")


def test_a_wrong_kernel_is_reported_with_file_and_line(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build.KERNEL_DIR, tmp_path / "metal_kernels"))
    source = folder / "attention_delta.metal"
    lines = source.read_text().splitlines()
    source.write_text("\n".join([*lines, "float wrong() { return missing_name; }", ""]))
    where = rf"attention_delta\.metal:{len(lines) + 1}\b.*missing_name"
    with pytest.raises(build.BuildError, match=where):
        build.build(
            kernel_dir=folder, only=["attention_delta"], output=tmp_path / "wrong.so"
        )


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [
        ("linux", "x86_64", "linux-x86_64"),
        ("linux", "aarch64", "linux-aarch64"),
        ("darwin", "arm64", "macos-arm64"),
    ],
)
def test_machines_have_a_target(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, name: str
) -> None:
    monkeypatch.setattr(build.sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert build.host_target() == name
    assert name in build.TARGETS


@pytest.mark.parametrize("machine", ["x86_64", "ppc"])
def test_other_macs_have_none(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(build.sys, "platform", "darwin")
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert build.host_target() not in build.TARGETS


def test_a_library_has_the_sources_of_its_device_alone() -> None:
    def folders(target: str) -> set[str]:
        sources = build.cpp_sources(build.TARGETS[target])
        return {path.parent.name for path in sources}

    assert {"software", "pjrt"} <= folders("linux-x86_64")
    assert {"apple", "pjrt"} <= folders("macos-arm64")
    assert "apple" not in folders("linux-x86_64")
    assert "software" not in folders("macos-arm64")
    # Every file is for some target.
    everywhere = {p for t in build.TARGETS.values() for p in build.cpp_sources(t)}
    assert everywhere == set((build.ROOT / "plugin").glob("**/*.cc"))


def test_tests_may_ask_for_the_other_device(tmp_path: Path) -> None:
    path = build.build(device="apple", output=tmp_path / "apple.so")
    content = path.read_bytes()
    assert b"JFM_FAKE_METAL_LIBRARY" in content
    assert build.load_variants()[0].instantiation().encode() in content
    assert b"_avx2" not in content


def test_another_device_needs_a_place(tmp_path: Path) -> None:
    """Or it would take the place of the library that the package loads."""
    with pytest.raises(build.BuildError, match=r"output be given.*device='apple'"):
        build.build(device="apple")
    with pytest.raises(build.BuildError, match=r"one of \('software', 'apple'\)"):
        build.build(device="cuda", output=tmp_path / "cuda.so")
    with pytest.raises(build.BuildError, match="software device alone"):
        build.build(device="apple", flavour="checker", output=tmp_path / "checker.so")


def test_headers_are_found_however_indirect(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#include "folder/b.h"\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.h").write_text('#  include "c.h"\n#include <vector>\n')
    (tmp_path / "folder" / "c.h").write_text('#include "a.h"\n')
    found = build.included_files(tmp_path / "a.h", [tmp_path])
    assert sorted(path.name for path in found) == ["a.h", "b.h", "c.h"]


def test_the_cache_makes_a_file_once_and_never_half(tmp_path: Path) -> None:
    cache = build.Cache(tmp_path / "cache")
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("content")
        if len(made) == 1:
            raise build.BuildError("stopped in the middle")

    key = build.digest("key")
    with pytest.raises(build.BuildError):
        cache.get(key, ".o", make)
    assert cache.get(key, ".o", make).read_text() == "content"
    assert cache.get(key, ".o", make).read_text() == "content"
    assert len(made) == 2


def test_digest_depends_on_where_a_part_ends() -> None:
    assert build.digest("ab", "c") != build.digest("a", "bc")
    assert build.digest(["a", "b"]) != build.digest("a", "b")
