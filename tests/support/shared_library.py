"""Small shared libraries for tests, by the compiler of the build, kept in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plugin import build


def compile_library(
    source: str, *, suffix: str = ".cc", flags: Sequence[str] = ()
) -> Path:
    """The library made from this text; includes are found from the project's root."""
    cache = build.default_cache()
    file = cache.text(source, suffix)
    target = build.TARGETS[build.host_target()].zig_triple
    options = ("-target", target, "-O1", "-fPIC", "-shared", f"-I{build.ROOT}", *flags)
    driver = "c++" if suffix == ".cc" else "cc"
    included = build.included_files(file, [build.ROOT])
    key = build.digest(build.zig_version(), driver, options, build.content_of(included))

    def make(new: Path) -> None:
        build.run_zig([driver, *options, str(file), "-o", str(new)])

    return cache.get(key, ".so", make)
