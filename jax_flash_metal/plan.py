"""How a partitioned program is run: the plan, and its bytes for the C++ executor.

`partition.py` makes plans; this file only describes them. It knows no MLIR and no JAX.

The wire format: every integer is an int64, little endian. `bytes` is a length and the
data, without padding; a list is a count and the items; records are their fields in the
order in which the classes below list them. The reader in C++ is plugin/pjrt/plan.cc,
one in Python for the tests is tests/support/plan_reader.py.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

WIRE_VERSION = 1
# An operand or result of a call that is a token: it orders, no buffer exists for it.
NO_VALUE = -1

# Of absl::StatusCode, as the PJRT C API has them.
INVALID_ARGUMENT = 3
UNIMPLEMENTED = 12

_T = TypeVar("_T")


class PartitionError(Exception):
    """A program that cannot be run in parts; `code` is a PJRT error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class StepKind(enum.IntEnum):
    SEGMENT = 0
    CALL = 1
    WHILE = 2
    CASE = 3
    IF = 4


class AttributeKind(enum.IntEnum):
    """The numbers of XLA_FFI_AttrType."""

    ARRAY = 1
    DICTIONARY = 2
    SCALAR = 3
    STRING = 4


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Element type (xla::PrimitiveType) and the dimensions that the handler sees."""

    dtype: int
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: int
    count: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Scalar:
    dtype: int
    data: bytes


# A nested tuple is a dictionary. Sorted by name: handlers look names up by bisection.
Attributes = tuple[tuple[str, "Array | Scalar | str | Attributes"], ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call. A buffer's bytes are in the layout that the call asked for."""

    target: str
    attributes: Attributes
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    aliases: tuple[tuple[int, int], ...]  # (operand, result)
    has_side_effect: bool


@dataclasses.dataclass
class Step:
    """One thing that the host does. Value ids are those of the step's block.

    Attributes:
      index: Of the segment or the call; -1 for while, case and if.
      donated: Segments only: positions in `inputs` whose memory the segment reuses.
      dead: Values that nothing needs after this step.
      blocks: while: condition, body. case: the branches. if: true, false.
      num_captures: while: the first inputs, given to both blocks before the carry.
        case and if: the inputs after the index, given to every block.
    """

    kind: StepKind
    index: int
    inputs: list[int]
    outputs: list[int]
    donated: list[int] = dataclasses.field(default_factory=list)
    dead: list[int] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_captures: int = 0


@dataclasses.dataclass
class Block:
    """Steps over values 0 … num_values - 1.

    `donated`: main's inputs that are given away; empty for other blocks.
    """

    num_values: int
    inputs: list[int]
    outputs: list[int]
    donated: list[int]
    steps: list[Step]


@dataclasses.dataclass
class Plan:
    """A program cut at its custom calls.

    Attributes:
      program: The whole original program, for people and for serialisation.
      shadow: A program with the same signature and attributes and zeros as results.
      options: CompileOptionsProto for the segments.
      segments: Programs without our calls, each different.
      blocks: The first is main.
      constants_segment: The segment without inputs that is run once, when the program
        is loaded; -1: none.
      constants: The values of main that it defines; no step lists them as dead.
    """

    fingerprint: str
    program: bytes
    shadow: bytes
    options: bytes
    segments: list[bytes]
    calls: list[Call]
    blocks: list[Block]
    constants_segment: int
    constants: list[int]
    peak_intermediate_bytes: int

    def __str__(self) -> str:
        return describe(self)


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """The host can compile the program as it came."""


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The host can compile this program instead; nothing is cut."""

    program: bytes


@dataclasses.dataclass(frozen=True)
class HostProfile:
    """What the host's compiler accepts.

    Attributes:
      stablehlo_version: The newest it reads ("1.13.7"); None: whatever came in.
      legalize_composites: It does not know stablehlo.composite.
      erase_sharding: It does not know the sdy dialect and Sharding calls.
      custom_calls: The targets that it knows; None: that is not known, and its own
        error has to say which one it lacks.
    """

    stablehlo_version: str | None = None
    legalize_composites: bool = False
    erase_sharding: bool = False
    custom_calls: frozenset[str] | None = None


# The bytes.


def encode(plan: Plan) -> bytes:
    """The plan in the wire format."""
    return b"".join(
        (
            _int(WIRE_VERSION),
            _bytes(plan.fingerprint.encode()),
            _bytes(plan.program),
            _bytes(plan.shadow),
            _bytes(plan.options),
            _list(_bytes, plan.segments),
            _list(_call, plan.calls),
            _list(_block, plan.blocks),
            _int(plan.constants_segment),
            _ints(plan.constants),
            _int(plan.peak_intermediate_bytes),
        )
    )


def _int(value: int) -> bytes:
    return struct.pack("<q", value)


def _bytes(data: bytes) -> bytes:
    return _int(len(data)) + data


def _ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<q{len(values)}q", len(values), *values)


def _list(encode_item: Callable[[_T], bytes], items: Sequence[_T]) -> bytes:
    return _int(len(items)) + b"".join(map(encode_item, items))


def _tensor(tensor: Tensor) -> bytes:
    return _int(tensor.dtype) + _ints(tensor.dims)


def _attribute(entry: tuple[str, Array | Scalar | str | Attributes]) -> bytes:
    name, value = entry
    if isinstance(value, Array):
        kind = AttributeKind.ARRAY
        payload = _int(value.dtype) + _int(value.count) + _bytes(value.data)
    elif isinstance(value, Scalar):
        kind, payload = AttributeKind.SCALAR, _int(value.dtype) + _bytes(value.data)
    elif isinstance(value, str):
        # A string attribute may hold any bytes, see call_records.py.
        kind = AttributeKind.STRING
        payload = _bytes(value.encode("utf-8", "surrogateescape"))
    else:
        kind, payload = AttributeKind.DICTIONARY, _list(_attribute, value)
    return _bytes(name.encode()) + _int(kind) + payload


def _call(call: Call) -> bytes:
    return b"".join(
        (
            _bytes(call.target.encode()),
            _list(_attribute, call.attributes),
            _list(_tensor, call.operands),
            _list(_tensor, call.results),
            _list(lambda pair: _int(pair[0]) + _int(pair[1]), call.aliases),
            _int(call.has_side_effect),
        )
    )


def _step(step: Step) -> bytes:
    return b"".join(
        (
            _int(step.kind),
            _int(step.index),
            _ints(step.inputs),
            _ints(step.outputs),
            _ints(step.donated),
            _ints(step.dead),
            _ints(step.blocks),
            _int(step.num_captures),
        )
    )


def _block(block: Block) -> bytes:
    return b"".join(
        (
            _int(block.num_values),
            _ints(block.inputs),
            _ints(block.outputs),
            _ints(block.donated),
            _list(_step, block.steps),
        )
    )


# The listing.


def describe(plan: Plan) -> str:
    """The steps, one a line, nested blocks indented."""
    lines: list[str] = []
    if plan.constants_segment >= 0:
        values = _names(plan.constants)
        lines.append(f"constants: segment {plan.constants_segment} -> {values}")
    _describe_block(plan, 0, "main", "", lines)
    return "\n".join(lines)


def _names(values: Iterable[int]) -> str:
    return " ".join("token" if v == NO_VALUE else f"v{v}" for v in values) or "()"


def _describe_block(
    plan: Plan, index: int, title: str, indent: str, lines: list[str]
) -> None:
    block = plan.blocks[index]
    donated = f" donated {_names(block.donated)}" if block.donated else ""
    inputs, outputs = _names(block.inputs), _names(block.outputs)
    lines.append(f"{indent}{title}: {inputs} -> {outputs}{donated}")
    indent += "  "
    for step in block.steps:
        _describe_step(plan, step, indent, lines)


def _describe_step(plan: Plan, step: Step, indent: str, lines: list[str]) -> None:
    what = step.kind.name.lower()
    if step.kind is StepKind.SEGMENT:
        what = f"segment {step.index}"
    elif step.kind is StepKind.CALL:
        what = f"call {plan.calls[step.index].target}"
    given_away = [step.inputs[position] for position in step.donated]
    notes = f" reuses {_names(given_away)}" if given_away else ""
    notes += f" dead {_names(step.dead)}" if step.dead else ""
    inputs, outputs = _names(step.inputs), _names(step.outputs)
    lines.append(f"{indent}{what}: {inputs} -> {outputs}{notes}")
    titles = {
        StepKind.WHILE: ["condition", "body"],
        StepKind.IF: ["true", "false"],
    }.get(step.kind, [f"branch {i}" for i in range(len(step.blocks))])
    for title, index in zip(titles, step.blocks):
        _describe_block(plan, index, title, indent + "  ", lines)
