"""The only place that knows differences between JAX versions (0.4.34 … newest).

Everything else of the package uses JAX through its stable public names and these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.ad_checkpoint
import jax.extend.core
from jax._src import compiler, dispatch, xla_bridge
from jax._src.interpreters import mlir as internal_mlir
from jax.core import ShapedArray
from jax.interpreters import batching, mlir
from jaxlib import xla_client

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
primitive: Any = jax.extend.core.Primitive

# jaxlib reads an optimised program back (as_text, cost_analysis) with its own parser,
# which was not made for the numbers that hosts with a newer XLA put into it.
READS_NEW_OPTIMIZED_PROGRAMS = jax.__version_info__ >= (0, 6, 2)

__all__ = [
    "READS_NEW_OPTIMIZED_PROGRAMS",
    "ShapedArray",
    "add_linear_algebra",
    "apply_primitive",
    "batching",
    "checkpoint_name",
    "ffi",
    "is_prng_key",
    "is_tracer",
    "lowering_platforms",
    "mlir",
    "primitive",
    "refuse_compiling_after_fork",
    "register_custom_call_handler",
    "register_failing_platform",
    "register_platform",
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
