"""JAX platform flash_metal: our PJRT plugin over a host plugin, registered with JAX.

JAX imports this module and calls `initialize` in every process that starts a backend
and has the package installed (entry point group jax_plugins). So importing it is
light, and `initialize` does nothing unless the platform is wanted: off macOS, when
jax_platforms (JAX_PLATFORMS) names flash_metal; on macOS also when it names nothing
and there is a host plugin.

The settings are environment variables, read when the platform starts:

    JAX_FLASH_METAL_HOST          the host plugin: the path of its library, or the name
                                  of a known one (hosts.py); default: the first of these
                                  that is installed and fits the installed jax
    JAX_FLASH_METAL_HOST_BUFFERS  auto, address or copy: how the kernels reach the
                                  host's buffers; default: auto

What is done with programs and buffers is in plugin/pjrt and partition.py.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

# Importing jax_flash_metal.* here would run in every process, see above.
if TYPE_CHECKING:
    from jax_flash_metal.plan import HostProfile

PLATFORM = "flash_metal"
# Above those of others: 400 unless they ask for another, as jax-metal does, for 500. Of
# two with the same the first that is registered would be JAX's default.
PRIORITY = 600

ProgramTransform = Callable[[bytes], "bytes | None"]

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_started = False
# The native library calls it for as long as the process lives, so it must too.
_callback: Any = None
_program_transform: ProgramTransform | None = None


class PluginError(RuntimeError):
    """The platform cannot start; a sentence that says what to do."""


def initialize() -> None:
    """Registers the platform if it is wanted; never raises, never warns.

    A platform that was asked for by name and cannot start is registered all the same,
    so that JAX's error has our sentence: an exception from here would only be logged.
    """
    import jax

    names = (jax.config.jax_platforms or "").split(",")  # type: ignore[attr-defined]
    is_named = PLATFORM in names
    if not is_named and (names != [""] or sys.platform != "darwin"):
        return
    try:
        start()
    except Exception as error:
        if not is_named:
            _logger.info("platform %s does not start: %s", PLATFORM, error)
            return
        from jax_flash_metal import _jax_compat

        expected = isinstance(error, RuntimeError)
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        _jax_compat.register_failing_platform(PLATFORM, message)


def start() -> None:
    """Loads the host plugin and registers the platform; only the first call does.

    Raises:
      RuntimeError: It cannot (LibraryError, HostError, PluginError); JAX is as before.
    """
    global _callback, _started
    from jax_flash_metal import _jax_compat, hosts, platforms

    with _lock:
        if _started:
            return
        library = platforms.load_library(platforms.LIBRARY)
        host = hosts.find()
        flags = 0
        if not _jax_compat.READS_NEW_OPTIMIZED_PROGRAMS:
            flags |= _HIDE_OPTIMIZED_PROGRAM
        targets = _Targets(library)
        if _callback is None:
            _callback = _PartitionFunction(_Partitioner(library))
            # JAX compiles on threads of its own, and Ctrl-C does not wait for them: the
            # end of the interpreter in the midst of a call would crash the process.
            atexit.register(library.jfm_pjrt_stop_partitioning)
        _call(
            library.jfm_pjrt_configure,
            ctypes.c_char_p(os.fsencode(host.path)),
            ctypes.c_char_p(PLATFORM.encode()),
            ctypes.c_char_p(hosts.buffers().encode()),
            ctypes.c_int(flags),
            _callback,
        )
        _jax_compat.register_platform(
            PLATFORM, str(platforms.LIBRARY), host.options, PRIORITY
        )
        # JAX hands over what was registered before, and from now on all that comes.
        _jax_compat.register_custom_call_handler(
            PLATFORM, targets.register, targets.register_type
        )
        targets.is_replay = False
        _jax_compat.add_linear_algebra(PLATFORM)
        _jax_compat.refuse_compiling_after_fork(
            PLATFORM,
            f"this process was forked from one in which the platform {PLATFORM} had "
            "started, and its threads did not come along; start worker processes "
            "before the first use of JAX, or by multiprocessing's 'spawn'.",
        )
        _started = True
        _logger.debug("platform %s runs over %s", PLATFORM, host.path)


def host_facts() -> dict[str, str]:
    """What the native library knows of the host that the platform runs over."""
    from jax_flash_metal import platforms

    text = _text(platforms.load_library().jfm_pjrt_host_facts)
    return dict(line.split("=", 1) for line in text.splitlines())


def set_program_transform(transform: ProgramTransform | None) -> None:
    """For tests: changes every program before it is partitioned; None: no more.

    The function gets and returns a program as JAX hands it to a PJRT plugin; None
    leaves it as it is. It runs inside compilation: no JAX calls in it.
    """
    global _program_transform
    from jax_flash_metal import platforms

    _program_transform = transform
    # Without that, programs that have no custom calls do not get here.
    platforms.load_library().jfm_pjrt_plan_every_program(transform is not None)


# -- Calls of the native library -------------------------------------------------------

_MAX_TEXT = 1 << 16
_HIDE_OPTIMIZED_PROGRAM = 1  # JFM_HIDE_OPTIMIZED_PROGRAM of plugin/pjrt/pjrt_c_api.h


def _call(function: Any, *arguments: Any) -> None:
    """Calls a function that ends in (char* error, size_t error_size).

    Raises:
      PluginError: It failed.
    """
    error = ctypes.create_string_buffer(_MAX_TEXT)
    if function(*arguments, error, ctypes.c_size_t(len(error))):
        raise PluginError(error.value.decode(errors="replace"))


def _text(function: Any) -> str:
    """What a function (char* text, size_t text_size) writes.

    Raises:
      PluginError: It failed.
    """
    text = ctypes.create_string_buffer(_MAX_TEXT)
    failed = function(text, ctypes.c_size_t(len(text)))
    result = text.value.decode(errors="replace")
    if failed:
        raise PluginError(result)
    return result


# -- Custom calls ----------------------------------------------------------------------

_STAGES = ("instantiate", "prepare", "initialize", "execute")


class _Targets:
    """Takes the custom-call targets and FFI types that JAX has for our platform.

    Attributes:
      is_replay: JAX hands over what was registered before the platform was there. An
        error then belongs to nobody's call, and must not stop the rest.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.is_replay = True

    def register(
        self,
        name: str | bytes,
        functions: Any,
        platform: str,
        api_version: int = 0,
        traits: int = 0,
    ) -> None:
        """`functions`: a capsule of the handler, or a mapping from stage to capsule."""
        if not isinstance(functions, Mapping):
            functions = {"execute": functions}
        encoded = name if isinstance(name, bytes) else name.encode()
        stages = [ctypes.c_void_p(_address(functions.get(stage))) for stage in _STAGES]
        self._register(
            self._library.jfm_pjrt_register_handler,
            ctypes.c_char_p(encoded),
            ctypes.c_size_t(len(encoded)),
            *stages,
            ctypes.c_int(int(api_version)),
            ctypes.c_uint(int(traits)),
        )

    def register_type(self, name: str, registration: Any) -> None:
        """`registration`: a capsule of the type's id, or a mapping with its facts."""
        if not isinstance(registration, Mapping):
            registration = {"type_id": registration}
        encoded = name.encode()
        self._register(
            self._library.jfm_pjrt_register_type,
            ctypes.c_char_p(encoded),
            ctypes.c_size_t(len(encoded)),
            ctypes.c_void_p(_address(registration["type_id"])),
            ctypes.c_void_p(_address(registration.get("type_info"))),
        )

    def _register(self, function: Any, *arguments: Any) -> None:
        try:
            _call(function, *arguments)
        except PluginError as error:
            if not self.is_replay:
                raise
            _logger.warning("platform %s: %s", PLATFORM, error)


# Prototypes of our own: ctypes.pythonapi's functions are everybody's.
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _address(capsule: Any) -> int | None:
    """What a capsule points to, whatever its name."""
    if capsule is None:
        return None
    address: int = _capsule_pointer(capsule, _capsule_name(capsule))
    return address


# -- Partitioning ----------------------------------------------------------------------

# JfmPartitionFunction of plugin/pjrt/pjrt_c_api.h: program, options, sink.
_PartitionFunction = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)
_UNCHANGED, _REWRITTEN, _PLAN, _ERROR = range(4)
# absl::StatusCode; CANCELLED makes the library send the interrupt again.
_CANCELLED, _INTERNAL = 1, 13
# jax-metal's. The mhlo ones are operations that JAX wrote so before composites.
_OLD_HOST_CALLS = frozenset(
    ("lapack_sgetrf", "Sharding", "mhlo.erf", "mhlo.topk", "mhlo.tan")
)


class _Partitioner:
    """Called by the native library, on any thread, for programs with custom calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(
        self,
        program: int,
        program_size: int,
        options: int | None,
        options_size: int,
        sink: int,
    ) -> None:
        try:
            kind, code, data = self._plan(
                ctypes.string_at(program, program_size),
                ctypes.string_at(options, options_size) if options else b"",
            )
        # ctypes would print any error and go on; so it becomes that of the compilation.
        except KeyboardInterrupt:
            kind, code, data = _ERROR, _CANCELLED, b"partitioning was interrupted"
        except BaseException as error:
            _logger.debug("partitioning failed", exc_info=True)
            message = f"partitioning failed: {type(error).__name__}: {error}"
            kind, code, data = _ERROR, _INTERNAL, message.encode()
        self._library.jfm_pjrt_reply(
            ctypes.c_void_p(sink),
            ctypes.c_int(kind),
            ctypes.c_int(code),
            ctypes.c_char_p(data),
            ctypes.c_size_t(len(data)),
        )

    def _plan(self, program: bytes, options: bytes) -> tuple[int, int, bytes]:
        """The reply to one program: kind, error code, data."""
        from jax_flash_metal import partition, plan

        transform = _program_transform
        changed = transform(program) if transform else None
        # From the library, which also has those registered through its own API.
        targets = _text(self._library.jfm_pjrt_registered_targets).splitlines()
        try:
            result = partition.plan_program(
                changed or program, options, self._host_profile(), targets
            )
        except plan.PartitionError as error:
            return _ERROR, error.code, str(error).encode()
        if isinstance(result, plan.Plan):
            return _PLAN, 0, plan.encode(result)
        if isinstance(result, plan.Rewritten):
            return _REWRITTEN, 0, result.program
        return (_REWRITTEN, 0, changed) if changed else (_UNCHANGED, 0, b"")

    def _host_profile(self) -> HostProfile:
        from jax_flash_metal import plan

        facts = host_facts()
        is_old = facts["old_host"] == "1"
        return plan.HostProfile(
            stablehlo_version=facts["stablehlo"] or None,
            legalize_composites=is_old,
            erase_sharding=is_old,
            custom_calls=_OLD_HOST_CALLS if is_old else None,
        )
