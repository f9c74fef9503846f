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
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_flash_metal import kernel_choices, kernel_proof, platforms
from jax_flash_metal._version import __version__
from jax_flash_metal.attention_library import AttentionError, AttentionLibrary
from jax_flash_metal.config import AttentionConfig, AttentionOperands, full_batch
from jax_flash_metal.kernel_choices import NO_FORM, Choice
from jax_flash_metal.lowering import KERNEL_PLATFORMS

_logger = logging.getLogger(__name__)

# "off": what is stored is not used.
SETTING = "JAX_FLASH_METAL_AUTOTUNE"

# The unfused form is taken only where it wins clearly and its memory is no surprise.
UNFUSED_GAIN = 1.05
MAX_SCORES_BYTES = 64 << 20


# Forms of a Timing that is of no single pass.
WHOLE_CALLS = ("fused", "unfused")


class TuningWarning(UserWarning):
    """What was measured earlier cannot be used: calls take the table's defaults."""


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
        """Whether calls without `implementation` take the reference for it.

        Not on a platform where they take no Metal kernels anyway.
        """
        default = next(iter(KERNEL_PLATFORMS.get(self.platform, ())), None)
        return default == "metal" and self.gain > UNFUSED_GAIN


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
                + (": unfused is taken" if self.unfused.is_taken else "")
            )
        lines += [
            f"  left out: {timing.label}: {timing.failure}"
            for timing in self.timings
            if timing.failure is not None
        ]
        return "\n".join(lines)


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


def _from_json(fields: Mapping[str, Any]) -> Tuning:
    """Raises ValueError, LookupError or TypeError: it is no tuning."""

    def chosen(value: Mapping[str, Any] | None) -> Chosen | None:
        if value is None:
            return None
        return Chosen(
            str(value["form"]),
            tuple(str(name) for name in value["kernels"]),
            _positive(value["seconds"]),
            _positive(value["default_seconds"]),
        )

    unfused = fields["unfused"]
    passes = ("forward", "forward+backward")
    return Tuning(
        shape_class=str(fields["shape_class"]),
        created=str(fields["created"]),
        device=str(fields["device"]),
        forward=chosen(fields["forward"]),
        backward=chosen(fields["backward"]),
        unfused=unfused
        and Unfused(
            str(unfused["platform"]),
            *(
                {which: _positive(unfused[name][which]) for which in passes}
                for name in ("seconds", "fused_seconds")
            ),
        ),
        timings=tuple(
            Timing(**{**timing, "kernels": tuple(timing["kernels"])})
            for timing in fields["timings"]
        ),
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"a time must be positive, but got {value!r}")
    return number


# -- The file --------------------------------------------------------------------------

_SCHEMA = 1
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
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            warnings.warn(
                f"jax_flash_metal: the measurements in {self.path} cannot be read, "
                f"calls take the table's defaults: {type(error).__name__}: {error}. "
                "Delete the file, or tune again: that keeps it as .corrupt.",
                TuningWarning,
                stacklevel=2,
            )
            return {}

    def _read(self) -> dict[str, Tuning]:
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        if content["schema"] != _SCHEMA or content["identity"] != self._identity:
            raise ValueError("it is of another schema or device")
        return {
            shape_class: _from_json({"shape_class": shape_class, **fields})
            for shape_class, fields in content["tunings"].items()
        }

    def add(self, tuning: Tuning) -> dict[str, Tuning]:
        """Keeps it beside what is there by now; returns everything.

        Under a lock of the system, so that of two processes neither loses what it has
        measured; then renamed into place, so that readers need no lock.
        """
        if self.path is None:
            return {tuning.shape_class: tuning}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                try:
                    kept = self._read()
                except (OSError, ValueError, LookupError, TypeError, AttributeError):
                    os.replace(self.path, self.path.with_suffix(".corrupt"))
                    kept = {}
                kept[tuning.shape_class] = tuning
                self._write(kept)
                return kept
        except OSError as error:
            _logger.info("what was measured is not kept: %s", error)
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
    """Alone among processes, if the file system can; the system frees a dead one's."""
    import fcntl

    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    _logger.info("%s cannot be locked: %s", path, error)
                    break
                if time.monotonic() > deadline:
                    _logger.info("%s is locked by another process", path)
                    break
            time.sleep(0.01)
        yield


# -- This process ----------------------------------------------------------------------

_lock = threading.RLock()
_in_use: dict[str, Tuning] | None = None  # by shape class; None: not loaded yet


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
            if is_off() or folder is None or not any(folder.glob("*.json")):
                return _in_use
            try:
                _use(store().read())
            except (platforms.LibraryError, AttentionError) as error:
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
    disabled = kernel_proof.failures("metal")
    kept: dict[str, Tuning] = {}
    choices: dict[kernel_choices.Key, Choice] = {}
    for shape_class, tuning in tunings.items():
        own = tuning.choices()
        wrong = [n for c in own.values() for n in c.kernels if n in disabled]
        if wrong:
            _logger.info("%s: %s is disabled: %s", shape_class, wrong[0], disabled)
            continue
        try:
            kernel_choices.use(library(), {**choices, **own})
        except AttentionError as error:
            warnings.warn(
                f"jax_flash_metal: what was measured of {shape_class} is not used: "
                f"{error}",
                TuningWarning,
                stacklevel=2,
            )
            continue
        kept[shape_class] = tuning
        choices |= own
    kernel_choices.use(library(), choices)
    _in_use = kept


def unfused_reason(
    config: AttentionConfig, operands: Mapping[str, Any], platform: str
) -> str | None:
    """Why a call takes the reference although the kernels cover it, as a clause.

    None: it takes the kernels. Asked when a program is lowered, so unlike the kernels'
    rows this is fixed in compiled programs.

    Args:
      config: Of the call.
      operands: By name: shapes and dtypes.
      platform: The JAX platform.
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
    if unfused is None or unfused.platform != platform or not unfused.is_taken:
        return None
    which = "forward+backward"
    return (
        f"measured on this machine, forward and backward take "
        f"{_duration(unfused.seconds[which])} by the reference, which keeps "
        f"{scores / 2**20:.3g} MiB of scores, and "
        f"{_duration(unfused.fused_seconds[which])} by the kernels"
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


def shape_class_of(config: AttentionConfig, operands: Mapping[str, Any]) -> str:
    """The planner's name for calls like this one.

    Raises:
      platforms.LibraryError: There is no library.
      AttentionError: No kernels take the call.
    """
    problem = kernel_choices.problem_of(config, operands)
    shape_class: str = library().outline(problem, "forward")["class"]
    return shape_class


def scores_bytes(operands: Mapping[str, Any]) -> int:
    """What the reference keeps of q_len * kv_len scores, in float32."""
    query, key = operands["query"].shape, operands["key"].shape
    pairs = math.prod(full_batch(operands)) * int(query[-2])
    return 4 * pairs * int(query[-3]) * int(key[-3])
