"""Splits a call over the devices of a program that JAX partitions (jit with shardings).

Batch dimensions and heads stay split as the operands are; everything else of an operand
is brought together by the partitioner. A result that is a sum over something split is
summed over the devices. `lowering` asks; shard_map needs none of this.

The rules see positions in the program's list of devices, not the user's mesh: a
sharding says for each dimension which digits of a device's position choose the part.
The digits, those of a mixed-radix number, are the axes of a mesh of our own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_flash_metal import _jax_compat
from jax_flash_metal.config import DIMS

_SHARED = ""  # a dimension of size 1 where the call has more


class Value(NamedTuple):
    """An operand or a result: its name in DIMS and its shape in the program."""

    name: str
    shape: tuple[int, ...]


class Axis(NamedTuple):
    """One digit of a device's position."""

    size: int
    stride: int


# Per dimension of a value the digits that choose its part, the most significant first.
_Parts = tuple[tuple[Axis, ...], ...]


def lower(
    ctx: Any,
    call: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Any],
    operand_names: Sequence[str],
    result_names: Sequence[str],
) -> Any:
    """Lowers a call in a program for several devices.

    Args:
      ctx: The lowering rule's context.
      call: The call on one device's parts, from arrays to a list of arrays.
      operands: The rule's values.
      operand_names: Per operand, in DIMS.
      result_names: Per result.
    """
    plan = _Plan.of(
        [Value(n, a.shape) for n, a in zip(operand_names, ctx.avals_in, strict=True)],
        [Value(n, a.shape) for n, a in zip(result_names, ctx.avals_out, strict=True)],
    )
    num_devices = _jax_compat.num_partitions(ctx)
    devices = _jax_compat.partition_devices(ctx)

    def infer(_: Mesh, args: Any, results: Any) -> Any:
        grid = _Grid.of(num_devices, args)
        split = plan.choose([grid.parts(a.sharding, len(a.shape)) for a in args])
        return plan.shardings(grid.mesh(devices), split)[1]

    def partition(_: Mesh, args: Any, results: Any) -> Any:
        values = [*args, *results]
        grid = _Grid.of(num_devices, values)
        split = plan.choose([grid.parts(a.sharding, len(a.shape)) for a in values])
        mesh = grid.mesh(devices)
        arg_shardings, result_shardings = plan.shardings(mesh, split)
        sums = plan.sums(split)

        def part(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(map(_sum_over, call(*arrays), sums))

        return mesh, part, result_shardings, arg_shardings

    rule, sizes, whole = plan.shardy_rule()
    return _jax_compat.lower_partitioned(
        ctx, call, operands, partition, infer, rule, sizes, whole
    )


def typed(
    results: Sequence[Any],
    result_names: Sequence[str],
    operands: Sequence[Any],
    operand_names: Sequence[str],
) -> list[Any]:
    """The results' types, with how they are sharded where the operands' types say it.

    Args:
      results: Abstract values with shapes and dtypes.
      result_names: Per result, in DIMS.
      operands: Abstract values.
      operand_names: Per operand, in DIMS.
    """
    plan = _Plan.of(
        [Value(n, a.shape) for n, a in zip(operand_names, operands)],
        [Value(n, a.shape) for n, a in zip(result_names, results)],
    )
    axes: dict[str, Any] = {}
    for names, operand in zip(plan.operands, operands):
        for name, own in zip(names, _jax_compat.explicit_spec(operand)):
            if own is not None and (name in ("N", "K") or name.startswith("b")):
                axes.setdefault(name, own)

    def spec(names: Sequence[str]) -> list[Any]:
        chosen: list[Any] = []
        used: set[Any] = set()
        for name in names:
            own = axes.get(name)
            these = set(own) if isinstance(own, tuple) else {own}
            chosen.append(None if used & these else own)
            used |= these - {None}
        return chosen

    like = next((a for a in operands if _jax_compat.has_mesh(a)), operands[0])
    return [
        _jax_compat.result_type(like, result.shape, result.dtype, spec(names))
        for names, result in zip(plan.results, results)
    ]


def _sum_over(array: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    if not axes:
        return array
    wide = array.astype(np.promote_types(array.dtype, np.float32))
    summed: jax.Array = _sum_p.bind(wide, axes=tuple(map(_axis_name, axes)))
    return summed.astype(array.dtype)


def _lower_sum(ctx: Any, array: Any, *, axes: tuple[str, ...]) -> Any:
    def psum(a: jax.Array) -> jax.Array:
        with _jax_compat.without_mesh():
            total: jax.Array = _jax_compat.psum(a, axes)
        return total

    (aval,) = ctx.avals_in
    with _jax_compat.without_mesh():
        avals = [_jax_compat.ShapedArray(aval.shape, aval.dtype)]
        ctx = ctx.replace(avals_in=avals, avals_out=avals)
        return _jax_compat.mlir.lower_fun(psum, multiple_results=False)(ctx, array)


# jax.lax.psum, but not under the mesh of the user's jax.set_mesh: in some versions of
# JAX that one would get into the reduction's code, and XLA refuses it there.
_sum_p = _jax_compat.primitive("flash_attention_sum")
_sum_p.def_abstract_eval(lambda array, axes: array)
_jax_compat.mlir.register_lowering(_sum_p, _lower_sum)


def _axis_name(axis: Axis) -> str:
    return f"digit{axis.stride}"


class _Split(NamedTuple):
    """The digits that each splittable dimension of the call is split over."""

    axes: Mapping[str, tuple[Axis, ...]]

    def of(self, dimension: str) -> tuple[Axis, ...]:
        return self.axes.get(dimension, ())


class _Plan(NamedTuple):
    """What the rules need to know of a call.

    Attributes:
      operands, results: Per value the names of its dimensions: of the batch dimensions
        "b0", "b1", …, then those of DIMS, or _SHARED.
      sizes: Of each named dimension.
    """

    operands: list[tuple[str, ...]]
    results: list[tuple[str, ...]]
    sizes: dict[str, int]

    @classmethod
    def of(cls, operands: Sequence[Value], results: Sequence[Value]) -> _Plan:
        def names(value: Value) -> tuple[str, ...]:
            own = DIMS[value.name]
            rank = len(value.shape) - len(own)
            return (*(f"b{i}" for i in range(rank)), *own)

        sizes: dict[str, int] = {}
        for value in (*operands, *results):
            for name, size in zip(names(value), value.shape, strict=True):
                # Not the largest: a batch of none makes parts of size 1 none.
                if sizes.get(name, 1) == 1:
                    sizes[name] = size

        def full(value: Value) -> tuple[str, ...]:
            return tuple(
                name if size == sizes[name] else _SHARED
                for name, size in zip(names(value), value.shape)
            )

        return cls([full(v) for v in operands], [full(v) for v in results], sizes)

    def choose(self, parts: Sequence[_Parts]) -> _Split:
        """How to split the call, from how its operands (and results) are.

        The first value that has a dimension and is split there decides; the query
        comes first. A split that does not divide is cut short.
        """
        values = (*self.operands, *self.results)
        axes: dict[str, tuple[Axis, ...]] = {}
        used: set[Axis] = set()

        def wanted(dimension: str) -> tuple[Axis, ...]:
            for names, own in zip(values, parts):
                for name, digits in zip(names, own):
                    if name == dimension and digits:
                        return digits
            return ()

        def take(dimension: str, digits: tuple[Axis, ...]) -> None:
            axes[dimension] = digits
            used.update(digits)

        batch = sorted(name for name in self.sizes if name.startswith("b"))
        for dimension in batch:
            for digits in _prefixes(wanted(dimension), used):
                if self.sizes[dimension] % _count(digits) == 0:
                    take(dimension, digits)
                    break
        for digits in _prefixes(wanted("N") or wanted("K"), used):
            kv_digits = self._split_of_kv_heads(digits)
            if kv_digits is not None:
                take("N", digits)
                take("K", kv_digits)
                break
        return _Split(axes)

    def _split_of_kv_heads(self, digits: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
        """Of the key-value heads where the query heads are split so; None: not so.

        Every device needs whole groups, or part of the group of one key-value head.
        """
        num_heads, num_kv_heads = self.sizes["N"], self.sizes["K"]
        if num_heads % _count(digits) != 0:
            return None
        most = max(
            n for n in range(len(digits) + 1) if num_kv_heads % _count(digits[:n]) == 0
        )
        whole_groups = most == len(digits)
        one_group = _count(digits[:most]) == num_kv_heads
        return digits[:most] if whole_groups or one_group else None

    def shardings(
        self, mesh: Mesh, split: _Split
    ) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """Of the operands and of the results."""

        def sharding(names: tuple[str, ...]) -> NamedSharding:
            spec = (tuple(map(_axis_name, split.of(n))) or None for n in names)
            return NamedSharding(mesh, _jax_compat.partition_spec(*spec))

        return (
            tuple(map(sharding, self.operands)),
            tuple(map(sharding, self.results)),
        )

    def sums(self, split: _Split) -> list[tuple[Axis, ...]]:
        """Per result the digits over which each device has only a part of the sum."""
        used = {axis for axes in split.axes.values() for axis in axes}
        return [
            tuple(sorted(used - {axis for n in names for axis in split.of(n)}))
            for names in self.results
        ]

    def shardy_rule(self) -> tuple[str, dict[str, int], tuple[str, ...]]:
        """The same for Shardy, which only propagates: rule, sizes, unsplit factors.

        Query heads are the compound of key-value heads and the heads of a group.
        """
        num_heads, num_kv_heads = self.sizes["N"], self.sizes["K"]
        heads, sizes = "k", {}
        if num_kv_heads == 1:
            heads = "g"
        elif num_heads != num_kv_heads:
            heads = "(k g)"
            sizes = {"g": num_heads // num_kv_heads}
        unsplit: list[str] = []

        def factor(name: str, size: int) -> str:
            if name == "N":
                return heads
            if name == "K" and num_kv_heads > 1:
                return "k"
            if name.startswith("b"):
                return name
            # A factor of its own wherever nothing can be split.
            unsplit.append(f"{(name or 'one').lower()}{len(unsplit)}")
            return unsplit[-1]

        def factors(values: list[tuple[str, ...]]) -> str:
            return ", ".join(
                " ".join(factor(name, self.sizes.get(name, 1)) for name in names)
                for names in values
            )

        rule = f"{factors(self.operands)} -> {factors(self.results)}"
        return rule, sizes, tuple(unsplit)


def _prefixes(digits: tuple[Axis, ...], used: set[Axis]) -> list[tuple[Axis, ...]]:
    """The longest first, each at least one digit, none of them used."""
    free = next((i for i, d in enumerate(digits) if d in used), len(digits))
    return [digits[:n] for n in range(free, 0, -1)]


def _count(digits: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in digits)


class _Grid(NamedTuple):
    """Digits of the devices' positions, the most significant first, of prime sizes."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, num_devices: int, values: Sequence[Any]) -> _Grid:
        """Digits fine enough for all the shardings that agree with each other."""
        strides = {1, num_devices}
        for value in values:
            own = _blocks(value.sharding, len(value.shape))
            more = strides.union(
                *({a.stride, a.stride * a.size} for b in own for a in b)
            )
            ordered = sorted(more)
            if all(b % a == 0 for a, b in itertools.pairwise(ordered)):
                strides = more
        axes = []
        ordered = sorted(strides)
        for stride, following in itertools.pairwise(ordered):
            for size in _prime_factors(following // stride):
                axes.append(Axis(size, stride))
                stride *= size
        return cls(tuple(reversed(axes)))

    def parts(self, sharding: Any, rank: int) -> _Parts:
        """The digits of each dimension; none for what does not fit the grid."""
        parts = []
        for blocks in _blocks(sharding, rank):
            digits: list[Axis] = []
            for block in blocks:
                end = block.stride * block.size
                own = [a for a in self.axes if block.stride <= a.stride < end]
                if _count(own) != block.size or own[-1].stride != block.stride:
                    return ((),) * rank
                digits += own
            parts.append(tuple(digits))
        return tuple(parts[:rank]) + ((),) * (rank - len(parts))

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        shape = [axis.size for axis in self.axes]
        return Mesh(
            np.array(devices, object).reshape(shape), tuple(map(_axis_name, self.axes))
        )


def _blocks(sharding: Any, rank: int) -> list[list[Axis]]:
    """Per dimension the digits that choose its part, each as coarse as it can be.

    Empty for shardings of other kinds (replicated, manual, irregular).
    """
    tiles = _jax_compat.tile_assignment(sharding, rank)
    if tiles is None:
        return []
    total = np.zeros((), int)
    result = []
    for dimension in range(tiles.ndim):
        index: list[Any] = [0] * tiles.ndim
        index[dimension] = slice(None)
        line = tiles[tuple(index)]
        blocks: list[Axis] = []
        while line.size > 1:
            stride = int(line[1])
            size = next(
                (i for i in range(line.size) if line[i] != i * stride), line.size
            )
            if stride <= 0 or line.size % size:
                return []
            blocks.insert(0, Axis(size, stride))
            line = line[::size]
        result.append(blocks)
        total = np.add.outer(total, _values(blocks))
    return result if np.array_equal(total, tiles) else []


def _values(blocks: Sequence[Axis]) -> np.ndarray:
    """Positions along a dimension with these digits."""
    values = np.zeros(1, int)
    for axis in blocks:
        values = np.add.outer(values, np.arange(axis.size) * axis.stride).ravel()
    return values


def _prime_factors(n: int) -> list[int]:
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors
