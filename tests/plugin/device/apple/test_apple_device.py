"""The Apple layer over the fake Objective-C runtime: the cases of driver.cc, and that
they notice mistakes in the layer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.plugin.device.apple import program
from tests.plugin.device.apple.program import Change
from tests.sanitize.drivers import DRIVERS

DRIVER = next(driver for driver in DRIVERS if driver.name == "apple")
CASES = re.findall(
    r'^    \{"(\w+)", \1\}', (program.FOLDER / "driver.cc").read_text(), re.M
)

pytestmark = pytest.mark.xdist_group("apple_device")


def run(path: Path, case: str) -> subprocess.CompletedProcess[str]:
    """One case in a process of its own."""
    return subprocess.run(
        [str(path), str(program.no_classes()), case],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    done = run(program.driver(), case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("apple: good\n")


def test_every_case_is_run() -> None:
    names = run(program.driver(), "list").stdout.split()[:-2]
    assert names == CASES
    assert set(DRIVER.runs) <= {(), *((name,) for name in names)}
    assert run(program.driver(), "NoSuchCase").returncode == 1


# What is wrong, in which case it shows, and what is said then.
PLANTED = {
    "misspelled selector": (
        Change("selectors.h", '"setBytes:length:atIndex:"', '"setBytes:length:index:"'),
        "ReportsGpuErrors",
        "unrecognized selector -[",
    ),
    "selector of another class": (
        Change("selectors.h", '"contents"', '"label"'),
        "CopiesResultsBack",
        "",
    ),
    "other language version": (
        Change("constants.h", "0x30001", "0x30000"),
        "ReportsCompilers",
        "Metal API misuse",
    ),
    "fast math": (
        Change(
            "pipeline_cache.cc",
            "FastMathEnabled(options.get(), false)",
            "FastMathEnabled(options.get(), true)",
        ),
        "ReportsCompilers",
        "Metal API misuse",
    ),
    "type of a constant": (
        Change("constants.h", "MTLDataTypeBool, 53", "MTLDataTypeBool, 29"),
        "ReportsCompilers",
        "Metal API misuse",
    ),
    "never released": (
        Change("objc.cc", "send::release(object_)", "(void)0"),
        "HasFacts",
        "HasFacts leaves objects: ",
    ),
    "released too often": (
        Change(
            "command_buffer.cc",
            "Ref::Retain(send::commandBuffer",
            "Ref::Adopt(send::commandBuffer",
        ),
        "DividesLongWork",
        "",
    ),
    "retained once too often": (
        Change(
            "buffers.cc",
            "Ref::Adopt(send::newBufferWithLength",
            "Ref::Retain(send::newBufferWithLength",
        ),
        "Allocates",
        "not so: ",
    ),
    "no pool": (
        Change(
            "objc.h", "Pool() : pool_(runtime.push_pool())", "Pool() : pool_(nullptr)"
        ),
        "HasFacts",
        "pool",
    ),
    "encoder left open": (
        Change(
            "command_buffer.cc",
            "  send::endEncoding(encoder_.get());\n  encoder_ = Ref();\n  Block",
            "  encoder_ = Ref();\n  Block",
        ),
        "DividesLongWork",
        "Metal API misuse",
    ),
    "alias of a part of a page": (
        Change("buffers.cc", "address & ~(page_bytes_ - 1);", "address;"),
        "WrapsHostMemory",
        "Metal API misuse",
    ),
    "alias taken at its word": (
        Change("buffers.cc", "return is_alias ?", "return is_alias || alias ?"),
        "WrapsHostMemory",
        "not so: ",
    ),
    "wrapped device refused": (
        Change(
            "buffers.cc",
            "device != device_ && send::registryID",
            "device != device_ || send::registryID",
        ),
        "WrapsNativeBuffers",
        "",
    ),
    "anything for a number": (
        Change(
            "apple_device.cc",
            "send::integerValue.selector()",
            "send::retain.selector()",
        ),
        "HasFacts",
        "unrecognized selector -[NSData integerValue]",
    ),
    "handler that holds nothing": (
        Change(
            "command_buffer.cc",
            "<Completion>(shared_from_this())",
            "<Completion>(this, [](Completion*) {})",
        ),
        "HandlersOutliveWhoWaits",
        "not so: ",
    ),
    "archive not yet on the disk": (
        Change("pipeline_cache.cc", "&& fsync(file) == 0", "&& file != -1"),
        "KeepsPipelines",
        "not so: ",
    ),
    "result read too early": (
        Change(
            "command_buffer.cc",
            "  completion_->WaitForAll();\n  Status status;",
            "  Status status;",
        ),
        "WaitsForTheGpu",
        "",
    ),
    "buffers freed in use": (
        Change(
            "command_buffer.cc",
            "{\n  completion_->WaitForAll();\n  Pool pool;",
            "{\n  Pool pool;",
        ),
        "WaitsForTheGpu",
        "",
    ),
    "results of failures copied": (
        Change(
            "command_buffer.cc",
            "if (status.ok()) {\n    for (const AppleBuffer*",
            "{\n    for (const AppleBuffer*",
        ),
        "ReportsGpuErrors",
        "not so: ",
    ),
    "constants not in the key": (
        Change(
            "pipeline_cache.cc",
            "{kernel, ConstantsText(constants)}",
            "{kernel, ConstantsText({})}",
        ),
        "ReportsCompilers",
        "",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistake(name: str) -> None:
    change, case, message = PLANTED[name]
    done = run(program.driver(change), case)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
