"""The only place that knows differences between JAX versions (0.4.34 … newest).

Everything else of the package uses JAX through its stable public names and these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.ad_checkpoint
import jax.extend.core
import numpy as np
from jax._src import compiler, dispatch, sharding_impls, xla_bridge
from jax._src.interpreters import mlir as internal_mlir
from jax.core import ShapedArray
from jax.experimental import custom_partitioning
from jax.interpreters import batching, mlir
from jaxlib import xla_client

_shardy_rules: Any = None
try:
    from jax._src import custom_partitioning_sharding_rule

    _shardy_rules = custom_partitioning_sharding_rule
except ImportError:  # before jax 0.5
    pass

# Untyped in JAX, hence Any. jax.ffi is a module since jax 0.5.
try:
    import jax.ffi

    ffi: Any = jax.ffi
except ImportError:
    import jax.extend.ffi

    ffi = jax.extend.ffi

# Runs one primitive outside jit. Not public, and not to be built from public parts: a
# plain jax.jit of the primitive calls itself without end under jax.disable_jit() and
# when jax_debug_nans looks for the operation that made a NaN.
apply_primitive: Any = dispatch.apply_primitive
checkpoint_name: Any = jax.ad_checkpoint.checkpoint_name
_custom_partitioning: Any = custom_partitioning.custom_partitioning
primitive: Any = jax.extend.core.Primitive
# Public, but untyped.
_clear_caches: Any = jax.clear_caches
partition_spec: Any = jax.sharding.PartitionSpec
psum: Any = jax.lax.psum

# jaxlib reads an optimised program back (as_text, cost_analysis) with its own parser,
# which was not made for the numbers that hosts with a newer XLA put into it.
READS_NEW_OPTIMIZED_PROGRAMS = jax.__version_info__ >= (0, 6, 2)

__all__ = [
    "READS_NEW_OPTIMIZED_PROGRAMS",
    "ShapedArray",
    "add_linear_algebra",
    "allow_in_shard_map",
    "apply_primitive",
    "batching",
    "checkpoint_name",
    "explicit_spec",
    "ffi",
    "has_mesh",
    "is_lost_to_gspmd",
    "is_prng_key",
    "is_tracer",
    "lower_partitioned",
    "lowering_platforms",
    "mlir",
    "note_kernel_program",
    "num_partitions",
    "partition_devices",
    "partition_spec",
    "primitive",
    "psum",
    "refuse_compiling_after_fork",
    "refuse_in_forked_process",
    "register_custom_call_handler",
    "register_failing_platform",
    "register_platform",
    "result_type",
    "tile_assignment",
    "vary_alike",
    "without_mesh",
]


def is_tracer(x: Any) -> bool:
    """Whether `x` is a value that is known only when the program runs."""
    return isinstance(x, jax.core.Tracer)


def is_prng_key(x: Any) -> bool:
    """Whether `x` is an array of new-style keys (`jax.random.key`)."""
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule is asked to lower for."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


# Registering a platform and its custom calls. JAX tells plugins to use xla_bridge and
# xla_client for it, which have no public names.


def register_platform(
    name: str, library: str, options: Mapping[str, Any], priority: int
) -> None:
    """Registers a PJRT plugin that lets JAX go on without it where nobody named it."""
    c_api = xla_bridge.register_plugin(
        name, library_path=library, options=options, priority=priority
    )
    # register_plugin makes every failure to start fatal for the process, and has JAX
    # print for every platform that it does not know itself that it is experimental.
    xla_bridge.register_backend_factory(
        name,
        xla_bridge._backend_factories[name].factory,
        priority=priority,
        fail_quietly=True,
        experimental=False,
        c_api=c_api,
    )
    # JAX leaves donation out of programs for platforms that are not listed here.
    donating = internal_mlir._platforms_with_donation
    if name not in donating:
        donating.append(name)


def register_failing_platform(name: str, message: str) -> None:
    """Registers a platform that JAX cannot start, for this reason."""

    def fail() -> Any:
        raise RuntimeError(message)

    xla_bridge.register_backend_factory(name, fail, fail_quietly=True)


def register_custom_call_handler(
    platform: str,
    register_target: Callable[..., None],
    register_type: Callable[[str, Any], None],
) -> None:
    """Sends the platform's custom-call targets and types to these functions."""
    # Types first: a handler whose state has an unknown type is refused.
    if hasattr(xla_client, "register_custom_type_handler"):  # since jax 0.5
        xla_client.register_custom_type_handler(platform, register_type)
    xla_client.register_custom_call_handler(platform, register_target)


def refuse_compiling_after_fork(platform: str, message: str) -> None:
    """Makes JAX raise instead of compiling for `platform` in forked processes.

    The plugin cannot: since jax 0.7, jaxlib compiles on threads of its own, which a
    forked process has not, and it would wait for them for ever.
    """

    def in_child() -> None:
        # Named so before and since jax 0.6.
        for name in ("backend_compile", "backend_compile_and_load"):
            if hasattr(compiler, name):
                setattr(compiler, name, _refusing(getattr(compiler, name)))

    def _refusing(compile_program: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(backend: Any, *args: Any, **kwargs: Any) -> Any:
            if backend.platform == platform:
                raise RuntimeError(message)
            return compile_program(backend, *args, **kwargs)

        return refuse

    os.register_at_fork(after_in_child=in_child)


_has_kernel_programs = False
_forked = False


def note_kernel_program() -> None:
    """To be told of every program with the Metal kernels; see `_after_fork`."""
    global _has_kernel_programs
    _has_kernel_programs = True


def _after_fork() -> None:
    """In the child: JAX compiles, and runs much, on threads that did not come along.

    What was compiled before is traced again, and then refused.
    """
    global _forked
    _forked = bool(xla_bridge._backends)
    if _forked and _has_kernel_programs:
        _clear_caches()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def refuse_in_forked_process() -> None:
    """Raises where JAX would wait for ever.

    Raises:
      RuntimeError: This process was forked from one that had started JAX.
    """
    if _forked:
        raise RuntimeError(
            "this process was forked from one that had used JAX, whose threads did not "
            "come along: it can neither compile nor run here; start worker processes "
            "before the first use of JAX, or by multiprocessing's 'spawn'."
        )


# Linear algebra that JAX can only lower for platforms that it knows (eigh, schur, …).


def add_linear_algebra(platform: str) -> None:
    """Lowers as for the CPU what JAX has no other rule for, and brings the handlers.

    jaxlib's LAPACK handlers are custom calls like any other; the private table of rules
    is the only place that says which primitives need them.
    """
    from jaxlib.cpu import _lapack

    cpu_rules: Mapping[Any, Any] = internal_mlir._platform_specific_lowerings["cpu"]
    for primitive_, rule in cpu_rules.items():
        if primitive_ not in internal_mlir._lowerings:
            # Wrapped in a record since jax 0.7 or so.
            rule = getattr(rule, "rule", rule)
            mlir.register_lowering(primitive_, rule, platform=platform)
    for name, handler in _lapack.registrations().items():
        if name.endswith("_ffi"):  # the others are not typed
            ffi.register_ffi_target(name, handler, platform=platform)


# Programs for several devices (sharding.py).


def num_partitions(ctx: Any) -> int:
    """Over how many devices JAX partitions the program; 1 also where it does not.

    Inside shard_map and pmap the program is one device's, or JAX partitions a rest of
    the mesh, which the custom call then does not take part in. Exported programs
    cannot take the rules with them.
    """
    axis_context = ctx.module_context.axis_context
    if ctx.module_context.lowering_parameters.for_export:
        return 1
    if isinstance(axis_context, sharding_impls.ShardingContext):
        return int(axis_context.num_devices)
    return 1


def partition_devices(ctx: Any) -> Sequence[Any]:
    """As many devices as the program has; in programs they only stand for positions."""
    context = ctx.module_context
    if context.axis_context.device_assignment is not None:
        return tuple(context.axis_context.device_assignment)
    return tuple(jax.devices(context.platforms[0]))[: context.axis_context.num_devices]


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context without the mesh of the user's `jax.set_mesh`."""
    if not hasattr(jax.sharding, "use_abstract_mesh"):  # before jax 0.7
        return contextlib.nullcontext()
    empty = jax.sharding.AbstractMesh((), ())
    context: contextlib.AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(
        empty
    )
    return context


def is_lost_to_gspmd(ctx: Any) -> bool:
    """Whether XLA's older partitioner would end the process because of a custom call.

    It does in a shard_map over some of the mesh's axes only.
    """
    axis_context = ctx.module_context.axis_context
    if getattr(jax.config, "jax_use_shardy_partitioner", True):
        return False
    if not isinstance(axis_context, sharding_impls.SPMDAxisContext):
        return False
    manual, sizes = axis_context.manual_axes, axis_context.mesh.shape
    return any(size > 1 for axis, size in sizes.items() if axis not in manual)


def tile_assignment(sharding: Any, rank: int) -> np.ndarray | None:
    """Positions of devices as [*parts of each dimension, copies]; None: not tiled."""
    if sharding is None:
        return None
    tiling = sharding._to_xla_hlo_sharding(rank)
    if tiling.is_replicated() or not tiling.is_tiled():
        return None
    if len(tiling.subgroup_types()) > 1:
        return None
    devices = np.asarray(tiling.tile_assignment_devices())
    tiles: np.ndarray = devices.reshape(tiling.tile_assignment_dimensions())
    return tiles


def lower_partitioned(
    ctx: Any,
    call: Callable[..., Any],
    operands: Sequence[Any],
    partition: Callable[..., Any],
    infer: Callable[..., Any],
    rule: str,
    sizes: Mapping[str, Any],
    unsplit: tuple[str, ...],
) -> Any:
    """Lowers `call` with rules for the partitioner; see jax's custom_partitioning."""
    partitioned: Any = _custom_partitioning(lambda *arrays: tuple(call(*arrays)))
    options: dict[str, Any] = {}
    if _shardy_rules is not None:
        parse: Any = _shardy_rules.str_to_sdy_sharding_rule
        if "need_replication_factors" in inspect.signature(parse).parameters:
            sizes = {**sizes, "need_replication_factors": unsplit}
        options["sharding_rule"] = parse(rule, **sizes)
    partitioned.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        **options,
    )
    context = ctx.module_context
    axis_context = dataclasses.replace(
        context.axis_context, device_assignment=tuple(partition_devices(ctx))
    )
    ctx = ctx.replace(module_context=context.replace(axis_context=axis_context))
    lower = mlir.lower_fun(partitioned, multiple_results=True)
    return lower(ctx, *operands)


def result_type(
    like: Any, shape: tuple[int, ...], dtype: Any, spec: Sequence[Any]
) -> ShapedArray:
    """The type of a result that varies over the manual axes that `like` varies over.

    Args:
      like: The type of an operand.
      shape: Of the result.
      dtype: Of the result.
      spec: Of the result, on the mesh of `like`: where axes are explicit, a type says
        how a value is sharded.
    """
    if not hasattr(like, "sharding"):
        return ShapedArray(shape, dtype)
    sharding = jax.sharding.NamedSharding(like.sharding.mesh, partition_spec(*spec))
    result: ShapedArray = like.update(
        shape=shape, dtype=dtype, weak_type=False, sharding=sharding
    )
    return result


def has_mesh(aval: Any) -> bool:
    """Whether a value's type knows of a mesh."""
    return hasattr(aval, "sharding") and not aval.sharding.mesh.empty


def explicit_spec(aval: Any) -> tuple[Any, ...]:
    """Per dimension the axes over which a value's type says that it is sharded."""
    spec = list(aval.sharding.spec) if hasattr(aval, "sharding") else []
    return (*spec, *[None] * (aval.ndim - len(spec)))


# shard_map's check of what is the same on all devices, and what gradients make of it.


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, all varying over the manual mesh axes that any of them varies over.

    So that JAX sums the gradient of one that did not vary.
    """
    cast = getattr(jax.lax, "pcast", None)
    if cast is not None:
        cast = functools.partial(cast, to="varying")
    else:  # before jax 0.8
        cast = getattr(jax.lax, "pvary", None)
    if cast is None:
        return list(arrays)
    varying = [_varying_axes(jax.typeof(a)) for a in arrays]
    every = frozenset().union(*varying)
    return [
        cast(a, tuple(sorted(every - axes))) if every - axes else a
        for a, axes in zip(arrays, varying)
    ]


def _varying_axes(aval: Any) -> frozenset[Any]:
    aval = getattr(aval, "manual_axis_type", None) or aval
    axes: frozenset[Any] = getattr(aval, "varying", getattr(aval, "vma", frozenset()))
    return axes


def allow_in_shard_map(*primitives: Any) -> None:
    """Gives the rules that shard_map wanted before it looked at types.

    JAX forgot that of `checkpoint_name`.
    """
    if jax.__version_info__ < (0, 6, 1):
        from jax._src.ad_checkpoint import name_p
        from jax.experimental import shard_map

        rules: Any = shard_map
        for primitive_ in (*primitives, name_p):
            rules.register_standard_check(primitive_)
            rules.register_standard_rewrite(primitive_)
