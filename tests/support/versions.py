"""Skips for what the installed versions do not have: allowed where a device must be."""

from __future__ import annotations

from typing import NoReturn

import pytest

PREFIX = "version: "


def skip(reason: str) -> NoReturn:
    """Skips the test; see REQUIRE_DEVICE in tests/conftest.py."""
    pytest.skip(PREFIX + reason)
