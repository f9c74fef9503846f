"""Objective-C type encodings in one spelling, so that sources can be compared.

A signature is the result's encoding and those of the arguments behind receiver and
selector: ("@", ("Q", "Q")). What is not a difference in a call is left out: qualifiers
(const, oneway, inout), class names behind @, names of structs, sizes of frames.
"""

from __future__ import annotations

import dataclasses
import re

_QUALIFIERS = "rnNoORVA"
_CLOSING = {"{": "}", "(": ")", "[": "]"}


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a method takes and gives."""

    result: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.result} ({' '.join(self.arguments)})"


def split(text: str) -> list[str]:
    """The types of `text`, each normalised; numbers between them are dropped."""
    types = []
    position = 0
    while position < len(text):
        if text[position] in "0123456789-":
            position += 1
            continue
        one, position = _take(text, position)
        types.append(one)
    return types


def method(text: str) -> Signature:
    """As compilers write a method: result, receiver, selector, arguments."""
    result, receiver, selector, *arguments = split(text)
    assert (receiver, selector) == ("@", ":"), f"not a method's encoding: {text}"
    return Signature(result, tuple(arguments))


def _take(text: str, position: int) -> tuple[str, int]:
    """The type at `position`, and where the next one begins."""
    while text[position : position + 1] in (*_QUALIFIERS,):
        position += 1
    if position == len(text):
        raise ValueError(f"no type behind the qualifiers of {text!r}")
    first = text[position]
    if first == "^":
        pointee, end = _take(text, position + 1)
        return "^" + pointee, end
    if first == "@":
        if text[position + 1 : position + 2] == "?":
            return "@?", position + 2
        name = re.compile(r'"[^"]*"').match(text, position + 1)
        return "@", name.end() if name else position + 1
    if first == "{":
        end = _end_of_group(text, position)
        fields = re.sub(r'"[^"]*"', "", text[position + 1 : end - 1])
        _, _, body = fields.partition("=")
        return "{" + "".join(split(body)) + "}", end
    if first in _CLOSING:
        end = _end_of_group(text, position)
        return text[position:end], end
    return first, position + 1


def _end_of_group(text: str, position: int) -> int:
    opening, depth = text[position], 0
    for end in range(position, len(text)):
        depth += (text[end] == opening) - (text[end] == _CLOSING[opening])
        if depth == 0:
            return end + 1
    raise ValueError(f"no end of the group at {position} in {text!r}")
