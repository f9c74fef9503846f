"""What the Apple layer takes for granted of the Objective-C runtime and of blocks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from plugin import build
from tests.oracle import oracles, our_table

pytestmark = pytest.mark.xdist_group("oracle")

# Functions without an oracle, and why they are used all the same.
UNCONFIRMED = {
    "IOServiceGetMatchingService": (
        "No program at hand imports it (psutil has the plural); Apple documents it for "
        "macOS 10.0 and newer. Only the number of GPU cores, in a text, depends on it."
    ),
}


def test_functions_are_in_the_libraries_that_are_loaded() -> None:
    """Other programs for macOS bind the same names to the same libraries."""
    text = (our_table.HEADERS / "objc.cc").read_text()
    names = re.findall(r'\b[Ff]ind\w*\("(\w+)"', text)
    assert len(names) >= 7
    loaded = set(re.findall(r'"(/(?:usr/lib|System)/[^"]+)"', text))
    # libobjc needs libSystem, and dlsym looks into what a library needs as well.
    loaded.add("/usr/lib/libSystem.B.dylib")
    imported = oracles.imported_functions()
    declared = oracles.declared_functions()
    for name in set(names) - set(UNCONFIRMED):
        libraries = {_without_version(path) for path in imported.get(name, ())}
        if not libraries and name in declared:
            libraries = {"/usr/lib/libobjc.A.dylib"}
        assert libraries, f"no program imports {name}, and no header of libobjc has it"
        assert libraries <= loaded, f"{name} is in {libraries}; loaded are {loaded}"


def test_unconfirmed_functions_are_used_and_still_unconfirmed() -> None:
    text = (our_table.HEADERS / "objc.cc").read_text()
    for name in UNCONFIRMED:
        assert f'"{name}"' in text
        assert name not in oracles.imported_functions()


def test_an_unknown_function_would_be_noticed() -> None:
    known = {*oracles.imported_functions(), *oracles.declared_functions()}
    assert "objc_msgSend" in known
    assert "objc_getClasses" not in known
    assert "MTLCreateDefaultSystemDevice" not in known


def _without_version(path: str) -> str:
    """Frameworks are found by the link to their current version as well."""
    return re.sub(r"/Versions/\w+/", "/", path)


BLOCKS = r"""
#include <cstdio>

#include "plugin/device/apple/objc.h"

using jfm::apple::Block;

extern "C" void* _NSConcreteStackBlock[32] = {};  // only its address counts

int main() {
  int value = 0;
  int* captured = &value;
  void (^literal)(int) = ^(int argument) { *captured = argument; };
  // An escape that the compiler cannot see through, or it would not build the literal.
  Block* volatile hidden = reinterpret_cast<Block*>(literal);
  Block* block = hidden;
  if (block->isa != _NSConcreteStackBlock) return std::puts("isa"), 1;
  if (block->captured != captured) return std::puts("captured"), 1;
  if (block->descriptor->size != sizeof(Block)) return std::puts("size"), 1;
  // 1 << 25: the block has helper functions for its copy, which ours have not.
  if (block->flags & (1 << 25)) return std::puts("flags"), 1;
  reinterpret_cast<void (*)(Block*, int)>(block->invoke)(block, 7);
  if (value != 7) return std::puts("invoke"), 1;
  // And a block made by hand is one for the compiler.
  static int received = 0;
  Block made = *block;
  made.flags = 0;
  made.captured = &received;
  made.invoke = reinterpret_cast<void (*)()>(+[](Block* self, int argument) {
    *static_cast<int*>(self->captured) = argument;
  });
  ((void (^)(int))(void*)&made)(9);
  if (received != 9) return std::puts("made"), 1;
  return std::puts("good"), 0;
}
"""


def test_blocks_are_what_clang_makes_of_them(tmp_path: Path) -> None:
    source = tmp_path / "blocks.cc"
    source.write_text(BLOCKS)
    program = tmp_path / "blocks"
    target = build.TARGETS[build.host_target()].zig_triple
    build.run_zig(
        [
            *("c++", "-target", target, "-std=c++17", "-fblocks", f"-I{build.ROOT}"),
            *(str(source), "-o", str(program)),
        ]
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout == "good\n", done
