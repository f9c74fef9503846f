"""A dylib for macOS, run in an emulator of its CPU: what needs no macOS but memory.

Loads the file as dyld would: segments, rebases, bindings, initialisers. The functions
that it imports from libSystem are a few lines of Python each, and one that is not here
is an error. No threads, no exceptions, no files. It shows that the linker's output
hangs together and that the code for this CPU computes what the code for others does; it
knows nothing of Metal.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import struct
from collections.abc import Callable
from pathlib import Path

import lief
import unicorn
from unicorn import arm64_const as arm64

PAGE = 0x4000
IMAGE, IMPORTS, HEAP, STACK = (n << 32 for n in (1, 2, 3, 4))
HEAP_BYTES, STACK_BYTES = 64 << 20, 1 << 20
IMPORT_BYTES = 16  # between the places of two imported symbols
RETURN_ADDRESS = IMPORTS  # nothing is there: running it ends a call
_REGISTERS = [getattr(arm64, f"UC_ARM64_REG_X{i}") for i in range(8)]


@dataclasses.dataclass(frozen=True)
class Jump:
    """What an imported function may return: code that returns to its caller instead."""

    address: int
    arguments: tuple[int, ...]


class EmulatedMac:
    """One loaded library.

    Attributes:
      opened: the paths that the library gave to dlopen.
      system: what dlsym finds: functions, by name, that take and give integers. None:
        dlopen fails already.
    """

    def __init__(self, path: Path) -> None:
        self.opened: list[str] = []
        self.system: dict[str, Callable[..., int | Jump]] | None = None
        self._cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._cpu.ctl_set_cpu_model(
            arm64.UC_CPU_ARM64_MAX
        )  # atomics, as an M1 has them
        self._places: dict[str, int] = {}
        self._functions: dict[int, Callable[..., int | Jump]] = {}
        self._next = HEAP
        self._failure: Exception | None = None
        for start, size in (
            (IMPORTS, 1 << 20),
            (HEAP, HEAP_BYTES),
            (STACK, STACK_BYTES),
        ):
            self._cpu.mem_map(start, size)
        self._cpu.hook_add(
            unicorn.UC_HOOK_CODE, self._imported, None, IMPORTS, IMPORTS + (1 << 20)
        )
        file = lief.MachO.parse(str(path))
        assert file is not None
        self._load(file.at(0))

    # -- Loading ---------------------------------------------------------------------

    def _load(self, image: lief.MachO.Binary) -> None:
        for segment in image.segments:
            size = -(-segment.virtual_size // PAGE) * PAGE
            self._cpu.mem_map(IMAGE + segment.virtual_address, size)
            self.write(IMAGE + segment.virtual_address, bytes(segment.content))
        for relocation in image.relocations:
            place = IMAGE + relocation.address
            self.write_word(place, IMAGE + self.word(place))
        for binding in image.bindings:
            if binding.has_symbol:
                name = str(binding.symbol.name)
                self.write_word(IMAGE + binding.address, self._place(name))
        self.exports = {
            str(symbol.name)[1:]: IMAGE + symbol.value
            for symbol in image.exported_symbols
        }
        sections = {section.name: section for section in image.sections}
        text = sections["__text"]
        self.code = range(
            IMAGE + text.virtual_address, IMAGE + text.virtual_address + text.size
        )
        initialisers = sections["__mod_init_func"]
        start = IMAGE + initialisers.virtual_address
        for place in range(start, start + initialisers.size, 8):
            self.run(self.word(place))

    def _place(self, symbol: str) -> int:
        """The address of an imported symbol; code there is what `_imported` does."""
        if symbol not in self._places:
            place = IMPORTS + IMPORT_BYTES * (1 + len(self._places))
            self._places[symbol] = place
            function = getattr(self, f"import{symbol}", None)
            if function is not None:
                self._functions[place] = function
        return self._places[symbol]

    # -- Running ---------------------------------------------------------------------

    def call(self, name: str, *arguments: int) -> int:
        """Calls an exported function."""
        return self.run(self.exports[name], *arguments)

    def run(self, address: int, *arguments: int) -> int:
        """Calls the function at an address: integers in, an integer out."""
        for register, value in zip(_REGISTERS, arguments):
            self._cpu.reg_write(register, value)
        self._cpu.reg_write(arm64.UC_ARM64_REG_SP, STACK + STACK_BYTES - PAGE)
        self._cpu.reg_write(arm64.UC_ARM64_REG_LR, RETURN_ADDRESS)
        try:
            self._cpu.emu_start(address, RETURN_ADDRESS)
        except unicorn.UcError as error:
            place = self._cpu.reg_read(arm64.UC_ARM64_REG_PC)
            raise RuntimeError(f"{error} at {place - IMAGE:#x} of the image") from error
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._cpu.reg_read(arm64.UC_ARM64_REG_X0)

    def _imported(self, cpu: unicorn.Uc, address: int, *_: object) -> None:
        if address == RETURN_ADDRESS:
            return
        try:
            if address not in self._functions:
                names = [n for n, place in self._places.items() if place == address]
                raise NotImplementedError(f"{names or hex(address)} is called")
            function = self._functions[address]
            values = [cpu.reg_read(register) for register in _REGISTERS]
            count = len(inspect.signature(function).parameters)
            result = function(*values[:count])
            if isinstance(result, Jump):
                for register, value in zip(_REGISTERS, result.arguments):
                    cpu.reg_write(register, value)
                cpu.reg_write(arm64.UC_ARM64_REG_PC, result.address)
                return
        except Exception as error:
            # It must not go through the emulator's C frames.
            self._failure = error
            cpu.emu_stop()
            return
        cpu.reg_write(arm64.UC_ARM64_REG_X0, result & (2**64 - 1))
        cpu.reg_write(arm64.UC_ARM64_REG_PC, cpu.reg_read(arm64.UC_ARM64_REG_LR))

    # -- Memory ----------------------------------------------------------------------

    def read(self, address: int, size: int) -> bytes:
        return bytes(self._cpu.mem_read(address, size))

    def write(self, address: int, content: bytes) -> int:
        self._cpu.mem_write(address, content)
        return address

    def word(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def write_word(self, address: int, value: int) -> None:
        self.write(address, struct.pack("<Q", value))

    def text(self, address: int) -> str:
        content = b""
        while b"\0" not in content:
            content += self.read(address + len(content), 1)
        return content[:-1].decode()

    def put(self, content: bytes) -> int:
        """New memory with this content."""
        return self.write(self.import_malloc(len(content)), content)

    # -- libSystem -------------------------------------------------------------------

    def import_malloc(self, size: int) -> int:
        place = self._next
        self._next += max(16, -(-size // 16) * 16)
        assert self._next <= HEAP + HEAP_BYTES
        return place

    def import_posix_memalign(self, target: int, alignment: int, size: int) -> int:
        place = self.import_malloc(size + alignment)
        self.write_word(target, -(-place // alignment) * alignment)
        return 0

    def import_free(self, place: int) -> int:
        return 0

    def import_memcpy(self, target: int, source: int, size: int) -> int:
        return self.write(target, self.read(source, size))

    import_memmove = import_memcpy

    def import_memset(self, target: int, value: int, size: int) -> int:
        return self.write(target, bytes([value & 0xFF]) * size)

    def import_memset_pattern16(self, target: int, pattern: int, size: int) -> int:
        content = self.read(pattern, 16) * (size // 16 + 1)
        return self.write(target, content[:size])

    def import_bzero(self, target: int, size: int) -> int:
        return self.write(target, bytes(size))

    def import_memcmp(self, a: int, b: int, size: int) -> int:
        left, right = self.read(a, size), self.read(b, size)
        return (left > right) - (left < right)

    def import_strlen(self, text: int) -> int:
        return len(self.text(text).encode())

    def import_strcmp(self, a: int, b: int) -> int:
        left, right = self.text(a), self.text(b)
        return (left > right) - (left < right)

    def import_zero(self) -> int:
        return 0

    import___cxa_atexit = import_zero
    import_pthread_mutex_lock = import_zero
    import_pthread_mutex_trylock = import_zero
    import_pthread_mutex_unlock = import_zero
    import_pthread_mutex_destroy = import_zero
    import_pthread_cond_broadcast = import_zero
    import_pthread_cond_destroy = import_zero
    import_pthread_self = import_zero  # there is one thread

    def import_pthread_mach_thread_np(self, thread: int) -> int:
        return 1

    def import_snprintf(self, target: int, size: int, form: int) -> int:
        """ "%s" alone. Arguments without a declared type are on the stack on macOS."""
        assert self.text(form) == "%s", self.text(form)
        stack = self._cpu.reg_read(arm64.UC_ARM64_REG_SP)
        content = self.text(self.word(stack)).encode()
        if size > 0:
            self.write(target, content[: size - 1] + b"\0")
        return len(content)

    def import_sysconf(self, name: int) -> int:
        # _SC_PAGESIZE and _SC_NPROCESSORS_ONLN of macOS are the only questions.
        return {29: PAGE, 58: 1}[name]

    def import_logf(self) -> int:
        s0 = arm64.UC_ARM64_REG_S0
        (x,) = struct.unpack("<f", struct.pack("<I", self._cpu.reg_read(s0)))
        logarithm = math.log(x) if x > 0 else math.nan if x != 0 else -math.inf
        bits = struct.unpack("<I", struct.pack("<f", logarithm))
        self._cpu.reg_write(s0, bits[0])
        return 0

    def import_uname(self, target: int) -> int:
        fields = (b"Darwin", b"mac", b"23.5.0", b"xnu", b"arm64")
        self.write(target, b"".join(field.ljust(256, b"\0") for field in fields))
        return 0

    def import_dlopen(self, name: int, flags: int) -> int:
        self.opened.append(self.text(name))
        return 0 if self.system is None else len(self.opened)

    def import_dlerror(self) -> int:
        return self.put(b"image not found\0")

    def import_dlsym(self, library: int, name: int) -> int:
        symbol = self.text(name)
        if self.system is None or symbol not in self.system:
            return 0
        place = self._place(f"_{symbol}")
        self._functions[place] = self.system[symbol]
        return place
