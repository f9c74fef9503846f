"""Plans: work, rows of the table, forms, chunks and parts; what cannot be planned.

Nothing runs. That the kernels of a plan compute the right numbers, and that parts of a
launch give the same bits, is in tests/kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from jax_flash_metal import variant_table
from jax_flash_metal.attention_library import CallShape, Problem, shape_problem
from tests.support import native
from tests.support.launch_params import constant_of, params_of

B, T, S, N, K, H = 2, 37, 53, 6, 3, 16


def make_problem(of: str = "", **options: Any) -> tuple[native.Problem, Any]:
    """Of an operand's gradient or the forward pass; and what it points into."""
    query, key = np.ones((B, T, N, H), np.float32), np.ones((B, S, K, H), np.float32)
    operands = {"query": query, "key": key, "value": key}
    if not of:
        problem = native.make_problem(operands, **options)
        results = native.attach_results(problem, operands, native.FORWARD_RESULTS)
        return problem, [operands, options, results]
    rows = np.ones((B, N, T), np.float32)
    operands |= {"out": query, "logsumexp": rows, "dout": query, "dlogsumexp": rows}
    problem = native.make_problem(operands, **options)
    gradient = native.attach_gradient(problem, of, options[of])
    return problem, [operands, options, gradient]


def count(of: str = "", **options: Any) -> int:
    """The launches of the pass."""
    problem, _alive = make_problem(of, **options)
    return native.num_launches(problem, "gradient" if of else "forward")


def count_at(limit: float, of: str = "", **options: Any) -> int:
    """The launches of the pass with this limit of work for each."""
    with native.planning(max_launch_work=limit):
        return count(of, **options)


def test_work_is_counted_without_what_the_window_hides() -> None:
    # Operations of a launch: 4 · H per pair that is seen.
    limit = 4 * H * B * N * T * S / 2
    start = np.zeros(1, np.int32)
    assert count_at(limit) == 2
    # 4 + 1 + 3 keys of 53.
    assert count_at(limit, sliding_window=(4, 3), q_offset=8) == 1
    assert count_at(limit, sliding_window=(4, 3), q_offset=start) == 1
    few = 4 * H * B * N * T * 8 * 1.01
    assert count_at(few, sliding_window=(4, 3), q_offset=8) == 1
    assert count_at(few, sliding_window=(5, 3), q_offset=8) == 2
    assert count_at(few, sliding_window=(4, 3), q_offset=start) == 1
    # Half of the rows are before the keys.
    assert count_at(few, sliding_window=(14, 0), q_offset=-18) == 1
    assert count_at(few, is_causal=True, sliding_window=(7, 99), q_offset=8) == 1
    assert count_at(limit, sliding_window=(None, 0)) == 1
    assert count_at(limit, sliding_window=(0, None)) == 2


def test_launches_that_only_read_are_cut_too() -> None:
    # 32 operations per byte: two float32 rows of delta, three numbers of a sink's row.
    delta, sinks = (32 * B * N * T * size for size in (2 * H * 4, 12))
    options = {"sinks": np.ones((1, N), np.float32)}
    assert count("sinks", **options) == 2
    assert count_at(sinks * 1.01, "sinks", **options) > 2  # delta in parts
    assert count_at(delta * 0.99, "sinks", **options) == 2 + 1
    assert count_at(1, "sinks", **options) == B * N * -(-T // 4) + N
    # A byte for each element that the mask has; the forward pass has more work.
    mask = np.ones((B, 1, T, S), bool)
    assert count_at(1, mask=mask) == count_at(1) + B * 2
    assert count_at(1, mask=mask[:1, :, :1]) == count_at(1) + 1
    limit = 32 * B * 2 * 2 * 32 * 32
    assert count_at(limit, mask=mask) == count_at(limit) + 1


def test_a_product_that_no_number_holds_is_refused() -> None:
    """Also where no memory is looked at, and where nothing is in it."""
    for sizes, text in (
        ((2**40, 2**40), f"{2**40}, {2**40}"),
        ((0, 2**60), f"0, {2**60}"),
        ((1, 2**39), f"1, {2**39}"),
    ):
        problem, _alive = make_problem("sinks", sinks=np.ones((1, N), np.float32))
        problem.num_batch_dims = len(sizes)
        for name in (
            *native.BACKWARD_OPERANDS,
            *("sinks", "gradient"),
        ):
            getattr(problem, name).num_batch_dims = len(sizes)
        for i, size in enumerate(sizes):
            problem.batch_sizes[i] = size
        message = (
            "the batch sizes, num_heads, q_len and kv_len must have a product of at "
            rf"most 2\^52, but got batch sizes \[{text}\], num_heads=6, q_len=37 and "
            "kv_len=53."
        )
        with pytest.raises(native.NativeError, match=message):
            native.plan(problem, "gradient")


def test_a_sum_that_no_index_can_count_is_refused() -> None:
    """Nothing of this size runs; nor does it with a wrong number."""
    slopes = np.ones((B, N), np.float32)
    problem, _alive = make_problem("alibi_slopes", alibi_slopes=slopes)
    problem.q_len = problem.kv_len = 2**24
    problem.num_heads = problem.num_kv_heads = 4
    with pytest.raises(native.NativeError, match="over more than 2\\^31 - 1 blocks"):
        native.plan(problem, "gradient")


# -- The text of a plan ----------------------------------------------------------------


def describe(shape: CallShape, batch: tuple[int, ...] = (), **options: Any) -> Problem:
    """A dense problem without memory."""
    problem = shape_problem(shape, **options)
    problem.num_batch_dims = len(batch)
    problem.batch_sizes[: len(batch)] = batch
    for name in (*native.BACKWARD_OPERANDS, *native.BACKWARD_RESULTS):
        tensor = getattr(problem, name)
        tensor.num_batch_dims = len(batch)
        stride = max(tensor.row_stride * max(shape.q_len, shape.kv_len), 1)
        if name in native.STATISTICS:
            stride = shape.num_heads * shape.q_len
        elif name in ("key", "value", "dkey", "dvalue"):
            stride = tensor.row_stride * shape.kv_len
        else:
            stride = tensor.row_stride * shape.q_len
        for i in reversed(range(len(batch))):
            tensor.batch_strides[i] = stride
            stride *= batch[i]
    return problem


def test_everything_of_a_launch_is_told() -> None:
    shape = CallShape("float16", 300, 53, 6, 3, 40, 24)
    problem = describe(shape, (2,), is_causal=True, q_offset=-7)
    with native.planning(family=8):
        plan = native.plan(problem, "forward")
    (launch,) = plan.pop("launches")
    names = ("delta", "partial", "partial_softmax", "mask_blocks", "score_gradient")
    assert plan == {
        "class": "float16 d40 v24 q512 k64 n16 g2 causal",
        "family": 8,
        "origin": "default",
        "form": "",
        "kernels": [launch["kernel"]],
        "num_launches": 1,
        "scratch_bytes": dict.fromkeys((*names, "partial_dvalue", "dquery_sum"), 0),
    }
    row = default_row("attention_forward", "float16", 40, 8)
    assert launch.pop("kernel") == row.host_name
    assert launch.pop("grid") == [-(-300 // row.block_q), 6, 2]
    assert launch.pop("threads") == 32 * row.num_simdgroups
    seen = sum(max(0, min(53, i - 7 + 1)) for i in range(300))
    assert launch["work"] == pytest.approx(2 * 6 * seen * 2 * (40 + 24), rel=1e-2)
    operands = ("query", "key", "value", "out", "logsumexp")
    assert launch["buffers"] == [[i + 1, name, 0] for i, name in enumerate(operands)]
    assert constant_of(launch, "is_causal") == 1
    assert constant_of(launch, "head_dim") == 40
    assert constant_of(launch, "value_head_dim") == 24
    params = params_of(launch)
    assert (params.q_len, params.kv_len, params.q_offset) == (300, 53, -7)
    assert (params.query.row, params.query.batch[0]) == (6 * 40, 300 * 6 * 40)
    assert params.scale == pytest.approx(40**-0.5)
    assert params.dropout_scale == 1


def test_offsets_of_outer_batch_dims() -> None:
    """Of six that do not merge; a kernel addresses four."""
    shape = CallShape("float32", 9, 11, 2, 1, 8, 8)
    problem = describe(shape, (2, 3, 2, 3, 2, 3))
    for i in (0, 2, 4):
        problem.key.batch_strides[i] = 0
    for i in (1, 3, 5):
        problem.value.batch_strides[i] = 0
    launches = native.plan(problem, "forward")["launches"]
    assert len(launches) == 2 * 3
    for (i, j), launch in zip(itertools.product(range(2), range(3)), launches):
        offsets = {name: offset for _, name, offset in launch["buffers"]}
        strides = problem.query.batch_strides
        assert offsets["query"] == i * strides[0] + j * strides[1]
        assert offsets["key"] == j * problem.key.batch_strides[1]
        assert offsets["value"] == i * problem.value.batch_strides[0]


@pytest.mark.parametrize(
    ("batch", "lengths", "text"),
    [
        ((), (1, 1), "q1 k1 n8"),
        ((2, 3), (37, 64), "q64 k64 n64"),
        ((5,), (65, 1000), "q128 k1024 n32"),
        ((0,), (0, 513), "q0 k1024 n0"),
    ],
    ids=str,
)
def test_classes_round_up(
    batch: tuple[int, ...], lengths: tuple[int, int], text: str
) -> None:
    shape = CallShape("bfloat16", *lengths, 6, 3, 65, 7)
    plan = native.plan(describe(shape, batch), "backward")
    assert plan["class"] == f"bfloat16 d65 v7 {text} g2"


def test_classes_name_what_a_call_has() -> None:
    options = {
        "sinks": np.ones((1, N), np.float32),
        "bias": np.ones((1, 1, 1, S), np.float16),
        "logits_soft_cap": 2.0,
    }
    problem, _alive = make_problem(sliding_window=(None, 3), is_causal=True, **options)
    words = native.plan(problem, "forward")["class"].split()
    assert words[6:] == ["g2", "causal", "window", "bias", "sinks", "softcap"]


def test_a_long_plan_is_told_whole() -> None:
    shape = CallShape("float32", 700, 900, 4, 4, 16, 16)
    with native.planning(max_launch_work=1):
        launches = native.plan(describe(shape), "backward")["launches"]
    assert len(launches) > 300  # some 3 KB each: more than the caller expected
    assert len({len(launch["params"]) for launch in launches}) == 1


# -- Rows of the table -----------------------------------------------------------------


def default_row(
    kernel: str, dtype: str, head_dim: int, family: int
) -> variant_table.Variant:
    """The row that a GPU takes that was not measured."""
    rows = [
        (row.head_dim, -row.min_family, i, row)
        for i, row in enumerate(variant_table.variants())
        if (row.kernel, row.dtype) == (kernel, dtype)
        and row.head_dim >= head_dim
        and row.min_family <= family
        and row.is_default
    ]
    return min(rows)[-1]


def backward_kernels(form: str) -> list[str]:
    """Those with rows of more than one kind."""
    dq = "attention_backward_dq" if form == "A" else "attention_backward_dq_product"
    return [dq, "attention_backward_dkv"]


@pytest.mark.parametrize("family", [0, 7, 8, 9, 10])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_go_by_head_dim_and_family(dtype: str, family: int) -> None:
    for head_dim in (1, 64, 65, 128, 129, 256):
        problem = describe(CallShape(dtype, 150, 170, 4, 2, 8, head_dim))
        with native.planning(family=family):
            forward = native.kernels(problem, "forward")
            plan = native.plan(problem, "backward")
        assert plan["family"] == family
        names = {launch["kernel"] for launch in plan["launches"]} | set(forward)
        for kernel in ("attention_forward", *backward_kernels(plan["form"])):
            row = default_row(kernel, dtype, max(8, head_dim), family)
            assert row.host_name in names


def test_families_differ() -> None:
    """Otherwise the test above says nothing."""
    rows = {
        default_row("attention_backward_dkv", "float16", 64, family).loads
        for family in (0, 9)
    }
    assert rows == {"threadgroup", "device"}


def test_the_software_device_is_of_no_family() -> None:
    problem = describe(CallShape("float32", 20, 20, 1, 1, 8, 8))
    assert native.plan(problem, "forward")["family"] == 0


@pytest.mark.parametrize("family", [0, 9])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_table_says_the_form(dtype: str, family: int) -> None:
    def expected(q_len: int, kv_len: int, head_dim: int) -> str:
        for row in variant_table.backward_forms():
            if (
                row.dtype == dtype
                and head_dim <= row.head_dim
                and family >= row.min_family
                and q_len * kv_len >= row.min_scores
            ):
                return row.form
        return "A"

    sizes = {row.min_scores for row in variant_table.backward_forms()} | {2**20}
    for scores, head_dim in itertools.product(sizes, (64, 65, 256)):
        for q_len in (9, 16, 128):
            for kv_len in {scores // q_len, max(scores // q_len - 1, 0)}:
                shape = CallShape(dtype, q_len, kv_len, 2, 1, head_dim, 8)
                with native.planning(family=family):
                    plan = native.plan(describe(shape), "backward")
                assert plan["form"] == expected(q_len, kv_len, head_dim)
    with native.planning(family=family):
        plan = native.plan(describe(CallShape(dtype, 8, 2**20, 2, 1, 8, 8)), "backward")
        forward = native.plan(describe(CallShape(dtype, 8, 9, 2, 1, 8, 8)), "forward")
    assert plan["form"] == forward["form"] == "short"


# -- Measured choices ------------------------------------------------------------------

CLASS = "float16 d64 v64 q256 k256 n4 g2"
DKV = default_row("attention_backward_dkv", "float16", 64, 0)
OTHER_DKV = next(
    row
    for row in variant_table.variants()
    if row.kernel == DKV.kernel and row.dtype == DKV.dtype and row != DKV
    and row.head_dim >= 64
)  # fmt: skip
FORWARD = default_row("attention_forward", "float16", 64, 0)


def measured_problem(**changes: Any) -> Problem:
    shape = CallShape("float16", 250, 129, 2, 1, 64, 64)
    return describe(dataclasses.replace(shape, **changes), (2,))


@pytest.mark.parametrize("form", ["A", "B"])
def test_a_choice_is_taken(form: str) -> None:
    line = f"{CLASS}\tbackward\t{form}\t{OTHER_DKV.host_name}\n"
    with native.planning(choices=line):
        plan = native.plan(measured_problem(), "backward")
        names = [launch["kernel"] for launch in plan["launches"]]
        assert (plan["class"], plan["origin"]) == (CLASS, "measured")
        assert plan["form"] == form
        assert OTHER_DKV.host_name in names
        assert DKV.host_name not in names
        # Others than the line's are defaults.
        dq = default_row(backward_kernels(form)[0], "float16", 64, 0)
        assert dq.host_name in names
        # So are other passes and classes.
        for problem, which in (
            (measured_problem(), "forward"),
            (measured_problem(q_len=257), "backward"),
            (measured_problem(num_kv_heads=2), "backward"),
        ):
            other = native.plan(problem, which)
            assert other["origin"] == "default"
            assert OTHER_DKV.host_name not in native.kernels(problem, which)
    assert native.plan(measured_problem(), "backward")["origin"] == "default"
    assert DKV.host_name in native.kernels(measured_problem(), "backward")


def test_a_choice_without_a_form() -> None:
    plain = native.plan(measured_problem(), "backward")
    lines = (
        f"{CLASS}\tforward\t-\t{FORWARD.host_name}\n\n"
        f"{CLASS}\tbackward\t-\t{OTHER_DKV.host_name}"
    )
    with native.planning(choices=lines):
        plan = native.plan(measured_problem(), "backward")
        assert native.plan(measured_problem(), "forward")["origin"] == "measured"
    assert plan["form"] == plain["form"]
    assert plan["origin"] == "measured"


def test_a_choice_replaces_those_before() -> None:
    with native.planning(choices=f"{CLASS}\tforward\t-\t{FORWARD.host_name}"):
        library = native.Recording(native.load())
        library.set_kernel_choices(f"{CLASS}\tbackward\tA\t{DKV.host_name}")
        assert native.plan(measured_problem(), "forward")["origin"] == "default"
        assert native.plan(measured_problem(), "backward")["origin"] == "measured"


LINE = f"{CLASS}\tbackward\tA\t{DKV.host_name}"
SHORT = CLASS.replace("q256", "q8")
SMALL = default_row("attention_backward_dkv", "float16", 64, 0).host_name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE.replace(DKV.host_name, "attention_no"), 'no kernel "attention_no"'),
        (f"{LINE},", 'no kernel ""'),
        (f"{LINE},{OTHER_DKV.host_name}", f"of the same kernel as {DKV.host_name}"),
        (LINE.replace("float16 d", "float32 d"), "for float16, but the class is for"),
        (
            LINE.replace("v64", "v65"),
            f"{SMALL} takes a head_dim of at most 64, but the class has 65",
        ),
        (LINE.replace("\tA", "\tC"), 'form must be A, B or - for this pass.*"C"'),
        (LINE.replace("\tbackward", "\tforward"), 'form must be - for this pass.*"A"'),
        (LINE.replace(CLASS, SHORT).replace("\tA", "\tB"), "q_len above 8.* has 8"),
        (LINE.replace("backward\t", "gradient\t"), 'pass must be .*"gradient"'),
        (LINE.replace("\tA", ""), "must be 4 fields, separated by tabs, but got 3"),
        (LINE.replace(" g2", ""), 'class must begin like "float16 d64 v64 .*n4"'),
        (LINE.replace("d64", "d6x"), 'class must begin like .*"float16 d6x'),
        (LINE.replace("float16 d", "half d"), 'class must begin like .*"half d64'),
        (f"{LINE}\n{LINE}", "there is a choice for this class and pass already"),
    ],
)
def test_a_wrong_choice_is_named(line: str, message: str) -> None:
    good = f"{CLASS}\tforward\t-\t{FORWARD.host_name}"
    number = 3 + line.count("\n")
    with native.planning(choices=good):
        library = native.Recording(native.load())
        with pytest.raises(
            native.NativeError, match=rf"^line {number}: .*{message}.*\.$"
        ):
            library.set_kernel_choices(f"{good}\n\n{line}\n")
        # Nothing has changed.
        assert native.plan(measured_problem(), "forward")["origin"] == "measured"


# -- Form B in chunks ------------------------------------------------------------------


def plan_b(
    problem: Problem, limit: int = 0, *, max_launch_work: float = 0, family: int = 0
) -> dict[str, Any]:
    """The plan in form B, whatever the table says to the size."""
    shape_class = native.plan(problem, "backward")["class"]
    with native.planning(
        family=family,
        choices=f"{shape_class}\tbackward\tB\t",
        score_gradient_limit=limit,
        max_launch_work=max_launch_work,
    ):
        plan = native.plan(problem, "backward")
    assert plan["form"] == "B"
    return plan


def launches_of(plan: dict[str, Any], kernel: str) -> list[dict[str, Any]]:
    return [
        launch for launch in plan["launches"] if f"{kernel}_float" in launch["kernel"]
        or f"{kernel}_bfloat" in launch["kernel"]
    ]  # fmt: skip


def groups_of(launch: dict[str, Any]) -> list[tuple[int, ...]]:
    """The threadgroups, as positions in the whole grid."""
    first = params_of(launch).first_group
    ranges = [range(f, f + size) for f, size in zip(first, launch["grid"])]
    return list(itertools.product(*ranges))


# Of an element of dS in scratch.
SIZE_BYTES = {"float32": 4, "float16": 4, "bfloat16": 2}


def check_chunks(plan: dict[str, Any], shape: CallShape, batch: int) -> int:
    """That the chunks are all of the problem, once, and fit into the scratch.

    Returns the number of chunks.
    """
    head_dim = max(shape.head_dim, shape.value_head_dim)
    dkv = default_row("attention_backward_dkv", shape.dtype, head_dim, plan["family"])
    product = default_row(
        "attention_backward_dq_product", shape.dtype, head_dim, plan["family"]
    )
    num_groups = shape.num_heads // shape.num_kv_heads
    col_blocks = -(-shape.head_dim // product.block_d)
    fragments = -(-shape.q_len // 8)
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    products: collections.Counter[tuple[int, ...]] = collections.Counter()
    num_chunks = 0
    written: set[int] = set()  # pairs of which dS is in the scratch
    chunk = None
    for launch in plan["launches"]:
        params = params_of(launch)
        if launch["kernel"] == dkv.host_name:
            key = (params.first_pair, params.first_chunk_key)
            if key != chunk:
                assert not written, "the scratch is overwritten before it was read"
                chunk, num_chunks = key, num_chunks + 1
            assert constant_of(launch, "writes_score_gradient") == 1
            for x, y, z in groups_of(launch):
                seen[x, y, z] += 1
                assert params.first_chunk_key <= x * dkv.block_kv
                assert x * dkv.block_kv < params.end_chunk_key
                for g in range(num_groups):
                    head = y // params.num_parts * num_groups + g
                    written.add(z * shape.num_heads + head - params.first_pair)
        elif launch["kernel"] == product.host_name:
            assert chunk == (params.first_pair, params.first_chunk_key)
            assert (params.score_block_q, params.score_block_kv) == (
                dkv.block_q,
                dkv.block_kv,
            )
            num_keys = params.end_chunk_key - params.first_chunk_key
            assert params.num_query_fragments == fragments
            assert params.num_key_fragments == -(-num_keys // 8)
            assert params.is_first_chunk == (params.first_chunk_key == 0)
            assert params.is_last_chunk == (params.end_chunk_key == shape.kv_len)
            pairs = set()
            for x, y, z in groups_of(launch):
                products[x, y, z, params.first_chunk_key] += 1
                head = y // col_blocks
                pairs.add(z * shape.num_heads + head - params.first_pair)
            assert pairs == written
            assert min(pairs) >= 0
            last = max(pairs) * fragments + fragments  # rows of fragments
            needed = last * params.num_key_fragments * 64 * SIZE_BYTES[shape.dtype]
            assert needed <= plan["scratch_bytes"]["score_gradient"]
            if not (params.is_first_chunk and params.is_last_chunk):
                rows = (max(pairs) + 1) * shape.q_len * shape.head_dim * 4
                assert rows <= plan["scratch_bytes"]["dquery_sum"]
            written = set()
    parts = params_of(launches_of(plan, dkv.kernel)[0]).num_parts
    whole = (-(-shape.kv_len // dkv.block_kv), shape.num_kv_heads * parts, batch)
    assert set(seen) == set(itertools.product(*map(range, whole)))
    starts = {key for *_, key in products}
    whole = (
        -(-shape.q_len // product.block_q),
        shape.num_heads * col_blocks,
        batch,
    )
    assert set(products) == {
        (*position, key)
        for position in itertools.product(*map(range, whole))
        for key in starts
    }
    assert set(seen.values()) == set(products.values()) == {1}
    return num_chunks


@pytest.mark.parametrize("family", [0, 9])
@pytest.mark.parametrize(
    ("units", "num_chunks"),
    # Of 2 · 3 batch indices with 3 key-value heads each.
    [(0, 1), (100, 1), (9, 2), (7, 3), (3, 6), (2, 12), (1, 18), (0.99, 36), (0.4, 54)],
)
def test_chunks_of_heads_and_keys(units: float, num_chunks: int, family: int) -> None:
    """As many units of a batch index and key-value head as fit; if none, 128 keys."""
    shape = CallShape("bfloat16", 37, 300, 6, 3, 40, 24)
    unit = 2 * 40 * 304 * 2
    plan = plan_b(describe(shape, (2, 3)), int(unit * units), family=family)
    assert check_chunks(plan, shape, 6) == num_chunks
    keys = 2 * 40 * 128 * 2
    if units >= 0.9:
        assert plan["scratch_bytes"]["score_gradient"] <= unit * units
    elif units:
        assert plan["scratch_bytes"]["score_gradient"] == keys
    assert (plan["scratch_bytes"]["dquery_sum"] > 0) == (0 < units < 1)
    work = sum(x["work"] for x in launches_of(plan, "attention_backward_dq_product"))
    assert work == pytest.approx(2 * 40 * 6 * 6 * 37 * 300)
    work = sum(x["work"] for x in launches_of(plan, "attention_backward_dkv"))
    assert work == pytest.approx(4 * (40 + 24) * 6 * 6 * 37 * 300)


def test_chunks_are_cut_like_any_launch() -> None:
    """A chunk of too much work is several launches, all before its dQ."""
    shape = CallShape("float32", 150, 200, 4, 2, 32, 16)
    problem = describe(shape, (2,))
    whole = plan_b(problem, 2 * 152 * 200 * 4)
    cut = plan_b(problem, 2 * 152 * 200 * 4, max_launch_work=1e6)
    assert len(cut["launches"]) > 3 * len(whole["launches"])
    assert max(launch["work"] for launch in cut["launches"]) < 2e6
    assert check_chunks_cut(cut) == check_chunks(whole, shape, 2) == 4


def check_chunks_cut(plan: dict[str, Any]) -> int:
    """The launches of each chunk: all of dK, dV, then all of dQ. Their number."""
    kinds = []
    for launch in plan["launches"]:
        kind = "product" if "dq_product" in launch["kernel"] else "dkv"
        if "_backward_" in launch["kernel"] and "_combine" not in launch["kernel"]:
            params = params_of(launch)
            kinds.append((params.first_pair, params.first_chunk_key, kind))
    order = [kind for kind, _ in itertools.groupby(kinds)]
    assert len(order) == len(set(order))
    assert [kind for *_, kind in order] == ["dkv", "product"] * (len(order) // 2)
    # Nothing twice, nothing missing.
    for kernel in ("attention_backward_dkv", "attention_backward_dq_product"):
        groups: collections.Counter[tuple[int, ...]] = collections.Counter()
        for launch in launches_of(plan, kernel):
            groups.update(groups_of(launch))
        assert set(groups.values()) == {1}
        assert len(groups) == math.prod(max(axis) + 1 for axis in zip(*groups))
    return len(order) // 2


@pytest.mark.parametrize("limit", [0, 2 * 40 * 304 * 4, 1])
def test_chunks_of_a_wide_head(limit: int) -> None:
    """Whose dQ has a threadgroup for each block of columns."""
    shape = CallShape("float32", 37, 300, 6, 3, 130, 24)
    row = default_row("attention_backward_dq_product", "float32", 130, 0)
    assert row.block_d < 130
    plan = plan_b(describe(shape, (2,)), limit)
    assert check_chunks(plan, shape, 2) == {0: 1, 1: 18}.get(limit, 6)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "batch"), [(40, 0, 2), (9, 1, 1), (64, 256, 0)]
)
def test_chunks_of_next_to_nothing(q_len: int, kv_len: int, batch: int) -> None:
    """Without keys dQ is 0: somebody must write it."""
    shape = CallShape("bfloat16", q_len, kv_len, 4, 2, 32, 32)
    for limit in (0, 1):
        plan = plan_b(describe(shape, (batch,)), limit)
        products = launches_of(plan, "attention_backward_dq_product")
        if batch == 0:
            assert plan["launches"] == []
        elif kv_len == 0:
            assert plan["launches"][-1] in products
            assert launches_of(plan, "attention_backward_dkv") == []
            pairs = [params_of(x).first_pair for x in products]
            assert pairs == ([0] if limit == 0 else [0, 2, 4, 6])
        else:
            check_chunks(plan, shape, batch)


def test_a_long_call_keeps_to_the_default_limit() -> None:
    shape = CallShape("float16", 16384, 16384, 8, 8, 128, 128)
    plan = plan_b(describe(shape, (2,)))
    bytes_kept = plan["scratch_bytes"]["score_gradient"]
    assert 2**25 < bytes_kept <= 2**26
    products = launches_of(plan, "attention_backward_dq_product")
    assert {params_of(x).end_chunk_key % 128 for x in products} == {0}
    assert len(products) == 2 * 8 * (4 * 16384 * 16384 // bytes_kept)


@pytest.mark.parametrize(
    ("num_heads", "length", "form"),
    [(8, 4096, "B"), (32, 16384, "B"), (64, 131072, "A")],
)
def test_the_default_is_form_a_where_the_scratch_of_b_is_too_large(
    num_heads: int, length: int, form: str
) -> None:
    """Many query heads that share a head of a very long sequence."""
    shape = CallShape("bfloat16", length, length, num_heads, num_heads // 4, 64, 64)
    plan = native.plan(describe(shape, (1,)), "backward")
    assert plan["form"] == form
    limit = 2**26  # for dS; its sums between chunks of keys fit beside the fewest keys
    assert sum(plan["scratch_bytes"].values()) <= 2 * limit + 16 * num_heads * length


def test_a_measured_form_b_stays_form_b() -> None:
    shape = CallShape("bfloat16", 131072, 131072, 64, 1, 64, 64)
    assert native.plan(describe(shape, (1,)), "backward")["form"] == "A"
    plan_b(describe(shape, (1,)))


@pytest.mark.parametrize(("stride", "is_wide"), [(2**24 - 1, 0), (2**24, 1)])
@pytest.mark.parametrize("operand", ["query", "key", "value", "dout"])
def test_rows_far_apart_need_offsets_of_64_bits(
    operand: str, stride: int, is_wide: int
) -> None:
    problem = describe(CallShape("float32", 40, 70, 2, 1, 16, 16), (1,))
    getattr(problem, operand).row_stride = stride
    for launch in native.plan(problem, "backward")["launches"]:
        if "_backward_" in launch["kernel"]:
            assert constant_of(launch, "has_wide_rows") == is_wide


# -- Parts of the sums of dK and dV ----------------------------------------------------


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize(
    ("shape", "batch", "num_parts"),
    [
        # One key-value head, few keys: parts until the GPU is full.
        (CallShape("float16", 2048, 128, 32, 1, 64, 64), 1, 64),
        # 1024 queries for each at least.
        (CallShape("float16", 2048, 128, 1, 1, 64, 64), 1, 2),
        # Partial sums of 16 MiB at most.
        (CallShape("float16", 2048, 4096, 32, 1, 128, 128), 1, 2),
        (CallShape("float16", 2048, 8192, 32, 1, 128, 128), 1, 1),
        # Enough threadgroups.
        (CallShape("float16", 2048, 128, 32, 32, 64, 64), 8, 1),
    ],
    ids=str,
)
def test_parts(shape: CallShape, batch: int, num_parts: int, form: str) -> None:
    problem = describe(shape, (batch,))
    shape_class = native.plan(problem, "backward")["class"]
    row = default_row("attention_backward_dkv", "float16", shape.head_dim, 0)
    with native.planning(choices=f"{shape_class}\tbackward\t{form}\t"):
        plan = native.plan(problem, "backward")
    blocks = -(-shape.kv_len // row.block_kv)
    simdgroups = blocks * shape.num_kv_heads * batch * row.num_simdgroups
    items = shape.num_heads // shape.num_kv_heads * -(-shape.q_len // row.block_q)
    least = -(-1024 // row.block_q)
    wanted = max(1, min(num_parts, items // least, 1024 // simdgroups))
    dkv = launches_of(plan, "attention_backward_dkv")
    params = params_of(dkv[0])
    assert params.num_parts == -(-items // params.blocks_per_part) == wanted
    assert params.num_parts * params.blocks_per_part >= items
    combine = launches_of(plan, "attention_backward_dkv_combine")
    rows = wanted * batch * shape.num_kv_heads * shape.kv_len
    if wanted == 1:
        assert combine == []
        assert plan["scratch_bytes"]["partial"] == 0
        assert constant_of(dkv[0], "writes_partials") == 0
        return
    assert constant_of(dkv[0], "writes_partials") == 1
    assert plan["launches"][-1:] == combine
    assert params_of(combine[0]).num_parts == wanted
    assert plan["scratch_bytes"]["partial"] == rows * shape.head_dim * 4
    assert plan["scratch_bytes"]["partial_dvalue"] == rows * shape.value_head_dim * 4
    elements = rows // wanted * max(shape.head_dim, shape.value_head_dim)
    x, y, z = combine[0]["grid"]
    assert (x * combine[0]["threads"] >= elements, y, z) == (True, 2, 1)
    sub_grid = {y for launch in dkv for _, y, _ in groups_of(launch)}
    assert sub_grid == set(range(shape.num_kv_heads * wanted))


def test_some_of_the_parts_above_are_many() -> None:
    shape = CallShape("float16", 2048, 128, 32, 1, 64, 64)
    plan = native.plan(describe(shape), "backward")
    assert params_of(launches_of(plan, "attention_backward_dkv")[0]).num_parts > 8


def test_parts_do_not_depend_on_the_limit_of_scratch() -> None:
    """Nor do the bits, then."""
    shape = CallShape("float32", 512, 300, 8, 2, 32, 32)
    problem = describe(shape, (2,))
    counts = set()
    for limit in (0, 1, 2**20):
        for launch in launches_of(plan_b(problem, limit), "attention_backward_dkv"):
            params = params_of(launch)
            counts.add((params.num_parts, params.blocks_per_part))
    ((num_parts, _),) = counts
    assert num_parts > 1


def test_few_queries_have_parts_too() -> None:
    """Whose sums share the scratch with those of dQ."""
    shape = CallShape("float32", 5, 100, 128, 1, 32, 16)
    plan = native.plan(describe(shape), "backward")
    params = params_of(launches_of(plan, "attention_backward_dkv")[0])
    assert params.num_parts > 1
    splits = params_of(launches_of(plan, "attention_short_dq")[0]).num_splits
    needed = max(params.num_parts * 100 * 32, splits * 128 * 5 * 32) * 4
    assert plan["scratch_bytes"]["partial"] == needed
