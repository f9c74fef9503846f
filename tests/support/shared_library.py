"""Small shared libraries for tests, by the compiler of the build, kept in its cache."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plugin import build


def compile_library(
    source: str, *, suffix: str = ".cc", flags: Sequence[str] = ()
) -> Path:
    """The library made from this text; includes are found from the project's root."""
    return compile_files([build.default_cache().text(source, suffix)], flags=flags)


def compile_files(
    sources: Sequence[Path],
    *,
    flags: Sequence[str] = (),
    headers: Sequence[Path] = (),
    compiler: str | None = None,
) -> Path:
    """The library made from these files of C++, or of C.

    Args:
      sources: the files; includes are found from the project's root.
      flags: for the compiler, which also links.
      headers: more folders of includes, whose warnings are not ours.
      compiler: one of the system; default: zig's.
    """
    is_cpp = any(path.suffix == ".cc" for path in sources)
    included = [
        path
        for source in sources
        for path in build.included_files(source, [build.ROOT, *headers])
    ]
    options = ["-O1", "-fPIC", "-shared", *flags]
    if compiler is None:
        triple = build.TARGETS[build.host_target()].zig_triple
        options = ["-target", triple, *options]
    version = compiler or build.zig_version()
    key = build.digest(version, str(is_cpp), options, build.content_of(included))

    def make(new: Path) -> None:
        folders = [f"-I{build.ROOT}", *(f"-isystem{folder}" for folder in headers)]
        arguments = [*options, *folders, *map(str, sources), "-o", str(new)]
        if compiler is None:
            build.run_zig(["c++" if is_cpp else "cc", *arguments])
        else:
            subprocess.run([compiler, *arguments], check=True)

    # The machine has few cores, and test processes start together.
    with open(Path(tempfile.gettempdir()) / "jfm_test_libraries.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.default_cache().get(key, ".so", make)
