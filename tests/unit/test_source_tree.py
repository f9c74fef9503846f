"""The native layers include only downwards, and no file names a developer's machine.

The Python layers are in test_layering.py.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each folder may include, besides its own files and the common headers.
COMMON = {"plugin/status.h", "plugin/c_boundary.h", "plugin/host_cpu.h"}
ALLOWED = {
    "plugin/ffi": (
        *("plugin/backends", "plugin/cpu/workers.h", "plugin/attention"),
        "plugin/device",
    ),
    "plugin/c_api": (
        *("plugin/backends", "plugin/cpu", "plugin/attention"),
        "plugin/device",
    ),
    "plugin/backends": ("plugin/cpu", "plugin/attention", "plugin/device"),
    "plugin/cpu": ("plugin/attention", "plugin/device/device.h"),
    "plugin/pjrt": (
        *("plugin/ffi/xla_ffi.h", "plugin/ffi/native_buffers.h"),
        *("plugin/device/device.h", "plugin/device/default_device.h"),
    ),
    "plugin/attention": ("plugin/device/device.h", "metal_kernels"),
    "plugin/device": (),
    "metal_kernels": (),
}
NATIVE = [
    path.relative_to(ROOT)
    for folder in ("plugin", "metal_kernels")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".h", ".cc", ".metal"}
]
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def _folder(path: Path) -> str | None:
    """The entry of ALLOWED that `path` lies in."""
    return next((f for f in ALLOWED if path.is_relative_to(f)), None)


@pytest.mark.parametrize("path", NATIVE, ids=str)
def test_includes_only_downwards(path):
    folder = _folder(path)
    for name in _INCLUDE.findall((ROOT / path).read_text()):
        if "/" not in name or name in COMMON or folder is None:
            continue
        own_or_allowed = name.startswith((f"{folder}/", *ALLOWED[folder]))
        assert own_or_allowed, f"{path} includes {name}"


@pytest.mark.parametrize("path", NATIVE, ids=str)
def test_no_iostream(path):
    """Its static initialisers would load a second C++ runtime's locale machinery."""
    text = (ROOT / path).read_text()
    assert not re.search(r"#include\s+<(iostream|sstream|fstream|iomanip)>", text)


def test_no_file_names_a_machine():
    # In two parts, so that this file does not find itself.
    needles = ["/wo" + "rk/", "/tm" + "p/w/", "/ro" + "ot/", "/ho" + "me/"]
    suffixes = {".py", ".h", ".cc", ".metal", ".toml", ".md", ".yaml", ".yml", ".map"}
    folders = ["jax_flash_metal", "metal_kernels", "plugin", "tests", "examples",
               "docs", "tools", ".ci"]  # fmt: skip
    files = [p for folder in folders for p in (ROOT / folder).rglob("*")]
    files += list(ROOT.iterdir())
    found = [
        f"{path.relative_to(ROOT)}: {needle}"
        for path in files
        if path.is_file()
        and (path.suffix in suffixes or path.name in {"Makefile", "run"})
        for needle in needles
        if needle in path.read_text()
    ]
    assert not found
