"""Finding and loading the library: the sentences when it is missing or does not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jax_flash_metal import __version__, platforms
from jax_flash_metal.platforms import LibraryError


def message_of(path: Path) -> str:
    with pytest.raises(LibraryError) as caught:
        platforms.load_library(path)
    return str(caught.value)


def test_missing_library(tmp_path: Path) -> None:
    path = tmp_path / "libjax_flash_metal.so"
    assert message_of(path) == (
        f"the native library {path} is missing: this installation has no kernels. In "
        "a source tree run `make build`, otherwise reinstall jax-flash-metal; "
        "implementation='xla' needs no library."
    )


def test_broken_library(tmp_path: Path) -> None:
    path = tmp_path / "libjax_flash_metal.so"
    path.write_bytes(b"not a library")
    message = message_of(path)
    assert message.startswith("cannot load the native library: ")
    assert str(path) in message


def test_library_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "__version__", "9.9.9")
    assert message_of(platforms.LIBRARY) == (
        f"the native library {platforms.LIBRARY} is version {__version__} with ABI "
        f"{platforms.ABI_VERSION}, but this package is version 9.9.9 with ABI "
        f"{platforms.ABI_VERSION}: rebuild it (`make build`) or reinstall "
        "jax-flash-metal."
    )


def test_registration_from_many_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(platforms.ensure_registered) for _ in range(32)]:
            future.result()
