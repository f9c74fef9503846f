"""Tests of platform flash_metal need a host plugin; there is none for every machine."""

import pytest

from jax_flash_metal import hosts


@pytest.fixture(scope="session", autouse=True)
def host_plugin():
    try:
        hosts.find()
    except hosts.HostError as error:
        pytest.skip(f"platform flash_metal cannot run here: {error}")
