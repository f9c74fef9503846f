"""Platform flash_metal over each kind of Metal host, or rather over a mock of each.

How handlers reach its memory, when they may, what is copied; and wrong answers of a
host, which must be errors with a sentence. jax-metal with objects of the device, as on
a Mac: test_metal_host.py. Older than memory spaces: test_old_host.py.
"""

from __future__ import annotations

import json

import pytest

from plugin import build
from tests.support import fake_metal, mock_host
from tests.support.processes import output_of, run_python
from tests.support.shared_library import compile_library

# What every program starts with.
PRELUDE = """
import functools, json, time
import jax, jax.numpy as jnp, numpy as np
from jax_flash_metal import dot_product_attention, pjrt
from tests.plugin.pjrt.on_platform import statistics
from tests.support.mock_host import Control

mock = Control()
rng = np.random.default_rng(0)
query, key, value = (
    rng.normal(size=(2, length, heads, 8)).astype(np.float32)
    for length, heads in ((5, 6), (7, 3), (7, 3))
)
attention = functools.partial(dot_product_attention, is_causal=True)

def error_of(function, *arguments):
    try:
        results = function(*arguments)
        # On some hosts it runs later: the first wrong answer must be to the plugin, and
        # not to JAX, which ends the process.
        mock.wait_for_faults()
        jax.block_until_ready(results)
    except Exception as error:
        return str(error)
    return "no error"
"""
STARTED = """
device, cpu = jax.devices()[0], jax.devices("cpu")[0]

def same(function, *arguments, rtol=1e-5, atol=1e-5):
    results = []
    for where in (device, cpu):
        placed = jax.device_put(arguments, where)
        results.append(jax.tree.leaves(jax.jit(function)(*placed)))
    for got, want in zip(*results, strict=True):
        assert got.devices() == {device}
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)

def all_freed():
    # On some hosts a program may still be running when its results are there.
    for _ in range(100):
        if statistics()["live_buffers"] == 0:
            return True
        time.sleep(0.1)
    return False

@jax.jit
def step(query, key, value):
    # The operand of the call comes from a segment that may still run.
    def loss(query):
        return jnp.sum(jnp.sin(attention(jnp.sin(query), key, value)))
    return jax.value_and_grad(loss)(query)

def looped(query, key, value):
    def layer(carry, _):
        return jax.lax.cond(carry.sum() > -1e9, attention, lambda q, k, v: q,
                            carry, key, value), None
    return jax.lax.scan(layer, query, None, length=3)[0]
"""
KINDS = {
    "jax-metal": "copy",  # without Apple's layer there are no objects of the device
    "jax-graft": "address",
    "metaljax": "address+copy",
    "jax-mps": "copy",
}


def run(program: str, kind: str, **settings: str) -> str:
    """What the program prints over a host of this kind, with nothing on stderr."""
    environment = mock_host.settings(kind=kind) | settings
    return output_of(PRELUDE + STARTED + program, **environment)


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_is_recognised(kind):
    facts = json.loads(run("print(json.dumps(pjrt.host_facts()))", kind))
    assert facts["handover"] == KINDS[kind]
    assert (facts["platform_name"], facts["platform_version"]) == {
        "jax-metal": ("METAL", "metal_0.5.1"),
        "jax-graft": ("mtl", "some version"),
        "metaljax": ("metal", "metaljax-native-p0"),
        "jax-mps": ("mps", "0.1.0"),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_give_what_they_give_on_cpu(kind):
    """Every event comes late, and memory is NaN before: see mock_host/memory.h."""
    program = """
mock.set_delay_ms(5)
same(step, query, key, value)
same(looped, query, key, value)
# Nothing to copy or to point to.
same(lambda q, k, v: attention(q[:0], k[:0], v[:0]).sum() + 1, query, key, value)

@functools.partial(jax.jit, donate_argnums=0)
def update(query, key, value):
    return query + attention(query, key, value), key

x, k, v = jax.device_put((query, key, value), device)
y, same_key = update(x, k, v)
assert x.is_deleted()
want = query + np.asarray(attention(*jax.device_put((query, key, value), cpu)))
np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
np.testing.assert_array_equal(same_key, key)
# Results in the place of operands.
from tests.plugin.pjrt.on_platform import ffi, like, register_handlers
if jax.__version_info__ >= (0, 5):
    register_handlers()
    in_place = ffi.ffi_call("test_Scale", like(k), input_output_aliases={0: 0})
    scaled = jax.jit(lambda k: in_place(k + 1, factor=np.float32(3)))(k)
    np.testing.assert_allclose(scaled, 3 * (key + 1), rtol=1e-6)
    del scaled
assert mock.broken_rules() == "", mock.broken_rules()
del x, y, k, v, same_key
assert all_freed()
"""
    run(program, kind)


# One forward and one backward call of attention: 3 + 6 operands, 2 + 3 results.
NUM_OPERANDS, NUM_RESULTS = 10, 5
COPIES = {
    "jax-metal": (NUM_OPERANDS, NUM_RESULTS, 0),
    "jax-graft": (0, 0, NUM_RESULTS),
    "metaljax": (0, NUM_RESULTS, 0),
    "jax-mps": (NUM_OPERANDS, NUM_RESULTS, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied(kind):
    program = """
def counts():
    return [mock.calls(f"{slot}") for slot in (
        "Buffer_ToHostBuffer", "Client_BufferFromHostBuffer",
        "Client_CreateUninitializedBuffer")]

arguments = jax.device_put((query, key, value), device)
jax.block_until_ready(step(*arguments))  # compiled
before, calls = counts(), statistics()["calls"]
jax.block_until_ready(step(*arguments))
assert statistics()["calls"] == calls + 2
print(*(after - count for after, count in zip(counts(), before)))
"""
    assert tuple(map(int, run(program, kind).split())) == COPIES[kind]


# -- Wrong answers when it starts ------------------------------------------------------

OF = "the host plugin's PJRT_"
BUT = "succeeded, but it"
NOT_KNOWN = "is not known, so neither is what the pointers to its buffers mean; "
STARTING = {
    "Client_Create:error": "injected error of Client_Create",
    "Client_Create:null": f"{OF}Client_Create succeeded, but it gave no client.",
    "Client_PlatformName:error": "injected error of Client_PlatformName",
    "Client_PlatformName:null": f"{OF}Client_PlatformName {BUT} gave no name.",
    "Client_PlatformName:empty": f"{OF}Client_PlatformName {BUT} gave no name.",
    "Client_PlatformName:other": "the host plugin's platform 'OTHER' (version "
    f"'metal_0.5.1') {NOT_KNOWN}",
    "Client_PlatformVersion:null": f"{OF}Client_PlatformVersion {BUT} gave no text.",
    "Client_PlatformVersion:empty": "the version '' of the host plugin's platform "
    "'METAL' is not known, only 'metal_0.5.1' (jax-metal 0.1.1) is, so neither is",
    "Client_PlatformVersion:other": "the version '2.0' of the host plugin's platform "
    "'METAL' is not known",
    "Client_AddressableDevices:null": f"{OF}Client_AddressableDevices {BUT} gave no",
    "Client_AddressableDevices:null device": f"{OF}Client_AddressableDevices {BUT} g",
    "Client_AddressableDevices:none": "must offer one device, but it has 0.",
    "Client_AddressableDevices:two": "must offer one device, but it has 2.",
}


def test_wrong_answers_when_it_starts():
    program = f"""
errors = {{}}
for fault in {list(STARTING)!r}:
    # JAX tries again each time.
    mock.fault(fault)
    errors[fault] = error_of(jax.devices)
print(json.dumps(errors))
print(jax.devices()[0].platform)  # the host has come to its senses
"""
    output = output_of(PRELUDE + program, **mock_host.settings())
    errors, platform = output.splitlines()
    found = json.loads(errors)
    for fault, sentence in STARTING.items():
        assert sentence in found[fault], (fault, found[fault])
    assert platform == "flash_metal"


@pytest.mark.parametrize("kind", ["opaque", "metaljax"])
def test_an_unknown_host_is_refused_unless_it_is_copied(kind):
    # A plugin that is called "metal", as others are, and is none that we know.
    fault = {"JFM_MOCK_HOST_FAULTS": "Client_PlatformVersion:other"}
    settings = mock_host.settings(kind=kind) | fault
    refused = run_python("import jax; jax.devices()", **settings)
    assert "JAX_FLASH_METAL_HOST_BUFFERS=copy works with every host" in refused.stderr
    copying = "same(step, query, key, value); print(pjrt.host_facts()['handover'])"
    settings = {"JAX_FLASH_METAL_HOST_BUFFERS": "copy"} | fault
    assert run(copying, kind, **settings) == "copy"


@pytest.mark.parametrize("kind", ["jax-metal", "jax-mps"])
def test_what_is_no_address_is_not_taken_for_one(kind):
    settings = mock_host.settings(kind=kind)
    settings["JAX_FLASH_METAL_HOST_BUFFERS"] = "address"
    refused = run_python("import jax; jax.devices()", **settings)
    assert refused.returncode != 0
    assert f"the pointers of {kind}" in refused.stderr
    assert "are no addresses" in refused.stderr


# -- Wrong answers of programs ---------------------------------------------------------

COMPILING = {
    "Client_Compile:error": "injected error of Client_Compile",
    "Client_Compile:null": f"{OF}Client_Compile succeeded, but it gave no executable.",
    "LoadedExecutable_GetExecutable:null": f"{OF}LoadedExecutable_GetExecutable "
    "succeeded, but it gave none.",
    "Executable_OutputElementTypes:null": f"{OF}Executable_OutputElementTypes "
    "succeeded, but it gave no list.",
    "Executable_OutputDimensions:null": f"{OF}Executable_OutputDimensions succeeded, "
    "but it gave no dimensions.",
    "Executable_OutputDimensions:fewer": f"{OF}Executable_OutputDimensions succeeded, "
    "but it speaks of 0 results where there are 2.",
}


def test_wrong_answers_when_a_program_is_compiled():
    program = f"""
arguments = jax.device_put((query, key, value), device)
errors = {{}}
for fault in {list(COMPILING)!r}:
    mock.fault(fault)
    errors[fault] = error_of(step, *arguments)
    mock.clear_faults()
print(json.dumps(errors))
same(step, query, key, value)
"""
    found = json.loads(run(program, "jax-metal"))
    for fault, sentence in COMPILING.items():
        assert sentence in found[fault], (fault, found[fault])


POINTER = "Buffer_OpaqueDeviceMemoryDataPointer"
EXECUTING = {
    "LoadedExecutable_Execute:error": "injected error of LoadedExecutable_Execute",
    "LoadedExecutable_Execute:null": f"{OF}LoadedExecutable_Execute succeeded, but it "
    "left out a result.",
    "Buffer_ReadyEvent:error": "injected error of Buffer_ReadyEvent",
    "Buffer_ReadyEvent:null": f"{OF}Buffer_ReadyEvent succeeded, but it gave no event.",
    "Event_Await:error": "injected error of Event_Await",
}
ADDRESSES = {
    f"{POINTER}:error": f"injected error of {POINTER}",
    f"{POINTER}:null": f"{OF}{POINTER} {BUT} gave no address for an array of ",
    f"{POINTER}:odd": f"{OF}{POINTER} {BUT} gave an address that is 1 bytes past a "
    "multiple of 4, which the array's elements need.",
    "Buffer_OnDeviceSizeInBytes:small": f"{OF}Buffer_OnDeviceSizeInBytes {BUT} says "
    "that a buffer has 4 bytes where the program has an array of ",
}
IN_PLACE = {
    "Client_CreateUninitializedBuffer:error": "injected error of Client_CreateUninit",
    "Client_CreateUninitializedBuffer:null": f"{OF}Client_CreateUninitializedBuffer "
    "succeeded, but it gave no buffer.",
    "Client_CreateAliasBuffer:error": "injected error of Client_CreateAliasBuffer",
    "Client_CreateAliasBuffer:null": f"{OF}Client_CreateAliasBuffer succeeded, but it "
    "gave no buffer.",
}
COPIES_IN = {
    "Buffer_ToHostBuffer:error": "injected error of Buffer_ToHostBuffer",
    "Buffer_ToHostBuffer:null": f"{OF}Buffer_ToHostBuffer succeeded, but it gave no",
    "Buffer_Dimensions:null": f"{OF}Buffer_Dimensions succeeded, but it gave no dim",
    "Buffer_Dimensions:short": f"{OF}Buffer_Dimensions succeeded, but it says that an "
    "array has the shape () where the program has (2, ",
}
COPIES_OUT = {
    "Client_BufferFromHostBuffer:error": "injected error of Client_BufferFromHost",
    "Client_BufferFromHostBuffer:null": f"{OF}Client_BufferFromHostBuffer {BUT} gave "
    "no buffer.",
    "Client_BufferFromHostBuffer:null event": f"{OF}Client_BufferFromHostBuffer {BUT} "
    "gave no event.",
}
REFERENCES = {
    "Buffer_IncreaseExternalReferenceCount:error": "injected error of Buffer_Increase",
}
FAULTS = {
    "jax-graft": EXECUTING | ADDRESSES | IN_PLACE,
    "metaljax": EXECUTING | ADDRESSES | REFERENCES | COPIES_OUT,
    "jax-mps": EXECUTING | COPIES_IN | COPIES_OUT,
}
# Run after each other, with a good execution after each.
FAULT_PROGRAM = """
arguments = jax.block_until_ready(jax.device_put((query, key, value), device))
want = jax.tree.map(np.asarray, step(*arguments))
errors = {}
for fault in FAULTS:
    mock.fault(fault)
    errors[fault] = error_of(step, *arguments)
    mock.clear_faults()
    got = jax.tree.map(np.asarray, step(*arguments))
    jax.tree.map(np.testing.assert_array_equal, got, want)
assert mock.broken_rules() == "", mock.broken_rules()
assert all_freed()
print(json.dumps(errors))
"""


@pytest.mark.parametrize("kind", FAULTS)
def test_wrong_answers_when_a_program_runs(kind):
    faults = FAULTS[kind]
    found = json.loads(run(f"FAULTS = {list(faults)!r}\n" + FAULT_PROGRAM, kind))
    for fault, sentence in faults.items():
        assert sentence in found[fault], (fault, found[fault])


EVENT_PROGRAM = """
from tests.plugin.pjrt.on_platform import ffi, register_handlers
arguments = jax.block_until_ready(jax.device_put((query, key, value), device))
programs = {"Buffer_ReadyEvent:null": functools.partial(step, *arguments)}
if jax.__version_info__ >= (0, 5):
    register_handlers()
    nothing = jax.jit(ffi.ffi_call("test_Nothing", [], has_side_effect=True))
    run_nothing = functools.partial(nothing, arguments[0])
    programs["Client_BufferFromHostBuffer:null"] = run_nothing
    programs["Client_BufferFromHostBuffer:null event"] = run_nothing
errors = {}
for fault, run in programs.items():
    jax.block_until_ready(run())  # compiled
    slot = fault.split(":")[0]
    before = mock.calls(slot)
    results = run()
    calls = mock.calls(slot) - before
    jax.block_until_ready(results)
    errors[fault] = []
    for skip in range(calls):
        mock.fault(fault, skip=skip)
        errors[fault].append(error_of(run))
        mock.clear_faults()
        jax.block_until_ready(run())
assert mock.broken_rules() == "", mock.broken_rules()
print(json.dumps(errors))
"""


def test_wrong_answers_when_an_event_is_made_for_the_caller():
    """It is the last that a host gives where programs run at once. JAX would crash."""
    found = json.loads(run(EVENT_PROGRAM, "jax-metal"))
    for fault, errors in found.items():
        assert errors, fault
        for error in errors:
            assert (EXECUTING | COPIES_OUT)[fault] in error, (fault, error)


def test_enough_faults():
    """Of what a running host can answer; those at the start not counted."""
    assert len({fault for faults in FAULTS.values() for fault in faults}) >= 12


# -- The mock is as strict as it should be ---------------------------------------------

DRIVER = r"""
// Uses the mock as a careless plugin would. The line of the first check that fails.
#include <dlfcn.h>
#include <cstring>
#include "plugin/pjrt/pjrt_api.h"
#include "tests/plugin/device/fake_metal/fake_metal.h"
using namespace jfm::pjrt;

#define CHECK(condition) do { if (!(condition)) return __LINE__; } while (false)

extern "C" __attribute__((visibility("default"))) int drive(const char* mock,
                                                            const char* fake) {
  void* library = dlopen(mock, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  const auto bytes = reinterpret_cast<decltype(&fake_metal_buffer_bytes)>(
      dlsym(dlopen(fake, RTLD_NOW | RTLD_LOCAL), "fake_metal_buffer_bytes"));
  const auto rules = reinterpret_cast<void (*)(char*, size_t)>(
      dlsym(library, "mock_host_broken_rules"));
  const PJRT_Api& api = *reinterpret_cast<const PJRT_Api* (*)()>(
      dlsym(library, "GetPjrtApi"))();
  auto call = [&api](auto& args) {
    args.struct_size = sizeof(args);
    return api.slots[static_cast<int>(args.kSlot)](&args);
  };
  PJRT_Client_Create_Args create = {};
  CHECK(call(create) == nullptr);
  PJRT_Client_AddressableDevices_Args devices = {};
  devices.client = create.client;
  CHECK(call(devices) == nullptr);
  const float values[4] = {1, 2, 3, 4};
  const int64_t dims[1] = {4};
  PJRT_Client_BufferFromHostBuffer_Args from_host = {};
  from_host.client = create.client;
  from_host.data = values;
  from_host.type = PJRT_BufferType_F32;
  from_host.dims = dims;
  from_host.num_dims = 1;
  from_host.device = devices.addressable_devices[0];
  CHECK(call(from_host) == nullptr);
  PJRT_Buffer* const buffer = from_host.buffer;

  // The pointer before the event: nothing is there, or NaNs.
  PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args pointer = {};
  pointer.buffer = buffer;
  const auto content = [&]() -> const float* {
    if (call(pointer) != nullptr) return nullptr;
    void* const memory = pointer.device_memory_ptr;
    return static_cast<const float*>(fake[0] == 0 ? memory : bytes(memory));
  };
  const float* early = content();
  CHECK(early != nullptr && early[0] != early[0]);
  char broken[1024];
  rules(broken, sizeof broken);
  const char* const rule = std::strstr(broken, "without an external reference");
  CHECK((rule != nullptr) == REFERENCES);

  PJRT_Buffer_IncreaseExternalReferenceCount_Args increase = {};
  increase.buffer = buffer;
  CHECK(call(increase) == nullptr);
  PJRT_Buffer_ReadyEvent_Args ready = {};
  ready.buffer = buffer;
  CHECK(call(ready) == nullptr);
  CHECK(content()[0] != content()[0]);
  PJRT_Event_Await_Args wait = {};
  wait.event = ready.event;
  CHECK(call(wait) == nullptr);
  CHECK(std::memcmp(content(), values, sizeof values) == 0);

  // What is read is there after its event.
  float read[4] = {};
  PJRT_Buffer_ToHostBuffer_Args to_host = {};
  to_host.src = buffer;
  to_host.dst = read;
  to_host.dst_size = sizeof read;
  CHECK(call(to_host) == nullptr);
  CHECK(read[0] != read[0]);
  wait.event = to_host.event;
  CHECK(call(wait) == nullptr);
  CHECK(std::memcmp(read, values, sizeof values) == 0);

  // Nor may a referenced buffer go.
  PJRT_Buffer_Destroy_Args destroy = {};
  destroy.buffer = buffer;
  CHECK(call(destroy) == nullptr);
  rules(broken, sizeof broken);
  CHECK(std::strstr(broken, "freed while it was referenced") != nullptr);
  return 0;
}
"""


@pytest.mark.parametrize("kind", ["jax-metal", "jax-graft", "metaljax"])
def test_the_mock_is_strict(kind):
    references = "false" if kind == "jax-graft" else "true"
    driver = compile_library(
        DRIVER.replace("REFERENCES", references), flags=build.CXX_FLAGS
    )
    settings = mock_host.settings(kind=kind)
    fake = ""
    if kind == "jax-metal":
        fake = settings[fake_metal.VARIABLE] = str(fake_metal.library())
    program = f"""
    import ctypes
    drive = ctypes.CDLL({str(driver)!r}).drive
    print(drive({settings["JAX_FLASH_METAL_HOST"].encode()!r}, {fake.encode()!r}))
    """
    # The CPU plugin may write to stderr.
    assert run_python(program, **settings).stdout.strip() == "0"
