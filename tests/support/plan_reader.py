"""Reads the wire format of plans back: what plugin/pjrt/plan.cc does, for the tests.

Written from the description of the format, without the encoder's helpers.
"""

import struct

from jax_flash_metal.plan import (
    Array,
    AttributeKind,
    Block,
    Call,
    Plan,
    Scalar,
    Step,
    StepKind,
    Tensor,
)


class _Reader:
    def __init__(self, data):
        self._data = data
        self._position = 0

    def int(self):
        (value,) = struct.unpack_from("<q", self._data, self._position)
        self._position += 8
        return value

    def bytes(self):
        size = self.int()
        start = self._position
        self._position += size
        assert size >= 0 and self._position <= len(self._data)
        return self._data[start : self._position]

    def list(self, read):
        return [read() for _ in range(self.int())]

    def ints(self):
        return self.list(self.int)

    def attribute(self):
        name = self.bytes().decode()
        kind = AttributeKind(self.int())
        if kind is AttributeKind.ARRAY:
            return name, Array(self.int(), self.int(), self.bytes())
        if kind is AttributeKind.SCALAR:
            return name, Scalar(self.int(), self.bytes())
        if kind is AttributeKind.STRING:
            return name, self.bytes().decode("utf-8", "surrogateescape")
        return name, tuple(self.list(self.attribute))

    def tensor(self):
        return Tensor(self.int(), tuple(self.ints()))

    def call(self):
        return Call(
            target=self.bytes().decode(),
            attributes=tuple(self.list(self.attribute)),
            operands=tuple(self.list(self.tensor)),
            results=tuple(self.list(self.tensor)),
            aliases=tuple(self.list(lambda: (self.int(), self.int()))),
            has_side_effect=bool(self.int()),
        )

    def step(self):
        return Step(
            kind=StepKind(self.int()),
            index=self.int(),
            inputs=self.ints(),
            outputs=self.ints(),
            donated=self.ints(),
            dead=self.ints(),
            blocks=self.ints(),
            num_captures=self.int(),
        )

    def block(self):
        return Block(
            num_values=self.int(),
            inputs=self.ints(),
            outputs=self.ints(),
            donated=self.ints(),
            steps=self.list(self.step),
        )

    def plan(self):
        version = self.int()
        assert version == 1
        plan = Plan(
            fingerprint=self.bytes().decode(),
            program=self.bytes(),
            shadow=self.bytes(),
            options=self.bytes(),
            segments=self.list(self.bytes),
            calls=self.list(self.call),
            blocks=self.list(self.block),
            constants_segment=self.int(),
            constants=self.ints(),
            peak_intermediate_bytes=self.int(),
        )
        assert self._position == len(self._data), "bytes after the plan"
        return plan


def decode(data: bytes) -> Plan:
    """The plan that `plan.encode` wrote."""
    return _Reader(data).plan()
