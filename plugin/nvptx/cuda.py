"""The few calls of NVIDIA's driver library that running a kernel takes, by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


class CudaError(Exception):
    """A call of the driver failed; the message has its name and the error's."""


class DeviceMemory:
    """An allocation of exactly some bytes, so that a sanitizer sees its ends."""

    def __init__(self, gpu: Gpu, size_bytes: int) -> None:
        self._gpu = gpu
        self.size_bytes = size_bytes
        address = ctypes.c_uint64()
        gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self.address = address.value

    def fill(self, byte: int) -> None:
        """Sets every byte."""
        self._gpu.call(
            "cuMemsetD8_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_ubyte(byte),
            ctypes.c_size_t(self.size_bytes),
        )

    def copy_from(self, host_address: int, size_bytes: int) -> None:
        """Copies from host memory."""
        self._gpu.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(host_address),
            ctypes.c_size_t(size_bytes),
        )

    def copy_to(self, host_address: int, size_bytes: int) -> None:
        """Copies to host memory."""
        self._gpu.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(host_address),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(size_bytes),
        )

    def free(self) -> None:
        """Gives the memory back."""
        self._gpu.call("cuMemFree_v2", ctypes.c_uint64(self.address))


class Module:
    """A loaded cubin."""

    def __init__(self, gpu: Gpu, image: bytes) -> None:
        self._gpu = gpu
        self._module = ctypes.c_void_p()
        gpu.call("cuModuleLoadData", ctypes.byref(self._module), image)
        self._functions: dict[str, ctypes.c_void_p] = {}

    def function(self, name: str) -> ctypes.c_void_p:
        """A kernel by its name."""
        if name not in self._functions:
            function = ctypes.c_void_p()
            self._gpu.call(
                "cuModuleGetFunction",
                ctypes.byref(function),
                self._module,
                name.encode(),
            )
            self._functions[name] = function
        return self._functions[name]

    def write_global(self, name: str, data: bytes) -> None:
        """Writes to the start of a variable of the module."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._gpu.call(
            "cuModuleGetGlobal_v2",
            ctypes.byref(address),
            ctypes.byref(size),
            self._module,
            name.encode(),
        )
        if len(data) > size.value:
            raise CudaError(f"{name} has {size.value} bytes, but got {len(data)}")
        self._gpu.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))


class Gpu:
    """The first GPU and its primary context.

    Raises:
      CudaError: There is none.
    """

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no NVIDIA driver: {error}") from None
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name = name.value.decode()
        self.driver_version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function of the driver."""
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{function}: {(text.value or b'?').decode()} ({code})")

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: Sequence[int],
        num_threads: int,
        argument: ctypes.Structure | ctypes.Array[Any],
    ) -> None:
        """Starts a kernel that has one argument, a struct."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self.call(
            "cuLaunchKernel",
            function,
            *(ctypes.c_uint(n) for n in grid),
            *(ctypes.c_uint(n) for n in (num_threads, 1, 1)),
            ctypes.c_uint(0),
            None,
            pointers,
            None,
        )

    def synchronize(self) -> None:
        """Waits for every kernel; reports what went wrong in one."""
        self.call("cuCtxSynchronize")
