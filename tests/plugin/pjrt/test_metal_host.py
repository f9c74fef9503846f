"""Platform flash_metal as on a Mac with jax-metal, as far as Linux can show it.

JAX, our plugin with Apple's layer, the mock of jax-metal, and a fake Metal whose
objects are both the mock's arrays and what our kernels work on. Nothing is copied; the
host's events come late, and its memory is NaN before.
"""

from __future__ import annotations

import json

import pytest

from tests.plugin.pjrt.test_hosts import EXECUTING, PRELUDE, STARTED
from tests.support import apple_plugin
from tests.support.processes import output_of

BROKEN = "mock.broken_rules() + fake.faults()"
HELPERS = """
import gc, threading

def collected():
    gc.collect()
    fake.drain()
    return fake.live_objects()

class Held:
    # step(*arguments) on another thread, up to where its kernels should run.

    def __init__(self, *arguments):
        commits = fake.calls("commit")
        fake.hold(1)
        self.results = []
        # A daemon: else a failing test would wait for it.
        self.thread = threading.Thread(
            target=lambda: self.results.append(step(*arguments)), daemon=True)
        self.thread.start()
        for _ in range(600):
            if fake.calls("commit") > commits:
                break
            time.sleep(0.1)
        time.sleep(0.2)  # for what should not happen now
        assert fake.calls("commit") == commits + 1 and self.thread.is_alive()

    def finish(self):
        fake.hold(0)
        self.thread.join()
        return self.results[0]

def copies():
    return mock.calls("Buffer_ToHostBuffer") + mock.calls("Client_BufferFromHostBuffer")
"""


@pytest.fixture(scope="module")
def run():
    """What a program prints, with nothing on stderr and no rule broken."""
    settings = apple_plugin.settings()
    start = apple_plugin.prelude() + PRELUDE.replace("mock = Control()", "")

    def run(program: str) -> str:
        end = f"\nassert {BROKEN} == '', {BROKEN}\n"
        return output_of(start + STARTED + HELPERS + program + end, **settings)

    return run


def test_the_host_is_recognised(run):
    assert run("print(pjrt.host_facts()['handover'])") == "native"


def test_programs_give_what_they_give_on_cpu(run):
    program = """
mock.set_delay_ms(5)
same(step, query, key, value)
same(looped, query, key, value)
same(lambda q, k, v: attention(q[:0], k[:0], v[:0]).sum() + 1, query, key, value)
# Operands that no segment makes, results that none reads, and one that is passed on.
same(lambda q, k, v: (attention(q, k, v), k), query, key, value)
# A result of one call is the operand of the next, with nothing between.
same(lambda q, k, v: attention(attention(q, k, v), k, v), query, key, value)

@functools.partial(jax.jit, donate_argnums=0)
def update(query, key, value):
    # The host may not overwrite what it only has a view of.
    result = attention(query, key, value)
    return result * 2 + query

x, k, v = jax.device_put((query, key, value), device)
y = update(update(x, k, v), k, v)
# Nor when the program has no call, or the view comes from another one.
plain = jax.jit(lambda z: z + 1, donate_argnums=0)
view = jax.jit(attention)(*jax.device_put((query, key, value), device))
plain(view)
view = jax.jit(attention)(*jax.device_put((query, key, value), device))
update(view, k, v)
assert view.is_deleted()
want = query
for _ in range(2):
    want = want + 2 * np.asarray(attention(*jax.device_put((want, key, value), cpu)))
np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
"""
    run(program)


def test_training_copies_nothing_and_leaves_nothing(run):
    program = """
from tests.plugin.pjrt.test_training import Model, batches
import optax

def training(implementation):
    model = Model(implementation)
    with jax.default_device(cpu):
        params = Model("xla").init(jax.random.key(0), jnp.zeros((1, 19), jnp.int32))

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return jax.device_put(params, device), step

losses = {}
for implementation in (None, "xla"):
    state, step = training(implementation)
    tokens = [jax.device_put(batch, device) for batch in batches(6)]
    values = []
    for i, batch in enumerate(tokens):
        if i == 2:
            live, copied = collected(), copies()
            calls, views = statistics()["calls"], mock.calls(VIEW)
        state, value = step(state, batch)
        jax.block_until_ready(state)
        values.append(value)
    # Four steps of two layers, forward and backward: 2 and 3 results.
    expected = 16 if implementation is None else 0
    assert statistics()["calls"] - calls == expected
    assert mock.calls(VIEW) - views == 2.5 * expected
    assert copies() == copied, (copies(), copied)
    # The losses that are kept, and nothing else.
    assert collected() - live <= 4, fake.live_text()
    losses[implementation] = np.array(values)
np.testing.assert_allclose(losses[None], losses["xla"], rtol=1e-5)
assert losses[None][-1] < losses[None][0]
"""
    run("VIEW = 'Client_CreateViewOfDeviceBuffer'\n" + program)


def test_results_are_released_and_never_used_again(run):
    program = """
arguments = jax.device_put((query, key, value), device)
jax.block_until_ready(step(*arguments))
live = collected()
allocate = "newBufferWithLength:options:"
counts = []
for _ in range(3):
    before = fake.calls(allocate)
    results = jax.block_until_ready(step(*arguments))
    counts.append(fake.calls(allocate) - before)
    del results
    assert collected() == live, fake.live_text()
# Every result is a new object, now and later; scratch is not.
assert counts[0] == counts[1] == counts[2] >= 5, counts
"""
    run(program)


def test_the_host_sees_results_only_when_they_are_complete(run):
    program = """
arguments = jax.device_put((query, key, value), device)
want = jax.tree.map(np.asarray, step(*arguments))
view = "Client_CreateViewOfDeviceBuffer"
views, executions = mock.calls(view), mock.calls("LoadedExecutable_Execute")
held = Held(*arguments)
# The first segment was given to the host, and nothing that needs our result.
assert mock.calls(view) == views
assert mock.calls("LoadedExecutable_Execute") == executions + 1
got = jax.tree.map(np.asarray, held.finish())
assert mock.calls(view) > views
jax.tree.map(np.testing.assert_array_equal, got, want)
"""
    run(program)


def test_operands_are_referenced_until_the_kernels_are_done(run):
    program = """
arguments = jax.device_put((query, key, value), device)
jax.block_until_ready(step(*arguments))

def open_references():
    return (mock.calls("Buffer_IncreaseExternalReferenceCount")
            - mock.calls("Buffer_DecreaseExternalReferenceCount"))

assert open_references() == 0
held = Held(*arguments)
assert open_references() == 3  # query, key and value
held.finish()
assert open_references() == 0
"""
    run(program)


def test_handlers_that_take_addresses_get_copies(run):
    program = """
from tests.plugin.pjrt.on_platform import scale

x = jax.device_put(query, device)
before = copies()
np.testing.assert_array_equal(jax.jit(scale)(x), 2 * query)
# In, out, and by np.asarray.
assert copies() == before + 3
"""
    run(program)


# -- Wrong answers ---------------------------------------------------------------------

OF = "the host plugin's PJRT_"
POINTER = "Buffer_OpaqueDeviceMemoryDataPointer"
VIEW = "Client_CreateViewOfDeviceBuffer"
NATIVE = {
    f"{POINTER}:error": f"injected error of {POINTER}",
    f"{POINTER}:null": f"{OF}{POINTER} succeeded, but it gave no object for an array",
    f"{POINTER}:odd": f"{OF}{POINTER} succeeded, but it gave what cannot be an object",
    f"{POINTER}:small": "bytes was expected, but got one of 4.",
    "Buffer_IncreaseExternalReferenceCount:error": "injected error of Buffer_Increase",
    f"{VIEW}:error": f"injected error of {VIEW}",
    f"{VIEW}:null": f"{OF}{VIEW} succeeded, but it gave no buffer.",
}
# Of Metal: selector, mode of fake_metal_fail, what the error says.
METAL = {
    ("newBufferWithLength:options:", 1): "out of memory",
    ("commit", 2): "injected",
    ("device", 1): "one of another device",
}


def test_wrong_answers_when_a_program_runs(run):
    faults = EXECUTING | NATIVE
    program = f"""
arguments = jax.block_until_ready(jax.device_put((query, key, value), device))
want = jax.tree.map(np.asarray, step(*arguments))
errors = []

def try_it(change, undo):
    live = collected()
    change()
    errors.append(error_of(step, *arguments))
    undo()
    again = jax.tree.map(np.asarray, step(*arguments))
    jax.tree.map(np.testing.assert_array_equal, again, want)
    del again
    # The small object stays with the mock, and a buffer that it did not hand over.
    assert collected() <= live + LOST, (errors[-1], fake.live_text())

for fault in {list(faults)!r}:
    LOST = {{"{POINTER}:small": 1, "LoadedExecutable_Execute:null": 2,
             "{VIEW}:null": 1}}.get(fault, 0)
    try_it(lambda: mock.fault(fault), mock.clear_faults)
LOST = 0
for selector, mode in {list(METAL)!r}:
    # Whatever memory is asked for: scratch is tried twice.
    try_it(lambda: fake.fail(selector, 0, 2, mode, "injected"), fake.clear_failures)
print(json.dumps(errors))
"""
    found = json.loads(run(program))
    expected = [*faults.items(), *METAL.items()]
    assert len(found) == len(expected)
    for (fault, sentence), error in zip(expected, found):
        assert sentence in error, (fault, error)
