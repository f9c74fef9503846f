"""Kernels without JAX, one call each: the packaged C ABI; notes which have run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_flash_metal import attention_library, platforms
from jax_flash_metal.attention_library import (
    BACKWARD_OPERANDS,
    BACKWARD_RESULTS,
    FORWARD_OPERANDS,
    FORWARD_RESULTS,
    PASSES,
    STATISTICS,
    Array,
    AttentionLibrary,
    Problem,
    Tensor,
    attach_gradient,
    attach_results,
    make_problem,
    make_tensor,
)
from jax_flash_metal.attention_library import AttentionError as NativeError

__all__ = [
    "BACKWARD_OPERANDS",
    "BACKWARD_RESULTS",
    "FORWARD_OPERANDS",
    "FORWARD_RESULTS",
    "PASSES",
    "STATISTICS",
    "NativeError",
    "Problem",
    "Tensor",
    "attach_gradient",
    "attach_results",
    "make_problem",
    "make_tensor",
]

# Names of the kernels that calls through this module have run (variant_coverage.py).
used_kernels: set[str] = set()


class Recording(AttentionLibrary):
    """Notes which kernels have run."""

    def run(self, problem: Problem, which: str) -> None:
        super().run(problem, which)
        used_kernels.update(self.kernels(problem, which))


@functools.cache
def load(path: Path = platforms.LIBRARY) -> ctypes.CDLL:
    """The library (or another build of it) with the types of its functions."""
    return attention_library.declare(platforms.load_library(path))


def set_threads(num_threads: int, *, library: ctypes.CDLL | None = None) -> None:
    """Threads of the CPU kernels and the software device; 0 = one per CPU."""
    (library or load()).jfm_set_threads(num_threads)


def run_forward(
    *operands: Array, library: ctypes.CDLL | None = None, **arguments: Any
) -> tuple[Array, Array]:
    """See AttentionLibrary.run_forward."""
    return Recording(library or load()).run_forward(*operands, **arguments)


def run_backward(
    *operands: Array, library: ctypes.CDLL | None = None, **arguments: Any
) -> tuple[Array, Array, Array]:
    """See AttentionLibrary.run_backward."""
    return Recording(library or load()).run_backward(*operands, **arguments)


def run_gradient(
    of: str, *operands: Array, library: ctypes.CDLL | None = None, **arguments: Any
) -> Array:
    """See AttentionLibrary.run_gradient."""
    return Recording(library or load()).run_gradient(of, *operands, **arguments)


def call(function: str, problem: Problem, library: ctypes.CDLL | None = None) -> None:
    """Runs a pass by the name of its function; its error becomes a NativeError."""
    Recording(library or load()).run(problem, function.rpartition("_")[2])


def kernels(
    problem: Problem, which: str | bool, library: ctypes.CDLL | None = None
) -> list[str]:
    """Names of the kernels that a pass launches, each once, in order."""
    return AttentionLibrary(library or load()).kernels(problem, _pass(which))


def num_launches(problem: Problem, which: str | bool) -> int:
    """Launches of a pass."""
    return AttentionLibrary(load()).num_launches(problem, _pass(which))


def plan(
    problem: Problem, which: str | bool, library: ctypes.CDLL | None = None
) -> dict[str, Any]:
    """What a pass launches, see AttentionLibrary.plan."""
    return AttentionLibrary(library or load()).plan(problem, _pass(which))


@contextlib.contextmanager
def planning(
    *,
    family: int = -1,
    choices: str = "",
    score_gradient_limit: int = 0,
    max_launch_work: float = 0,
    library: ctypes.CDLL | None = None,
) -> Iterator[None]:
    """Plans are made with these settings meanwhile, and with the defaults after it.

    Args:
      family: Of the GPU; -1: the device's.
      choices: Lines as jfm_set_kernel_choices takes them.
      score_gradient_limit: Bytes; 0: the default.
      max_launch_work: Floating-point operations; 0: the default.
    """
    loaded = library or load()
    settings = AttentionLibrary(loaded)
    settings.set_kernel_choices(choices)
    settings.set_gpu_family(family)
    settings.set_score_gradient_limit(score_gradient_limit)
    loaded.jfm_set_max_launch_work(ctypes.c_double(max_launch_work))
    try:
        yield
    finally:
        settings.set_kernel_choices("")
        settings.set_gpu_family(-1)
        settings.set_score_gradient_limit(0)
        loaded.jfm_set_max_launch_work(ctypes.c_double(0))


def _pass(which: str | bool) -> str:
    """By its name, or whether it is the backward pass."""
    return which if isinstance(which, str) else PASSES[which]


def __getattr__(name: str) -> Recording:
    """`cpu`: the CPU kernels. Loaded when first asked for, as the functions above."""
    if name == "cpu":
        return Recording(load(), backend="cpu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
