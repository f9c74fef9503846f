"""An oracle that cannot be had is a failure with a reason, never a test less."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from plugin import build
from tests.oracle import downloads
from tests.oracle.downloads import Unavailable, Unreachable, Wheel

pytestmark = pytest.mark.xdist_group("oracle")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its wheels from, instead of any index; an empty cache."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(build, "default_cache", lambda: build.Cache(tmp_path / "cache"))
    return folder


def _put_wheel(folder: Path) -> str:
    path = folder / "sample-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sample/wanted.h", "wanted")
        archive.writestr("sample/other.h", "other")
        metadata = "Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n"
        archive.writestr("sample-1.0.dist-info/METADATA", metadata)
        archive.writestr("sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _pin(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    wheel = Wheel("sample", "1.0", sha256, ("sample/wanted",))
    monkeypatch.setitem(downloads.WHEELS, "sample", wheel)


def test_the_pinned_wheel_is_unpacked(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pin(monkeypatch, _put_wheel(shelf))
    folder = downloads.folder_of("sample")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path.relative_to(folder) for path in files] == [Path("sample/wanted.h")]
    (shelf / "sample-1.0-py3-none-any.whl").unlink()
    assert downloads.folder_of("sample") == folder  # from the cache


def test_a_download_that_fails_says_what_it_is_for(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pin(monkeypatch, "0" * 64)
    message = r"sample 1\.0 is needed to check plugin/device.*PyPI reachable"
    with pytest.raises(Unreachable, match=message):
        downloads.folder_of("sample")


def test_another_file_of_that_name_is_refused(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_wheel(shelf)
    _pin(monkeypatch, "0" * 64)
    message = r"expected sha256 000.*, got [0-9a-f]{64}"
    with pytest.raises(Unavailable, match=message) as error:
        downloads.folder_of("sample")
    # No reason to skip a test.
    assert not isinstance(error.value, Unreachable)
