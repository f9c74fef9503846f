"""The kernels of native.py with the planner's choice forced."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from tests.support import native
from tests.support.inputs import make_arguments, make_inputs

_alive: list[Any] = []  # a problem points into its operands


@dataclasses.dataclass(frozen=True)
class Forced:
    """An implementation for kernel_check.py.

    Attributes:
      form: Of backward passes, "A" or "B"; "-": as the planner says.
      family: The GPU family whose rows are taken; -1: the device's.
      limit: Bytes of the score gradient in scratch, 0: the default.
      rows: Names of kernels to take instead of the family's.
      library: Another build; None: native.py's.
    """

    form: str = "-"
    family: int = -1
    limit: int = 0
    rows: tuple[str, ...] = ()
    library: ctypes.CDLL | None = None

    def run_forward(self, *operands, **options):
        with native.planning(**self._settings("forward", operands, options)):
            return native.run_forward(*operands, **options, library=self.library)

    def run_backward(self, *operands, **options):
        with native.planning(**self._settings("backward", operands, options)):
            return native.run_backward(*operands, **options, library=self.library)

    def run_gradient(self, of, *operands, **options):
        with native.planning(family=self.family, library=self.library):
            return native.run_gradient(of, *operands, **options, library=self.library)

    def plan(self, case, which="backward"):
        """Of a pass of a case, see AttentionLibrary.plan."""
        inputs, options = make_inputs(case), make_arguments(case)
        operands = inputs.operands
        if which == "backward":  # whose values do not matter
            operands = (*operands, *(2 * (inputs.dout, inputs.dlogsumexp)))
        with native.planning(**self._settings(which, operands, options)):
            problem = _problem(which, operands, options)
            return native.plan(problem, which, self.library)

    def _settings(self, which, operands, options):
        """Of native.planning, for a pass with these operands."""
        problem = _problem(which, operands, options)
        shape_class = native.plan(problem, which, self.library)["class"]
        form = self.form if which == "backward" else "-"
        is_forward = which == "forward"
        rows = [name for name in self.rows if ("_forward_" in name) == is_forward]
        return {
            "family": self.family,
            "choices": f"{shape_class}\t{which}\t{form}\t{','.join(rows)}",
            "score_gradient_limit": self.limit,
            "library": self.library,
        }


def _problem(which, operands, options):
    is_forward = which == "forward"
    names = native.FORWARD_OPERANDS if is_forward else native.BACKWARD_OPERANDS
    named = dict(zip(names, operands))
    problem = native.make_problem(named, **options)
    results = native.FORWARD_RESULTS if is_forward else native.BACKWARD_RESULTS
    _alive[:] = [operands, options, native.attach_results(problem, named, results)]
    return problem
