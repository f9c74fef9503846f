"""Platform flash_metal as JAX finds it: when it is there, and how it says why not."""

from __future__ import annotations

import os
import re
import struct
import sys
import textwrap
from pathlib import Path

import pytest

from jax_flash_metal import hosts
from tests.support.processes import output_of, run_python
from tests.support.shared_library import compile_library

NAMED = {"JAX_PLATFORMS": "flash_metal"}
DEFAULT = "import jax; print(jax.devices()[0].platform)"
# What on_mac() programs start with: initialize() decides as on a Mac.
ON_A_MAC = """
import types
from jax_flash_metal import pjrt
pjrt.sys = types.SimpleNamespace(platform="darwin")
"""


# -- Where nobody asked for it ---------------------------------------------------------


def test_absent_unless_named():
    program = """
    import jax
    print(jax.devices()[0].platform)
    try:
        jax.devices("flash_metal")
    except RuntimeError as error:
        print(error)
    """
    platform, error = output_of(program).splitlines()
    assert platform == "cpu"
    assert "flash_metal" in error


@pytest.mark.parametrize("platforms", [None, "", "cpu"])
def test_silent_when_nothing_of_it_would_work(platforms):
    program = f"""
    import pathlib
    from jax_flash_metal import platforms
    platforms.LIBRARY = pathlib.Path("missing.so")
    {DEFAULT}
    """
    settings = {"JAX_PLATFORMS": platforms, "JAX_FLASH_METAL_HOST": "missing"}
    assert output_of(program, **settings) == "cpu"


def test_a_process_without_it_loads_none_of_it():
    program = """
    import jax, sys
    jax.devices()
    modules = [name for name in sys.modules if name.startswith("jax_flash_metal")]
    maps = open("/proc/self/maps").read()
    print(*sorted(modules), "jax_flash_metal.so" in maps, "pjrt_c_api" in maps)
    """
    assert output_of(program) == (
        "jax_flash_metal jax_flash_metal._version jax_flash_metal.pjrt False False"
    )


def test_default_on_a_mac_with_a_host():
    assert output_of(ON_A_MAC + DEFAULT) == "flash_metal"


def test_default_on_a_mac_beside_jax_metal():
    """Which asks for priority 500; of two with the same the first would be taken."""
    program = """
    from jax._src import xla_bridge
    cpu = xla_bridge._backend_factories["cpu"].factory
    xla_bridge.register_backend_factory("METAL", cpu, priority=500)
    """
    program = textwrap.dedent(program)
    assert output_of(ON_A_MAC + program + DEFAULT) == "flash_metal"


def test_not_on_a_mac_whose_user_names_others():
    assert output_of(ON_A_MAC + DEFAULT, JAX_PLATFORMS="cpu") == "cpu"


@pytest.mark.parametrize(
    "settings",
    [
        {"JAX_FLASH_METAL_HOST": "missing"},
        {"JAX_FLASH_METAL_HOST_BUFFERS": "wrong"},
        # Goes to every plugin's client: ours is found and loaded, and then fails.
        {"JAX_PJRT_CLIENT_CREATE_OPTIONS": "not an option"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_silent_on_a_mac_where_it_fails(settings):
    assert output_of(ON_A_MAC + DEFAULT, **settings) == "cpu"


# -- By name ---------------------------------------------------------------------------


def test_named():
    program = """
    import jax, jax.numpy as jnp
    device, = jax.devices()
    print(device.platform, jax.default_backend(), jnp.arange(4).sum())
    """
    assert output_of(program, **NAMED) == "flash_metal flash_metal 6"


def test_beside_cpu():
    program = """
    import jax, jax.numpy as jnp, numpy as np
    x = jax.jit(lambda x: x * 2)(np.ones(3))
    y = jax.device_put(x, jax.devices("cpu")[0]) + 1
    print(*(next(iter(a.devices())).platform for a in (x, y)), y)
    """
    settings = {"JAX_PLATFORMS": "flash_metal,cpu"}
    assert output_of(program, **settings) == "flash_metal cpu [3. 3. 3.]"


def test_named_in_the_configuration():
    program = """
    import jax
    jax.config.update("jax_platforms", "cpu,flash_metal")
    print(jax.default_backend(), jax.devices("flash_metal")[0].platform)
    """
    assert output_of(program) == "cpu flash_metal"


@pytest.mark.parametrize("host", [host.name for host in hosts._hosts_here()])
def test_every_known_host(host):
    program = """
    import jax, jax.numpy as jnp
    from jax_flash_metal import hosts
    path = hosts.find().path
    assert str(path) in open("/proc/self/maps").read() or jax.devices()
    assert str(path) in open("/proc/self/maps").read()
    print(jax.jit(lambda x: x @ x)(jnp.ones((2, 2)))[0, 0])
    """
    assert output_of(program, **NAMED, JAX_FLASH_METAL_HOST=host) == "2.0"


def test_starting_twice():
    program = """
    from jax_flash_metal import pjrt
    pjrt.start()
    pjrt.start()
    import jax
    print(jax.devices()[0].platform, sorted(pjrt.host_facts()))
    """
    assert output_of(program, **NAMED).startswith("flash_metal [")


# -- By name, and it cannot start ------------------------------------------------------


def error_of(prelude: str = "", **settings: str) -> str:
    """The reason in the RuntimeError of `jax.devices()`; nothing else is said."""
    program = f"""
{prelude}
import jax
try:
    jax.devices()
except RuntimeError as error:
    print(error)
    """
    output = output_of(program, **NAMED, **settings)
    start = "Unable to initialize backend 'flash_metal': "
    match = re.fullmatch(rf"{start}(.*) \(set JAX_PLATFORMS='' .*\)", output, re.DOTALL)
    assert match, output
    return match[1]


def host_error(path: Path) -> str:
    """The error with this file as the host plugin; its path is written HOST in it."""
    return error_of(JAX_FLASH_METAL_HOST=str(path)).replace(str(path), "HOST")


def test_our_library_missing():
    prelude = """
import pathlib
from jax_flash_metal import platforms
platforms.LIBRARY = pathlib.Path("missing.so")
"""
    assert error_of(prelude).startswith("the native library missing.so is missing")


def test_host_setting_names_nothing():
    assert error_of(JAX_FLASH_METAL_HOST="no/such.so") == (
        "JAX_FLASH_METAL_HOST is 'no/such.so', which is neither a file nor a known "
        "host plugin; it must be the path of a PJRT plugin's library or one of "
        "lammps-jax-pjrt-cpu, fastatomstruct-xla-cpu."
    )


NONE_INSTALLED = """
import dataclasses
from jax_flash_metal import hosts
hosts.KNOWN_HOSTS = tuple(
    dataclasses.replace(host, module="no_such_module") for host in hosts.KNOWN_HOSTS
)
"""


def test_no_host_installed():
    assert error_of(NONE_INSTALLED) == (
        "platform flash_metal runs over a host plugin, and none is installed: pip "
        "install 'jax-flash-metal[software]' installs one; JAX_FLASH_METAL_HOST can "
        "name the library of any PJRT plugin."
    )


def test_no_host_known(monkeypatch):
    monkeypatch.setattr(hosts.platform, "machine", lambda: "riscv64")
    monkeypatch.delenv("JAX_FLASH_METAL_HOST", raising=False)
    with pytest.raises(hosts.HostError, match="none is known for linux on riscv64;"):
        hosts.find()


def test_named_host_not_installed():
    settings = {"JAX_FLASH_METAL_HOST": "lammps-jax-pjrt-cpu"}
    assert error_of(NONE_INSTALLED, **settings) == (
        "JAX_FLASH_METAL_HOST names the host plugin lammps-jax-pjrt-cpu, which is not "
        "installed: pip install lammps-jax-pjrt-cpu."
    )


def test_buffers_setting():
    assert error_of(JAX_FLASH_METAL_HOST_BUFFERS="zero-copy") == (
        "JAX_FLASH_METAL_HOST_BUFFERS must be one of auto, address, copy, but is "
        "'zero-copy'."
    )


NOT_A_LIBRARY = (
    "the host plugin's library HOST is not a shared library: JAX_FLASH_METAL_HOST must "
    "name the .so or .dylib of a PJRT plugin."
)


def elf(machine: int, kind: int = 3) -> bytes:
    """The start of an ELF file."""
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    return ident + struct.pack("<HHI", kind, machine, 1) + bytes(40)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF", b"import jax\n", elf(62, kind=2), b"\xca\xfe\xba\xbe\0\0\0\x41"],
    ids=["empty", "cut off", "text", "executable", "java"],
)
def test_not_a_shared_library(content, tmp_path):
    path = tmp_path / "host.so"
    path.write_bytes(content)
    assert host_error(path) == NOT_A_LIBRARY


def test_a_folder(tmp_path):
    assert host_error(tmp_path).startswith(
        "the host plugin's library HOST cannot be read (Is a directory): reinstall"
    )


MACHO_ARM64 = struct.pack("<IIII", 0xFEEDFACF, 0x0100000C, 0, 6) + bytes(16)
MACHO_BOTH = struct.pack(">II", 0xCAFEBABE, 2) + b"".join(
    struct.pack(">IIIII", cpu, 0, 0, 0, 0) for cpu in (0x01000007, 0x0100000C)
)


@pytest.mark.parametrize(
    ("content", "system"),
    [
        (elf(183), "Linux on aarch64"),
        (elf(8), "Linux on machine 8"),
        (MACHO_ARM64, "macOS on arm64"),
        (MACHO_BOTH, "macOS on x86_64 and arm64"),
    ],
    ids=["elf-aarch64", "elf-mips", "macho-arm64", "macho-both"],
)
def test_library_for_another_machine(content, system, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hosts.sys, "platform", "linux")
    path = tmp_path / "host.so"
    path.write_bytes(content)
    with pytest.raises(hosts.HostError) as raised:
        hosts.check_library(path)
    assert str(raised.value).replace(str(path), "HOST") == (
        f"the host plugin's library HOST is for {system}, but this process runs on "
        "Linux on x86_64: install the host plugin for this machine, or let "
        "JAX_FLASH_METAL_HOST name another."
    )


@pytest.mark.parametrize("content", [MACHO_ARM64, MACHO_BOTH], ids=["arm64", "both"])
def test_library_for_a_mac_on_a_mac(content, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(hosts.sys, "platform", "darwin")
    path = tmp_path / "host.dylib"
    path.write_bytes(content)
    hosts.check_library(path)


def test_host_that_the_loader_refuses(tmp_path):
    path = tmp_path / "host.so"
    path.write_bytes(elf(62))
    assert host_error(path).startswith("the host plugin HOST cannot be loaded: ")


def test_host_that_is_no_plugin():
    path = compile_library("int nothing;", suffix=".c")
    assert host_error(path) == (
        "the host plugin HOST is not a PJRT plugin: it has no GetPjrtApi."
    )


FAKE_HOST = """
#include <stddef.h>
static struct {{
  size_t size;
  void* extensions;
  struct {{ size_t size; void* extensions; int major, minor; }} version;
  void* slots[97];
}} api = {{sizeof(api), 0, {{24, 0, {major}, {minor}}}}};
void* GetPjrtApi(void) {{ return {result}; }}
"""


@pytest.mark.parametrize(
    ("major", "minor", "result", "reason"),
    [
        (0, 39, "&api", "PJRT API version 0.39, which is too old: at least 0.40"),
        (1, 0, "&api", "PJRT API version 1.0, but 0.x is needed"),
        (0, 90, "0", "gave no API"),
    ],
    ids=["old", "major", "null"],
)
def test_host_with_a_strange_api(major, minor, result, reason):
    source = FAKE_HOST.format(major=major, minor=minor, result=result)
    path = compile_library(source, suffix=".c")
    assert reason in host_error(path)


def test_cpu_still_works_after_a_failure():
    program = """
    import jax
    try:
        jax.devices()
    except RuntimeError:
        pass
    jax.config.update("jax_platforms", "cpu")
    print(jax.numpy.ones(2).sum())
    """
    assert output_of(program, **NAMED, JAX_FLASH_METAL_HOST="missing") == "2.0"


# -- Custom calls ----------------------------------------------------------------------

DOUBLE = r"""
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Double(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i)
    y->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    double_it, Double,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
extern "C" void untyped(void*, const void**) {}
"""


@pytest.fixture(scope="module")
def double_library() -> Path:
    from jax_flash_metal._jax_compat import ffi

    flags = ("-std=c++17", f"-I{ffi.include_dir()}", "-Wno-everything")
    return compile_library(DOUBLE, flags=flags)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("form", ["capsule", "stages"])
def test_custom_call(double_library, when, form):
    program = f"""
    import ctypes, jax, numpy as np
    from jax_flash_metal._jax_compat import ffi
    capsule = ffi.pycapsule(ctypes.CDLL("{double_library}").double_it)
    target = capsule if "{form}" == "capsule" else dict(execute=capsule)
    if "{when}" == "after":
        jax.devices()
    ffi.register_ffi_target("double_it", target, platform="flash_metal")
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    if jax.__version_info__ < (0, 5):
        call = lambda x: ffi.ffi_call("double_it", shape, x)
    else:
        call = ffi.ffi_call("double_it", shape)
    print(jax.jit(lambda x: call(x + 1) - 1)(np.arange(3, dtype=np.float32)))
    """
    assert output_of(program, **NAMED) == "[1. 3. 5.]"


def test_exported_for_two_platforms():
    # Each has kernels of its own, so the program has a branch for each.
    program = """
    import jax, numpy as np
    from jax import export
    from jax_flash_metal import flash_attention
    x = np.linspace(-1, 1, 256, dtype=np.float32).reshape(1, 8, 2, 16)
    attend = jax.jit(lambda x: flash_attention(x, x, x, is_causal=True))
    allowed = export.DisabledSafetyCheck.custom_call("jax_flash_metal_forward_v3")
    platforms = ["cpu", "flash_metal"]
    exported = export.export(attend, platforms=platforms, disabled_checks=[allowed])(x)
    assert "jax_flash_metal_forward_v3" in exported.mlir_module()
    for platform in platforms:
        out = exported.call(jax.device_put(x, jax.devices(platform)[0]))
        print(next(iter(out.devices())).platform, np.abs(out - attend(x)).max() < 1e-5)
    """
    settings = {"JAX_PLATFORMS": "flash_metal,cpu"}
    assert output_of(program, **settings) == "cpu True\nflash_metal True"


def test_untyped_custom_call_is_refused(double_library):
    program = f"""
    import ctypes, jax
    from jaxlib import xla_client
    from jax_flash_metal._jax_compat import ffi
    capsule = ffi.pycapsule(ctypes.CDLL("{double_library}").untyped)
    jax.devices()
    try:
        xla_client.register_custom_call_target("old", capsule, "flash_metal")
    except RuntimeError as error:
        print(error)
    """
    assert "old" in output_of(program, **NAMED)


def test_bad_registration_does_not_stop_the_platform(double_library):
    # Made before the platform was there, it can only be reported.
    program = f"""
    import ctypes, jax
    from jaxlib import xla_client
    from jax_flash_metal._jax_compat import ffi
    capsule = ffi.pycapsule(ctypes.CDLL("{double_library}").untyped)
    xla_client.register_custom_call_target("old", capsule, "flash_metal")
    print(jax.devices()[0].platform)
    """
    done = run_python(program, **NAMED)
    assert done.stdout == "flash_metal\n"
    assert "platform flash_metal: " in done.stderr
    assert "old" in done.stderr


# -- Two copies of XLA in one process --------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the trace is of Linux's loader")
def test_no_symbol_goes_from_one_xla_to_the_other(tmp_path):
    program = """
    import jax, jax.numpy as jnp
    from jax_flash_metal import hosts, platforms
    print(hosts.find().path, platforms.LIBRARY)
    jax.jit(lambda x: x @ x)(jnp.ones((2, 2))).block_until_ready()
    jax.jit(lambda x: x @ x, backend="cpu")(jnp.ones((2, 2))).block_until_ready()
    """
    trace = tmp_path / "trace"
    done = run_python(
        program,
        JAX_PLATFORMS="flash_metal,cpu",
        LD_DEBUG="bindings",
        LD_DEBUG_OUTPUT=str(trace),
    )
    assert done.returncode == 0, done.stderr
    host, library = done.stdout.split()
    bound = re.compile(r"binding file (\S+) \[0\] to (\S+) \[0\]: \w+ symbol `(.*?)'")
    crossing = set()
    sources = set()
    for part in tmp_path.glob("trace*"):
        for user, provider, symbol in bound.findall(part.read_text()):
            sources.add(user)
            jaxlib = ["/jaxlib/" in path for path in (user, provider)]
            native = [path in (host, library) for path in (user, provider)]
            if jaxlib != jaxlib[::-1] and native != native[::-1]:
                crossing.add((user, provider, symbol))
    assert host in sources
    assert any("/jaxlib/" in source for source in sources)
    assert not crossing


FORKED = (
    "this process was forked from one in which the platform flash_metal had started, "
    "and its threads did not come along; start worker processes before the first use "
    "of JAX, or by multiprocessing's 'spawn'."
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_fork_after_the_start():
    program = """
    import os, signal, warnings
    import jax, jax.numpy as jnp, numpy as np
    warnings.simplefilter("ignore")  # Python and JAX warn of forking with threads
    x = jnp.ones(3)
    add = jax.jit(lambda x: x + 5)
    add(x).block_until_ready()
    actions = {
        "compile": lambda: jax.jit(lambda x: x + 6)(x),
        "run": lambda: add(x),
        "transfer": lambda: jax.device_put(np.ones(3)).block_until_ready(),
        "read": lambda: np.asarray(x),
    }
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        for name, act in actions.items():
            try:
                print(name, act(), flush=True)
            except Exception as error:
                print(name, error, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("parent", status, actions["compile"]())
    """
    lines = output_of(program, **NAMED).splitlines()
    outcomes = dict(line.split(" ", 1) for line in lines)
    for action in ("compile", "run", "transfer"):
        assert FORKED in outcomes[action]
    assert outcomes["read"] == "[1. 1. 1.]"
    assert outcomes["parent"] == "0 [7. 7. 7.]"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_fork_before_the_start():
    program = """
    import os
    import jax, jax.numpy as jnp
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    print(jax.devices()[0].platform, jnp.ones(3) + (child == 0), flush=True)
    """
    assert output_of(program, **NAMED).splitlines() == [
        "flash_metal [2. 2. 2.]",
        "flash_metal [1. 1. 1.]",
    ]
