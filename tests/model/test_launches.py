"""The launches that the model has, against the planner's; plans run nothing."""

import math

import pytest

from jax_flash_metal import gpu_counts, gpu_planner
from jax_flash_metal.attention_library import CallShape
from jax_flash_metal.benchmark_shapes import AttentionShape
from tests.plugin.test_planner import describe
from tests.support import native
from tests.support.launch_params import params_of

MIB = 1 << 20
SHAPES = (
    AttentionShape(1, 8, 8, 4096, 64),
    AttentionShape(2, 12, 4, 4096, 128),
    AttentionShape(1, 16, 2, 8192, 64),
    AttentionShape(3, 2, 1, 5000, 61, q_len=4321),
    AttentionShape(1, 2, 2, 16384, 256),
    AttentionShape(1, 4, 1, 16384, 128),
    AttentionShape(1, 64, 1, 131072, 64),  # too large for form B
)


def planned(shape, dtype, family, limit, is_causal, pass_):
    call = CallShape(
        dtype,
        shape.num_queries,
        shape.length,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.head_dim,
    )
    offset = shape.q_offset if is_causal else 0
    problem = describe(call, (shape.batch_size,), is_causal=is_causal, q_offset=offset)
    # Launches are cut by their work, which the model leaves out: it costs little.
    settings = {"score_gradient_limit": limit, "max_launch_work": 1e30}
    with native.planning(family=family, **settings):
        return native.plan(problem, pass_)


@pytest.mark.parametrize("limit", [64 * MIB, 240 * MIB], ids=["64MiB", "240MiB"])
@pytest.mark.parametrize("family", [0, 7, 8, 9])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_models_launches_are_the_planners(shape, dtype, family, limit):
    rows = gpu_planner.default_rows(shape, dtype, family, limit)
    names = {
        row.kernel: row.host_name
        for row in vars(rows).values()
        if not isinstance(row, str) and row is not None
    }
    # The planner's chunks and kernels do not depend on the mask.
    for is_causal, passes in ((False, native.PASSES[:2]), (True, ("forward",))):
        for pass_ in passes:
            plan = planned(shape, dtype, family, limit, is_causal, pass_)
            model = gpu_counts.launches(shape, rows, pass_, is_causal, limit)
            assert [names[launch.kernel] for launch in model] == [
                launch["kernel"] for launch in plan["launches"]
            ]
            assert [launch.num_threadgroups for launch in model] == [
                math.prod(launch["grid"]) for launch in plan["launches"]
            ]
            if pass_ == "backward":
                assert plan["form"] == rows.form


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_the_models_chunks_are_the_planners(shape):
    limit = 64 * MIB
    rows = gpu_planner.default_rows(shape, "float32", 9, limit)
    assert rows.form == "B"
    chunks = list(gpu_planner.chunks(shape, rows.dkv, limit))
    plan = planned(shape, "float32", 9, limit, True, "backward")
    products = [
        params_of(launch)
        for launch in plan["launches"]
        if launch["kernel"] == rows.dq_product.host_name
    ]
    assert [(chunk.first_key, chunk.end_key) for chunk in chunks] == [
        (params.first_chunk_key, params.end_chunk_key) for params in products
    ]
    assert len(chunks) > 1
