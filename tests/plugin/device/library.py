"""A library with the software Metal device, a file of kernels and no attention."""

from __future__ import annotations

import ctypes
import fcntl
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from plugin import build
from plugin.device.software import frontend

FOLDER = Path(__file__).parent
KERNELS = FOLDER / "kernels.metal"


class DeviceError(Exception):
    """The device's error; `code` as in plugin/status.h."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Constant(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("value", ctypes.c_int32),
    ]


class _Array(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("size_bytes", ctypes.c_size_t),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("constants", ctypes.POINTER(_Constant)),
        ("num_constants", ctypes.c_size_t),
        ("buffers", ctypes.POINTER(_Array)),
        ("num_buffers", ctypes.c_size_t),
        ("bytes", ctypes.POINTER(_Array)),
        ("num_bytes", ctypes.c_size_t),
        ("threadgroups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("repeats", ctypes.c_int32),
    ]


def build_library(flavour: str, output: Path, kernels: Path = KERNELS) -> Path:
    """Compiles the file of kernels, the device's sources and the driver."""
    request = build.Request(
        kernel_dir=FOLDER,
        only=None,
        head_dims=None,
        flavour=flavour,
        target=build.TARGETS[build.host_target()],
        cache=build.default_cache(),
    )
    machine = request.target.machine
    text = build.run_zig(frontend.preprocess_command(kernels))
    translation = frontend.translate(text, kernels.stem)
    assert not translation.errors, "\n".join(map(str, translation.errors))
    source = request.cache.text(translation.text, ".clcpp")
    registry = request.cache.text(frontend.registry([translation]), ".cc")
    compiled = output.with_suffix(".o")
    build.run_zig(frontend.compile_command(flavour, machine, source, compiled))
    device = [
        path
        for path in build.cpp_sources(request.target)
        if path.is_relative_to(build.ROOT / "plugin" / "device")
    ]
    sources = [*device, FOLDER / "driver.cc", registry]
    objects = [build.compile_cpp(request, path, FOLDER) for path in sources]
    return build.link(request, [compiled, *objects], output)


class TestDevice:
    """The device of one build of the library."""

    __test__ = False  # not a test case

    def __init__(self, flavour: str, kernels: Path = KERNELS) -> None:
        folder = Path(tempfile.mkdtemp(prefix="jfm_device_"))
        # The machine has few cores, and test processes start together.
        with open(Path(tempfile.gettempdir()) / "jfm_device_build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            output = folder / f"device_{flavour}.so"
            path = build_library(flavour, output, kernels)
        self.library = ctypes.CDLL(str(path))

    def set_threads(self, num_threads: int) -> None:
        """As jfm_set_threads of the C ABI."""
        self.library.jfm_test_set_threads(num_threads)

    def run(
        self,
        kernel: str,
        buffers: Mapping[int, np.ndarray],
        *,
        threadgroups: tuple[int, int, int] = (1, 1, 1),
        threads: tuple[int, int, int] = (32, 1, 1),
        constants: Mapping[int, bool | int] | None = None,
        values: Mapping[int, np.ndarray] | None = None,
        repeats: int = 1,
    ) -> None:
        """Dispatches a kernel. `buffers` by index, in place; `values` are copied."""
        table = [
            _Constant(index, 0 if isinstance(value, bool) else 1, int(value))
            for index, value in (constants or {}).items()
        ]
        arrays = [_array(index, array) for index, array in buffers.items()]
        blocks = [_array(index, array) for index, array in (values or {}).items()]
        launch = _Launch(
            kernel.encode(),
            *((_Constant * len(table))(*table), len(table)),
            *((_Array * len(arrays))(*arrays), len(arrays)),
            *((_Array * len(blocks))(*blocks), len(blocks)),
            *(threadgroups, threads, repeats),
        )
        message = ctypes.create_string_buffer(1024)
        code = self.library.jfm_test_run(ctypes.byref(launch), message, len(message))
        if code:
            raise DeviceError(code, message.value.decode())


def _array(index: int, array: np.ndarray) -> _Array:
    assert array.flags.c_contiguous
    return _Array(index, array.ctypes.data, array.nbytes)
