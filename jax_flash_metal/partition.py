"""Cuts a program at its custom calls into segments that any host can compile.

`plan_program` is what the plugin calls, on any thread: it traces nothing, keeps no
state and makes an MLIR context of its own. The result is a plan (plan.py) that a host
carries out: run a segment, make a call, go round a loop, take a branch.

Which operation goes where
--------------------------
In a block (main, or a region that the host drives) an operation is a *barrier* if it is
a custom call of ours, or a while, case or if that contains one; all others are *pure*.
Functions that contain a custom call are inlined before. Let

    f(pure op) = max(1, f(u) of pure operands u, f(u) + 1 of barrier operands u)
    f(barrier) = max(0, f(u) of all operands u)

where operands include what regions capture; inputs of the block count 0 as operands.
Segment r consists of pure operations with f <= r, barriers with f = r run after segment
r in the order of the program. Then every operand is there when it is needed.

No schedule has fewer segments. Follow the maxima back from an operation with f = R: a
chain of dependent operations in which pure stretches alternate with barriers, and the
number goes up by one exactly where a pure operation follows a barrier, or starts the
chain; so it has R pure stretches. A segment is one uninterrupted run of pure
operations, each barrier of the chain must run after the stretch before it and before
the stretch after it, hence no two of the stretches share a segment: R are needed. And
the segments 1 … R are enough, by construction. (That an operation may be computed again
in several segments, see below, changes nothing: each time it is needed in its place in
the chain.) Only what nothing needs is left out before.

Operations with side effects depend, besides, on the one before them in the program.

What is not done where f says
-----------------------------
* Cheap operations (constants, what is folded from them, broadcasts and reshapes) are
  computed again in each segment and nested block that needs them; only barriers and
  block outputs need their buffers, which the segment just before makes.
* Another pure operation moves from segment f to the segment of its first use if that
  keeps fewer or equal bytes alive, for instance a cast of a weight.
* Constants of LARGE_CONSTANT_BYTES or more come from one segment run at load time.
* Tokens have no buffers. A segment that needs one from outside makes a new one: the
  order of the steps is the order that the token stood for.

Donation: `Step.donated` names inputs that the block owns (results of its steps, main's
donated inputs, the carry in a loop's body) and that nothing uses afterwards, where an
output has the same type. The executor still has to look whether it holds the only
reference: a loop that runs zero times returns the very buffers that went in.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager

from jax_flash_metal import call_records, compile_options, segment_writer, stablehlo
from jax_flash_metal.plan import (
    INVALID_ARGUMENT,
    NO_VALUE,
    UNIMPLEMENTED,
    Block,
    Call,
    HostProfile,
    PartitionError,
    Plan,
    Rewritten,
    Step,
    StepKind,
    Unchanged,
    describe,
    encode,
)
from jax_flash_metal.program_graph import (
    Graph,
    Node,
    Region,
    all_operations,
    functions_by_name,
    read,
)
from jax_flash_metal.segment_writer import SegmentBody, SegmentWriter

__all__ = [
    "HostProfile",
    "PartitionError",
    "Plan",
    "Rewritten",
    "Unchanged",
    "describe",
    "encode",
    "plan_program",
]

# Part of every fingerprint: to be changed with whatever changes what a plan computes.
_FINGERPRINT_VERSION = b"jax-flash-metal plan 1"

# Layouts and memory kinds that are the default ones.
_PLAIN_SIGNATURE = frozenset(("default", "auto", "device", "unpinned_host"))

_KINDS = {
    "stablehlo.while": StepKind.WHILE,
    "stablehlo.case": StepKind.CASE,
    "stablehlo.if": StepKind.IF,
}


def plan_program(
    program: bytes, options: bytes, host: HostProfile, targets: Collection[str]
) -> Unchanged | Rewritten | Plan:
    """What the host has to compile, and how to run it.

    Args:
      program: StableHLO, as PJRT_Client_Compile gets it.
      options: CompileOptionsProto.
      host: What the host's compiler understands.
      targets: The custom calls that the host does not have.

    Raises:
      PartitionError: the program cannot be run in parts, with a sentence that says why.
    """
    came_in = stablehlo.artifact_version(program)
    version = _older(came_in, host.stablehlo_version)
    rewrites = host.legalize_composites or host.erase_sharding or version != came_in
    # Names are stored as they are, so most programs need not be read at all.
    has_targets = any(target.encode() in program for target in targets)
    if not has_targets and not rewrites:
        return Unchanged()
    try:
        module, _ = stablehlo.parse(program)
        if has_targets and _calls_any(module, targets):
            with module.context, ir.Location.unknown():
                return _plan(module, program, options, host, version, targets)
        if not rewrites:
            return Unchanged()
        _rewrite(module, host, targets)
        return Rewritten(stablehlo.serialize(module, version))
    except stablehlo.StablehloError as error:
        raise PartitionError(INVALID_ARGUMENT, str(error)) from error


def _older(came_in: str | None, readable: str | None) -> str | None:
    if came_in is None or readable is None:
        return came_in or readable
    return readable if stablehlo.newer_than(came_in, readable) else came_in


def _rewrite(module: Any, host: HostProfile, targets: Collection[str]) -> None:
    if host.erase_sharding:
        stablehlo.erase_sharding(module)
    if host.legalize_composites:
        stablehlo.legalize_composites(module)
    if host.custom_calls is not None:
        _require_known_calls(module, host.custom_calls, targets)


def _plan(
    module: Any,
    program: bytes,
    options: bytes,
    host: HostProfile,
    version: str | None,
    targets: Collection[str],
) -> Plan:
    # Source lines would only make equal segments different.
    passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(
        module.operation
    )
    _require_one_device(module)
    _require_plain_signature(module)
    _rewrite(module, host, targets)
    shadow = segment_writer.shadow(module)
    donated = _donated_arguments(module)
    stablehlo.erase_sharding(module)
    graph = read(module, targets)

    def serialize(part: Any) -> bytes:
        return stablehlo.serialize(part, version)

    planner = _Planner(graph, SegmentWriter(graph, module, serialize))
    planner.plan(donated)
    plan = Plan(
        fingerprint="",
        program=b"",
        shadow=serialize(shadow),
        options=b"",
        segments=planner.writer.segments,
        calls=planner.calls,
        blocks=planner.blocks,
        constants_segment=planner.constants_segment,
        constants=planner.constants,
        peak_intermediate_bytes=planner.peak_bytes,
    )
    # Of what the plan does: the program's own bytes also name the lines of the source.
    fingerprint = hashlib.sha256(_FINGERPRINT_VERSION)
    for part in (encode(plan), compile_options.canonical(options)):
        fingerprint.update(len(part).to_bytes(8, "little") + part)
    return dataclasses.replace(
        plan,
        fingerprint=fingerprint.hexdigest(),
        program=program,
        options=compile_options.for_segments(options),
    )


def _calls_any(module: Any, targets: Collection[str]) -> bool:
    return any(
        op.name == "stablehlo.custom_call" and call_records.target_of(op) in targets
        for op in all_operations(module.operation)
    )


# -- What is refused -----------------------------------------------------------------


def _require_known_calls(
    module: Any, known: Collection[str], targets: Collection[str]
) -> None:
    for op in all_operations(module.operation):
        if op.name != "stablehlo.custom_call":
            continue
        name = call_records.target_of(op)
        if name not in known and name not in targets:
            raise PartitionError(
                UNIMPLEMENTED,
                f"there is no custom call {name!r}: the host plugin does not know it, "
                "and the targets registered by jax.ffi.register_ffi_target(..., "
                f"platform='flash_metal') are {', '.join(sorted(targets)) or 'none'}.",
            )


def _require_one_device(module: Any) -> None:
    for name, count in stablehlo.device_counts(module).items():
        if count > 1:
            raise PartitionError(
                UNIMPLEMENTED,
                f"this program is for {count} devices ({name}), and programs with "
                "custom calls run on one device only on this platform.",
            )


def _signature_attributes(module: Any) -> list[tuple[str, Any, Any]]:
    """(which, attributes, type) of each argument and result of main."""
    main = functions_by_name(module)["main"]
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    found = []
    for which, name, types in (
        ("argument", "arg_attrs", kind.inputs),
        ("result", "res_attrs", kind.results),
    ):
        if name in main.attributes:
            listed = map(ir.DictAttr, ir.ArrayAttr(main.attributes[name]))
            found += [
                (f"{which} {i}", attributes, mlir)
                for i, (attributes, mlir) in enumerate(zip(listed, types))
            ]
    return found


def _require_plain_signature(module: Any) -> None:
    """Segments are compiled for row-major arrays in the device's default memory."""
    for which, attributes, mlir in _signature_attributes(module):
        for name, what in (
            ("mhlo.layout_mode", "layout"),
            ("mhlo.memory_kind", "memory kind"),
        ):
            if name not in attributes:
                continue
            value = ir.StringAttr(attributes[name]).value
            if value not in _PLAIN_SIGNATURE and value != _row_major(mlir):
                raise PartitionError(
                    UNIMPLEMENTED,
                    f"{which} of this program has the {what} {value}, and programs "
                    "with custom calls take and return row-major arrays in the "
                    "default memory only on this platform.",
                )


def _row_major(mlir: Any) -> str:
    rank = ir.RankedTensorType(mlir).rank
    return "{" + ",".join(map(str, reversed(range(rank)))) + "}"


def _donated_arguments(module: Any) -> list[int]:
    donation = ("tf.aliasing_output", "jax.buffer_donor")
    arguments = [
        attributes
        for which, attributes, _ in _signature_attributes(module)
        if which.startswith("argument")
    ]
    return [
        i for i, each in enumerate(arguments) if any(name in each for name in donation)
    ]


# -- Planning ------------------------------------------------------------------------


class _Planner:
    """Plans main, and from there the blocks in it."""

    def __init__(self, graph: Graph, writer: SegmentWriter) -> None:
        self.graph = graph
        self.writer = writer
        self.calls: list[Call] = []
        self.blocks: list[Block] = []
        self.constants_segment = -1
        self.constants: list[int] = []
        self.peak_bytes = 0
        self._call_indices: dict[Call, int] = {}
        self._roots: dict[int, tuple[int, ...]] = {}

    def plan(self, donated: Sequence[int]) -> None:
        main = self.graph.main
        for value in (*main.arguments, *main.outputs):
            segment_writer.require_buffer(self.graph, value)
            if self.graph.types[value].is_token:
                raise PartitionError(
                    UNIMPLEMENTED,
                    "a program with custom calls cannot take or return tokens on this "
                    "platform.",
                )
        constants = [node.results[0] for node in self.graph.constants]
        owned = {main.arguments[i] for i in donated}
        _, self.peak_bytes = self.block(main, (), owned, constants)
        if constants:
            body = SegmentBody(list(self.graph.constants), [], constants)
            self.constants_segment = self.writer.write(body, {})

    def block(
        self,
        region: Region,
        captures: Sequence[int],
        owned: Collection[int],
        constants: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Plans a block; returns its index and its peak of intermediate bytes.

        Args:
          captures: The block's inputs before the region's own arguments.
          owned: Arguments whose memory the block may reuse.
          constants: Values that are there besides the inputs (main only).
        """
        index = len(self.blocks)
        self.blocks.append(Block(0, [], [], [], []))  # takes the place
        planner = _BlockPlanner(self, region)
        inputs = [
            planner.identity(v)
            for v in (*captures, *region.arguments)
            if not self.is_token(v)
        ]
        known = [planner.identity(v) for v in constants]
        if constants:
            self.constants = known
        planner.add_steps()
        outputs = planner.outputs()
        donated = [planner.identity(v) for v in region.arguments if v in owned]
        peak = planner.finish(outputs, {*donated}, {*known})
        self.blocks[index] = Block(
            num_values=len(planner.values),
            inputs=inputs,
            outputs=outputs,
            donated=donated if index == 0 else [],
            steps=planner.steps,
        )
        return index, peak

    def call(self, node: Node) -> int:
        """The index of a custom call; equal ones are one."""
        sides = []
        for values in (node.operands, node.results):
            for value in values:
                segment_writer.require_buffer(self.graph, value)
            tensors = (self.graph.types[value].tensor for value in values)
            sides.append([tensor for tensor in tensors if tensor is not None])
        record = call_records.call_record(node.op, *sides)
        index = self._call_indices.setdefault(record, len(self.calls))
        if index == len(self.calls):
            self.calls.append(record)
        return index

    def is_token(self, value: int) -> bool:
        return self.graph.types[value].is_token

    def cheap_producer(self, value: int) -> Node | None:
        producer = self.graph.producers[value]
        return producer if producer is not None and producer.is_cheap else None

    def roots(self, value: int) -> tuple[int, ...]:
        """The buffers that a value is, or is cheaply made of."""
        if self.is_token(value):
            return ()
        producer = self.cheap_producer(value)
        if producer is None:
            return (value,)
        if value not in self._roots:
            self._roots[value] = self.roots_of(producer.operands)
        return self._roots[value]

    def roots_of(self, values: Iterable[int]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for value in values:
            found.update(dict.fromkeys(self.roots(value)))
        return tuple(found)


class _BlockPlanner:
    """The steps of one block.

    Values of the plan are keyed by the value of the graph, and by the round for what
    is made again in each.
    """

    def __init__(self, planner: _Planner, region: Region) -> None:
        self.steps: list[Step] = []
        self.values: dict[int | tuple[int, int], int] = {}
        self._planner = planner
        self._region = region
        self._value_of: list[int] = []  # the graph's value of each of the plan's
        self._bodies: list[tuple[Step, SegmentBody]] = []
        self._nested_peaks: dict[int, int] = {}  # by position of the step
        self._rounds = _Rounds(planner, region)

    def identity(self, value: int, round_: int | None = None) -> int:
        key = value if round_ is None else (value, round_)
        if key not in self.values:
            self.values[key] = len(self._value_of)
            self._value_of.append(value)
        return self.values[key]

    def outputs(self) -> list[int]:
        last = self._rounds.last
        return [
            self._buffer(v, last)
            for v in self._region.outputs
            if not self._planner.is_token(v)
        ]

    def _buffer(self, value: int, round_: int) -> int:
        """The plan's value that a barrier of this round takes, or the block returns."""
        if self._planner.is_token(value):
            return NO_VALUE
        if self._planner.cheap_producer(value) is None:
            return self.identity(value)
        return self.identity(value, round_)

    def add_steps(self) -> None:
        rounds = self._rounds
        for round_ in range(rounds.last + 1):
            self._add_segment(round_)
            for barrier in rounds.barriers.get(round_, ()):
                self._add_barrier(barrier, round_)

    def _add_segment(self, round_: int) -> None:
        nodes = self._rounds.segments.get(round_, [])
        wanted = list(self._rounds.materialized.get(round_, ()))
        if not nodes and not wanted:
            return
        items: list[Node | int] = []
        inputs: dict[int, None] = {}
        defined: set[int] = set()

        def need(value: int) -> None:
            if value in defined:
                return
            producer = self._planner.cheap_producer(value)
            if producer is not None:
                for operand in producer.operands:
                    need(operand)
                add(producer)
            elif self._planner.is_token(value):
                items.append(value)
                defined.add(value)
            else:
                inputs[value] = None

        def add(node: Node) -> None:
            items.append(node)
            defined.update(node.results)

        for node in nodes:
            for value in (*node.operands, *node.captures):
                need(value)
            add(node)
        for value in wanted:
            need(value)
        exported = [
            value
            for node in nodes
            for value in node.results
            if value in self._rounds.exported
        ]
        body = SegmentBody(items, list(inputs), [*exported, *wanted])
        step = Step(
            StepKind.SEGMENT,
            index=-1,  # known when the module has been written
            inputs=[self.identity(v) for v in inputs],
            outputs=[
                *(self.identity(v) for v in exported),
                *(self.identity(v, round_) for v in wanted),
            ],
        )
        self._bodies.append((step, body))
        self.steps.append(step)

    def _add_barrier(self, node: Node, round_: int) -> None:
        operands = [self._buffer(v, round_) for v in node.operands]
        results = [
            NO_VALUE if self._planner.is_token(v) else self.identity(v)
            for v in node.results
        ]
        if node.name == "stablehlo.custom_call":
            index = self._planner.call(node)
            self.steps.append(Step(StepKind.CALL, index, operands, results))
            return
        captures = self._planner.roots_of(node.captures)
        captured = [self.identity(v) for v in captures]
        is_loop = node.name == "stablehlo.while"
        blocks, peaks = [], []
        for position, region in enumerate(node.regions):
            # The condition must leave the carry to the body.
            owned = region.arguments if is_loop and position == 1 else ()
            index, peak = self._planner.block(region, captures, owned)
            blocks.append(index)
            peaks.append(peak)
        operands = [v for v in operands if v != NO_VALUE]
        self._nested_peaks[len(self.steps)] = max(peaks)
        self.steps.append(
            Step(
                _KINDS[node.name],
                index=-1,
                inputs=captured + operands if is_loop else operands + captured,
                outputs=[v for v in results if v != NO_VALUE],
                blocks=blocks,
                num_captures=len(captured),
            )
        )

    def finish(
        self, outputs: Sequence[int], owned: set[int], constants: set[int]
    ) -> int:
        """Finds last uses, donates, writes the segments; returns the peak of bytes."""
        kept = {*outputs, *constants, NO_VALUE}
        for step in reversed(self.steps):
            touched = dict.fromkeys((*step.inputs, *step.outputs))
            step.dead = [v for v in touched if v not in kept]
            kept.update(step.dead)
        owned = owned.union(*(step.outputs for step in self.steps))
        for step, body in self._bodies:
            aliases = self._donate(step, owned.intersection(step.dead))
            step.donated = list(aliases)
            step.index = self._planner.writer.write(body, aliases)
        return self._peak_bytes()

    def _donate(self, step: Step, candidates: set[int]) -> dict[int, int]:
        """Positions of outputs by those of the inputs whose memory they take."""
        free: dict[Any, list[int]] = {}
        for position, value in enumerate(step.outputs):
            free.setdefault(self._type(value).tensor, []).append(position)
        aliases = {}
        for position, value in enumerate(step.inputs):
            known = self._type(value)
            if value in candidates and known.num_bytes and free.get(known.tensor):
                aliases[position] = free[known.tensor].pop(0)
        return aliases

    def _type(self, value: int) -> call_records.ValueType:
        return self._planner.graph.types[self._value_of[value]]

    def _peak_bytes(self) -> int:
        made: set[int] = set()
        now = peak = 0
        for position, step in enumerate(self.steps):
            outputs = [v for v in step.outputs if v != NO_VALUE]
            made.update(outputs)
            now += sum(self._type(v).num_bytes for v in outputs)
            given = [step.inputs[position] for position in step.donated]
            reused = sum(self._type(v).num_bytes for v in given)
            nested = self._nested_peaks.get(position, 0)
            peak = max(peak, now - reused + nested)
            now -= sum(self._type(v).num_bytes for v in step.dead if v in made)
        return peak


class _Rounds:
    """Which operation of a block runs when.

    Attributes:
      last: The last round: 0 where no segment is needed.
      segments: The nodes of each round's segment, in program order, cheap ones not.
      barriers: Those of each round, in program order.
      materialized: Cheap values of which each round's segment makes buffers.
      exported: Other values that leave the segment that computes them.
    """

    def __init__(self, planner: _Planner, region: Region) -> None:
        self.segments: dict[int, list[Node]] = {}
        self.barriers: dict[int, list[Node]] = {}
        self.materialized: dict[int, dict[int, None]] = {}
        self.exported: set[int] = set()
        self._planner = planner
        self._region = region
        self._round: dict[Node, int] = {}
        # Of the first segment, and of the first barrier, that can use a value.
        self._in_segment: dict[int, int] = {}
        self._in_barrier: dict[int, int] = {}
        self.last = 0
        self._find_earliest()
        self._move_to_first_uses()
        self._group()

    def _find_earliest(self) -> None:
        effects_segment = effects_barrier = 0
        for node in self._region.nodes:
            if node.has_target:
                captured = self._planner.roots_of(node.captures)
                round_ = self._latest(self._in_barrier, (*node.operands, *captured))
                if node.has_effect:
                    round_ = max(round_, effects_barrier)
                after = (round_ + 1, round_)
            else:
                used = (*node.operands, *node.captures)
                round_ = max(1, self._latest(self._in_segment, used))
                if node.has_effect:
                    round_ = max(round_, effects_segment)
                after = (round_, round_)
                if node.is_cheap and self._planner.is_token(node.results[0]):
                    # A new token needs no segment to be there.
                    after = (0, 0)
            self._round[node] = round_
            for value in node.results:
                self._in_segment[value], self._in_barrier[value] = after
            if node.has_effect:
                effects_segment, effects_barrier = after
            if not node.is_cheap:
                self.last = max(self.last, round_)
        self.last = max(self.last, self._latest(self._in_barrier, self._region.outputs))

    def _latest(self, rounds: dict[int, int], values: Iterable[int]) -> int:
        return max((self._when(rounds, value) for value in values), default=0)

    def _when(self, rounds: dict[int, int], value: int) -> int:
        if value in rounds:
            return rounds[value]
        # From outside. A buffer of what is cheap has to be made in here.
        producer = self._planner.cheap_producer(value)
        return 0 if producer is None or self._planner.is_token(value) else 1

    def _move_to_first_uses(self) -> None:
        """Lets pure operations wait where that keeps no more bytes alive."""
        types = self._planner.graph.types
        first: dict[int, int] = {}
        final: dict[int, int] = {}

        def use(values: Iterable[int], round_: int) -> None:
            for value in values:
                first[value] = min(first.get(value, round_), round_)
                final[value] = max(final.get(value, round_), round_)

        use(self._planner.roots_of(self._region.outputs), self.last)
        for node in reversed(self._region.nodes):
            if node.is_cheap:
                continue
            roots = self._planner.roots_of((*node.operands, *node.captures))
            round_ = self._round[node]
            if not node.has_target and not node.has_effect:
                uses = [first[v] for v in node.results if v in first]
                target = min(uses, default=round_)
                before = sum(types[v].num_bytes for v in node.results)
                after = sum(
                    types[v].num_bytes
                    for v in roots
                    if v in self._in_segment and final.get(v, 0) < target
                )
                if after <= before:
                    round_ = self._round[node] = target
            use(roots, round_)

    def _group(self) -> None:
        for node in self._region.nodes:
            if node.is_cheap:
                continue
            round_ = self._round[node]
            used = (*node.operands, *node.captures)
            if node.has_target:
                self.barriers.setdefault(round_, []).append(node)
                self._materialize(node.operands, round_)
                self.exported.update(self._planner.roots_of(used))
            else:
                self.segments.setdefault(round_, []).append(node)
                self._export(used, round_)
        self._materialize(self._region.outputs, self.last)
        self.exported.update(self._planner.roots_of(self._region.outputs))

    def _materialize(self, values: Iterable[int], round_: int) -> None:
        for value in values:
            if self._planner.is_token(value):
                continue
            if self._planner.cheap_producer(value) is not None:
                self.materialized.setdefault(round_, {})[value] = None
                self._export(self._planner.roots(value), round_)

    def _export(self, values: Iterable[int], round_: int) -> None:
        """Values that a segment of this round uses and others compute."""
        for value in self._planner.roots_of(values):
            producer = self._planner.graph.producers[value]
            if producer is not None and self._round.get(producer) != round_:
                self.exported.add(value)
