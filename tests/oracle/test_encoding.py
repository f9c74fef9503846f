"""The comparison's own parts: encodings are read and mistakes in them are seen."""

from __future__ import annotations

import pytest

from tests.oracle import encoding
from tests.oracle.encoding import Signature
from tests.oracle.oracles import NOT_SAID, Oracle


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("v16@0:8", ["v", "@", ":"]),
        ("Vv16@0:8", ["v", "@", ":"]),
        ('@24@0:8@"NSString"16', ["@", "@", ":", "@"]),
        ("B32@0:8@16^@24", ["B", "@", ":", "@", "^@"]),
        ("v24@0:8@?16", ["v", "@", ":", "@?"]),
        ("r*16@0:8", ["*", "@", ":"]),
        ("v32@0:8r^v16Q24", ["v", "@", ":", "^v", "Q"]),
        ("v64@0:8{?=QQQ}16{MTLSize=QQQ}40", ["v", "@", ":", "{QQQ}", "{QQQ}"]),
        ('{S="a"Q"b"{T=[4C]}}', ["{Q{[4C]}}"]),
    ],
)
def test_split(text: str, types: list[str]) -> None:
    assert encoding.split(text) == types


@pytest.mark.parametrize("text", ["r", "{MTLSize=QQQ", "^"])
def test_half_an_encoding_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no (type|end)"):
        encoding.split(text)


def test_an_oracle_may_leave_types_open() -> None:
    said = Signature(NOT_SAID, ("Q", NOT_SAID))
    oracle = Oracle("test", {("A", "b:c:"): {said}}, owners=False)
    assert oracle.agrees("A", "b:c:", Signature("v", ("Q", "@"))) is True
    assert oracle.agrees("B", "b:c:", Signature("v", ("Q", "@"))) is True
    assert oracle.agrees("A", "b:c:", Signature("v", ("q", "@"))) is False
    assert oracle.agrees("A", "b:c:", Signature("v", ("Q",))) is False
    assert oracle.agrees("A", "b:", Signature("v", ("Q",))) is None
