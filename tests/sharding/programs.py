"""Attention on several devices, against the same on one.

`main` runs in a process of its own that has four CPU devices, and prints as JSON what
the named functions return.
"""

from __future__ import annotations

import json
import re
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_flash_metal import SegmentIds, flash_attention
from jax_flash_metal.kernel_proof import KernelWarning

P = PartitionSpec
B, T, S, N, K, H, V = 4, 9, 11, 8, 4, 16, 24
CASES = {}
IMPLEMENTATION = "metal"  # `main` may set another


def case(function):
    CASES[function.__name__] = function
    return function


def mesh(order=(0, 1, 2, 3), **axes):
    devices = np.array(jax.devices())[list(order)]
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def square():
    return mesh(x=2, y=2)


def array(seed, *shape, dtype=jnp.float32):
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(numbers, dtype)


def attend(query, key, value, **options):
    return flash_attention(
        query,
        key,
        value,
        is_causal=True,
        implementation=IMPLEMENTATION,
        return_logsumexp=True,
        **options,
    )


def forward_and_backward(attend):
    """Of arrays and their cotangents: results and gradients of every array."""

    def run(arrays, dout):
        (out, logsumexp), pullback = jax.vjp(attend, arrays)
        # A row that sees no key has no logsumexp worth a gradient.
        dlogsumexp = jnp.where(jnp.isfinite(logsumexp), jnp.sin(logsumexp), 0)
        return (out, logsumexp), pullback((dout, dlogsumexp))[0]

    return run


def inputs(n=N, k=K, b=B):
    arrays = {
        "query": array(0, b, T, n, H),
        "key": array(1, b, S, k, H),
        "value": array(2, b, S, k, V),
    }
    return arrays, array(3, b, T, n, V)


def compare(function, arguments, mesh, specs, tolerance=2e-5):
    """Runs the function with the arguments split so, and with all on one device.

    Returns:
      The collectives of the compiled program, the largest difference of a result, and
      per result, by its path, its PartitionSpec.
    """
    expected = jax.jit(function)(*arguments)
    split = jax.tree.map(
        lambda spec, a: jax.device_put(a, NamedSharding(mesh, spec)),
        specs,
        arguments,
        is_leaf=lambda x: isinstance(x, P),
    )
    compiled = jax.jit(function).lower(*split).compile()
    results = compiled(*split)
    differences = []
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(results)):
        # -inf, of rows without keys, minus itself is no difference.
        want, got = (np.maximum(np.asarray(a, np.float32), -1e9) for a in (want, got))
        assert want.shape == got.shape
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)
        differences.append(np.abs((got - want)[got != want]).max(initial=0))
    paths = jax.tree_util.tree_flatten_with_path(results)[0]
    return {
        "collectives": collectives(compiled),
        "difference": float(max(differences)),
        "specs": {
            "".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path[-1:]): (
                spec_of(result)
            )
            for path, result in paths
        },
    }


def collectives(compiled):
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return sorted(re.findall(rf"\b({kinds})(?:-start)?\(", compiled.as_text()))


def spec_of(result):
    spec = list(getattr(result.sharding, "spec", ["not named"]))
    while spec and spec[-1] is None:
        spec.pop()
    return spec


def plain(spec, kv_spec, mesh, n=N, k=K, b=B):
    arrays, dout = inputs(n, k, b)
    run = forward_and_backward(lambda a: attend(**a))
    specs = {"query": spec, "key": kv_spec, "value": kv_spec}
    return compare(run, (arrays, dout), mesh, (specs, spec))


@case
def batch():
    return plain(P("x"), P("x"), square())


@case
def batch_over_two_axes():
    return plain(P(("y", "x")), P(("y", "x")), square())


@case
def heads():
    return plain(P(None, None, "z"), P(None, None, "z"), mesh(z=4))


@case
def batch_and_heads():
    return plain(P("y", None, "x"), P("y", None, "x"), square())


@case
def one_kv_head():
    return plain(P("y", None, "x"), P("y"), square(), k=1)


@case
def more_parts_than_kv_heads():
    return plain(P(None, None, ("x", "y")), P(None, None, "x"), square(), k=2)


@case
def parts_of_an_axis():
    return plain(P(None, None, "z"), P(), mesh(z=4), k=2)


@case
def shuffled_devices():
    return plain(P("y", None, "x"), P("y", None, "x"), mesh((3, 1, 2, 0), x=2, y=2))


@case
def kv_heads_do_not_divide():
    return plain(P("y", None, "x"), P("y"), square(), n=6, k=3)


@case
def split_sequences():
    arrays, dout = inputs()
    arrays = {n: a[:, :8] for n, a in arrays.items()}
    run = forward_and_backward(lambda a: attend(**a))
    specs = {name: P("x", "y") for name in arrays}
    return compare(run, (arrays, dout[:, :8]), square(), (specs, P("x", "y")))


@case
def nothing_split():
    return plain(P(), P(), square())


def everything(bias_shape, bias_spec, per_head, bias_dtype=jnp.float32):
    """All options at once, over batch and heads."""
    arrays, dout = inputs()
    arrays |= {
        "bias": array(4, *bias_shape, dtype=bias_dtype),
        "sinks": array(5, N),
        "alibi_slopes": array(6, N) ** 2,
    }
    ids = jnp.asarray(np.arange(B * S).reshape(B, S) // 5 % 2, jnp.int32)
    others = {
        "mask": jnp.asarray(np.asarray(array(7, B, 1, T, S)) > -1),
        "q_ids": ids[:, :T],
        "kv_ids": ids,
        "q_lengths": jnp.array([T, T - 1, T, 3], jnp.int32),
        "kv_lengths": jnp.array([S, 4, S - 2, S], jnp.int32),
        "offset": jnp.int32(2),
        "dropout_key": jax.random.key(8),
    }

    def run(arrays, others, dout):
        def call(arrays):
            return attend(
                **arrays,
                mask=others["mask"],
                segment_ids=SegmentIds(others["q_ids"], others["kv_ids"]),
                query_seq_lengths=others["q_lengths"],
                key_value_seq_lengths=others["kv_lengths"],
                q_offset=others["offset"],
                dropout_key=others["dropout_key"],
                dropout_rate=0.3,
                sliding_window=(7, None),
                logits_soft_cap=5.0,
            )

        return forward_and_backward(call)(arrays, dout)

    split = P("x", None, "y")
    specs = {name: split for name in ("query", "key", "value")}
    specs |= {"bias": bias_spec, "sinks": per_head, "alibi_slopes": per_head}
    other_specs = {name: P("x") for name in others}
    other_specs |= {"offset": P(), "dropout_key": P()}
    tolerance = 2e-5 if bias_dtype == jnp.float32 else 2e-2
    return compare(
        run, (arrays, others, dout), square(), (specs, other_specs, split), tolerance
    )


@case
def shared_bias():
    return everything((1, 1, T, S), P(), P())


@case
def bfloat16_bias_of_heads():
    return everything((N, 1, S), P("y"), P("y"), jnp.bfloat16)


@case
def bias_of_everything():
    return everything((B, N, T, S), P("x", "y"), P("y"))


@case
def shared_bias_gspmd():
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        return None
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        return shared_bias()
    finally:
        jax.config.update("jax_use_shardy_partitioner", DEFAULT_PARTITIONER)


@case
def same_dropout():
    arrays, _ = inputs()
    key = jax.random.key(0)

    def run(arrays):
        return attend(**arrays, dropout_rate=0.4, dropout_key=key)

    return compare(run, (arrays,), square(), ({n: P("x", None, "y") for n in arrays},))


@case
def vmapped():
    """Over query and bias; key and value are shared, and split over what vmap added."""
    arrays, _ = inputs(b=2)
    arrays["query"] = array(0, 4, 2, T, N, H)
    arrays["bias"] = array(4, 4, 1, 1, T, S)
    axes = {"query": 0, "key": None, "value": None, "bias": 0}
    run = forward_and_backward(jax.vmap(lambda a: attend(**a), in_axes=(axes,)))
    shared = P(None, None, "y")
    specs = {"query": P("x", None, None, "y"), "key": shared, "value": shared}
    return compare(
        run,
        (arrays, array(3, 4, 2, T, N, V)),
        square(),
        ({**specs, "bias": P("x")}, P("x", None, None, "y")),
    )


@case
def vmapped_pullback():
    """A shared bias: its gradient is full in the dimension of vmap, summed over B."""
    arrays, _ = inputs()
    arrays["bias"] = array(4, 1, 1, T, S)

    def run(arrays, douts):
        (_, logsumexp), pullback = jax.vjp(lambda a: attend(**a), arrays)
        zeros = jnp.zeros_like(logsumexp)
        return jax.vmap(lambda dout: pullback((dout, zeros)))(douts)

    split = P("x", None, "y")
    specs = {"query": split, "key": split, "value": split, "bias": P()}
    douts = array(3, 3, B, T, N, V)
    return compare(run, (arrays, douts), square(), (specs, P(None, *split)))


@case
def outside_jit():
    arrays, _ = inputs()
    expected, _ = attend(**arrays)
    sharding = NamedSharding(square(), P("x", None, "y"))
    out, _ = attend(**{n: jax.device_put(a, sharding) for n, a in arrays.items()})
    np.testing.assert_array_equal(out, expected)
    return {"specs": {"out": spec_of(out)}}


@case
def explicit_axes():
    """A mesh as jax.make_mesh makes it since jax 0.9, set for the program."""
    if not hasattr(jax, "set_mesh"):
        return None
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    split = P("x", None, "y", None)
    types = []

    def run(arrays):
        def loss(arrays):
            out, _ = attend(**arrays)
            types.append(list(jax.typeof(out).sharding.spec))
            return ((arrays["query"] + out) ** 2).sum()

        return jax.grad(loss)(arrays)

    arrays = {n: array(1, B, T, N, H) for n in ("query", "key", "value")}
    specs = {name: split for name in arrays}
    arrays["bias"] = array(4, 1, 1, T, T)
    expected = jax.jit(run)(arrays)
    types.clear()
    with jax.set_mesh(explicit):
        result = compare_in_mesh(
            run, arrays, explicit, {**specs, "bias": P()}, expected
        )
    return {**result, "types": types}


def compare_in_mesh(run, arrays, mesh, specs, expected):
    split = {
        n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()
    }
    compiled = jax.jit(run).lower(split).compile()
    results = compiled(split)
    for name, want in expected.items():
        np.testing.assert_allclose(
            np.asarray(results[name]), want, atol=1e-4, rtol=1e-4, err_msg=name
        )
    return {
        "collectives": collectives(compiled),
        "specs": {name: spec_of(result) for name, result in results.items()},
    }


@case
def one_device():
    arrays, dout = inputs()
    run = forward_and_backward(lambda a: attend(**a))
    text = jax.jit(run).lower(arrays, dout).as_text()
    return {
        "plain": "jax_flash_metal_forward" in text,
        "partitioned": "CustomSPMDPartitioning" in text,
    }


# shard_map: what one device does is an ordinary program. What does not vary over the
# devices (sinks, slopes, a shared bias) gets a gradient that is summed over them.


def shard_map(function, mesh, in_specs, out_specs, **options):
    if hasattr(jax, "shard_map"):
        if "auto" in options:
            auto = options.pop("auto")
            options["axis_names"] = set(mesh.axis_names) - auto
        mapping = jax.shard_map
    else:
        from jax.experimental.shard_map import shard_map as mapping
    return mapping(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
    )


def mapped(jit):
    arrays, dout = inputs()
    arrays |= {
        "bias": array(4, 1, N, T, S),
        "sinks": array(5, N),
        "alibi_slopes": array(6, N) ** 2,
    }
    lengths = jnp.array([S, 4, S - 2, S], jnp.int32)

    def call(arrays, lengths):
        return attend(**arrays, key_value_seq_lengths=lengths)

    split = P("x", None, "y")
    specs = {name: split for name in ("query", "key", "value")}
    specs |= {"bias": P(None, "y"), "sinks": P("y"), "alibi_slopes": P("y")}
    on_devices = shard_map(call, square(), (specs, P("x")), (split, P("x", "y")))

    def gradients(call):
        def run(arrays, dout):
            both = forward_and_backward(lambda a: call(a, lengths))
            return both(arrays, dout)

        return jax.jit(run) if jit else run

    expected = gradients(call)(arrays, dout)
    results = gradients(on_devices)(arrays, dout)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(results)):
        np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=2e-5)
    return {}


@case
def shard_map_in_jit():
    return mapped(jit=True)


@case
def shard_map_outside_jit():
    return mapped(jit=False)


@case
def shard_map_over_one_of_two_axes():
    arrays, _ = inputs()
    specs = {name: P("x") for name in arrays}
    function = shard_map(
        lambda a: attend(**a)[0], square(), (specs,), P("x"), auto=frozenset({"y"})
    )
    split = {n: P("x", None, "y") for n in arrays}
    split = {
        n: jax.device_put(a, NamedSharding(square(), split[n]))
        for n, a in arrays.items()
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = jax.jit(function)(split)
        except NotImplementedError as error:
            return {"error": str(error), "warnings": []}
    np.testing.assert_allclose(out, attend(**arrays)[0], atol=1e-5)
    ours = [str(w.message) for w in caught if w.category is KernelWarning]
    return {"error": None, "warnings": ours}


@case
def shard_map_over_one_of_two_axes_gspmd():
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        return shard_map_over_one_of_two_axes()  # there is only this one
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        return shard_map_over_one_of_two_axes()
    finally:
        jax.config.update("jax_use_shardy_partitioner", DEFAULT_PARTITIONER)


DEFAULT_PARTITIONER = getattr(jax.config, "jax_use_shardy_partitioner", False)


def main(names, implementation):
    global IMPLEMENTATION
    IMPLEMENTATION = implementation
    for name in names:
        try:
            outcome = {"result": CASES[name]()}
        except Exception:
            outcome = {"failure": traceback.format_exc()}
        print(json.dumps({"case": name, **outcome}), flush=True)
