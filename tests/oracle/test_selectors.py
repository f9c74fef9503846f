"""Every selector of the Apple layer against Apple's own statements of it.

A wrong one would be found on a Mac only, as a crash. Each must be known, with these
very types and for this class, to one oracle at least, and contradicted by none.
"""

from __future__ import annotations

import functools
import re

import pytest

from tests.oracle import oracles, our_table
from tests.oracle.oracles import Oracle

pytestmark = pytest.mark.xdist_group("oracle")

# (class, selector): the oracle that contradicts, and why that is no contradiction.
EXCEPTIONS = {
    ("MTLCommandBuffer", "status"): (
        "metadata of Metal",
        "It has one entry for all of the name: MTLIOCommandBuffer's, an NSInteger. "
        "metal-cpp has MTLCommandBuffer's, and the protocol is an NSUInteger enum.",
    ),
}


@functools.cache
def all_oracles() -> list[Oracle]:
    return oracles.all_oracles()


def complaints(rows: list[our_table.Row]) -> list[str]:
    """A sentence for each row that no oracle knows, or that one contradicts."""
    found = []
    for row in rows:
        method = f"-[{row.owner} {row.selector}] {row.signature}"
        confirmed = False
        excepted, _ = EXCEPTIONS.get((row.owner, row.selector), ("", ""))
        for oracle in all_oracles():
            verdict = oracle.agrees(row.owner, row.selector, row.signature)
            # One that does not tell classes apart confirms nothing of this class.
            confirmed |= verdict is True and oracle.owners
            if verdict is False and oracle.name != excepted:
                known = oracle.signatures(row.owner, row.selector)
                found.append(
                    f"{method}: {oracle.name} has {sorted(map(str, known))} instead"
                )
        if not confirmed:
            found.append(f"{method}: confirmed by no oracle")
        if row.selector.count(":") != len(row.signature.arguments):
            found.append(f"{method}: as many colons as arguments were expected")
        if row.signature.result.startswith("{"):
            found.append(f"{method}: messages that return structs are not used")
    return found


def test_every_selector_is_confirmed() -> None:
    rows = our_table.read().rows
    assert len(rows) > 30
    assert complaints(rows) == []


def test_no_selector_is_twice_in_the_table() -> None:
    rows = our_table.read().rows
    assert len({(row.owner, row.selector) for row in rows}) == len(rows)


def test_exceptions_are_still_needed() -> None:
    rows = {(row.owner, row.selector): row for row in our_table.read().rows}
    by_name = {oracle.name: oracle for oracle in all_oracles()}
    for key, (name, _) in EXCEPTIONS.items():
        assert key in rows, f"{key} is not in the table any more"
        assert by_name[name].agrees(*key, rows[key].signature) is False


def test_classes_are_known() -> None:
    classes = our_table.read().classes
    assert classes
    assert set(classes) - oracles.metal_cpp_classes() == set()


# What is right in the table, what is planted, and the complaint that it must cause.
PLANTED = [
    (
        'newCommandQueue, MTLDevice, "newCommandQueue"',
        'newCommandQueue, MTLDevice, "newCommandQueu"',
        r"newCommandQueu\] .*confirmed by no oracle",
    ),
    (  # an argument left out
        '"setBytes:length:atIndex:", void, const void*, NSUInteger, NSUInteger)',
        '"setBytes:length:atIndex:", void, const void*, NSUInteger)',
        "setBytes:length:atIndex:.*colons",
    ),
    (  # arguments exchanged
        '"setBuffer:offset:atIndex:", void, id, NSUInteger,',
        '"setBuffer:offset:atIndex:", void, NSUInteger, id,',
        r"setBuffer.*protocols of Metal has \['v \(@ Q Q\)'\] instead",
    ),
    ('"commit", void)', '"commit", BOOL)', "commit.*metal-cpp has"),
    (  # another sign
        '"supportsFamily:", BOOL, NSInteger)',
        '"supportsFamily:", BOOL, NSUInteger)',
        "supportsFamily.*metal-cpp has",
    ),
    (  # another result
        '"respondsToSelector:", BOOL, SEL)',
        '"respondsToSelector:", NSInteger, SEL)',
        "respondsToSelector.*NSObject.h has",
    ),
    (  # an object for a pointer to one
        '"newBinaryArchiveWithDescriptor:error:", id, id, id*)',
        '"newBinaryArchiveWithDescriptor:error:", id, id, id)',
        "newBinaryArchive.*metal-cpp has",
    ),
    (  # another class
        "X(contents, MTLBuffer,",
        "X(contents, MTLTexture,",
        "MTLTexture contents.*confirmed by no oracle",
    ),
    (
        '"staticThreadgroupMemoryLength", NSUInteger)',
        '"staticThreadgroupMemoryLength", MTLSize)',
        "staticThreadgroupMemoryLength.*return structs",
    ),
]


def test_planted_mistakes_are_found() -> None:
    text = _squeeze((our_table.HEADERS / "selectors.h").read_text())
    for right, wrong, _ in PLANTED:
        assert text.count(right) == 1, f"the table does not have {right}"
        text = text.replace(right, wrong)
    found = complaints(our_table.read_changed({"selectors.h": text}).rows)
    for _, wrong, complaint in PLANTED:
        assert any(re.search(complaint, line) for line in found), (wrong, found)
    # And no others: each complaint is about something that was planted.
    planted = [wrong.split('"')[-2] for _, wrong, _ in PLANTED if '"' in wrong]
    planted.append("contents")
    assert [line for line in found if not any(name in line for name in planted)] == []


def _squeeze(text: str) -> str:
    """One space between words and one line per macro, however it is laid out."""
    lines = text.replace("\\\n", " ").splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)
