"""What the autotuner has measured on this machine: kept in a file, used by calls.

Read once, when a program with Metal kernels is first lowered or explained, and handed
to the native planner. Nothing is measured here: that is autotuner.py, on request only.
Uses no JAX: it runs inside JAX's lowering. For users: docs/autotune.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_flash_metal import kernel_cases, kernel_choices, kernel_proof, platforms
from jax_flash_metal._version import __version__
from jax_flash_metal.attention_library import (
    FORWARD_OPERANDS,
    AttentionError,
    AttentionLibrary,
    CallShape,
    Problem,
    shape_problem,
)
from jax_flash_metal.config import AttentionConfig, AttentionOperands, full_batch
from jax_flash_metal.kernel_choices import FORMS, NO_FORM, Choice
from jax_flash_metal.lowering import KERNEL_PLATFORMS
from jax_flash_metal.variant_table import row_head_dim

_logger = logging.getLogger(__name__)

# "off": what is stored is not used.
SETTING = "JAX_FLASH_METAL_AUTOTUNE"
# Why nothing is measured then.
OFF = f"{SETTING} says that nothing measured is used; unset it."

# The unfused form is taken only where it wins clearly and its memory is no surprise.
UNFUSED_GAIN = 1.05
MAX_SCORES_BYTES = 64 << 20


# Forms of a Timing that is of no single pass.
WHOLE_CALLS = ("fused", "unfused")


class TuningWarning(UserWarning):
    """What was measured earlier cannot be used, or what was measured not be kept."""


# -- One class -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """One candidate.

    Attributes:
      which: The pass: "forward", "backward", or "forward+backward" of a whole call.
      form: Of kernel_choices.FORMS; of a whole call "fused" or "unfused".
      kernels: Names of those that were chosen.
      seconds: Median time of a call; None: not measured.
      failure: Why not, as a clause.
    """

    which: str
    form: str
    kernels: tuple[str, ...]
    seconds: float | None
    failure: str | None = None

    @property
    def label(self) -> str:
        """For the reader."""
        whole = f"{self.which} {self.form}" if self.form in WHOLE_CALLS else self.which
        return " + ".join(self.kernels) or whole


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The kernels that one pass takes from now on.

    Attributes:
      form: Of kernel_choices.FORMS.
      kernels: Their names.
      seconds: Of a call.
      default_seconds: Of a call with the table's default rows, measured in turn.
    """

    form: str
    kernels: tuple[str, ...]
    seconds: float
    default_seconds: float

    @property
    def choice(self) -> Choice:
        return Choice(self.form, self.kernels)

    @property
    def gain(self) -> float:
        """How many times as fast as the default."""
        return self.default_seconds / self.seconds


@dataclasses.dataclass(frozen=True)
class Unfused:
    """Whole jitted calls, by the kernels and by the reference.

    Attributes:
      platform: The JAX platform that they ran on; holds for no other.
      seconds: Of the reference, by "forward" and "forward+backward".
      fused_seconds: Of the chosen kernels, likewise.
    """

    platform: str
    seconds: dict[str, float]
    fused_seconds: dict[str, float]

    @property
    def gain(self) -> float:
        """How many times as fast a training step's part is by the reference."""
        which = "forward+backward"
        return self.fused_seconds[which] / self.seconds[which]

    @property
    def is_taken(self) -> bool:
        """Whether gradients of calls without `implementation` take the reference.

        Not on a platform where they take no Metal kernels anyway.
        """
        default = next(iter(KERNEL_PLATFORMS.get(self.platform, ())), None)
        return default == "metal" and self.gain > UNFUSED_GAIN

    @property
    def is_taken_forward(self) -> bool:
        """Whether the calls themselves take it, too.

        Nobody knows yet whether a gradient will be asked for: it must be slower neither
        with one nor without.
        """
        slower = self.fused_seconds["forward"] > self.seconds["forward"]
        return self.is_taken and slower

    def is_taken_by(self, which: str) -> bool:
        """Whether that pass takes it."""
        return self.is_taken_forward if which == "forward" else self.is_taken


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What was measured of a shape class, and what follows.

    Attributes:
      shape_class: What the calls have in common that this holds for: dtype, head_dims,
        lengths and heads rounded up to powers of two, groups, options.
      created: When it was measured, in ISO 8601.
      device: Name of the device.
      forward: What the forward pass takes; None: not measured, the defaults.
      backward: Likewise.
      unfused: Against the reference; None: that was not measured.
      timings: All candidates, in the order of their measurement.
      origin: "measured" by this call of autotune, or "stored" by an earlier one.
    """

    shape_class: str
    created: str
    device: str
    forward: Chosen | None
    backward: Chosen | None
    unfused: Unfused | None
    timings: tuple[Timing, ...]
    origin: str = dataclasses.field(default="stored", compare=False)

    def choices(self) -> dict[kernel_choices.Key, Choice]:
        passes = {"forward": self.forward, "backward": self.backward}
        return {
            (self.shape_class, which): chosen.choice
            for which, chosen in passes.items()
            if chosen is not None
        }

    def without(self, which: str) -> Tuning:
        """Where a pass takes the table's rows; whole calls were measured with others.

        The other pass keeps its own: programs may run them, whose proof was of these.
        """
        passes: dict[str, Any] = {which: None}
        return dataclasses.replace(self, **passes, unfused=None)

    def __str__(self) -> str:
        lines = [f"{self.shape_class} on {self.device} ({self.origin} {self.created})"]
        for which in ("forward", "backward"):
            chosen: Chosen | None = getattr(self, which)
            if chosen is None:
                lines.append(f"  {which}: not measured, the table's defaults")
                continue
            count = len(
                {
                    timing.kernels
                    for timing in self.timings
                    if timing.which == which and timing.form not in WHOLE_CALLS
                    if timing.seconds is not None
                }
            )
            rows = describe(which, chosen.choice)
            lines.append(
                f"  {rows}: {_duration(chosen.seconds)}, the default "
                f"{_duration(chosen.default_seconds)} ({count} measured)"
            )
        if self.unfused is not None:
            which = "forward+backward"
            lines.append(
                f"  whole call, {which}: {_duration(self.unfused.fused_seconds[which])}"
                f" by the kernels, {_duration(self.unfused.seconds[which])} unfused"
                + self._verdict()
            )
        lines += [
            f"  left out: {timing.label}: {timing.failure}"
            for timing in self.timings
            if timing.failure is not None
        ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.unfused is None or not self.unfused.is_taken:
            return ""
        if self.unfused.is_taken_forward:
            return ": unfused is taken"
        return ": unfused is taken by the gradient, the forward pass is slower by it"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def describe(which: str, choice: Choice) -> str:
    """A pass and its rows of the variant table, without what a call says itself."""
    rows = []
    for name in choice.kernels:
        template = kernel_choices.template_of().get(name, "")
        row = name.removeprefix(f"{template}_").partition("_")[2]
        part = template.removeprefix("attention_").removeprefix(f"{which}_")
        part = part.removesuffix(f"_{which}")
        rows.append(row if part in (which, "") else f"{part} {row}")
    form = "" if choice.form == NO_FORM else f" form {choice.form}"
    return f"{which}{form} {' + '.join(rows)}"


def _as_json(tuning: Tuning) -> dict[str, Any]:
    fields = dataclasses.asdict(tuning)
    del fields["origin"]
    return fields


def _from_json(fields: Any) -> Tuning:
    """Of what _as_json made, and of nothing else.

    Raises:
      ValueError: It is no tuning.
    """

    def chosen(which: str) -> Chosen | None:
        value = fields[which]
        if value is None:
            return None
        _demand_keys(value, Chosen)
        kernels = _names(value["kernels"])
        forms = [form for form, _ in FORMS[which]]
        if value["form"] not in forms or not kernels:
            raise ValueError(f"{_short(value)} chooses no kernels")
        seconds = (_positive(value[s]) for s in ("seconds", "default_seconds"))
        return Chosen(value["form"], kernels, *seconds)

    def whole_calls(value: Any) -> dict[str, float]:
        passes = ("forward", "forward+backward")
        if not isinstance(value, dict) or value.keys() != set(passes):
            raise ValueError(f"{_short(value)} has no times of whole calls")
        return {which: _positive(value[which]) for which in passes}

    def compared(value: Any) -> Unfused | None:
        if value is None:
            return None
        _demand_keys(value, Unfused)
        times = (whole_calls(value[name]) for name in ("seconds", "fused_seconds"))
        return Unfused(_name(value["platform"]), *times)

    def timing(value: Any) -> Timing:
        _demand_keys(value, Timing)
        seconds, failure = value["seconds"], value["failure"]
        return Timing(
            _name(value["which"]),
            _name(value["form"]),
            _names(value["kernels"]),
            None if seconds is None else _positive(seconds),
            None if failure is None else _text(failure),
        )

    _demand_keys(fields, Tuning, but="origin")
    return Tuning(
        shape_class=_name(fields["shape_class"]),
        created=_name(fields["created"]),
        device=_text(fields["device"]),
        forward=chosen("forward"),
        backward=chosen("backward"),
        unfused=compared(fields["unfused"]),
        timings=tuple(map(timing, _list(fields["timings"]))),
    )


def _demand_keys(value: Any, record: Any, but: str = "") -> None:
    names = {field.name for field in dataclasses.fields(record)} - {but}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"{_short(value)} is no {record.__name__}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{_short(value)} is no list")
    return value


def _text(value: Any) -> str:
    """Can be printed: a file may have halves of characters."""
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is no text")
    value.encode()
    return value


def _name(value: Any) -> str:
    """Has no tabs and line breaks: the planner reads them."""
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
        raise ValueError(f"{_short(value)} is no name")
    return value


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(_name, _list(value)))


def _positive(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared before it is converted: an integer may be too large.
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"a time must be positive, but got {_short(value)}")
    return float(value)


def _short(value: Any) -> str:
    """ASCII, for a warning that can be printed."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 60


# -- The file --------------------------------------------------------------------------

_SCHEMA = 1
_CONTENT = {"schema", "identity", "tunings"}
# Of waiting for another process, which holds the lock for milliseconds.
_LOCK_SECONDS = 10.0


class Store:
    """The file of one device, system, package version and text of the kernels.

    Attributes:
      path: None: there is no cache folder, and nothing is kept.
    """

    def __init__(self, identity: Mapping[str, Any], folder: Path | None) -> None:
        self._identity = dict(identity)
        self.path: Path | None = None
        if folder is not None:
            text = json.dumps(self._identity, sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()
            self.path = folder / f"{digest[:32]}.json"

    def read(self) -> dict[str, Tuning]:
        """By shape class. A file that cannot be read stays as it is, with a warning."""
        try:
            return self._read()
        except Exception as error:  # whatever is in it: calls must not fail for it
            _warn(
                f"the measurements in {self.path} cannot be read, calls take the "
                f"table's defaults: {type(error).__name__}: {error}. Delete the file, "
                "or tune again: that keeps it as .corrupt."
            )
            return {}

    def _read(self) -> dict[str, Tuning]:
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        if not isinstance(content, dict) or content.keys() != _CONTENT:
            raise ValueError("it has other contents")
        if content["schema"] != _SCHEMA or content["identity"] != self._identity:
            raise ValueError("it is of another schema or device")
        return {
            shape_class: _from_json({"shape_class": shape_class, **fields})
            for shape_class, fields in content["tunings"].items()
        }

    def add(self, tuning: Tuning) -> dict[str, Tuning]:
        """Keeps it beside what is there by now; returns everything.

        Under a lock of the system, so that of two processes neither loses what it has
        measured; then renamed into place, so that readers need no lock. Where that is
        not possible nothing is written, with a warning.

        Raises:
          ValueError: It could not be read again.
        """
        _from_json(json.loads(json.dumps(_as_json(tuning))))
        if self.path is None:
            return {tuning.shape_class: tuning}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                try:
                    kept = self._read()
                except OSError:
                    raise
                except Exception:  # as in `read`
                    os.replace(self.path, self.path.with_suffix(".corrupt"))
                    kept = {}
                kept[tuning.shape_class] = tuning
                self._write(kept)
                return kept
        except OSError as error:
            _warn(
                f"what was measured of {tuning.shape_class} is used in this process, "
                f"but not kept for others: {type(error).__name__}: {error}"
            )
            return {tuning.shape_class: tuning}

    def _write(self, tunings: Mapping[str, Tuning]) -> None:
        assert self.path is not None
        by_class = {}
        for shape_class, tuning in sorted(tunings.items()):
            fields = _as_json(tuning)
            del fields["shape_class"]
            by_class[shape_class] = fields
        content = {
            "schema": _SCHEMA,
            "identity": self._identity,
            "tunings": by_class,
        }
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, delete=False, encoding="utf-8"
        ) as file:
            try:
                json.dump(content, file, indent=1)
                file.flush()
                os.replace(file.name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(file.name).unlink()
                raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes; the system frees a dead one's.

    Raises:
      OSError: The file system has no locks, or another process keeps this one.
    """
    import fcntl

    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    text = f"another process has locked {path} for too long"
                    raise TimeoutError(text) from error
            time.sleep(0.01)
        yield


# -- This process ----------------------------------------------------------------------

_lock = threading.RLock()
_in_use: dict[str, Tuning] | None = None  # by shape class; None: not loaded yet


_warned: set[str] = set()


def _warn(text: str) -> None:
    """Of each once per process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"jax_flash_metal: {text}", TuningWarning, stacklevel=3)


def is_off() -> bool:
    """Whether the user's setting says that nothing stored is used."""
    return os.environ.get(SETTING, "").strip().lower() in ("off", "0", "no", "false")


def _folder() -> Path | None:
    folder = platforms.cache_folder()
    return None if folder is None else folder / "autotune"


@functools.cache
def library() -> AttentionLibrary:
    """Raises platforms.LibraryError: there is none."""
    return AttentionLibrary(platforms.load_library())


def store() -> Store:
    """The device's.

    Raises:
      platforms.LibraryError: There is no library.
      AttentionError: There is no device.
    """
    facts = library().device_facts()
    identity = {
        **{key: facts.get(key) for key in ("device", "name", "family", "system")},
        "package": __version__,
        "kernels": library().kernel_digest(),
    }
    return Store(identity, _folder())


def load() -> Mapping[str, Tuning]:
    """What is in use in this process, by shape class; the first call reads the file.

    Without a file it costs no more than looking for one: no device is opened.
    """
    global _in_use
    with _lock:
        if _in_use is None:
            _in_use = {}
            folder = _folder()
            try:
                if is_off() or folder is None or not any(folder.glob("*.json")):
                    return _in_use
                _use(store().read())
            except (platforms.LibraryError, AttentionError, OSError) as error:
                _logger.info("nothing stored is used: %s", error)
        return _in_use


def keep(tuning: Tuning) -> None:
    """Stores it; the next call of its class, of compiled programs too, goes by it."""
    with _lock:
        known = load()
        # Where nothing can be kept, other classes are known to this process alone.
        _use({**known, **store().add(tuning)})


def _use(tunings: Mapping[str, Tuning]) -> None:
    """Hands the planner what holds: it must know the kernels, and none is disabled."""
    global _in_use
    kept: dict[str, Tuning] = {}
    choices: dict[kernel_choices.Key, Choice] = {}
    for shape_class, tuning in tunings.items():
        features = _has_features(shape_class)
        for (_, which), choice in tuning.choices().items():
            failure = kernel_proof.known_failure(choice, features)
            if failure is not None:
                _logger.info("%s, %s: %s", shape_class, which, failure)
                tuning = tuning.without(which)
        own = tuning.choices()
        if not own:
            continue
        try:
            kernel_choices.use(library(), {**choices, **own})
        except AttentionError as error:
            _warn(f"what was measured of {shape_class} is not used: {error}")
            continue
        kept[shape_class] = tuning
        choices |= own
    kernel_choices.use(library(), choices)
    _in_use = kept


def prove_rows(
    config: AttentionConfig,
    operands: Mapping[str, Any],
    which: str,
    *,
    has_features: bool,
) -> Problem:
    """Loads what is stored, and proves the rows that the pass of a call takes by it.

    Asked before the kernels' own proof when a program is lowered. If one fails, the
    pass takes the table's rows for the class, with a warning.

    Args:
      config: Of the call.
      operands: By name: shapes and dtypes.
      which: The pass; "gradient" has nothing that can be chosen.
      has_features: Of the call, as kernel_proof.objection takes it.

    Returns:
      The call as kernel_proof.objection must see it: one that takes the rows of its
      class. Where those are the table's, its shape says as much. To plan that is quick,
      while the launches for each of many batch elements may take seconds.

    Raises:
      platforms.LibraryError: There is no library.
    """
    tunings = load()
    shape = CallShape.of(*(operands[name] for name in FORWARD_OPERANDS))
    plain = shape_problem(shape)
    if not tunings:
        return plain
    problem = kernel_choices.problem_of(config, operands)
    try:
        found = tunings.get(_class_of(problem))
        if found is None:
            # Without its batch and options it may be of a class that takes other rows.
            return problem if _class_of(plain) in tunings else plain
        key = (found.shape_class, which)
        chosen = found.choices().get(key)
        if chosen is None:
            return problem
        kernels = library().outline(problem, which)["kernels"]
    except AttentionError:
        return problem  # the call's own error says it better
    failure = disproof(
        shape,
        which,
        chosen,
        has_features=has_features,
        in_parts=kernel_choices.sums_in_parts(kernels),
    )
    if failure is None:
        return problem
    with _lock:
        known = load()
        now = known.get(found.shape_class)
        # Another thread may have found it, too, or measured anew.
        if now is not None and now.choices().get(key) == chosen:
            _warn(
                f"what was measured of the {which} pass of {found.shape_class} is not "
                f"used: {failure}. To measure it anew, pass again=True to autotune."
            )
            _use({**known, found.shape_class: now.without(which)})
    return problem


def disproof(
    shape: CallShape, which: str, choice: Choice, *, has_features: bool, in_parts: bool
) -> str | None:
    """What the tiny cases of the kernels find wrong with a choice, as a clause.

    What they find holds for all calls.

    Args:
      shape: Of a call that is to take it.
      which: The pass.
      choice: Its kernels.
      has_features: Of the call, as kernel_proof.objection takes it.
      in_parts: Whether the call makes the sums of dK and dV in parts, by this choice.

    Raises:
      platforms.LibraryError: There is no library.
    """
    row = row_head_dim(shape.dtype, max(shape.head_dim, shape.value_head_dim))
    is_short = kernel_choices.is_short(choice.kernels)
    for case in kernel_cases.cases_of(shape.dtype, row):
        is_ours = (case.which, case.is_short) == (which, is_short)
        if not is_ours or (case.has_options and not has_features):
            continue
        if case.is_grouped and not in_parts:
            continue
        try:
            found = kernel_proof.prove(dataclasses.replace(case, choice=str(choice)))
        except AttentionError as error:
            return str(error).rstrip(".")
        for name, verdict in found.items():
            if verdict.failure is not None:
                return f"the kernel {name} is disabled: {verdict.failure}"
    return None


def unfused_reason(
    config: AttentionConfig,
    operands: Mapping[str, Any],
    platform: str,
    which: str = "forward",
) -> str | None:
    """Why a pass takes the reference although the kernels cover it, as a clause.

    None: it takes the kernels. Asked when a program is lowered, so unlike the kernels'
    rows this is fixed in compiled programs.

    Args:
      config: Of the call.
      operands: By name: shapes and dtypes.
      platform: The JAX platform.
      which: The pass. The forward one takes it only where the others do, too.
    """
    if config.implementation is not None:
        return None
    tunings = load()
    if not any(t.unfused is not None and t.unfused.is_taken for t in tunings.values()):
        return None
    scores = scores_bytes(operands)
    if scores > MAX_SCORES_BYTES:
        return None
    try:
        found = tunings.get(shape_class_of(config, operands))
    except AttentionError:
        return None  # the call's own error says it better
    unfused = found.unfused if found is not None else None
    if unfused is None or unfused.platform != platform:
        return None
    if not unfused.is_taken_by(which):
        return None
    both = "forward+backward"
    return (
        f"measured on this machine, forward and backward take "
        f"{_duration(unfused.seconds[both])} by the reference, which keeps "
        f"{scores / 2**20:.3g} MiB of scores, and "
        f"{_duration(unfused.fused_seconds[both])} by the kernels"
    )


def describe_call(
    config: AttentionConfig, operands: AttentionOperands
) -> tuple[str, str]:
    """The rows and forms that the call's passes take, and where they come from.

    Both empty where that is not known.

    Args:
      config: Of the call.
      operands: Shapes and dtypes.

    Raises:
      platforms.LibraryError: There is no library.
    """
    found = load()
    passes = ("forward", "backward")
    try:
        problem = kernel_choices.problem_of(config, operands._asdict())
        plans = {which: library().outline(problem, which) for which in passes}
    except AttentionError:
        return "", ""
    choices = {w: kernel_choices.choice_of(plan, w) for w, plan in plans.items()}
    rows = "; ".join(describe(w, c) for w, c in choices.items() if c is not None)
    plan = plans["forward"]
    if "measured" in (p["origin"] for p in plans.values()):
        return rows, _describe_measured(found.get(plan["class"]))
    if plan["family"]:
        family = f"Apple GPU family {plan['family']}"
        return rows, f"modelled: the table's for {family}, not measured here"
    return rows, "default: the table's, not measured here"


def _describe_measured(tuning: Tuning | None) -> str:
    if tuning is None:  # chosen by somebody else
        return "measured"
    gains = [
        f"{which} {chosen.gain:.2f}"
        for which in ("forward", "backward")
        if (chosen := getattr(tuning, which)) is not None
    ]
    when = tuning.created.partition("T")[0]
    return f"measured {when}, times as fast as the default: {', '.join(gains)}"


def _has_features(shape_class: str) -> bool:
    """Of the calls of a class, as lowering.has_features has it of a call."""
    options = shape_class.split()[_NUM_SIZES:]
    return any(option != "causal" for option in options)


_NUM_SIZES = 7  # words of a class that all have: "float16 d64 v64 q64 k64 n16 g2"


def shape_class_of(config: AttentionConfig, operands: Mapping[str, Any]) -> str:
    """The planner's name for calls like this one.

    Raises:
      platforms.LibraryError: There is no library.
      AttentionError: No kernels take the call.
    """
    return _class_of(kernel_choices.problem_of(config, operands))


def _class_of(problem: Problem) -> str:
    shape_class: str = library().outline(problem, "forward")["class"]
    return shape_class


def scores_bytes(operands: Mapping[str, Any]) -> int:
    """What the reference keeps of q_len * kv_len scores, in float32."""
    query, key = operands["query"].shape, operands["key"].shape
    pairs = math.prod(full_batch(operands)) * int(query[-2])
    return 4 * pairs * int(query[-3]) * int(key[-3])
