"""Platform flash_metal over a host like jax-metal: API 0.47, StableHLO 0.19.4.

The host is the mock, which refuses whatever jax-metal would not understand; so nearly
every test is that something works, and gives what the cpu platform gives.
"""

from __future__ import annotations

import jax
import pytest

from jax_flash_metal import hosts, platforms
from tests.support import mock_host
from tests.support.processes import output_of, run_python
from tests.support.shared_library import compile_library

# What every program starts with. `same` runs a function on both platforms.
PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
device, cpu = jax.devices()[0], jax.devices("cpu")[0]

def same(function, *arguments, rtol=1e-6, atol=1e-6):
    results = []
    for where in (device, cpu):
        placed = jax.device_put(arguments, where)
        results.append(jax.tree.leaves(jax.jit(function)(*placed)))
    assert len(results[0]) == len(results[1]) > 0
    for got, want in zip(*results):
        assert got.devices() == {device}, got.devices()
        got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)

def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected an error")

rng = np.random.default_rng(0)
x = rng.normal(size=(4, 6)).astype(np.float32)
"""


@pytest.fixture(scope="module")
def settings():
    return mock_host.settings()


@pytest.fixture(scope="module")
def run(settings):
    return lambda program: output_of(PRELUDE + program, **settings)


def test_the_host_is_recognised(run):
    program = """
from jax_flash_metal import pjrt
facts = pjrt.host_facts()
print(facts["api_version"], facts["old_host"], facts["stablehlo"], device.platform)
"""
    assert run(program) == "0.47 1 0.19.4 flash_metal"


def test_a_device_has_one_memory(run):
    program = """
memory = device.default_memory()
assert device.addressable_memories() == [memory]
assert memory.addressable_by_devices() == [device]
y = jax.device_put(x, device)
assert y.sharding.memory_kind == "device"
in_memory = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
np.testing.assert_array_equal(jax.device_put(y, in_memory), x)
print(memory.kind, memory)
"""
    assert run(program) == "device Memory(kind=device, id=0)"


def test_arrays_of_any_address_and_strides_arrive(run):
    program = """
for dtype in (np.int8, np.uint16, np.float32, np.complex64, jnp.bfloat16, jnp.int4):
    base = np.arange(-32, 32).astype(np.int8).view(np.int8)
    base = base.astype(dtype).reshape(8, 8)
    memory = np.empty(base.nbytes + 1, np.uint8)
    memory[1:] = base.reshape(-1).view(np.uint8)
    odd = memory[1:].view(base.dtype).reshape(8, 8)
    for array in (odd, odd[1:, 1:], odd[::2, ::-3], odd.T, odd[:0], odd[3, 4]):
        placed = jax.device_put(array, device)
        np.testing.assert_array_equal(np.asarray(placed), array)
        np.testing.assert_array_equal(np.asarray(placed.copy()), array)
        again = jax.device_put(placed, cpu)
        np.testing.assert_array_equal(np.asarray(again), array)
        np.testing.assert_array_equal(np.asarray(jax.device_put(again, device)), array)
"""
    run(program)


def test_a_copy_is_a_buffer_of_its_own(run):
    program = """
for copy in (jnp.copy, lambda y: jax.device_put(y, y.device, may_alias=False)):
    survives = []
    for where in (cpu, device):
        y = jax.device_put(x, where)
        z = copy(y)
        y.delete()
        survives.append(not z.is_deleted())
    # In old jax device_put gives the array itself, whatever it was asked for.
    assert survives[0] == survives[1]
    if survives[0]:
        np.testing.assert_array_equal(z, x)
assert jax.__version_info__ < (0, 5) or survives[1]
"""
    run(program)


def test_device_pointers_are_handles(run):
    # Or the other tests would not notice that memory is read by address.
    program = """
pointers = [jax.device_put(x, device).unsafe_buffer_pointer() for _ in range(2)]
assert all(pointer % 2 for pointer in pointers), pointers
"""
    run(program)


def test_programs_give_what_they_give_on_cpu(run):
    program = """
same(lambda x: (x @ x.T, jnp.sum(x, 0), x > 0), x)
same(jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2)), x)
same(lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x), x)
same(lambda x: jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * c + 1, x), x)
same(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x)
same(lambda x: jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], x), x)
same(lambda x: jax.vmap(lambda row, i: row[i])(x, jnp.arange(4)), x)
same(lambda x: x.at[1, ::2].add(3.0).at[0].set(1.0), x)
same(lambda x: (jnp.sort(x), jnp.argsort(x), jnp.argmax(x), jnp.cumsum(x, 1)), x)
same(lambda x: (x.astype(jnp.bfloat16) * 3, x.astype(jnp.float16) @ x.T), x, rtol=1e-2)
same(lambda x: jax.lax.conv(x[None, None], x[None, None, :2, :3], (1, 1), "SAME"), x)
same(lambda k: (jax.random.normal(k, (5,)), jax.random.permutation(k, 9)),
     np.uint32([1, 2]))
same(lambda x: (x + 1, x.sum()), x[:0])
same(lambda x: (x, x, jnp.float32(3)), x)
same(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(4)), x)
same(lambda x: jnp.linalg.eigh(x @ x.T)[0], x, rtol=1e-4, atol=1e-4)
"""
    run(program)


def test_what_new_jax_says_by_composites(run):
    program = """
same(jax.scipy.special.erf, x)
same(lambda x: jax.lax.top_k(x, 3), x)
same(lambda x: (jnp.sinh(x), jnp.cosh(x), jnp.arcsinh(x), jnp.tan(x)), x, rtol=1e-5)
same(lambda x: jax.lax.scan(lambda c, y: (jax.nn.gelu(c + y, approximate=False), c),
                            x[0], x), x)
same(jax.grad(lambda x: jax.scipy.special.erf(jnp.sinh(x)).sum()), x)
"""
    run(program)


def test_sharding_over_one_device(run):
    program = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map
mesh = Mesh(np.array([device]), ("x",))
spread = NamedSharding(mesh, P("x"))
y = jax.device_put(x, spread)

@jax.jit
def constrained(y):
    return jax.lax.with_sharding_constraint(jnp.sin(y), spread) * 2

np.testing.assert_allclose(constrained(y), np.sin(x) * 2, rtol=1e-6)
placed = jax.jit(lambda y: y + 1, in_shardings=spread, out_shardings=spread)(y)
np.testing.assert_allclose(placed, x + 1)
assert placed.sharding == spread

def per_device(y):
    return jax.lax.all_gather(y, "x", tiled=True) + jax.lax.axis_index("x")

gathered = jax.jit(shard_map(per_device, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
np.testing.assert_allclose(gathered(y), x)
"""
    run(program)


def test_donated_arrays_are_deleted(settings):
    program = """
step = jax.jit(lambda a, b: (a + b, a * b), donate_argnums=0)
y = jax.device_put(x, device) * 2
kept = jax.device_put(x, device)
results = step(y, kept)
assert y.is_deleted() and not kept.is_deleted()
np.testing.assert_allclose(results[0], x * 3, rtol=1e-6)
print(error_of(step, y, kept))
"""
    # The CPU plugin behind the mock also says it on stderr.
    assert "deleted" in run_python(PRELUDE + program, **settings).stdout


def test_ahead_of_time_compilation(run):
    program = """
compiled = jax.jit(lambda y: (y * 2, jnp.sum(y))).lower(x).compile()
np.testing.assert_allclose(compiled(x)[0], x * 2)
# The host has none of these, and jax makes None of that. For jaxlib 0.4.34 the plugin
# shows what it gave to compile.
text = compiled.as_text()
print(text is None or "multiply" in text)
print(compiled.memory_analysis(), compiled.cost_analysis())
from jax.experimental import serialize_executable
print(error_of(serialize_executable.serialize, compiled))
"""
    text, facts, error = run(program).splitlines()
    assert (text, facts) == ("True", "None None")
    assert "UNIMPLEMENTED: SerializeExecutable is not supported." in error


ATTENTION = """
import ctypes, functools
from jax_flash_metal import dot_product_attention, platforms

def arrays(*lengths):
    return [rng.normal(size=(2, length, heads, 8)).astype(np.float32)
            for length, heads in lengths]

attention = functools.partial(dot_product_attention, is_causal=True)
query, key, value = arrays((5, 6), (7, 3), (7, 3))

def counted(name):
    text = ctypes.create_string_buffer(4096)
    platforms.load_library().jfm_pjrt_statistics(text, ctypes.c_size_t(len(text)))
    return int(dict(x.split("=") for x in text.value.decode().split())[name])

def calls():
    return counted("calls")
"""


def test_attention(run):
    program = """
def everything(query, key, value):
    def loss(*operands):
        return jnp.sum(jnp.sin(attention(*operands)))
    return attention(query, key, value), jax.grad(loss, (0, 1, 2))(query, key, value)

before = calls()
same(everything, query, key, value, rtol=1e-5, atol=1e-5)
assert calls() >= before + 2

def looped(query, key, value):
    def layer(carry, _):
        return jax.lax.cond(carry.sum() > -1e9, attention, lambda q, k, v: q,
                            carry, key, value), None
    return jax.lax.scan(layer, query, None, length=3)[0].sum()

before = calls()
same(lambda *operands: jax.value_and_grad(looped)(*operands), query, key, value,
     rtol=1e-4, atol=1e-5)
assert calls() >= before + 6
"""
    run(ATTENTION + program)


def test_training_gives_the_losses_of_cpu(run):
    program = """
def init():
    shapes = dict(embed=(16, 48), q=(48, 48), k=(48, 24), v=(48, 24), out=(48, 16))
    return {name: (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
            for name, shape in shapes.items()}

def loss(params, tokens):
    h = params["embed"][tokens]
    heads = {name: (h @ params[name]).reshape(*tokens.shape, -1, 8) for name in "qkv"}
    h = h + attention(heads["q"], heads["k"], heads["v"]).reshape(h.shape)
    logits = jax.nn.gelu(h, approximate=False) @ params["out"]
    labels = jax.nn.one_hot(jnp.roll(tokens, -1, 1), 16)
    return -jnp.mean(jax.nn.log_softmax(logits) * labels)

@functools.partial(jax.jit, donate_argnums=0)
def step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

start, tokens = init(), rng.integers(0, 16, (3, 9))
losses = {}
for where in (device, cpu):
    params, batch = jax.device_put((start, tokens), where)
    before, losses[where] = calls(), []
    for _ in range(5):
        params, value = step(params, batch)
        losses[where].append(float(value))
    assert (calls() >= before + 10) == (where is device)
np.testing.assert_allclose(losses[device], losses[cpu], rtol=2e-6)
assert losses[cpu][-1] < losses[cpu][0]
"""
    run(ATTENTION + program)


def test_many_steps_leave_nothing_behind(run):
    program = """
@functools.partial(jax.jit, donate_argnums=0)
def step(query, key, value):
    return query + attention(query, key, value)

def memory():
    pages = open("/proc/self/statm").read().split()[1]
    return int(pages) * 4096

odd = np.empty(query.nbytes + 1, np.uint8)[1:].view(np.float32)

def steps(count):
    query, key, value = jax.device_put(operands, device)
    for _ in range(count):
        query = step(query, key, value)
        jax.device_put(query, device, may_alias=False)
        jax.device_put(odd, device)
    query.block_until_ready()

operands = query, key, value
steps(200)
before, live = memory(), len(jax.live_arrays())
steps(1000)
assert memory() - before < 2**20, memory() - before
assert len(jax.live_arrays()) == live
assert counted("live_buffers") == 0
"""
    run(ATTENTION + program)


def test_a_target_that_nobody_knows_is_named(run):
    program = """
from jax_flash_metal._jax_compat import ffi

def call(x):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if jax.__version_info__ < (0, 5):
        return ffi.ffi_call("nobody_has_this", result, x)
    return ffi.ffi_call("nobody_has_this", result)(x)

print(error_of(jax.jit(call), x).replace(chr(10), " "))
same(jnp.sin, x)
"""
    error = run(program)
    assert "nobody_has_this" in error
    assert "registered by jax.ffi.register_ffi_target" in error


@pytest.mark.skipif(
    not hasattr(jax.lax, "DotAlgorithmPreset"), reason="this jax has no dot algorithms"
)
def test_an_operation_that_is_too_new_for_the_host_is_named(run):
    program = """
dot = jax.jit(lambda x: jax.lax.dot(x, x.T, precision="F32_F32_F32"))
print(error_of(dot, jax.device_put(x, device)).replace(chr(10), " "))
same(jnp.sin, x)
"""
    error = run(program)
    assert "StableHLO 0.19.4 has no form of stablehlo.dot_general" in error


def test_callbacks_are_refused_with_a_sentence(run):
    program = """
y = jax.device_put(x, device)
print(error_of(jax.jit(lambda y: jax.pure_callback(lambda a: a, y, y)), y))
same(jnp.sin, x)
"""
    assert "not supported on flash_metal" in run(program)


CPU_HOSTS = [row.name for row in hosts.KNOWN_HOSTS if row.system == "linux"]


@pytest.mark.parametrize("backend", CPU_HOSTS[1:])
def test_another_plugin_behind_the_mock(backend):
    program = "same(lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x), x)"
    assert output_of(PRELUDE + program, **mock_host.settings(backend)) == ""


# -- The mock is as strict as it should be -------------------------------------------


@pytest.mark.parametrize(
    "reply, function, sentence",
    [
        ("Unchanged()", "jnp.sinh", "Failed to deserialize StableHLO_v1."),
        ("at('0.20.0')", "jnp.sinh", "Failed to deserialize StableHLO_v0.20.0"),
        ("at('0.19.4')", "jnp.sinh", None),
        ("as_it_is()", "jnp.sinh", "failed to legalize operation 'mhlo.composite'"),
        ("as_it_is()", "spread", "dialect 'sdy' is unknown"),
        ("text()", "jnp.sinh", "no portable StableHLO artifact"),
    ],
)
def test_the_mock_refuses(settings, reply, function, sentence):
    if reply in ("Unchanged()", "as_it_is()") and jax.__version_info__ < (0, 5):
        pytest.skip("what this jax emits for an old host is old enough")
    program = f"""
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_flash_metal import partition, stablehlo
from jax_flash_metal.plan import Rewritten, Unchanged

def rewritten(program):
    module, _ = stablehlo.parse(program)
    stablehlo.erase_sharding(module)
    stablehlo.legalize_composites(module)
    return module

def spread(y):
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    return jax.lax.with_sharding_constraint(y, sharding) + 1

def plan_program(program, *_):
    def at(version):
        return Rewritten(stablehlo.serialize(rewritten(program), version))
    def as_it_is():
        return Rewritten(stablehlo.serialize(stablehlo.parse(program)[0], "0.19.4"))
    def text():
        return Rewritten(str(rewritten(program)).encode())
    return {reply}

y = jax.device_put(x, device)
partition.plan_program = plan_program
try:
    jax.jit({function})(y)
except Exception as error:
    print(error)
"""
    done = run_python(PRELUDE + program, **settings)
    assert done.returncode == 0, done.stderr
    assert (sentence in done.stdout) if sentence else (done.stdout == "")


# -- Callers of other versions -------------------------------------------------------

DRIVER = r"""
// Uses the plugin's table as callers of other versions than the jaxlib at hand do.
#include <dlfcn.h>
#include <cstdlib>
#include <cstring>
#include "plugin/pjrt/pjrt_api.h"
#include "plugin/pjrt/pjrt_c_api.h"
using namespace jfm::pjrt;

#define CHECK(condition) do { if (!(condition)) return __LINE__; } while (false)

static int destroyed = 0;

extern "C" __attribute__((visibility("default"))) int drive(const char* plugin,
                                                            const char* host) {
  void* library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  char error[1024];
  auto configure = reinterpret_cast<decltype(&jfm_pjrt_configure)>(
      dlsym(library, "jfm_pjrt_configure"));
  CHECK(configure(host, "flash_metal", "copy", 0,
                  [](const char*, size_t, const char*, size_t, void*) { std::abort(); },
                  error, sizeof error) == 0);
  const PJRT_Api& api = *reinterpret_cast<const PJRT_Api* (*)()>(
      dlsym(library, "GetPjrtApi"))();
  auto call = [&api](auto& args) {
    args.struct_size = sizeof(args);
    return api.slots[static_cast<int>(args.kSlot)](&args);
  };
  CHECK(api.version.minor == 47);

  PJRT_Client_Create_Args create = {};
  CHECK(call(create) == nullptr);
  PJRT_Client_AddressableMemories_Args memories = {};
  memories.client = create.client;
  CHECK(call(memories) == nullptr);
  CHECK(memories.num_addressable_memories == 1);
  PJRT_Memory* memory = memories.addressable_memories[0];

  // What newer callers reach through the memory's first word.
  const PJRT_MemoryFunctions& functions = *memory->functions;
  static int key, other_key, data;
  CHECK(functions.get_user_data(memory, &key) == nullptr);
  functions.set_user_data(memory, &key, &data, [](void*) { ++destroyed; });
  CHECK(functions.get_user_data(memory, &key) == &data);
  CHECK(functions.get_user_data(memory, &other_key) == nullptr);
  functions.set_user_data(memory, &key, nullptr, nullptr);
  CHECK(destroyed == 1);

  // A place given as a memory only; the caller takes the done event as ever.
  const float values[6] = {1, 2, 3, 4, 5, 6};
  const int64_t dims[2] = {2, 3};
  PJRT_Client_BufferFromHostBuffer_Args from_host = {};
  from_host.client = create.client;
  from_host.data = values;
  from_host.type = PJRT_BufferType_F32;
  from_host.dims = dims;
  from_host.num_dims = 2;
  from_host.memory = memory;
  CHECK(call(from_host) == nullptr);
  PJRT_Event_Await_Args done = {};
  done.event = from_host.done_with_host_buffer;
  CHECK(call(done) == nullptr);

  PJRT_Buffer_CopyToMemory_Args copy = {};
  copy.buffer = from_host.buffer;
  copy.dst_memory = memory;
  CHECK(call(copy) == nullptr);
  PJRT_Buffer_Memory_Args where = {};
  where.buffer = copy.dst_buffer;
  CHECK(call(where) == nullptr);
  CHECK(where.memory == memory);
  PJRT_Buffer_Delete_Args remove = {};
  remove.buffer = from_host.buffer;
  CHECK(call(remove) == nullptr);
  float copied[6] = {};
  PJRT_Buffer_ToHostBuffer_Args to_host = {};
  to_host.src = copy.dst_buffer;
  to_host.dst = copied;
  to_host.dst_size = sizeof(copied);
  CHECK(call(to_host) == nullptr);
  done.event = to_host.event;
  CHECK(call(done) == nullptr);
  CHECK(std::memcmp(copied, values, sizeof(values)) == 0);

  // A copy of what is deleted is an error, with a table of its own in front.
  copy.buffer = from_host.buffer;
  PJRT_Error* deleted = call(copy);
  CHECK(deleted != nullptr);
  const char* message = nullptr;
  size_t size = 0;
  deleted->functions->message(deleted, &message, &size);
  CHECK(size > 0 && std::strstr(message, "delete") != nullptr);
  deleted->functions->destroy(deleted);
  return 0;
}
"""


def test_callers_of_other_versions(settings):
    driver = compile_library(DRIVER, flags=["-std=c++17", "-Wall", "-Werror"])
    program = f"""
    import ctypes
    driver = ctypes.CDLL({str(driver)!r})
    print(driver.drive({str(platforms.LIBRARY).encode()!r},
                       {settings["JAX_FLASH_METAL_HOST"].encode()!r}))
    """
    # The line of the driver whose check failed. The CPU plugin writes to stderr.
    assert run_python(program, **settings).stdout.strip() == "0"
