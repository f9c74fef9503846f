"""Registers and code size of a kernel, estimated from its PTX.

PTX has an unlimited number of registers and one instruction per operation: what is live
at once, and how many instructions there are, says what a kernel asks of any GPU whose
lanes have 32-bit registers. Which instructions Apple's compiler makes, in which order,
is not known here: these are estimates, for choosing between variants.

How they count:
  registers   32 bits each; an address or other 64-bit value is two, a 16-bit value or a
              condition half a one. Products have packed pairs of 16-bit operands.
  uniform     what depends on nothing but constants, the parameters and the buffers'
              addresses has registers of its own on Apple GPUs, filled before the kernel
              runs; counted apart, and its instructions not at all.
  addresses   that differ by a constant are one: loads and stores take the difference.
  code        BYTES_PER_INSTRUCTION each; nothing for moves between registers, which
              allocation removes, several for 64-bit arithmetic and division (_WEIGHTS).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

# Apple's instructions have 2 to 12 bytes, those of float arithmetic and of memory 8
# mostly (the disassembler of github.com/dougallj/applegpu).
BYTES_PER_INSTRUCTION = 8
INSTRUCTION_CACHE_BYTES = 12 * 1024
# All that a lane of an Apple GPU has: 256 of 16 bits.
MOST_REGISTERS = 128

_HALF_UNITS = {"p": 1, "rs": 1, "r": 2, "f": 2, "rd": 4, "fd": 4}  # 16 bits each
_NO_RESULT = ("st.", "bra", "ret", "bar.", "barrier", "membar", "fence")
_FREE = ("mov.", "ld.param", "cvt.u64.u32", "cvt.u32.u64")
# Instructions for one of PTX's, by the start of its name; 1 for others.
_WEIGHTS = {
    **{"mul.lo.s64": 3, "mul.lo.u64": 3, "mad.lo.s64": 4, "mad.lo.u64": 4},
    **{"div.s32": 12, "div.u32": 10, "rem.s32": 12, "rem.u32": 10},
    **{"div.s64": 60, "div.u64": 50, "rem.s64": 60, "rem.u64": 50},
    **{"div.rn.f32": 8, "sqrt.rn": 6, "mul.wide": 2, "mad.wide": 2},
}
_WORDS_64 = re.compile(r"\.[sub]64\b")
_CLASSES = {  # of instructions, by the start of the name
    "jfm.product": "products",
    "jfm.exp2": "exp2",
    "jfm.log2": "log2",
    "jfm.tanh": "tanh",
    "jfm.shuffle": "shuffles",
    "jfm.vote": "votes",
    "jfm.reduction": "reductions",
    "jfm.threadgroup_barrier": "threadgroup_barriers",
    "jfm.simdgroup_barrier": "simdgroup_barriers",
    "ld.global": "device_loads",
    "st.global": "device_stores",
    "ld.shared": "threadgroup_loads",
    "st.shared": "threadgroup_stores",
    "ld.const": "constant_loads",
    "ld.local": "spill_loads",
    "st.local": "spill_stores",
    "bra": "branches",
}

_REGISTER = re.compile(r"%(p|rs|r|f|rd|fd)(\d+)\b")
_SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid|laneid|warpid)\b")


# -- Reading PTX ---------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction. Registers as PTX writes them, "%f12"."""

    opcode: str
    operands: list[str]
    defines: tuple[str, ...]
    uses: tuple[str, ...]
    targets: tuple[str, ...] = ()  # labels
    predicated: bool = False

    @property
    def weight(self) -> int:
        """Machine instructions that it stands for."""
        if self.opcode.startswith(_FREE):
            return 0
        for start, weight in _WEIGHTS.items():
            if self.opcode.startswith(start):
                return weight
        is_memory = self.opcode.startswith(("ld.", "st."))
        return 2 if _WORDS_64.search(self.opcode) and not is_memory else 1

    @property
    def kind(self) -> str:
        """Its class, for the mix."""
        for start, kind in _CLASSES.items():
            if self.opcode.startswith(start):
                return kind
        types = self.opcode.split(".")
        is_float = any(t in ("f32", "f16", "f16x2", "bf16", "bf16x2") for t in types)
        return "float_alu" if is_float else "integer_alu"


def kernels(ptx: str) -> dict[str, list[list[Instruction]]]:
    """The basic blocks of each entry point of a module, in order."""
    found = {}
    for match in re.finditer(r"\.entry (\w+)\(.*?^\{\n(.*?)^\}", ptx, re.M | re.S):
        found[match[1]] = _blocks(match[2])
    return found


def _blocks(body: str) -> list[list[Instruction]]:
    labels: dict[str, int] = {}
    blocks: list[list[Instruction]] = [[]]
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if match := re.match(r"(\$L__BB\w+):$", line):
            if blocks[-1]:
                blocks.append([])
            labels[match[1]] = len(blocks) - 1
        elif line and not line.startswith((".", "$", "{", "}")):
            instruction = _parse(line.rstrip(";"))
            blocks[-1].append(instruction)
            if instruction.opcode.startswith(("bra", "ret")):
                blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    for block in blocks:
        for instruction in block:
            instruction.targets = tuple(
                str(labels[name]) for name in instruction.targets if name in labels
            )
    return blocks


def _parse(text: str) -> Instruction:
    predicate: tuple[str, ...] = ()
    if text.startswith("@"):
        guard, text = text.split(None, 1)
        predicate = _registers(guard)
    opcode, _, rest = text.partition(" ")
    opcode, _, more = opcode.partition("\t")
    operands = _split(f"{more} {rest}")
    has_result = not opcode.startswith(
        (*_NO_RESULT, "jfm.threadgroup", "jfm.simdgroup")
    )
    defines = _registers(operands[0]) if has_result and operands else ()
    sources = operands[1:] if has_result else operands
    uses = tuple(r for operand in sources for r in _registers(operand)) + predicate
    targets = tuple(o for o in operands if o.startswith("$L__BB"))
    return Instruction(opcode, operands, defines, uses, targets, bool(predicate))


def _split(text: str) -> list[str]:
    """Operands at commas outside of brackets."""
    operands, depth, current = [], 0, ""
    for character in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += character
    return [*operands, current.strip()] if current.strip() else operands


def _registers(operand: str) -> tuple[str, ...]:
    return tuple(match[0] for match in _REGISTER.finditer(operand))


# -- Rewriting -----------------------------------------------------------------------


def _definitions(blocks: Sequence[Sequence[Instruction]]) -> dict[str, Instruction]:
    """Registers that one instruction defines, by their names."""
    found: dict[str, Instruction | None] = {}
    for instruction in (i for block in blocks for i in block):
        for register in instruction.defines:
            several = register in found or instruction.predicated
            found[register] = None if several else instruction
    return {r: instruction for r, instruction in found.items() if instruction}


def _is_address_plus_constant(instruction: Instruction) -> bool:
    return (
        instruction.opcode in ("add.s32", "add.s64", "add.u32", "add.u64")
        and re.fullmatch(r"-?\d+", instruction.operands[2]) is not None
        and len(instruction.uses) == 1
    )


def fold_addresses(blocks: list[list[Instruction]]) -> list[list[Instruction]]:
    """Uses the base of an address that is a register plus a constant in its place."""
    single = _definitions(blocks)

    def base(register: str) -> str:
        while True:
            definition = single.get(register)
            if definition is None or not _is_address_plus_constant(definition):
                return register
            if definition.uses[0] not in single:
                return register  # the base changes: it may have by now
            register = definition.uses[0]

    for instruction in (i for block in blocks for i in block):
        if not instruction.opcode.startswith(("ld.", "st.")):
            continue
        addresses = {
            register
            for operand in instruction.operands
            if operand.startswith("[")
            for register in _registers(operand)
        }
        instruction.uses = tuple(
            base(r) if r in addresses else r for r in instruction.uses
        )
    return remove_dead(blocks)


def remove_dead(blocks: list[list[Instruction]]) -> list[list[Instruction]]:
    """Without instructions whose results nobody uses."""
    while True:
        used = {r for block in blocks for i in block for r in i.uses}
        kept = [
            [
                i
                for i in block
                if not i.defines
                or i.opcode.startswith(("jfm.", "ld.volatile", "atom"))
                or used.intersection(i.defines)
            ]
            for block in blocks
        ]
        if sum(map(len, kept)) == sum(map(len, blocks)):
            return kept
        blocks = kept


def uniform_registers(blocks: Sequence[Sequence[Instruction]]) -> set[str]:
    """Registers that depend on constants, parameters and buffers' addresses alone."""
    single = _definitions(blocks)
    uniform: set[str] = set()
    while True:
        more = {
            register
            for register, i in single.items()
            if register not in uniform
            and all(use in uniform for use in i.uses)
            and not i.opcode.startswith(("jfm.", "ld.global", "ld.shared", "ld.local"))
            and not any(_SPECIAL.search(operand) for operand in i.operands)
        }
        if not more:
            return uniform
        uniform |= more


# -- The control flow ----------------------------------------------------------------


def successors(blocks: Sequence[Sequence[Instruction]]) -> list[list[int]]:
    """The blocks that may run after each block."""
    result = []
    for index, block in enumerate(blocks):
        last = block[-1] if block else None
        targets = [int(t) for t in last.targets] if last else []
        is_end = last is not None and last.opcode.startswith(("ret", "bra"))
        if (not is_end or (last is not None and last.predicated)) and index + 1 < len(
            blocks
        ):
            targets.append(index + 1)
        result.append(targets)
    return result


def dominators(following: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each block, the blocks that every way from the first one to it passes."""
    count = len(following)
    before: list[list[int]] = [[] for _ in range(count)]
    for block, targets in enumerate(following):
        for target in targets:
            before[target].append(block)
    dominating = [{0}] + [set(range(count)) for _ in range(1, count)]
    changed = True
    while changed:
        changed = False
        for block in range(1, count):
            incoming = [dominating[b] for b in before[block]]
            new = (set.intersection(*incoming) if incoming else set()) | {block}
            if new != dominating[block]:
                dominating[block] = new
                changed = True
    return dominating


@dataclasses.dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks from which its header is reached again."""

    header: int
    blocks: frozenset[int]
    always: frozenset[int]  # those that every round passes


def loops(following: Sequence[Sequence[int]]) -> list[Loop]:
    """The natural loops, those with a common header as one."""
    dominating = dominators(following)
    before: list[list[int]] = [[] for _ in following]
    for block, targets in enumerate(following):
        for target in targets:
            before[target].append(block)
    latches: dict[int, list[int]] = {}
    for block, targets in enumerate(following):
        for target in targets:
            if target in dominating[block]:
                latches.setdefault(target, []).append(block)
    found = []
    for header, ends in latches.items():
        body, queue = {header}, list(ends)
        while queue:
            block = queue.pop()
            if block not in body:
                body.add(block)
                queue += before[block]
        always = set.intersection(*(dominating[end] for end in ends)) & body
        found.append(Loop(header, frozenset(body), frozenset(always)))
    return found


# -- Liveness ------------------------------------------------------------------------


def live_units(
    blocks: Sequence[Sequence[Instruction]],
    following: Sequence[Sequence[int]],
    registers: set[str],
) -> list[int]:
    """The most units of 16 bits that `registers` need at once, in each block."""
    masks = {r: 1 << i for i, r in enumerate(sorted(registers))}
    widths = [_HALF_UNITS[_REGISTER.match(r)[1]] for r in sorted(registers)]  # type: ignore[index]

    def mask(names: Iterable[str]) -> int:
        result = 0
        for name in names:
            result |= masks.get(name, 0)
        return result

    effects = [
        [
            # A conditional result leaves the old one alive.
            (0 if i.predicated else mask(i.defines), mask(i.uses), mask(i.defines))
            for i in block
        ]
        for block in blocks
    ]
    live_in = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for index in range(len(blocks) - 1, -1, -1):
            live = 0
            for target in following[index]:
                live |= live_in[target]
            for kills, uses, _ in reversed(effects[index]):
                live = (live & ~kills) | uses
            if live != live_in[index]:
                live_in[index] = live
                changed = True

    by_width: dict[int, int] = {}
    for position, width in enumerate(widths):
        by_width[width] = by_width.get(width, 0) | 1 << position

    def units(live: int) -> int:
        return sum(
            width * (live & group).bit_count() for width, group in by_width.items()
        )

    most = []
    for index, effect in enumerate(effects):
        live = 0
        for target in following[index]:
            live |= live_in[target]
        peak = units(live)
        for kills, uses, defines in reversed(effect):
            peak = max(peak, units(live | defines))
            live = (live & ~kills) | uses
            peak = max(peak, units(live))
        most.append(peak)
    return most


# -- The estimate --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoopResources:
    """The loop with the most products, without the loops around it."""

    registers: int
    code_bytes: int  # with everything that may run in it
    # Instructions that every round runs, by their kind; an inner loop's are its own.
    every_round: dict[str, int]
    inner_loops: list[dict[str, int]]  # that every round comes to: of one round of each


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """What a kernel is estimated to need."""

    registers: int
    uniform_registers: int
    code_bytes: int
    hot_loop: LoopResources | None


def estimate(blocks: list[list[Instruction]]) -> KernelResources:
    """The resources of one kernel, from its basic blocks."""
    blocks = fold_addresses(blocks)
    following = successors(blocks)
    uniform = uniform_registers(blocks)
    everything = {r for block in blocks for i in block for r in (*i.defines, *i.uses)}
    live = live_units(blocks, following, everything - uniform)
    live_uniform = live_units(blocks, following, uniform)

    def own(block: int) -> Iterator[Instruction]:
        """Its instructions that run in the kernel."""
        for i in blocks[block]:
            if not i.defines or not uniform.issuperset(i.defines):
                yield i

    def code_bytes(which: Iterable[int]) -> int:
        weights = (i.weight for block in which for i in own(block))
        return BYTES_PER_INSTRUCTION * sum(weights)

    def mix(which: Iterable[int]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for block in which:
            for i in own(block):
                counts[i.kind] += i.weight
        return {kind: counts[kind] for kind in sorted(counts) if counts[kind]}

    hot = None
    all_loops = loops(following)

    def products(loop: Loop) -> int:
        counted = (i for b in loop.blocks for i in own(b))
        return sum(i.kind == "products" for i in counted)

    # Of nested loops with the same products, the innermost.
    candidates = [(products(loop), -len(loop.blocks), loop) for loop in all_loops]
    if candidates:
        count, _, loop = max(candidates, key=lambda c: c[:2])
        if count:
            inner = [
                other
                for other in all_loops
                if other.blocks < loop.blocks and other.header != loop.header
            ]
            nested = frozenset().union(*(other.blocks for other in inner))
            hot = LoopResources(
                registers=_whole(max(live[b] for b in loop.blocks)),
                code_bytes=code_bytes(loop.blocks),
                every_round=mix(loop.always - nested),
                inner_loops=[
                    mix(other.always) for other in inner if other.header in loop.always
                ],
            )
    return KernelResources(
        registers=_whole(max(live)),
        uniform_registers=_whole(max(live_uniform)),
        code_bytes=code_bytes(range(len(blocks))),
        hot_loop=hot,
    )


def _whole(units: int) -> int:
    return -(-units // 2)
