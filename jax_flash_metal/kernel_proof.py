"""Proof of each kernel at its first use: does it compute the right numbers here?

Asked when a program is lowered and by `explain`, before a kernel is trusted. A kernel
runs one tiny case (kernel_cases.py) against the definition; the verdict is kept in
memory and in a file of the cache folder, per device, system, package version and text
of the kernels. One that fails is not used: lowering takes the reference and warns.
Uses no JAX: it runs inside JAX's lowering. Where an earlier proof did not come to its
end, the kernel may have crashed that process, so it is proven in one of its own:

    python -m jax_flash_metal.kernel_proof CASE LIBRARY

The CPU kernels are proven in the same way: they may be wrong on a processor that nobody
has tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal import crashes, kernel_cases, kernel_choices, platforms
from jax_flash_metal._version import __version__
from jax_flash_metal.attention_library import (
    DTYPES,
    AttentionError,
    AttentionLibrary,
    Problem,
)
from jax_flash_metal.config import Backend
from jax_flash_metal.kernel_cases import KernelCase, Verdict
from jax_flash_metal.kernel_choices import Choice
from jax_flash_metal.variant_table import row_head_dim

_logger = logging.getLogger(__name__)

WHAT_TO_DO = (
    "Please run `python -m jax_flash_metal doctor --report report.txt`, which tests "
    "the kernels again, and attach report.txt to an issue of jax-flash-metal."
)


class KernelWarning(UserWarning):
    """A call takes the reference because the kernels cannot be used.

    They failed their proof, there is no device or no native library, or JAX's older
    partitioner would end the process.
    """


def objection(
    backend: Backend,
    problem: Problem,
    which: str,
    has_features: bool,
    plan: Mapping[str, Any] | None = None,
) -> str | None:
    """Why a pass of a call must not take the kernels, as a clause; None: it may.

    The first question about a kernel runs its proof.

    Args:
      backend: Which kernels.
      problem: Of the call: as the planner sees it, whose kernels may be those of its
        class (tunings.prove_rows).
      which: The pass, among attention_library.PASSES.
      has_features: Whether the call has any optional operand, a window, a softcap or
        dropout. Such a call needs the proof with all of them at once, too.
      plan: Of the pass (of "gradient": the backward pass), as
        AttentionLibrary.outline gives it; None: that of now.

    Raises:
      platforms.LibraryError: There is no library.
    """
    return _proofs(backend).objection(problem, which, has_features, plan)


def missing_device(backend: Backend) -> str | None:
    """Why no call at all can take the kernels here, as a clause; proves nothing.

    Raises:
      platforms.LibraryError: There is no library.
    """
    return _proofs(backend).missing_device


def family(backend: Backend) -> str:
    """What the device is one of: of the CPU kernels, the instruction set they use.

    Raises:
      platforms.LibraryError: There is no library.
    """
    return _proofs(backend).family


def prove(case: KernelCase) -> dict[str, Verdict]:
    """The verdicts of a case, by KernelCase.keys, for whoever wants to use its kernels.

    Runs it unless they are known. They hold for all calls.

    Raises:
      platforms.LibraryError: There is no library.
      AttentionError: No kernels take the case.
    """
    return _proofs(case.backend).prove(case)


def known_failure(choice: Choice, has_features: bool) -> str | None:
    """What is known to be wrong with a choice of Metal kernels, as a clause.

    None: nothing is. Runs nothing.

    Args:
      choice: The kernels, and their form: of another form's verdicts none counts, nor
        does one of sums in parts, which few of its calls make.
      has_features: Of the calls that take it, as `objection` has it: without, kernels
        may be wrong with options.

    Raises:
      platforms.LibraryError: There is no library.
    """
    return _proofs("metal").known_failure(choice, has_features)


def warn(reason: str, advice: str = WHAT_TO_DO) -> None:
    """Warns of an objection, of each once per process."""
    with _warned_lock:
        if reason in _warned:
            return
        _warned.add(reason)
    warnings.warn(
        f"jax_flash_metal: {reason}. Such calls take the reference, which is "
        f"right, but slower and with memory for q_len * kv_len scores. {advice}",
        KernelWarning,
        stacklevel=2,
    )


def replace(backend: Backend, verdicts: Mapping[str, Verdict]) -> None:
    """Takes new verdicts in place of what is known of these kernels, for `doctor`."""
    _proofs(backend).add(verdicts)


_warned: set[str] = set()
_warned_lock = threading.Lock()


_proofs_lock = threading.Lock()


def _proofs(backend: Backend) -> _Proofs:
    with _proofs_lock:  # programs are lowered on several threads
        return _only_proofs(backend)


@functools.cache
def _only_proofs(backend: Backend) -> _Proofs:
    library = AttentionLibrary(platforms.load_library(), backend=backend)
    return _Proofs(library, backend)


class _Proofs:
    """The verdicts on one backend's kernels of a library, on its device."""

    def __init__(self, library: AttentionLibrary, backend: Backend = "metal") -> None:
        self._library, self._backend = library, backend
        self._lock = threading.RLock()
        self._verdicts: dict[str, Verdict] = {}
        self._path: Path | None = None
        self.missing_device: str | None = None
        try:
            identity = _identity(library)
        except AttentionError as error:
            self.missing_device = _clause(
                f"the kernels have no device to run on: {error}"
            )
            return
        folder = platforms.cache_folder()
        if folder is not None:
            digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
            self._path = folder / "proofs" / f"{digest[:32]}.json"
        self._identity = identity
        self._verdicts = self._read()

    @property
    def family(self) -> str:
        return "" if self.missing_device else str(self._identity["family"])

    def objection(
        self,
        problem: Problem,
        which: str,
        has_features: bool = False,
        plan: Mapping[str, Any] | None = None,
    ) -> str | None:
        if self.missing_device is not None:
            return self.missing_device
        try:
            keys, cases = self._asked(problem, which, has_features, plan)
        except AttentionError:
            return None  # no fault of a kernel's: the call's own error says it better
        with self._lock:
            for key in keys:
                if key not in self._verdicts:
                    self._prove(key, cases)
                verdict = self._verdicts[key]
                if verdict.failure is not None:
                    where = f"on {self._identity['name']}"
                    if verdict.is_transient:
                        where += " in this process"
                    return _clause(
                        f"the kernel {key} is disabled {where}: {verdict.failure}"
                    )
        return None

    def prove(self, case: KernelCase) -> dict[str, Verdict]:
        with self._lock:
            own = case.keys(self._library)
            keys = [key for name, key in own.items() if case.judges(name)]
            if not self._verdicts.keys() >= set(keys):
                self.add(self._check(keys[0], case))
            return {key: v for key, v in self._verdicts.items() if key in keys}

    def known_failure(self, choice: Choice, has_features: bool) -> str | None:
        with self._lock:
            for key, verdict in self._verdicts.items():
                if verdict.failure is not None and _is_of(key, choice, has_features):
                    return f"the kernel {key} is disabled: {verdict.failure}"
        return None

    def add(self, verdicts: Mapping[str, Verdict]) -> None:
        with self._lock:
            self._verdicts.update(verdicts)
            self._write()

    def _asked(
        self,
        problem: Problem,
        which: str,
        has_features: bool,
        plan: Mapping[str, Any] | None = None,
    ) -> tuple[list[str], list[KernelCase]]:
        """What must be proven for the pass, in the order of its launches; cases for it.

        Planned at most once: of many launches a plan takes seconds.
        """
        planned_pass = "backward" if which == "gradient" else which
        if plan is None:
            # Where the kernels take no such call, its error comes from here.
            plan = self._library.outline(problem, planned_pass)
        dtype = _DTYPE_NAMES[problem.dtype]
        if self._backend == "cpu":
            cases = kernel_cases.cpu_cases(dtype)
            keys = [
                key
                for case in cases
                if case.which == which and (has_features or not case.has_options)
                for key in case.keys(self._library).values()
            ]
            return keys, cases
        row = row_head_dim(dtype, max(problem.head_dim, problem.value_head_dim))
        # Large problems and measured ones may take other kernels than the tiny cases.
        choice = kernel_choices.choice_of(plan, planned_pass)
        cases = [
            dataclasses.replace(case, choice=_choice_of(case, choice))
            if case.which == planned_pass
            else case
            for case in kernel_cases.cases_of(dtype, row)
        ]
        names: list[str] = plan["kernels"]
        is_short = kernel_choices.is_short(names)
        plain = next(
            case
            for case in cases
            if (case.which, case.is_short) == (planned_pass, is_short)
            and not case.has_options
        )
        kernels = {kernel_cases.kernel_of(name) for name in names}
        keys = []
        if which != "gradient":
            own = plain.keys(self._library)
            keys += [own[name] for name in names if name in own]
        if which == "backward" and kernel_choices.sums_in_parts(names):
            grouped = next(case for case in cases if case.is_grouped)
            keys += [
                key
                for name, key in grouped.keys(self._library).items()
                if kernel_cases.kernel_of(name) in (_SUM, _COMBINE)
            ]
        if has_features:
            keys += [
                key
                for case in cases
                if case.which == which and case.has_options
                if which == "gradient" or case.is_short == is_short
                for name, key in case.keys(self._library).items()
                if which == "gradient"
                or kernel_cases.kernel_of(name) in {*kernels, "attention_mask_blocks"}
            ]
        return list(dict.fromkeys(keys)), cases

    def _case_of(self, key: str, cases: Sequence[KernelCase]) -> KernelCase:
        """The case that judges what the key says."""
        if self._backend == "metal":
            cases = [*cases, *kernel_cases.shared_cases()]
        return next(
            case
            for case in cases
            for name, own in case.keys(self._library).items()
            if own == key and case.judges(name)
        )

    def _form_a(self, case: KernelCase) -> KernelCase | None:
        """The case in form A, if it is not; None: it has no other form."""
        if not kernel_cases.has_form_b(case.kernels(self._library)):
            return None
        return dataclasses.replace(case, choice=str(Choice("A", ())))

    def _prove(self, key: str, cases: Sequence[KernelCase]) -> None:
        case = self._case_of(key, cases)
        _logger.debug("proving %s by %s", key, case)
        found = self._check(key, case)
        # There dQ does not go through the kernel of dK and dV. If one of them is right,
        # so is what both need, which calls need that do without the other one.
        other = None if key in found else self._form_a(case)
        if other is not None and key in other.keys(self._library).values():
            _logger.debug("proving %s by %s", key, other)
            found |= self._check(key, other)
        if key not in found:
            others = "; ".join(f"{n}: {v.failure}" for n, v in found.items())
            failure = f"it could not be tested, for another kernel failed: {others}"
            found[key] = Verdict(None, failure, is_transient=True)
        # A verdict that is there stays: another case gave it.
        self.add(found | self._verdicts)

    def _check(self, name: str, case: KernelCase) -> dict[str, Verdict]:
        """Runs the case, here unless it may crash.

        Metal may end a process that misuses it, and the next one must not run into the
        same. So a mark in the cache folder says that the kernel is being tested. Who
        finds one knows that another process is at it, or has not come to its end: it
        may have been killed, so that this alone says nothing of the kernel.
        """
        if self._path is None:
            return kernel_cases.check(self._library, case)
        mark = self._path.with_suffix(f".{name}{_MARK}")
        if any(self._path.parent.glob(f"{self._path.stem}.*{_MARK}")):
            keys = list(case.keys(self._library).values())
            tested = _check_in_a_process(case, keys)
            if tested is not None:
                found, came_to_its_end = tested
                if came_to_its_end:
                    _remove(mark)
                return found
        try:
            with contextlib.suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            return kernel_cases.check(self._library, case)
        finally:
            _remove(mark)

    def _read(self) -> dict[str, Verdict]:
        """What other processes found; nothing if the file is not there or not ours."""
        try:
            text = self._path.read_text() if self._path else ""
            content = json.loads(text) if text else {}
            if content.get("identity") != self._identity:
                return {}
            return {
                str(name): Verdict(fields["error"], fields["failure"])
                for name, fields in content["verdicts"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _logger.info("the proofs in %s cannot be read: %s", self._path, error)
            return {}

    def _write(self) -> None:
        """Keeps the verdicts for other processes, if that is possible."""
        if self._path is None:
            return
        kept = self._read() | {
            name: verdict
            for name, verdict in self._verdicts.items()
            if not verdict.is_transient
        }
        verdicts = {
            name: {"error": verdict.error, "failure": verdict.failure}
            for name, verdict in sorted(kept.items())
        }
        content = {"identity": self._identity, "verdicts": verdicts}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place: another process reads the old file or the new one.
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, delete=False
            ) as file:
                try:
                    json.dump(content, file, indent=1)
                    file.flush()
                    os.replace(file.name, self._path)
                except BaseException:
                    _remove(Path(file.name))
                    raise
        except OSError as error:
            _logger.info("the proofs are not kept: %s", error)


_DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
# The sums of dK and dV, and that of their parts.
_SUM, _COMBINE = "attention_backward_dkv", "attention_backward_dkv_combine"


def _choice_of(case: KernelCase, choice: Choice | None) -> str:
    """The part of a call's choice that a case of its pass can take."""
    if choice is None:
        return ""
    if kernel_choices.is_short(choice.kernels) == case.is_short:
        return str(choice)
    if case.is_grouped:
        # Few queries have sums in parts, too, by the same kernel, which writes no score
        # gradient.
        sums = [n for n in choice.kernels if kernel_cases.kernel_of(n) == _SUM]
        return str(Choice("A", tuple(sums)))
    return ""


def _is_of(key: str, choice: Choice, has_features: bool) -> bool:
    """Whether a verdict under the key is one on what all calls with the choice run."""
    name = kernel_cases.kernel_of_key(key)
    if name not in choice.kernels or (" with options" in key and not has_features):
        return False
    if " in parts" in key:  # who knows the call asks for it (tunings.disproof)
        return False
    is_form_b = " of form B" in key
    return kernel_cases.kernel_of(name) != _SUM or is_form_b == (choice.form == "B")


def _clause(text: str) -> str:
    """Without the full stop that an error may end with."""
    return text.rstrip(".")


_MARK = ".running"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _identity(library: AttentionLibrary) -> dict[str, Any]:
    """What the verdicts hold for; raises AttentionError where there is no device."""
    facts = library.device_facts()
    file = platforms.LIBRARY.stat()
    return {
        **{key: facts.get(key) for key in ("device", "name", "family", "system")},
        "package": __version__,
        "kernels": library.kernel_digest(),
        # A library that was built anew has the same version: of use to developers.
        "library": [file.st_size, file.st_mtime_ns],
    }


# -- In a process of its own -----------------------------------------------------------

# Seconds; it takes one or two. macOS is documented to end what hangs on the GPU.
_TIME_LIMIT = 120


def _check_in_a_process(
    case: KernelCase, keys: Sequence[str]
) -> tuple[dict[str, Verdict], bool] | None:
    """kernel_cases.check, and whether the process came to its end.

    None: no process can be started here that does it.
    """
    if not sys.executable or hasattr(sys, "frozen"):  # an application's own executable
        return None
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(case))]
    try:
        done = subprocess.run(
            [*command, str(platforms.LIBRARY)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIME_LIMIT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        failure = f"its test did not end within {_TIME_LIMIT} s"
        return dict.fromkeys(keys, Verdict(None, failure, is_transient=True)), False
    except OSError as error:
        _logger.info("a kernel cannot be tested in another process: %s", error)
        return None
    if done.returncode < 0:
        failure = f"its test {crashes.ending(done.returncode)}"
        is_transient = not crashes.is_crash(done.returncode)
        return dict.fromkeys(keys, Verdict(None, failure, is_transient)), False
    try:
        found = json.loads(done.stdout.rpartition(_SEPARATOR)[2])
    except ValueError:
        _logger.info("a kernel cannot be tested in another process: %s", done.stderr)
        return None
    return {name: Verdict(**fields) for name, fields in found.items()}, True


_SEPARATOR = "\0"  # of what others may print, and the verdicts


def main() -> None:
    fields, path = sys.argv[1:]
    case = KernelCase(**json.loads(fields))
    library = AttentionLibrary(platforms.load_library(Path(path)), backend=case.backend)
    found = kernel_cases.check(library, case)
    verdicts = {name: dataclasses.asdict(verdict) for name, verdict in found.items()}
    print(_SEPARATOR, json.dumps(verdicts), sep="")


if __name__ == "__main__":
    main()
