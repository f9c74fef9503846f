"""Handlers given call frames built by hand: the metadata probe, other stages, grown and
cut structs, null pointers, repeated attributes, and random damage.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jax_flash_metal import attention_library
from tests.support import ffi_frame, native
from tests.support.ffi_frame import Frame

INVALID_ARGUMENT = 3
UNIMPLEMENTED = 12
TARGET = "jax_flash_metal_forward_v3"
GRADIENT = "jax_flash_metal_gradient_v3"
ATTRIBUTES = ffi_frame.attributes()
SCALE = [name for name, _, _ in ATTRIBUTES].index("scale")


@pytest.fixture(scope="module")
def handler() -> Any:
    return getattr(native.load(), TARGET)


def make_frame(
    attributes: list[tuple[str, int, Any]] = ATTRIBUTES,
) -> tuple[Frame, np.ndarray]:
    """A good forward call, and where its out goes."""
    ones = [np.ones(s, np.float32) for s in ((2, 5, 6, 8), (1, 7, 3, 8), (2, 7, 3, 4))]
    out = np.full((2, 5, 6, 4), np.nan, np.float32)
    logsumexp = np.full((2, 6, 5), np.nan, np.float32)
    return Frame(ones, [out, logsumexp], attributes), out


def options() -> dict[str, Any]:
    """Every option and optional operand of a call with the shapes of make_frame."""
    rng = np.random.default_rng(3)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(0, 2, shape).astype(np.int32)

    return {
        "scale": 0.25,
        "is_causal": True,
        "sliding_window": (4, None),
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.25,
        "bias": floats(1, 6, 1, 7),
        "mask": rng.random((2, 1, 5, 7)) < 0.8,
        "q_offset": ints(2),
        "q_segment_ids": ints(2, 5),
        "kv_segment_ids": ints(1, 7),
        "query_seq_lengths": ints(1) + 4,
        "key_value_seq_lengths": ints(2) + 5,
        "sinks": floats(1, 6),
        "alibi_slopes": floats(2, 6),
        "dropout_key": np.array([[1, 2**32 - 1]], np.uint32),
        "dropout_batch_indices": np.arange(2, dtype=np.int32),
        "dropout_head_indices": np.arange(6, dtype=np.int32)[None],
    }


def make_full_frame(
    operands: list[np.ndarray], results: list[np.ndarray], of: str | None = None
) -> Frame:
    """A call with options(). `operands`: those that every call of the pass has."""
    given = options()
    optional = [given[name] for name in attention_library.OPTIONAL_OPERANDS]
    changed = {
        "dropout_rate": given["dropout_rate"],
        "is_causal": 1,
        "logits_soft_cap": given["logits_soft_cap"],
        "operands": 2**12 - 1,
        "window_left": given["sliding_window"][0],
    }
    attributes = ffi_frame.attributes(**changed)
    if of is not None:
        number = attention_library.DIFFERENTIABLE_OPTIONS.index(of)
        attributes.append(("gradient_of", ffi_frame.S64, number))
    return Frame([*operands[:3], *optional, *operands[3:]], results, attributes)


def random_operands() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    shapes = ((2, 5, 6, 8), (1, 7, 3, 8), (2, 7, 3, 4))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def make_residuals(operands: list[np.ndarray]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    out, logsumexp = native.run_forward(*operands, **options())
    cotangents = (rng.standard_normal(x.shape, np.float32) for x in (out, logsumexp))
    return [out, logsumexp, *cotangents]


def empty(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def assert_error(frame: Frame, handler: Any, sentence: str) -> None:
    error = frame.call(handler)
    assert error is not None
    assert error.message == f"{TARGET}: {sentence}"
    assert error.code == INVALID_ARGUMENT


def test_good_frame(handler: Any) -> None:
    frame, out = make_frame()
    assert frame.call(handler) is None
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def test_attributes_in_any_order(handler: Any) -> None:
    frame, out = make_frame(ATTRIBUTES[::-1])
    assert frame.call(handler) is None
    np.testing.assert_allclose(out, 1, rtol=1e-5)


# -- Optional operands: as through the C ABI -------------------------------------------


def test_forward_with_all_operands(handler: Any) -> None:
    operands = random_operands()
    results = [empty(2, 5, 6, 4), empty(2, 6, 5)]
    assert make_full_frame(operands, results).call(handler) is None
    for actual, expected in zip(results, native.run_forward(*operands, **options())):
        np.testing.assert_array_equal(actual, expected)


def test_backward_with_all_operands() -> None:
    operands = random_operands()
    operands += make_residuals(operands)
    results = [empty(2, 5, 6, 8), empty(2, 7, 3, 8), empty(2, 7, 3, 4)]
    frame = make_full_frame(operands, results)
    assert frame.call(native.load().jax_flash_metal_backward_v3) is None
    for actual, expected in zip(results, native.run_backward(*operands, **options())):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("of", "shape"),
    [
        ("bias", (1, 6, 1, 7)),
        ("bias", (2, 6, 5, 7)),  # as vmap asks for it: more than the operand has
        ("bias", (2, 1, 1, 1)),
        ("sinks", (1, 6)),
        ("sinks", (2, 6)),
        ("alibi_slopes", (2, 6)),
        ("alibi_slopes", (1, 6)),
    ],
)
def test_gradient_with_all_operands(of: str, shape: tuple[int, ...]) -> None:
    operands = random_operands()
    operands += make_residuals(operands)
    gradient = empty(*shape)
    frame = make_full_frame(operands, [gradient], of)
    assert frame.call(getattr(native.load(), GRADIENT)) is None
    expected = native.run_gradient(of, *operands, shape=shape, **options())
    np.testing.assert_array_equal(gradient, expected)
    assert np.isfinite(gradient).all()
    assert gradient.any()


@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_over_nothing_is_zero(axis: int) -> None:
    """Summed over no batch, or no queries: its elements are there all the same."""
    operands = random_operands()
    operands += make_residuals(operands)
    gradient = empty(1, 6, 1, 7)
    frame = make_full_frame(operands, [gradient], "bias")
    batch_or_queries = 2 if axis == 0 else 5
    for dims in frame.dims[:-1]:
        for i in range(len(dims)):
            if dims[i] == batch_or_queries and not (axis == 1 and i == 0):
                dims[i] = 0
    key = 3 + attention_library.OPTIONAL_OPERANDS.index("dropout_key")
    frame.dims[key][1] = 2
    assert frame.call(getattr(native.load(), GRADIENT)) is None
    assert (gradient == 0).all()


# -- Metadata and stages -------------------------------------------------------------


def probe(frame: Frame, **changes: int) -> ffi_frame.Metadata:
    """Turns the frame into a metadata probe, as XLA sends before the first call."""
    metadata = ffi_frame.Metadata(
        struct_size=ffi_frame.Metadata.state_type_id.offset,
        traits=77,
        state_type_id=88,
    )
    extension = ffi_frame.Extension(
        struct_size=ctypes.sizeof(ffi_frame.Extension),
        type=ffi_frame.METADATA,
        metadata=ctypes.addressof(metadata),
    )
    for name, value in changes.items():
        setattr(extension if name == "metadata" else metadata, name, value)
    frame.frame.extensions = frame.keep(extension)
    frame.keep(metadata)
    return metadata


def test_metadata_probe(handler: Any) -> None:
    frame, out = make_frame()
    metadata = probe(frame)
    frame.frame.arguments = ffi_frame.Values()  # a probe comes without buffers
    frame.frame.results = ffi_frame.Values()
    frame.frame.attributes = ffi_frame.Attributes()
    assert frame.call(handler) is None
    assert (metadata.api_version.major, metadata.api_version.minor) == (0, 1)
    assert metadata.api_version.struct_size == ctypes.sizeof(ffi_frame.Version)
    assert metadata.traits == 0
    assert metadata.state_type_id == 88, "not of version 0.1: not ours to write"
    assert np.isnan(out).all(), "a probe is not an execution"


def test_metadata_probe_behind_another_extension(handler: Any) -> None:
    frame, _ = make_frame()
    metadata = probe(frame)
    other = ffi_frame.Extension(struct_size=24, type=1234, next=frame.frame.extensions)
    frame.frame.extensions = frame.keep(other)
    assert frame.call(handler) is None
    assert metadata.traits == 0


def test_unknown_extension_is_ignored(handler: Any) -> None:
    frame, out = make_frame()
    other = ffi_frame.Extension(struct_size=24, type=1234)
    frame.frame.extensions = frame.keep(other)
    assert frame.call(handler) is None
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def test_bad_metadata_probe(handler: Any) -> None:
    frame, _ = make_frame()
    probe(frame, struct_size=20)
    assert_error(
        frame, handler, "XLA_FFI_Metadata must have at least 36 bytes, but got 20."
    )
    probe(frame, metadata=0)
    assert_error(frame, handler, "the metadata is a null pointer.")


def test_capabilities_behind_the_metadata(handler: Any) -> None:
    """Our PJRT plugin's question; plugin/ffi/native_buffers.h."""
    frame, _ = make_frame()
    metadata = probe(frame)
    capabilities = ffi_frame.Capabilities(
        struct_size=ffi_frame.Capabilities.takes_native_buffers.offset + 4,
        type=ffi_frame.CAPABILITIES,
    )
    first = ffi_frame.Extension.from_address(frame.frame.extensions)
    first.next = frame.keep(capabilities)
    assert frame.call(handler) is None
    assert metadata.traits == 0
    assert capabilities.takes_native_buffers == 1
    capabilities.struct_size = 24
    assert_error(
        frame,
        handler,
        "the capabilities extension must have at least 28 bytes, but got 24.",
    )


def test_native_buffers_need_a_device_that_has_them(handler: Any) -> None:
    frame, out = make_frame()
    native_buffers = ffi_frame.Extension(struct_size=24, type=ffi_frame.NATIVE_BUFFERS)
    frame.frame.extensions = frame.keep(native_buffers)
    error = frame.call(handler)
    assert error == ffi_frame.Error(
        UNIMPLEMENTED,
        f"{TARGET}: query: the software Metal device has no native buffers.",
    )
    assert np.isnan(out).all()


@pytest.mark.parametrize("stage", range(3))
def test_stages_before_execution_do_nothing(handler: Any, stage: int) -> None:
    frame, out = make_frame()
    frame.frame.stage = stage
    assert frame.call(handler) is None
    assert np.isnan(out).all()


def test_unknown_stage(handler: Any) -> None:
    frame, _ = make_frame()
    frame.frame.stage = 4
    error = frame.call(handler)
    assert error == ffi_frame.Error(
        UNIMPLEMENTED,
        f"{TARGET}: execution stage 4 is not known; the last one known is 3 (execute).",
    )


# -- Struct sizes --------------------------------------------------------------------


def test_grown_structs_are_accepted(handler: Any) -> None:
    frame, out = make_frame()
    lists = (frame.frame.arguments, frame.frame.results, frame.frame.attributes)
    for struct in (frame.frame, frame.api, *lists, *frame.buffers):
        struct.struct_size += 64
    assert frame.call(handler) is None
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def damage_frame(frame: Frame) -> None:
    frame.frame.struct_size = 160


def damage_arguments(frame: Frame) -> None:
    frame.frame.arguments.struct_size = 32


def damage_results(frame: Frame) -> None:
    frame.frame.results.types = None


def damage_attributes(frame: Frame) -> None:
    frame.frame.attributes.struct_size = 40


def damage_attribute_names(frame: Frame) -> None:
    frame.frame.attributes.names = None


def damage_buffer(frame: Frame) -> None:
    frame.buffers[1].struct_size = 40


def damage_argument_type(frame: Frame) -> None:
    frame.types["arguments"][2] = 9


def damage_data(frame: Frame) -> None:
    frame.buffers[3].data = None


def damage_rank(frame: Frame) -> None:
    frame.buffers[0].rank = -1


def damage_dims(frame: Frame) -> None:
    frame.buffers[0].dims = None


def damage_dimension(frame: Frame) -> None:
    for index in (0, 3, 4):
        frame.dims[index][0] = -2


def damage_size(frame: Frame) -> None:
    for index in (0, 3, 4):
        frame.dims[index][0] = 2**62


def damage_attribute_value(frame: Frame) -> None:
    frame.scalars[SCALE].value = None


def damage_attribute_type(frame: Frame) -> None:
    frame.types["attributes"][SCALE] = 17


def damage_attribute_dtype(frame: Frame) -> None:
    frame.scalars[SCALE].dtype = 29


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_frame, "XLA_FFI_CallFrame must have at least 168 bytes, but got 160."),
        (
            damage_arguments,
            "the list of operands must have at least 40 bytes, but got 32.",
        ),
        (damage_results, "the list of results is a null pointer."),
        (
            damage_attributes,
            "the list of attributes must have at least 48 bytes, but got 40.",
        ),
        (damage_attribute_names, "the list of attributes is not valid: 10 entries."),
        (
            damage_buffer,
            "key must have an XLA_FFI_Buffer of at least 48 bytes, but got 40.",
        ),
        (
            damage_argument_type,
            "value must be a buffer (argument type 1), but got argument type 9.",
        ),
        (
            damage_data,
            "out must have memory for at least 240 float32 elements, but got a null "
            "pointer.",
        ),
        (damage_rank, "query has no valid shape: rank -1."),
        (damage_dims, "query has no valid shape: rank 4."),
        (damage_dimension, "query has an impossible shape: [-2, 5, 6, 8]."),
        (damage_size, f"query has an impossible shape: [{2**62}, 5, 6, 8]."),
        (
            damage_attribute_value,
            "attribute scale must be a scalar of type float32, but got a null pointer.",
        ),
        (
            damage_attribute_type,
            "attribute scale must be a scalar of type float32, but got an attribute of "
            "type 17.",
        ),
        (
            damage_attribute_dtype,
            "attribute scale must be a scalar of type float32, but got a scalar of "
            "type XLA data type 29.",
        ),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_damage(handler: Any, damage: Callable[[Frame], None], sentence: str) -> None:
    frame, out = make_frame()
    damage(frame)
    if damage in (damage_dimension, damage_size):
        frame.dims[2][0] = 1  # value: shared, or its batch size would be the news
    assert_error(frame, handler, sentence)
    assert np.isnan(out).all()


def test_repeated_attribute(handler: Any) -> None:
    frame, _ = make_frame([*ATTRIBUTES, ("scale", ffi_frame.F32, 0.5)])
    assert_error(
        frame,
        handler,
        "attribute scale (a scalar of type float32) must be given once, but got it 2 "
        "times.",
    )


def test_empty_sizes(handler: Any) -> None:
    """No keys: XLA may pass null for what has no bytes."""
    frame, out = make_frame()
    for index in (1, 2):
        frame.dims[index][1] = 0
        frame.buffers[index].data = None
    assert frame.call(handler) is None
    assert (out == 0).all()


# -- Random damage -------------------------------------------------------------------

NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 2**31, 2**62, 2**63 - 1)


def damage_somewhere(frame: Frame, rng: random.Random) -> None:
    """One change. Counts only shrink: lengths of lists are the caller's word."""
    small = rng.choice((-(2**31), -1, *range(24), 2**31 - 1))
    buffer = rng.randrange(len(frame.buffers))
    attribute = rng.randrange(len(frame.scalars))
    which = rng.choice(("arguments", "results", "attributes"))
    values = getattr(frame.frame, which)

    def shrink(count: int) -> int:
        return rng.choice((-(2**63), -1, *range(count + 1)))

    def change_dimension() -> None:
        dims = frame.dims[buffer]
        dims[rng.randrange(len(dims))] = rng.choice(NUMBERS)

    def change_type() -> None:
        types = frame.types[which]
        types[rng.randrange(len(types))] = small

    changes: list[Callable[[], None]] = [
        change_dimension,
        change_type,
        lambda: setattr(frame.buffers[buffer], "dtype", small),
        lambda: setattr(frame.buffers[buffer], "data", None),
        lambda: setattr(frame.buffers[buffer], "rank", shrink(len(frame.dims[buffer]))),
        lambda: setattr(frame.buffers[buffer], "struct_size", rng.randrange(96)),
        lambda: setattr(frame.scalars[attribute], "dtype", small),
        lambda: setattr(frame.scalars[attribute], "value", None),
        lambda: setattr(
            frame.names[attribute], "size", shrink(frame.names[attribute].size) % 16
        ),
        lambda: setattr(values, "size", shrink(values.size)),
        lambda: setattr(values, "struct_size", rng.randrange(96)),
        lambda: setattr(values, "types", None),
        lambda: setattr(frame.frame, "stage", small),
        lambda: setattr(frame.frame, "struct_size", rng.randrange(256)),
    ]
    rng.choice(changes)()


def make_gradient_frame() -> Frame:
    operands = random_operands()
    residuals = [empty(*s) for s in ((2, 5, 6, 4), (2, 6, 5)) * 2]
    return make_full_frame([*operands, *residuals], [empty(1, 6, 1, 7)], "bias")


@pytest.mark.parametrize("target", [TARGET, GRADIENT])
def test_random_damage(target: str) -> None:
    """Every damaged frame is refused, or was still a good call; never a crash."""
    handler = getattr(native.load(), target)
    rng = random.Random(20)
    num_errors = 0
    for _ in range(3000):
        frame = make_frame()[0] if target == TARGET else make_gradient_frame()
        for _ in range(rng.choice((1, 1, 2, 4))):
            damage_somewhere(frame, rng)
        error = frame.call(handler)
        if error is not None:
            num_errors += 1
            assert error.message.startswith(f"{target}: ")
            assert error.message.endswith(".")
    assert num_errors > 2000
