"""Which kernels calls of a shape class take instead of the variant table's defaults.

The native planner has the table and looks into it at every call, so a program that is
compiled already takes a new choice. This module is the only one that sets it; what is
measured, and kept between processes, is the business of tunings.py and autotuner.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_flash_metal.attention_library import (
    BACKWARD_OPERANDS,
    BACKWARD_RESULTS,
    FORWARD_OPERANDS,
    NUMPY_DTYPES,
    STATISTICS,
    Array,
    AttentionError,
    AttentionLibrary,
    CallShape,
    Problem,
    make_problem,
    make_tensor,
    sizes_of,
)
from jax_flash_metal.config import DIMS, AttentionConfig
from jax_flash_metal.variant_table import variants

# What can be chosen: forms of a pass, and the kernels of each in the order of their
# names in a choice. A pass is of the first form whose kernels it launches.
NO_FORM = "-"  # no other one is possible
FORMS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "forward": (
        (NO_FORM, ("attention_forward",)),
        (NO_FORM, ("attention_short_forward",)),
    ),
    "backward": (
        ("A", ("attention_backward_dq", "attention_backward_dkv")),
        ("B", ("attention_backward_dkv", "attention_backward_dq_product")),
        (NO_FORM, ("attention_short_dq", "attention_backward_dkv")),
    ),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one pass runs.

    Attributes:
      form: Of FORMS.
      kernels: Names in the library.
    """

    form: str
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.form}\t{','.join(self.kernels)}"

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Of str(choice)."""
        form, _, names = text.partition("\t")
        return cls(form, tuple(names.split(",")))


Key = tuple[str, str]  # a shape class as the planner names it, and a pass

# Guards the two while they change. Who forces a choice sees to it that nobody else
# forces one for the same class: kernel_proof.py and autotuner.py have locks of their
# own.
_lock = threading.RLock()
_measured: dict[Key, Choice] = {}
_forced: dict[Key, list[tuple[object, Choice | None]]] = {}  # the last of a key holds


def use(library: AttentionLibrary, choices: Mapping[Key, Choice]) -> None:
    """Takes these choices, and no others, from now on, in this process.

    Raises:
      AttentionError: The library has no such kernel, or it cannot take the class;
        nothing has changed.
    """
    with _lock:
        library.set_kernel_choices(_lines({**choices, **_in_force()}))
        _measured.clear()
        _measured.update(choices)


@contextlib.contextmanager
def forced(
    library: AttentionLibrary, key: Key, choice: Choice | None
) -> Iterator[None]:
    """Every call of the class and pass in this process takes the choice meanwhile.

    Args:
      library: Whose planner it is.
      key: Class and pass.
      choice: None: the table's defaults.

    Raises:
      AttentionError: As `use`.
    """
    # Threads may force the same class and not leave in the order in which they came.
    mine = (object(), choice)
    with _lock:
        _forced.setdefault(key, []).append(mine)
        try:
            _send(library)
        except AttentionError:
            _leave(key, mine)
            raise
    try:
        yield
    finally:
        with _lock:
            _leave(key, mine)
            _send(library)


def _leave(key: Key, mine: tuple[object, Choice | None]) -> None:
    _forced[key].remove(mine)
    if not _forced[key]:
        del _forced[key]


def _in_force() -> dict[Key, Choice | None]:
    return {key: choices[-1][1] for key, choices in _forced.items()}


def _send(library: AttentionLibrary) -> None:
    library.set_kernel_choices(_lines({**_measured, **_in_force()}))


def _lines(choices: Mapping[Key, Choice | None]) -> str:
    return "".join(
        f"{shape_class}\t{which}\t{choice}\n"
        for (shape_class, which), choice in sorted(choices.items())
        if choice is not None
    )


def choice_of(plan: Mapping[str, Any], which: str) -> Choice | None:
    """The choice that makes a plan what it is; None: nothing in it can be chosen.

    Args:
      plan: Of AttentionLibrary.plan or outline.
      which: Its pass.
    """
    templates = template_of()
    launched = {templates.get(name): name for name in plan["kernels"]}
    for form, kernels in FORMS.get(which, ()):
        if launched.keys() >= set(kernels):
            return Choice(form, tuple(launched[kernel] for kernel in kernels))
    return None


def is_short(names: Iterable[str]) -> bool:
    """Whether these are kernels for few queries."""
    return any(
        template_of().get(name, "").startswith("attention_short") for name in names
    )


def sums_in_parts(names: Iterable[str]) -> bool:
    """Whether a pass of these kernels makes the sums of dK and dV in parts."""
    return any(
        template_of().get(name) == "attention_backward_dkv_combine" for name in names
    )


@functools.cache
def template_of() -> dict[str, str]:
    """The first column of the variant table by the kernels' names."""
    return {v.host_name: v.kernel for v in variants()}


def rows_of(kernel: str, dtype: str, head_dim: int) -> list[str]:
    """Names of a kernel's rows that a call may take, in the order of the table.

    Those of the smallest head_dim that covers the call's, for any GPU family.
    """
    rows = [
        v
        for v in variants()
        if (v.kernel, v.dtype) == (kernel, dtype) and v.head_dim >= head_dim
    ]
    bucket = min((v.head_dim for v in rows), default=0)
    return [v.host_name for v in rows if v.head_dim == bucket]


def every_choice(
    which: str, dtype: str, head_dim: int, *, for_few_queries: bool
) -> list[Choice]:
    """Choices in which every row of exactly that head_dim occurs, of every form."""
    exact = {v.host_name for v in variants() if v.head_dim == head_dim}
    choices = []
    for form, kernels in FORMS.get(which, ()):
        rows = [rows_of(kernel, dtype, head_dim) for kernel in kernels]
        if not all(rows) or is_short(r[0] for r in rows) != for_few_queries:
            continue
        for i in range(max(len(r) for r in rows)):
            # Of a kernel with fewer rows the last one stands beside the others' rest.
            names = tuple(r[min(i, len(r) - 1)] for r in rows)
            if exact.intersection(names):
                choices.append(Choice(form, names))
    return choices


def problem_of(config: AttentionConfig, operands: Mapping[str, Any]) -> Problem:
    """A problem for AttentionLibrary.plan, with no memory.

    Args:
      config: Of the call.
      operands: By their names in AttentionOperands: anything with a shape and a dtype;
        None: not given.
    """
    options: dict[str, Any] = options_of(config)
    for name, x in operands.items():
        if x is not None:  # an array of offsets takes the place of the number
            options[name] = _phantom(x.shape, x.dtype)
    required: dict[str, Array] = {n: options.pop(n) for n in FORWARD_OPERANDS}
    problem = make_problem(required, **options)
    shape = CallShape.of(*required.values())
    batch = tuple(problem.batch_sizes[: problem.num_batch_dims])
    sizes = sizes_of(shape)
    for name in (*BACKWARD_OPERANDS, *BACKWARD_RESULTS):
        if name not in required:
            dtype = np.float32 if name in STATISTICS else NUMPY_DTYPES[shape.dtype]
            whole = (*batch, *(sizes[letter] for letter in DIMS[name]))
            setattr(problem, name, make_tensor(name, _phantom(whole, dtype), batch))
    return problem


def options_of(config: AttentionConfig) -> dict[str, Any]:
    """The static options, as attention_library.make_problem takes them."""
    return {
        "scale": config.scale,
        "is_causal": config.is_causal,
        "q_offset": config.q_offset,
        "sliding_window": config.sliding_window,
        "logits_soft_cap": config.logits_soft_cap,
        "dropout_rate": config.dropout_rate,
    }


def _phantom(shape: tuple[int, ...], dtype: Any) -> Array:
    """Has the strides of an array, and the memory of one element: not to be read."""
    dtype = np.dtype(dtype)
    strides = np.cumprod([dtype.itemsize, *(max(1, n) for n in shape[:0:-1])])[::-1]
    return np.lib.stride_tricks.as_strided(
        np.zeros(1, dtype), shape, tuple(int(n) for n in strides[: len(shape)])
    )
