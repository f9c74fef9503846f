"""The texts that a device compiles at run time: whole, and checked like the files.

What Apple's compiler gets is what the strict front end sees here: the text that C++ has
from the generated header, not the files that it was made of.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plugin import build, kernel_sources
from plugin.device.software import frontend
from plugin.device.software.frontend import lint
from plugin.kernel_sources import BuildError

# Prints the tables, parts separated by characters that no source has.
PROGRAM = r"""
#include <cstdio>
struct MslSource { const char* name; const char* text; };
struct MslKernel { const char* host_name; int source; const char* instantiation; };
#include "kernel_sources.inc"
const char kDigest[] =
#include "kernel_digest.inc"
;
int main() {
  for (const MslSource& s : kMslSources) {
    std::printf("source\1%s\1%s\2", s.name, s.text);
  }
  for (const MslKernel& k : kMslKernels) {
    std::printf("kernel\1%s\1%d\1%s\2", k.host_name, k.source, k.instantiation);
  }
  std::printf("digest\1%s\2digest\1%s\2", kMslDigest, kDigest);
}
"""


@functools.cache
def embedded() -> tuple[list[list[str]], list[list[str]], set[str]]:
    """Of a program: name and text; host name, index, instantiation; digests."""
    target = build.TARGETS[build.host_target()].zig_triple
    generated = build.generated_headers(build.default_cache())
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "program.cc"), Path(folder, "program")
        source.write_text(PROGRAM)
        flags = ["-target", target, "-std=c++17", f"-I{generated}"]
        build.run_zig(["c++", *flags, str(source), "-o", str(program)])
        output = subprocess.check_output([program], text=True)
    records = [record.split("\1") for record in output.split("\2")[:-1]]
    return (
        [fields for kind, *fields in records if kind == "source"],
        [fields for kind, *fields in records if kind == "kernel"],
        {fields[0] for kind, *fields in records if kind == "digest"},
    )


def test_every_row_has_its_source_and_its_instantiation() -> None:
    sources, kernels, _ = embedded()
    rows = build.load_variants()
    assert [host_name for host_name, _, _ in kernels] == [r.host_name for r in rows]
    for row, (_, index, instantiation) in zip(rows, kernels, strict=True):
        assert sources[int(index)][0] == row.source
        assert instantiation == row.instantiation()


def test_texts_have_each_header_once_and_include_nothing_of_ours() -> None:
    for name, text in embedded()[0]:
        assert not re.search(r'^[ \t]*#[ \t]*include[ \t]*"', text, re.MULTILINE), name
        assert not re.search(r"^[ \t]*#[ \t]*pragma[ \t]+once", text, re.MULTILINE)
        path = build.KERNEL_DIR / f"{name}.metal"
        for file in build.included_files(path, [build.KERNEL_DIR]):
            assert text.count(f'#line 1 "{file.name}"\n') == 1
            # Every line of every file is there.
            assert set(_content(file.read_text())) <= set(text.splitlines())


def _content(text: str) -> list[str]:
    dropped = ('#include "', "#pragma once")
    return [line for line in text.splitlines() if not line.startswith(dropped)]


@pytest.mark.parametrize("name", sorted({row.source for row in build.load_variants()}))
def test_the_front_end_accepts_the_text(name: str) -> None:
    """With all instantiations, as strictly as the files; no folder to include from."""
    sources, kernels, _ = embedded()
    (index,) = (i for i, (source, _) in enumerate(sources) if source == name)
    mine = [kernel for kernel in kernels if int(kernel[1]) == index]
    text = sources[index][1] + "".join(instance for _, _, instance in mine)
    report = lint.lint_text(text, name, include_dirs=[])
    # In one text with the kernel, the header's constants count as the kernel's own.
    unused = "[-Wunused-const-variable]"
    assert [f for f in report.findings if unused not in f.message] == []
    assert set(report.threadgroup_bytes) == {host_name for host_name, _, _ in mine}


def test_the_front_end_accepts_each_kernel_alone() -> None:
    """A device compiles a source with the instantiation of one kernel."""
    sources, kernels, _ = embedded()
    by_source = {int(index): (name, instance) for name, index, instance in kernels}

    def translate(item: tuple[int, tuple[str, str]]) -> frontend.Translation:
        index, (host_name, instantiation) = item
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{host_name}.metal")
            path.write_text(sources[index][1] + instantiation)
            text = build.run_zig(frontend.preprocess_command(path))
        return frontend.translate(text, host_name)

    assert len(by_source) == len(sources)
    with ThreadPoolExecutor(2) as pool:
        translations = list(pool.map(translate, by_source.items()))
    for translation, (host_name, _) in zip(translations, by_source.values()):
        assert translation.errors == []
        assert [kernel.host_name for kernel in translation.kernels] == [host_name]


def test_the_digest_depends_on_every_source_and_row(tmp_path: Path) -> None:
    _, _, digests = embedded()
    (digest,) = digests
    assert re.fullmatch("[0-9a-f]{64}", digest)
    for name in ("attention_params.h", "attention_delta.metal", "variants.toml"):
        folder = Path(shutil.copytree(build.KERNEL_DIR, tmp_path / name))
        text = (folder / name).read_text()
        if name == "variants.toml":
            (folder / name).write_text(text.replace("block_q = 32", "block_q = 16", 1))
        else:
            (folder / name).write_text(f"{text}// changed\n")
        assert kernel_sources.headers(folder)["kernel_digest.inc"] != f'"{digest}"\n'
    same = shutil.copytree(build.KERNEL_DIR, tmp_path / "same")
    headers = kernel_sources.headers(Path(same))
    assert headers["kernel_digest.inc"] == f'"{digest}"\n'


# -- Flattening ----------------------------------------------------------------------


def test_flatten_numbers_the_lines_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("#pragma once\n#include <metal_stdlib>\nint b;\n")
    main = tmp_path / "main.metal"
    main.write_text('// main\n#include "a.h"\n#include "b.h"\nint c;\n')
    assert kernel_sources.flatten(main).splitlines() == [
        '#line 1 "main.metal"',
        "// main",
        '#line 1 "a.h"',
        "",
        '#line 1 "b.h"',
        "",
        "#include <metal_stdlib>",
        "int b;",
        '#line 3 "a.h"',
        "int a;",
        '#line 3 "main.metal"',
        '#line 4 "main.metal"',
        "int c;",
    ]


def test_an_error_in_a_header_is_reported_there(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build.KERNEL_DIR, tmp_path / "metal_kernels"))
    header = folder / "attention_params.h"
    lines = header.read_text().splitlines()
    header.write_text("\n".join([*lines, "int wrong() { return missing; }", ""]))
    text = kernel_sources.flatten(folder / "attention_delta.metal")
    findings = lint.lint_text(text, "attention_delta", include_dirs=[]).findings
    assert ("attention_params.h", len(lines) + 1) in {
        (f.file, f.line) for f in findings
    }


@pytest.mark.parametrize(
    ("main", "header", "message"),
    [
        ('#include "none.h"\n', "", r"main\.metal:1: .*none\.h is not there"),
        ('\n#include "a.h"\n', "int a;\n", r"a\.h:1: a header without #pragma once"),
        (
            '#ifdef X\n#include "a.h"\n#endif\n',
            "#pragma once\n",
            r"main\.metal:2: .*under a condition",
        ),
    ],
)
def test_what_cannot_be_one_text_is_an_error(
    main: str, header: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.h").write_text(header)
    (tmp_path / "main.metal").write_text(main)
    with pytest.raises(BuildError, match=message):
        kernel_sources.flatten(tmp_path / "main.metal")


def test_a_text_must_not_end_its_literal(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build.KERNEL_DIR, tmp_path / "metal_kernels"))
    path = folder / "attention_delta.metal"
    path.write_text(path.read_text() + '// )msl"\n')
    with pytest.raises(BuildError, match=r"attention_delta\.metal: .*would end"):
        kernel_sources.headers(folder)
