"""Inputs from public bug reports, and what else is of their kind.

`test_report_NN_…` is report NN of 35; some are in tests/kernels, the last test counts
them. The kernels run always, the other implementations in the slow tests.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx

from jax_flash_metal import dot_product_attention, flash_attention
from jax_flash_metal import flax as fused_flax
from jax_flash_metal.config import BACKENDS
from tests.semantics import attention_cases
from tests.semantics.attention_cases import normal
from tests.support import cases, jax_call, reference_f64, tolerances
from tests.support.closeness import assert_close
from tests.support.compare import assert_identical
from tests.support.inputs import Inputs
from tests.support.kernel_check import assert_result

BF16 = np.dtype(ml_dtypes.bfloat16)
NUM_REPORTS = 35

implementations = pytest.mark.parametrize(
    "implementation",
    [
        *BACKENDS,
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("fallback", marks=pytest.mark.slow),
    ],
    indirect=True,
)


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def qkv(rng, batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, dtype=np.float32):
    """query, key, value and the cotangents of out and logsumexp."""
    return Inputs(
        normal(rng, batch, q_len, num_heads, head_dim, dtype=dtype),
        normal(rng, batch, kv_len, num_kv_heads, head_dim, dtype=dtype),
        normal(rng, batch, kv_len, num_kv_heads, head_dim, dtype=dtype),
        normal(rng, batch, q_len, num_heads, head_dim, dtype=dtype),
        normal(rng, batch, num_heads, q_len),
    )


def check(implementation, inputs, tolerance=tolerances.STANDARD, **arguments):
    """Both passes and every gradient against float64; returns the results."""
    results = jax_call.run(implementation, inputs, **arguments)
    expected = reference_f64.attention(*inputs.operands, **arguments)._asdict()
    expected |= reference_f64.attention_gradients(
        *inputs.operands, inputs.dout, inputs.dlogsumexp, **arguments
    )._asdict()
    case = _case_of(inputs, arguments)
    for name, actual in results.present():
        assert_result(
            *(case, name, actual, expected[name]),
            context=f"{implementation}, {sorted(arguments)}",
            tolerance=tolerance,
        )
    return results


def _case_of(inputs, arguments):
    """What sizes of tolerances depend on."""
    batch, q_len, num_heads, head_dim = inputs.query.shape
    _, kv_len, num_kv_heads, _ = inputs.key.shape
    bias = arguments.get("bias")
    shape = (1,) * (4 - np.ndim(bias)) + np.shape(bias)
    sizes = dict(zip("nts", (num_heads, q_len, kv_len)))
    return cases.Case(
        "report",
        dtype=inputs.query.dtype.name,
        batch=(batch,),
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=None if bias is None else bias.dtype.name,
        bias_ones="".join(
            d for d, n in zip("nts", shape[1:]) if n == 1 and sizes[d] > 1
        ),
        feature_batch={"bias": shape[:1], "sinks": (1,), "alibi_slopes": (1,)},
        sinks="sinks" in arguments,
        slopes="alibi_slopes" in arguments,
    )


def bits(a, b):
    assert_identical(np.asarray(a), np.asarray(b), name="result", context="two ways")


@implementations
@pytest.mark.parametrize("side", ["key_value_seq_lengths", "query_seq_lengths"])
def test_report_01_jax_23349(rng, implementation, side):
    """Padding lengths equal the explicit mask."""
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114], np.int32)
    inputs = qkv(rng, 8, 128, 128, 4, 4, 16, BF16)
    results = check(implementation, inputs, **{side: lengths})
    mask = np.arange(128) < lengths[:, None]
    mask = mask[:, None, None, :] if side.startswith("key") else mask[:, None, :, None]
    masked = jax_call.run(implementation, inputs, mask=mask)
    for name, array in results.present():
        assert_identical(array, getattr(masked, name), name=name, context=side)


@implementations
@pytest.mark.parametrize("size", [1, 32])
def test_report_02_jax_32300(rng, implementation, size):
    """Right windows without a mask, both passes."""
    inputs = qkv(rng, 1, 48, 80, 4, 4, 16, BF16)
    check(implementation, inputs, sliding_window=(0, size - 1))


def test_report_02_jax_32300_at_its_size(rng):
    """T2048 S2080 N8 H64: the two windows differ, some rows against float64."""
    inputs = qkv(rng, 1, 2048, 2080, 8, 8, 64, BF16)
    outs = []
    for size in (1, 32):
        out = dot_product_attention(
            *inputs.operands, local_window_size=(0, size - 1), implementation="metal"
        )
        outs.append(np.asarray(out))
        for start in (0, 1000, 2016):
            rows = slice(start, start + 32)
            expected = reference_f64.attention(
                *(inputs.query[:, rows], inputs.key, inputs.value),
                sliding_window=(0, size - 1),
                q_offset=start,
            )
            assert_close("out", outs[-1][:, rows], expected.out, "bfloat16")
    assert (outs[0] != outs[1]).any()


@implementations
@pytest.mark.parametrize("left", [0, 9, 63])
@pytest.mark.parametrize("lengths", [(64, 64), (70, 130), (130, 70)])
def test_report_03_jax_39576(rng, implementation, lengths, left):
    """A left window without causality: row i uses keys i - L … i."""
    inputs = qkv(rng, 2, *lengths, 2, 2, 16)
    check(implementation, inputs, sliding_window=(left, 0))


@implementations
@pytest.mark.parametrize(
    "shape",
    [(4, 1, 1, 32), (4, 1, 32, 1), (1, 4, 1, 32), (32, 32), (32,), (4, 1, 32, 32)],
)
def test_report_04_jax_28974(rng, implementation, shape):
    """A (B, 1, 1, S) mask alone, and every other shape that broadcasts."""
    inputs = qkv(rng, 4, 32, 32, 4, 4, 16)
    check(implementation, inputs, mask=rng.random(shape) < 0.5)


@implementations
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("float16", "bfloat16")),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [(3, 4, 9, 17), (3, 1, 9, 17), (1, 4, 9, 17), (1, 1, 9, 17), (9, 17), (4, 1, 17),
     (3, 1, 1, 1)],
)  # fmt: skip
def test_report_05_jax_27184(rng, implementation, shape, dtype):
    """jax #30593 too: the gradient of bias has its shape and dtype."""
    inputs = qkv(rng, 3, 9, 17, 4, 2, 8)
    bias = normal(rng, *shape, dtype=tolerances.DTYPES[dtype])
    results = check(implementation, inputs, bias=bias)
    assert results.dbias.shape == shape and results.dbias.dtype == bias.dtype


@implementations
def test_report_06_jax_32242(rng, implementation):
    """bfloat16 operands, float32 bias: the bias gradient is float32 and finite."""
    inputs = qkv(rng, 8, 128, 128, 4, 4, 32, BF16)
    results = check(implementation, inputs, bias=normal(rng, 1, 4, 128, 128))
    assert results.dbias.dtype == np.float32
    for _, array in results.present():
        assert np.isfinite(array.astype(np.float32)).all()


@implementations
@pytest.mark.parametrize("of", ["query", "key", "bias"])
def test_report_07_jax_38495(rng, implementation, of):
    """The Jacobian: a mapped pullback with residuals that are not mapped."""
    query, key, value, *_ = qkv(rng, 2, 4, 4, 16, 16, 32, np.float16)
    arguments = {"query": query, "key": key, "value": value}
    arguments["bias"] = normal(rng, 1, 16, 4, 4)

    def some_of(x, implementation):
        out = flash_attention(**arguments | {of: x}, implementation=implementation)
        return out[:, :2, :3, :4]

    jacobian = jax.jit(
        jax.jacobian(functools.partial(some_of, implementation=implementation))
    )
    got = np.asarray(jacobian(arguments[of]))
    assert got.shape == (2, 2, 3, 4, *arguments[of].shape)
    # Element by element, without vmap.
    one_of = jax.jit(
        lambda x, i: jax.grad(lambda x: some_of(x, implementation).reshape(-1)[i])(x)
    )
    flat = got.reshape(48, *arguments[of].shape)
    for i in (0, 5, 47):
        want = np.asarray(one_of(arguments[of], i)).astype(np.float64)
        assert_close("dquery" if of != "bias" else "dbias", flat[i], want, "float16")


@implementations
def test_report_08_jax_36702(rng, implementation):
    """vmap of the gradient with a mapped bias."""
    _mapped_gradient_is_right(rng, implementation, batch=5, length=24)


@pytest.mark.slow
def test_report_08_jax_36702_at_its_size(rng):
    """The bias is (128, 1, 512, 512)."""
    _mapped_gradient_is_right(rng, "metal", batch=128, length=512)


def _mapped_gradient_is_right(rng, implementation, *, batch, length):
    query, key, value, *_ = qkv(rng, batch, length, length, 1, 1, 8)
    bias = normal(rng, batch, 1, length, length)

    def loss(query, key, value, bias):
        out = flash_attention(query, key, value, bias, implementation=implementation)
        return jnp.sum(out**2)

    grad = jax.grad(loss, argnums=(0, 1, 2, 3))
    got = jax.jit(jax.vmap(grad))(query, key, value, bias)
    alone = jax.jit(grad)
    for i in (0, batch - 1):
        want = alone(query[i], key[i], value[i], bias[i])
        for a, b in zip(got, want):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


def test_report_09_jax_35916(rng):
    """(B, H, L, D) passed to a BTNH function is an error, or at least another shape."""
    inputs = qkv(rng, 2, 10, 12, 4, 4, 8)
    swapped = [np.swapaxes(x, 1, 2) for x in inputs.operands]
    with pytest.raises(
        ValueError,
        match=r"query and \w+ must have the same|must be a multiple of",
    ):
        flash_attention(*swapped, implementation="metal")


def test_report_09_sizes_of_the_tests_differ():
    """So that any swap of two axes is seen."""
    names = ("B", "T", "S", "N", "K", "H", "V")
    sizes = [getattr(attention_cases, name) for name in names]
    case = cases.Case("default")
    kernel_sizes = [
        *(*case.batch, case.q_len, case.kv_len, case.num_heads),
        *(case.num_kv_heads, case.head_dim),
    ]
    for distinct in (sizes, kernel_sizes):
        assert len(set(distinct)) == len(distinct) and 1 not in distinct


@implementations
def test_report_12_jax_metal_20114(rng, implementation):
    """The gradient of multi-query attention through an nnx module."""

    class MultiQuery(nnx.Module):
        def __init__(self):
            shapes = {"query": (24, 6, 8), "key": (24, 1, 8), "value": (24, 1, 8)}
            for name, shape in shapes.items():
                setattr(self, name, nnx.Param(jnp.asarray(0.3 * normal(rng, *shape))))

        def __call__(self, x, implementation):
            return flash_attention(
                *(
                    jnp.tensordot(x, weights[...], 1)
                    for weights in (self.query, self.key, self.value)
                ),
                is_causal=True,
                implementation=implementation,
            )

    module, x = MultiQuery(), normal(rng, 2, 11, 24)

    def loss(module, implementation):
        return jnp.sum(module(x, implementation) ** 2)

    grad = nnx.jit(nnx.grad(loss), static_argnums=1)
    leaves = jax.tree.leaves(grad(module, implementation))  # by name
    got = dict(zip(("key", "query", "value"), leaves, strict=True))
    weights = [np.asarray(w[...]) for w in (module.query, module.key, module.value)]
    operands = [np.tensordot(x, w, 1) for w in weights]
    out = reference_f64.attention(*operands, is_causal=True).out
    wanted = reference_f64.attention_gradients(*operands, 2 * out, is_causal=True)
    for name, gradient in zip(("query", "key", "value"), wanted):
        want = np.tensordot(x.reshape(-1, 24).T, gradient.reshape(22, -1, 8), 1)
        np.testing.assert_allclose(got[name], want, rtol=1e-3, atol=1e-3)


@implementations
def test_report_13_jax_25986(rng, implementation):
    """Transposed, sliced and sharded inputs under jit; more in tests/sharding."""
    inputs = qkv(rng, 2, 21, 33, 4, 2, 8)
    expected = jax_call.run(implementation, inputs, is_causal=True)

    def call(inputs):
        results = jax_call.results(
            implementation, {"is_causal": True}, inputs.operands, {}, inputs.dout,
            inputs.dlogsumexp,
        )  # fmt: skip
        return results[:5]

    def heads_first(x):
        return np.ascontiguousarray(np.swapaxes(x, 1, -2)) if x.ndim == 4 else x

    @jax.jit
    def transposed(inputs):
        return call(
            jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x, inputs)
        )

    @jax.jit
    def sliced(inputs):
        return call(jax.tree.map(lambda x: x[:, 1:-1] if x.ndim == 4 else x, inputs))

    def widened(x):
        return np.pad(x, [(0, 0), (1, 1), (0, 0), (0, 0)]) if x.ndim == 4 else x

    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    sharded = jax.device_put(inputs, sharding)
    for got in (
        transposed(jax.tree.map(heads_first, inputs)),
        sliced(jax.tree.map(widened, inputs)),
        jax.jit(call)(sharded),
    ):
        for name, array, want in zip(expected._fields, got, expected):
            assert_identical(np.asarray(array), want, name=name, context="layouts")


@implementations
def test_report_14_jax_40128(rng, implementation):
    """The sink gradient in bfloat16 is summed in float32 before the cast."""
    inputs = qkv(rng, 2, 300, 40, 4, 2, 8, BF16)
    sinks = normal(rng, 4, dtype=BF16)

    def attend(sinks):
        return flash_attention(
            *inputs.operands, sinks=sinks, implementation=implementation
        )

    _, pullback = jax.vjp(attend, sinks)
    (got,) = pullback(jnp.asarray(inputs.dout))
    want = reference_f64.attention_gradients(
        *inputs.operands, inputs.dout, sinks=sinks
    ).dsinks
    assert got.dtype == BF16
    # Rounding a running sum of 600 rows to 8 bits would be off by several percent.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_report_15_flax_2858(rng, kind):
    """flax #4009 too: mask and dropout reach the attention_fn of both APIs."""
    attention_fn = functools.partial(
        fused_flax.dot_product_attention, implementation="metal"
    )
    x = jnp.asarray(normal(rng, 2, 11, 24))
    mask = jnp.asarray(rng.random((2, 1, 11, 11)) < 0.6).at[..., 0].set(True)
    if kind == "linen":
        ours, theirs = (
            linen.MultiHeadDotProductAttention(
                num_heads=6, dropout_rate=0.5, attention_fn=f
            )
            for f in (attention_fn, linen.dot_product_attention)
        )
        variables = theirs.init(jax.random.key(0), x, deterministic=True)

        def run(module, seed=None):
            rngs = None if seed is None else {"dropout": jax.random.key(seed)}
            return module.apply(
                variables, x, mask=mask, deterministic=seed is None, rngs=rngs
            )
    else:
        ours, theirs = (
            nnx.MultiHeadAttention(
                num_heads=6, in_features=24, dropout_rate=0.5, decode=False,
                attention_fn=f, rngs=nnx.Rngs(0),
            )
            for f in (attention_fn, nnx.dot_product_attention)
        )  # fmt: skip

        def run(module, seed=None):
            rngs = None if seed is None else nnx.Rngs(dropout=seed)
            return module(x, mask=mask, deterministic=seed is None, rngs=rngs)

    np.testing.assert_allclose(run(ours), run(theirs), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(run(ours, 1), run(ours, 1))
    assert (np.asarray(run(ours, 1)) != np.asarray(run(ours, 2))).any()
    assert (np.asarray(run(ours, 1)) != np.asarray(run(ours))).any()


@pytest.mark.parametrize("heads", [(0, 1), (1, 0), (0, 0)])
def test_report_16_flax_5333(heads):
    """No heads: a ValueError that says so, no ZeroDivisionError."""
    num_heads, num_kv_heads = heads
    query, key = np.zeros((2, 5, num_heads, 8)), np.zeros((2, 7, num_kv_heads, 8))
    for attend in (flash_attention, dot_product_attention):
        with pytest.raises(ValueError, match="heads"):
            attend(*(x.astype(np.float32) for x in (query, key, key)))


@implementations
@pytest.mark.parametrize("lengths", [(16, 17), (17, 16), (1, 17)])
def test_report_17_lucidrains_7(rng, implementation, lengths):
    """Lq 16, Lkv 17 under jit and checkpoint: gradient shapes and values."""
    inputs = qkv(rng, 2, *lengths, 4, 2, 8)

    @jax.checkpoint
    def attend(query, key, value):
        return flash_attention(query, key, value, implementation=implementation)

    @jax.jit
    def gradients(*operands):
        _, pullback = jax.vjp(attend, *operands)
        return pullback(jnp.asarray(inputs.dout))

    want = reference_f64.attention_gradients(*inputs.operands, inputs.dout)
    for name, got, x in zip(want._fields, gradients(*inputs.operands), inputs.operands):
        assert got.shape == x.shape
        assert_close(name, got, getattr(want, name), "float32")


@implementations
@pytest.mark.parametrize("share", [1 / 3, 1.0])
def test_report_18_jax_flash_attn2_1(rng, implementation, share):
    """The lowest float16 is a number, also in whole rows. No cotangent, no gradient."""
    inputs = qkv(rng, 2, 16, 16, 4, 4, 8, np.float16)
    bias = np.zeros((1, 4, 16, 16), np.float16)
    bias[..., : int(16 * share)] = np.finfo(np.float16).min
    check(implementation, inputs, tolerances.HUGE_LOGITS, bias=bias)
    zeros = inputs._replace(
        dout=np.zeros_like(inputs.dout), dlogsumexp=np.zeros_like(inputs.dlogsumexp)
    )
    results = jax_call.run(implementation, zeros, bias=bias)
    for name in ("dquery", "dkey", "dvalue", "dbias"):
        assert (getattr(results, name) == 0).all(), name


@implementations
@pytest.mark.parametrize("heads", [(6, 3), (6, 2), (5, 1)])
def test_report_19_levanter_449(rng, implementation, heads):
    """Grouped heads: dkey and dvalue are summed over the group."""
    num_heads, num_kv_heads = heads
    inputs = qkv(rng, 2, 11, 19, num_heads, num_kv_heads, 8)
    results = check(implementation, inputs, is_causal=True)
    groups = num_heads // num_kv_heads
    repeated = inputs._replace(
        key=np.repeat(inputs.key, groups, 2), value=np.repeat(inputs.value, groups, 2)
    )
    each = jax_call.run(implementation, repeated, is_causal=True)
    for name in ("dkey", "dvalue"):
        parts = getattr(each, name).reshape(2, 19, num_kv_heads, groups, 8)
        np.testing.assert_allclose(
            getattr(results, name), parts.sum(3), rtol=1e-4, atol=1e-4
        )


@implementations
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [(7, 19, 11), (1, 33, 1), (40,)])
def test_report_20_maxtext_4478(rng, implementation, lengths, is_causal):
    """Packed sequences equal the separate ones, in both passes."""
    total = sum(lengths)
    ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)[None]
    inputs = qkv(rng, 1, total, total, 6, 3, 8)
    attend = functools.partial(check, implementation, is_causal=is_causal)
    whole = attend(inputs, segment_ids=(ids, ids))
    if implementation != "metal":
        return  # against float64 already, and every length would be compiled
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        one = Inputs(*(x[:, rows] for x in inputs[:4]), inputs.dlogsumexp[..., rows])
        alone = attend(one)
        np.testing.assert_allclose(whole.out[:, rows], alone.out, rtol=1e-5, atol=1e-5)
        for name in ("dquery", "dkey", "dvalue"):
            np.testing.assert_allclose(
                getattr(whole, name)[:, rows],
                getattr(alone, name),
                rtol=1e-4,
                atol=1e-5,
            )


@implementations
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [8, 2])
def test_report_21_jax_mps(rng, implementation, num_heads, is_causal):
    """A (1, 1, T, T) mask where T equals or differs from N; with a bias' gradient."""
    inputs = qkv(rng, 3, 8, 8, num_heads, num_heads, 4)
    mask = rng.random((1, 1, 8, 8)) < 0.7
    bias = normal(rng, 1, num_heads, 8, 8)
    results = check(implementation, inputs, mask=mask, is_causal=is_causal, bias=bias)
    assert (results.dbias != 0).any()


@implementations
def test_report_21_jax_mps_vmap(rng, implementation):
    """The mask mapped, and not mapped."""
    query, key, value, *_ = qkv(rng, 3, 8, 8, 2, 2, 4)
    masks = rng.random((5, 1, 1, 8, 8)) < 0.7

    def attend(query, mask):
        return flash_attention(
            query, key, value, mask=mask, is_causal=True, implementation=implementation
        )

    queries = np.stack([query] * 5)
    got = jax.jit(jax.vmap(attend))(queries, masks)
    shared = jax.jit(jax.vmap(attend, (0, None)))(queries, masks[0])
    for i in range(5):
        options = {"is_causal": True}
        want = reference_f64.attention(query, key, value, mask=masks[i], **options)
        assert_close("out", got[i], want.out, "float32")
        want = reference_f64.attention(query, key, value, mask=masks[0], **options)
        assert_close("out", shared[i], want.out, "float32")


@implementations
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_report_22_mlx_2835(rng, implementation, dtype):
    """Few queries, many keys: top-left by default, bottom-right with q_offset."""
    inputs = qkv(rng, 1, 32, 1024, 2, 2, 64, tolerances.DTYPES[dtype])
    top_left = check(implementation, inputs, is_causal=True)
    first = flash_attention(
        *(inputs.query, inputs.key[:, :32], inputs.value[:, :32]),
        is_causal=True,
        implementation=implementation,
    )
    np.testing.assert_allclose(top_left.out, first, rtol=2e-3, atol=1e-3)
    check(implementation, inputs, is_causal=True, q_offset=1024 - 32)


@implementations
@pytest.mark.parametrize("left", [0, 3])
def test_report_23_mlx_2626(rng, implementation, left):
    """mlx-swift #275 too: padding on either side equals the truncated sequence."""
    inputs = qkv(rng, 1, 8, 8, 2, 2, 8, BF16)
    visible = np.zeros(8, bool)
    visible[left : left + 5] = True
    mask = visible[:, None] & visible
    padded = check(implementation, inputs, mask=mask)
    rows = slice(left, left + 5)
    short = Inputs(*(x[:, rows] for x in inputs[:4]), inputs.dlogsumexp[..., rows])
    truncated = jax_call.run(implementation, short)
    assert (padded.out[:, ~visible] == 0).all()
    for name in ("out", "dquery", "dkey", "dvalue"):
        want = getattr(truncated, name).astype(np.float64)
        kind = "out" if name == "out" else "dquery"
        assert_close(kind, getattr(padded, name)[:, rows], want, "bfloat16")


@implementations
@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 1), (1, 8, 1, 1), ()])
def test_report_24_mlx_2096(rng, implementation, shape):
    """One query, an additive mask of shape (8, 1, 1): no NaN, -inf included."""
    inputs = qkv(rng, 1, 1, 1, 8, 8, 64)
    bias = np.asarray(normal(rng, *shape))
    results = check(implementation, inputs, bias=bias)
    np.testing.assert_allclose(results.out, inputs.value, rtol=1e-6)
    hidden = np.full(shape, -np.inf, np.float32)
    results = jax_call.run(implementation, inputs, bias=hidden)
    assert (results.out == 0).all() and (results.dbias == 0).all()


@implementations
@pytest.mark.parametrize("length", [34, 5])
def test_report_26_mlx_3452(rng, implementation, length):
    """With sinks the last row of 34 equals that row alone."""
    inputs = qkv(rng, 1, length, length, 4, 2, 16)
    sinks = normal(rng, 4)
    whole = check(implementation, inputs, sinks=sinks, is_causal=True)
    last = flash_attention(
        *(inputs.query[:, -1:], inputs.key, inputs.value),
        sinks=sinks,
        is_causal=True,
        q_offset=length - 1,
        implementation=implementation,
    )
    np.testing.assert_allclose(whole.out[:, -1:], last, rtol=1e-5, atol=1e-6)


@implementations
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_report_27_mlx_3383(rng, implementation, axes):
    """vmap with 4 query heads on 2, D64 L4, in both passes."""
    query, key, value, dout, _ = qkv(rng, 3, 4, 4, 4, 2, 64)
    operands = [
        x[:, None] if axis == 0 else x[:1]
        for x, axis in zip((query, key, value), axes, strict=True)
    ]

    def attend(query, key, value, dout):
        call = functools.partial(flash_attention, implementation=implementation)
        out, pullback = jax.vjp(call, query, key, value)
        return out, pullback(dout)

    mapped = jax.jit(jax.vmap(attend, (*axes, 0)))
    out, gradients = mapped(*operands, dout[:, None])
    for i in range(3):
        one = [x[i] if axis == 0 else x for x, axis in zip(operands, axes)]
        assert_close("out", out[i], reference_f64.attention(*one).out, "float32")
        want = reference_f64.attention_gradients(*one, dout[i : i + 1])
        for name, got in zip(("dquery", "dkey", "dvalue"), gradients):
            assert_close(name, got[i], getattr(want, name), "float32")


@implementations
@pytest.mark.parametrize("shape", [(4,), (1, 1, 2, 4), (1, 1, 1, 1)])
def test_report_28_pytorch_156707(rng, implementation, shape):
    """PyTorch #167515 too: a mask that hides everything, in any rank."""
    inputs = qkv(rng, 1, 2, 4, 1, 1, 8)
    hidden = np.zeros(shape, bool)
    results = jax_call.run(implementation, inputs, mask=hidden, sinks=normal(rng, 1))
    assert np.isneginf(results.logsumexp).all()
    for name, array in results.present():
        assert name == "logsumexp" or (array == 0).all(), name


@implementations
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_report_28_one_hidden_row(rng, implementation, dtype):
    inputs = qkv(rng, 2, 12, 9, 4, 2, 8, tolerances.DTYPES[dtype])
    mask = np.ones((2, 4, 12, 9), bool)
    mask[1, 2, 5] = mask[0, :, 0] = False
    results = check(implementation, inputs, mask=mask)
    assert (results.out[1, 5, 2] == 0).all() and (results.out[0, 0] == 0).all()


@implementations
def test_report_29_pytorch_163597(rng, implementation):
    """PyTorch #181133 too: permuted q, k, v of batch 84, 3 rows, 3 heads, D64."""
    inputs = qkv(rng, 84, 3, 3, 3, 3, 64)
    expected = check(implementation, inputs).out

    @jax.jit
    def permuted(query, key, value):
        return flash_attention(
            *(jnp.transpose(x, (1, 2, 0, 3)) for x in (query, key, value)),
            implementation=implementation,
        )

    memory = [np.ascontiguousarray(x.transpose(2, 0, 1, 3)) for x in inputs.operands]
    bits(permuted(*memory), expected)


@implementations
@pytest.mark.parametrize("is_causal", [True, False])
def test_report_31_dao_ailab_443(rng, implementation, is_causal):
    """Packed, cu_q [0, 76, 110, 256], one key per sequence, D32 f16: dquery finite."""
    query_ids = np.repeat(np.arange(3), (76, 34, 146)).astype(np.int32)[None]
    key_ids = np.arange(3, dtype=np.int32)[None]
    inputs = qkv(rng, 1, 256, 3, 2, 2, 32, np.float16)
    results = check(
        implementation, inputs, is_causal=is_causal, segment_ids=(query_ids, key_ids)
    )
    for name in ("dquery", "dkey", "dvalue"):
        assert np.isfinite(getattr(results, name)).all(), name


@implementations
def test_report_32_dao_ailab_1778(rng, implementation):
    """More queries than keys, bottom-right: rows without keys are 0, in any rule."""
    inputs = qkv(rng, 1, 64, 32, 2, 1, 8, np.float16)
    results = check(implementation, inputs, is_causal=True, q_offset=-32)
    for array in (results.out[:, :32], results.dquery[:, :32]):
        assert (array == 0).all()
    assert np.isneginf(results.logsumexp[..., :32]).all()


@implementations
@pytest.mark.parametrize("hidden_by", ["lengths", "segments", "mask"])
def test_report_34_dao_ailab_2421(rng, implementation, hidden_by):
    """A sequence without queries gives zero dkey and dvalue, not NaN."""
    inputs = qkv(rng, 2, 12, 13, 4, 2, 8)
    arguments = {
        "lengths": {"query_seq_lengths": np.array([0, 9], np.int32)},
        "segments": {
            "segment_ids": (
                np.array([[5] * 12, [1] * 12], np.int32),
                np.array([[6] * 13, [1] * 13], np.int32),
            )
        },
        "mask": {"mask": np.array([False, True]).reshape(2, 1, 1, 1)},
    }[hidden_by]
    results = check(implementation, inputs, **arguments)
    for name in ("dquery", "dkey", "dvalue"):
        gradient = getattr(results, name)
        assert (gradient[0] == 0).all() and np.isfinite(gradient).all()


@implementations
def test_report_35_dao_ailab_429(rng, implementation):
    """#414, #988 too: the backward twice gives the same bits, with every feature."""
    inputs = qkv(rng, 2, 33, 40, 4, 2, 8)
    arguments = {
        "bias": normal(rng, 1, 4, 33, 40),
        "mask": rng.random((2, 1, 33, 40)) < 0.8,
        "sinks": normal(rng, 4),
        "alibi_slopes": normal(rng, 4),
        "dropout_rate": 0.3,
        "dropout_key": np.array([1, 2], np.uint32),
    }
    first = jax_call.run(implementation, inputs, **arguments)
    second = jax_call.run(implementation, inputs, **arguments)
    for name, array in first.present():
        assert_identical(array, getattr(second, name), name=name, context="twice")


def test_every_report_has_a_test():
    tests = Path(__file__).parents[1]
    text = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    numbers = {
        int(n) for n in re.findall(r"^def test_report_(\d\d)_", text, re.MULTILINE)
    }
    assert numbers == set(range(1, NUM_REPORTS + 1))
