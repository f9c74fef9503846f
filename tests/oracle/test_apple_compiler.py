"""Our front end against Apple's compiler: the same kernels give the same bits.

MLX's kernels as Apple's compiler made them (AIR, from MLX's wheel) and as our front end
compiles the wheel's headers, both on the software device. What this cannot see: matrix
layouts, sums over lanes and elementary functions are the device's own on both sides.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.oracle import downloads
from tests.oracle.apple_compiler import air, kernels, metallib
from tests.oracle.apple_compiler.kernels import APPLE, OURS, Mistake

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("apple_compiler")]

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    try:
        kernels.wheel()
    except downloads.Unreachable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("apple_compiler")
    return kernels.OracleDevice(folder / "oracle.so")


# -- Running both --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A dispatch of a kernel. `outputs` are the buffers that it writes."""

    kernel: str
    buffers: Mapping[int, np.ndarray]
    outputs: Mapping[int, np.ndarray]
    threadgroups: tuple[int, int, int]
    threads: tuple[int, int, int]
    values: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    constants: Mapping[int, bool | int] = dataclasses.field(default_factory=dict)


def outputs_of(device, maker: str, call: Call) -> dict[int, np.ndarray]:
    """The results of one compiler's kernel."""
    outputs = {index: array.copy() for index, array in call.outputs.items()}
    device.run_kernel(
        maker,
        call.kernel,
        {**call.buffers, **outputs},
        threadgroups=call.threadgroups,
        threads=call.threads,
        values=call.values,
        constants=call.constants,
    )
    return outputs


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ in a bit."""
    bits = np.dtype(f"u{a.itemsize}")
    return int((a.view(bits) != b.view(bits)).sum())


def check(device, call: Call) -> dict[int, np.ndarray]:
    """Both compilers' kernels write everything, and the same bits."""
    apple = outputs_of(device, APPLE, call)
    ours = outputs_of(device, OURS, call)
    for index, result in apple.items():
        assert np.isfinite(result.astype(np.float32)).all(), f"output {index}"
        assert differing(result, ours[index]) == 0, f"output {index}"
    return apple


def unwritten(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.full(shape, np.nan, DTYPES[dtype])


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values.astype(DTYPES[dtype])


def int32(value: int) -> np.ndarray:
    return np.array([value], np.int32)


def uint64(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


def float32(value: float) -> np.ndarray:
    return np.array([value], np.float32)


# -- Attention with matrix products --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of MLX's steel_attention. Lengths in elements."""

    q_len: int
    kv_len: int
    causal: bool = False
    mask: bool = False
    sinks: bool = False
    groups: int = 1

    def __str__(self) -> str:
        features = [name for name in ("causal", "mask", "sinks") if getattr(self, name)]
        return "-".join([f"q{self.q_len}", f"kv{self.kv_len}", *features])


NUM_HEADS, BATCH_SIZE, BLOCK_Q = 4, 2, 32


def attention_call(kernel: str, case: Attention) -> Call:
    """The call that MLX's host code would make."""
    dtype = kernel.split("_")[2]
    block_kv, head_dim, columns = (
        int(kernel.split(f"_{name}")[1].split("_")[0]) for name in ("bk", "bd", "wn")
    )
    q_len, kv_len, num_heads = case.q_len, case.kv_len, NUM_HEADS
    num_kv_heads = num_heads // case.groups
    query = normal(1, (BATCH_SIZE, num_heads, q_len, head_dim), dtype)
    key = normal(2, (BATCH_SIZE, num_kv_heads, kv_len, head_dim), dtype)
    value = normal(3, (BATCH_SIZE, num_kv_heads, kv_len, head_dim), dtype)
    out = unwritten(query.shape, dtype)
    strides = [
        stride // array.itemsize
        for array in (query, key, value, out)
        for stride in array.strides[:3]
    ]
    params = struct.pack(
        "<6if7i12q",
        *(BATCH_SIZE, num_heads, head_dim, q_len, kv_len, case.groups),
        head_dim**-0.5,
        *(-(-q_len // BLOCK_Q), -(-kv_len // block_kv)),
        *(q_len // BLOCK_Q, kv_len // block_kv),
        *(q_len % BLOCK_Q, kv_len % block_kv, kv_len - q_len),
        *strides,
    )
    buffers = {0: query, 1: key, 2: value}
    values = {4: np.frombuffer(params, np.uint8)}
    if case.mask:
        mask = normal(4, (BATCH_SIZE, num_heads, q_len, kv_len), dtype)
        mask_strides = [stride // mask.itemsize for stride in mask.strides[:3]]
        buffers[6] = mask
        values[5] = np.array(mask_strides, np.int64)
    if case.sinks:
        buffers[7] = normal(5, (num_heads,), dtype)
    return Call(
        kernel,
        buffers,
        {3: out, 8: unwritten((BATCH_SIZE, num_heads, q_len), "float32")},
        (-(-q_len // BLOCK_Q), num_heads, BATCH_SIZE),
        (32, 4, columns),
        values,
        {
            200: q_len % BLOCK_Q == 0,
            201: kv_len % block_kv == 0,
            300: case.mask,
            301: case.causal,
            302: case.sinks,
            303: True,
        },
    )


def attention_f64(call: Call, case: Attention) -> np.ndarray:
    """The output in float64, so that both are not wrong in the same way."""
    query, key, value = (call.buffers[i].astype(np.float64) for i in range(3))
    key, value = (np.repeat(x, case.groups, axis=1) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if case.mask:
        scores += call.buffers[6].astype(np.float64)
    if case.causal:
        q, kv = np.indices((case.q_len, case.kv_len))
        scores[..., kv > q + case.kv_len - case.q_len] = -np.inf
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = probs.sum(axis=-1, keepdims=True)
    if case.sinks:
        sinks = call.buffers[7].astype(np.float64).reshape(1, -1, 1, 1)
        total += np.exp(sinks - scores.max(axis=-1, keepdims=True))
    return probs / total @ value


ATTENTION_KERNELS = list(kernels.ATTENTION.kernels)
ATTENTION_CASES = [
    Attention(64, 64),
    Attention(96, 96, causal=True),
    Attention(77, 101),
    Attention(33, 200, causal=True, groups=2),
    Attention(45, 45, causal=True),
    Attention(50, 70, mask=True, groups=4),
    Attention(64, 96, causal=True, mask=True, sinks=True),
    Attention(1, 1),
]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_attention(device, kernel: str, case: Attention) -> None:
    call = attention_call(kernel, case)
    out = check(device, call)[3]
    tolerance = {4: 1e-5, 2: 2e-2}[out.itemsize]
    np.testing.assert_allclose(
        out.astype(np.float64), attention_f64(call, case), atol=tolerance, rtol=0
    )


# -- Attention of a few queries ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decode:
    """A call of MLX's sdpa_vector kernels: one threadgroup or several per query."""

    q_len: int
    kv_len: int
    causal: bool = False
    mask: str = ""  # "bool" or "float"
    sinks: bool = False
    transposed: bool = False  # queries are [q_len, heads, head_dim]

    def __str__(self) -> str:
        features = [name for name in ("causal", "sinks") if getattr(self, name)]
        mask = [f"{self.mask}_mask"] if self.mask else []
        return "-".join([f"q{self.q_len}", f"kv{self.kv_len}", *mask, *features])


VECTOR_CASES = [
    Decode(1, 300),
    Decode(1, 7, sinks=True),
    Decode(5, 65, causal=True, transposed=True),
    Decode(3, 100, mask="bool"),
    Decode(4, 33, mask="float", sinks=True),
]
NUM_KV_HEADS = 2


def vector_call(kernel: str, case: Decode, num_blocks: int = 0) -> Call:
    """num_blocks: of the kernel with several threadgroups per query; 0 = the other."""
    match = re.search(r"_(b?float(?:16)?)(?:_t)?_(\d+)_(\d+)$", kernel)
    assert match is not None
    dtype = {"float": "float32"}.get(match[1], match[1])
    head_dim, value_head_dim = int(match[2]), int(match[3])
    batch_size, num_kv_heads = (2, NUM_KV_HEADS) if num_blocks else (1, NUM_KV_HEADS)
    groups, q_len, kv_len = 3, case.q_len, case.kv_len
    heads = batch_size * num_kv_heads * groups
    key = normal(2, (batch_size * num_kv_heads, kv_len, head_dim), dtype)
    value = normal(3, (batch_size * num_kv_heads, kv_len, value_head_dim), dtype)
    buffers = {0: normal(1, (heads, q_len, head_dim), dtype), 1: key, 2: value}
    strides = [kv_len * head_dim, head_dim, kv_len * value_head_dim, value_head_dim]
    # The parameters of both kernels are the same from N on, at other indices.
    first = 7 if num_blocks else 5
    values = {first: int32(kv_len), first + 5: float32(head_dim**-0.5)}
    values |= {first + 1 + i: uint64(stride) for i, stride in enumerate(strides)}
    if case.mask == "bool":
        rng = np.random.default_rng(6)
        mask = rng.random((heads, q_len, kv_len)) < 0.7
        buffers[first + 6] = mask
    elif case.mask == "float":
        mask = normal(6, (heads, q_len, kv_len), dtype)
        mask[:, :, ::5] = -np.inf
        buffers[first + 7] = mask
    if case.mask:
        for i, stride in enumerate((1, kv_len, q_len * kv_len)):
            values[first + 8 + i] = int32(stride)
    if case.sinks:
        buffers[first + 11] = normal(7, (heads,), dtype)
    constants: dict[int, bool | int] = {
        20: bool(case.mask),
        21: case.transposed,
        22: case.causal,
        23: case.mask == "bool",
        24: case.mask == "float",
        25: case.sinks,
    }
    if not num_blocks:
        values |= {4: int32(groups), 17: int32(heads)}
        outputs = {3: unwritten((heads, q_len, value_head_dim), dtype)}
        grid, threads = (heads, q_len, 1), (1024, 1, 1)
    else:
        constants[26] = num_blocks
        rows = (heads, q_len, num_blocks)
        outputs = {
            3: unwritten((*rows, value_head_dim), dtype),
            4: unwritten(rows, "float32"),
            5: unwritten(rows, "float32"),
        }
        grid, threads = (num_kv_heads, batch_size, num_blocks), (32, groups, q_len)
    return Call(kernel, buffers, outputs, grid, threads, values, constants)


VECTOR_KERNELS = ["sdpa_vector_float_64_64", "sdpa_vector_bfloat16_t_128_128"]


@pytest.mark.parametrize("case", VECTOR_CASES, ids=str)
@pytest.mark.parametrize("kernel", VECTOR_KERNELS)
def test_vector_attention(device, kernel: str, case: Decode) -> None:
    check(device, vector_call(kernel, case))


@pytest.mark.parametrize("case", VECTOR_CASES, ids=str)
def test_vector_attention_in_blocks(device, case: Decode) -> None:
    """The function constant `blocks` is an int."""
    check(device, vector_call("sdpa_vector_2pass_1_float16_t_96_64", case, 6))


def test_sum_of_the_blocks(device) -> None:
    heads, q_len, num_blocks, head_dim = 3, 2, 64, 64
    rows = (heads, q_len, num_blocks)
    call = Call(
        "sdpa_vector_2pass_2_float16_t_64",
        {
            0: normal(1, (*rows, head_dim), "float16"),
            1: np.exp(normal(2, rows, "float32")),
            2: normal(3, rows, "float32"),
        },
        {3: unwritten((heads, q_len, head_dim), "float16")},
        (heads, q_len, 1),
        (1024, 1, 1),
        {4: int32(num_blocks)},
    )
    check(device, call)


# -- Other kernels -------------------------------------------------------------------

ROWS = {
    # Kernel: dtype, threads, elements of a row.
    "block_softmax_float32": ("float32", 128, (1, 77, 509)),
    "block_softmax_float16": ("float16", 96, (64, 381)),
    # The looped kernels want 32 simdgroups.
    "looped_softmax_precise_bfloat16": ("bfloat16", 1024, (100, 4096, 5003)),
    "block_logsumexp_float32": ("float32", 128, (3, 512)),
    "looped_logsumexp_float16": ("float16", 1024, (17, 9001)),
}


@pytest.mark.parametrize(
    ("kernel", "row"),
    [(name, row) for name, (*_, rows) in ROWS.items() for row in rows],
)
def test_rows(device, kernel: str, row: int) -> None:
    dtype, threads, _ = ROWS[kernel]
    values = normal(1, (5, row), dtype) * DTYPES[dtype](4)
    shape = (5,) if "logsumexp" in kernel else values.shape
    call = Call(
        kernel,
        {0: values},
        {1: unwritten(shape, dtype)},
        (5, 1, 1),
        (threads, 1, 1),
        {2: int32(row)},
    )
    out = check(device, call)[1].astype(np.float64)
    wide = values.astype(np.float64)
    expected = np.log(np.exp(wide).sum(axis=-1))
    if "softmax" in kernel:
        expected = np.exp(wide - expected[:, None])
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.01)


GATED_DELTA_KERNEL = "gated_delta_fused_chunk_float16_t_128_128_16_32_8"


def gated_delta_call(length: int) -> Call:
    """A step of gated linear attention, by chunks of eight positions."""
    batch_size, num_heads, num_v_heads, head_dim = 1, 16, 32, 128
    rows = (batch_size, length)
    state = (batch_size, num_v_heads, head_dim, head_dim)
    gates = np.random.default_rng(5).uniform(0.5, 1, (2, *rows, num_v_heads))
    key = normal(2, (*rows, num_heads, head_dim), "float32") / np.sqrt(head_dim)
    return Call(
        GATED_DELTA_KERNEL,
        {
            0: normal(1, (*rows, num_heads, head_dim), "float16"),
            1: key.astype(np.float16),
            2: normal(3, (*rows, num_v_heads, head_dim), "float16"),
            3: normal(4, state, "float32"),
            4: gates[0].astype(np.float16),
            5: gates[1].astype(np.float16),
        },
        {
            6: unwritten((*rows, num_v_heads, head_dim), "float16"),
            7: unwritten(state, "float32"),
        },
        (1, head_dim // 32, batch_size * num_v_heads),
        (32, 4, 1),
        {8: int32(length)},
    )


@pytest.mark.parametrize("length", [8, 19])
def test_matrices_from_and_to_memory(device, length: int) -> None:
    """simdgroup_load, simdgroup_store, transposed too; sums over the lanes so far."""
    check(device, gated_delta_call(length))


def reduction_call(kernel: str, values: np.ndarray, out: np.ndarray) -> Call:
    return Call(
        kernel,
        {0: values},
        {1: out},
        (1, 1, 1),
        (96, 1, 1),
        {2: uint64(values.size), 3: uint64(values.size)},
    )


@pytest.mark.parametrize("count", [5, 384, 1001])
def test_reductions(device, count: int) -> None:
    rng = np.random.default_rng(count)
    integers = rng.integers(-(2**31), 2**31, count, np.int32)
    call = reduction_call("all_reduce_minint32", integers, int32(7))
    assert check(device, call)[1] == integers.min()
    for last in (0, 3):
        flags = np.append(integers | 1, np.int32(last))
        call = reduction_call("all_reduce_andint32", flags, np.array([2], np.uint8))
        assert check(device, call)[1] == (last != 0)
    values = normal(1, (count,), "float32")
    for last in (np.nan, -1.0):
        values[-1] = last
        call = reduction_call("all_reduce_maxfloat32", values, float32(7))
        both = [outputs_of(device, maker, call)[1] for maker in (APPLE, OURS)]
        assert differing(*both) == 0
        np.testing.assert_array_equal(both[0][0], values.max())
    values = normal(2, (count,), "float16")
    call = reduction_call("all_reduce_sumfloat16", values, unwritten((1,), "float16"))
    check(device, call)


def test_positions_in_the_grid(device) -> None:
    batch_size, num_heads, q_len, rows, head_dim = 2, 3, 11, 6, 16
    query = normal(1, (batch_size, q_len, num_heads, head_dim), "bfloat16")
    strides = (q_len * num_heads * head_dim, head_dim, num_heads * head_dim)
    call = Call(
        "sdpa_blocked_scale_copy_bfloat16",
        {0: query},
        {1: unwritten((batch_size, num_heads, rows, head_dim), "bfloat16")},
        (2, 3, batch_size * num_heads),
        (8, 2, 1),
        {
            2: float32(0.3),
            3: np.array(strides, np.int64),
            4: int32(num_heads),
            5: int32(rows),
            6: int32(head_dim),
            7: int32(4),
        },
    )
    out = check(device, call)[1]
    expected = query[:, 4 : 4 + rows].swapaxes(1, 2) * ml_dtypes.bfloat16(0.3)
    np.testing.assert_array_equal(out, expected)

    scores = normal(2, (12, 20), "float16")
    call = Call(
        "sdpa_blocked_causal_mask_float16",
        {},
        {0: scores},
        (2, 4, 1),
        (4, 3, 1),
        {1: int32(8), 2: int32(20)},
    )
    changed = check(device, call)[0] != scores
    row, column = np.indices(scores.shape)
    np.testing.assert_array_equal(changed, column - 12 > row % 8)


# -- The oracle itself ---------------------------------------------------------------


def test_every_kernel_of_the_library_is_compared() -> None:
    compared = {
        *ATTENTION_KERNELS,
        *VECTOR_KERNELS,
        *ROWS,
        "sdpa_vector_2pass_1_float16_t_96_64",
        "sdpa_vector_2pass_2_float16_t_64",
        GATED_DELTA_KERNEL,
        "all_reduce_andint32",
        "all_reduce_maxfloat32",
        "all_reduce_minint32",
        "all_reduce_sumfloat16",
        "sdpa_blocked_scale_copy_bfloat16",
        "sdpa_blocked_causal_mask_float16",
    }
    assert compared == {name for family in kernels.FAMILIES for name in family.kernels}


# A mistake on our side; a call that it changes nothing of; one that it must change.
MISTAKES = {
    "a causal query does not see its position": (
        Mistake(
            kernels.ATTENTION, ATTENTION_KERNELS[0], "row_pos < (col", "row_pos <=(col"
        ),
        lambda: attention_call(ATTENTION_KERNELS[0], Attention(64, 64)),
        lambda: attention_call(ATTENTION_KERNELS[0], Attention(45, 45, causal=True)),
    ),
    "the same with mixed products": (
        Mistake(
            kernels.ATTENTION, ATTENTION_KERNELS[5], "row_pos < (col", "row_pos <=(col"
        ),
        lambda: attention_call(ATTENTION_KERNELS[5], Attention(45, 45)),
        lambda: attention_call(ATTENTION_KERNELS[5], Attention(96, 96, causal=True)),
    ),
    "the last key is not seen": (
        Mistake(
            kernels.VECTOR_ATTENTION,
            VECTOR_KERNELS[0],
            "use_key = i <= (",
            "use_key = i < (",
        ),
        lambda: vector_call(VECTOR_KERNELS[0], Decode(1, 40)),
        lambda: vector_call(VECTOR_KERNELS[0], Decode(1, 40, causal=True)),
    ),
    "a shuffle from another lane": (
        Mistake(
            kernels.ATTENTION,
            ATTENTION_KERNELS[0],
            "(__msl_lane_index() ^ mask)",
            "(__msl_lane_index() + mask)",
            in_shim=True,
        ),
        None,
        lambda: attention_call(ATTENTION_KERNELS[0], Attention(64, 64)),
    ),
    "a matrix is loaded transposed": (
        Mistake(
            kernels.GATED_DELTA,
            GATED_DELTA_KERNEL,
            "= transpose ? source",
            "= !transpose ? source",
            in_shim=True,
        ),
        None,
        lambda: gated_delta_call(8),
    ),
    "a sum without the own lane": (
        Mistake(
            kernels.GATED_DELTA,
            GATED_DELTA_KERNEL,
            "i <= __msl_lane_index()",
            "i < __msl_lane_index()",
            in_shim=True,
        ),
        None,
        lambda: gated_delta_call(8),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_our_side_is_noticed(device, tmp_path: Path, name: str) -> None:
    mistake, unaffected, affected = MISTAKES[name]
    wrong = kernels.OracleDevice(tmp_path / "wrong.so", mistake)
    for make_call, is_noticed in [(unaffected, False), (affected, True)]:
        if make_call is None:
            continue
        call = make_call()
        apple = outputs_of(device, APPLE, call)
        ours = outputs_of(wrong, OURS, call)
        found = sum(differing(apple[index], ours[index]) for index in apple)
        assert (found > 0) is is_noticed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "air.simd_sum.f32",
            "air.simd_product.f32",
            "softmax_float32: the AIR intrinsic air.simd_product.f32 is not known",
        ),
        (
            "air.thread_index_in_simdgroup",
            "air.thread_index_in_quadgroup",
            "softmax_float32: .* attribute air.thread_index_in_quadgroup is not known",
        ),
    ],
)
def test_what_is_not_known_is_named(device, old: str, new: str, message: str) -> None:
    text = kernels.disassembled("block_softmax_float32")
    assert old in text
    with pytest.raises(air.AirError, match=message):
        air.translate(text.replace(old, new), "block_softmax_float32", "entry", {})


def test_an_unknown_function_constant_is_named(device) -> None:
    name = "sdpa_vector_float_64_64"
    with pytest.raises(
        air.AirError, match=r"64_64: function constant 2\d is not known"
    ):
        air.translate(kernels.disassembled(name), name, "entry", {20: 0})


def test_what_the_metallib_says_of_itself_is_checked(device, tmp_path: Path) -> None:
    data = bytearray((kernels.wheel() / "mlx/lib/mlx.metallib").read_bytes())
    path = tmp_path / "changed.metallib"
    path.write_bytes(data[:-1])
    with pytest.raises(metallib.MetallibError, match=r"should have \d+ bytes"):
        metallib.Metallib(path)
    data[data.index(kernels.apple_library().bitcode(ATTENTION_KERNELS[0])) + 99] ^= 1
    path.write_bytes(data)
    changed = metallib.Metallib(path)
    changed.bitcode(ATTENTION_KERNELS[1])
    with pytest.raises(metallib.MetallibError, match="does not have its hash"):
        changed.bitcode(ATTENTION_KERNELS[0])
    with pytest.raises(metallib.MetallibError, match="no function"):
        changed.bitcode("attention")
    path.write_bytes(b"MTLA" + data[4:])
    with pytest.raises(metallib.MetallibError, match="no Metal library"):
        metallib.Metallib(path)


def test_apple_compiles_products_of_mixed_types(device) -> None:
    """Our kernels multiply operands as they are, and sum in float32."""
    types = kernels.apple_library().matrix_products()
    assert set(types) == {
        ("f32", "f32", "f32", "f32"),
        ("f32", "f16", "f16", "f32"),
        ("f32", "f32", "f16", "f32"),
        ("f32", "bf16", "bf16", "f32"),
        ("f32", "f32", "bf16", "f32"),
    }
