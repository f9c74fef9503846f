"""jit with shardings and shard_map, on four devices: right, and nothing is gathered."""

import json

import pytest

from tests.support.processes import run_python

# How the results of a split of batch and heads are split: out, logsumexp, gradients.
SPLIT = {
    "0": ["x", None, "y"],
    "1": ["x", "y"],
    "query": ["x", None, "y"],
    "key": ["x", None, "y"],
    "value": ["x", None, "y"],
}


def run(*cases, implementation="metal"):
    """What the cases of programs.py return; their results were as on one device."""
    done = run_python(
        "from tests.sharding import programs; "
        f"programs.main({cases}, {implementation!r})",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="cpu",
        OPENBLAS_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    for outcome in outcomes:
        assert "failure" not in outcome, outcome["case"] + "\n" + outcome["failure"]
    return {outcome["case"]: outcome["result"] for outcome in outcomes}


def test_batch_and_heads_stay_split():
    results = run(
        *("batch", "batch_over_two_axes", "heads", "batch_and_heads"),
        *("shuffled_devices", "nothing_split", "same_dropout", "one_device"),
    )
    assert results.pop("one_device") == {"plain": True, "partitioned": False}
    for result in results.values():
        assert result["collectives"] == []
        assert result["difference"] == 0.0
    specs = {name: result["specs"] for name, result in results.items()}
    assert set(map(str, specs["batch"].values())) == {"['x']"}
    assert set(map(str, specs["batch_over_two_axes"].values())) == {"[['y', 'x']]"}
    for name, spec in specs["heads"].items():
        assert spec == ([None, "z"] if name == "1" else [None, None, "z"])
    other = {"x": "y", "y": "x", None: None}
    swapped = {name: [other[axis] for axis in spec] for name, spec in SPLIT.items()}
    assert specs["batch_and_heads"] == specs["shuffled_devices"] == swapped


def test_kv_heads_that_several_devices_share_are_summed():
    results = run("one_kv_head", "more_parts_than_kv_heads", "parts_of_an_axis")
    for name in ("one_kv_head", "more_parts_than_kv_heads"):
        assert set(results[name]["collectives"]) == {"all-reduce"}
    specs = results["one_kv_head"]["specs"]
    assert specs["query"] == ["y", None, "x"]
    assert specs["key"] == specs["value"] == ["y"]
    assert results["more_parts_than_kv_heads"]["specs"]["key"] == [None, None, "x"]
    assert results["parts_of_an_axis"]["specs"]["query"] == [None, None, "z"]


def test_what_cannot_be_split_is_gathered():
    results = run("kv_heads_do_not_divide", "split_sequences")
    for result in results.values():
        assert set(result["collectives"]) == {"all-gather"}
        assert result["difference"] == 0.0
    # The batch stays split all the same.
    assert set(map(str, results["kv_heads_do_not_divide"]["specs"].values())) == {
        "['y']"
    }


def test_every_option():
    cases = ("shared_bias", "bfloat16_bias_of_heads", "bias_of_everything")
    results = run(*cases)
    # Only gradients are summed, over the devices that share an operand.
    for result in results.values():
        assert set(result["collectives"]) == {"all-reduce"}
    per_head = {"sinks": ["y"], "alibi_slopes": ["y"]}
    for name, bias in zip(cases, ([], ["y"], ["x", "y"])):
        assert results[name]["specs"] == SPLIT | per_head | {"bias": bias}


def test_vmap_and_explicit_axes():
    results = run("vmapped", "vmapped_pullback", "outside_jit", "explicit_axes")
    for name in ("vmapped", "vmapped_pullback"):
        assert set(results[name]["collectives"]) == {"all-reduce"}
    assert results["vmapped"]["specs"]["query"] == ["x", None, None, "y"]
    assert results["vmapped"]["specs"]["key"] == [None, None, "y"]
    assert results["vmapped"]["specs"]["bias"] == ["x"]
    assert results["vmapped_pullback"]["specs"]["query"] == [None, "x", None, "y"]
    assert results["vmapped_pullback"]["specs"]["bias"] == []
    assert results["outside_jit"]["specs"]["out"] == SPLIT["0"]
    explicit = results["explicit_axes"]
    if explicit is not None:  # since jax 0.7
        assert explicit["types"] == [["x", None, "y", None]]
        assert explicit["collectives"] == ["all-reduce"]
        assert explicit["specs"]["key"] == SPLIT["key"]


PARTIAL = ("shard_map_over_one_of_two_axes", "shard_map_over_one_of_two_axes_gspmd")
LOST_TO_GSPMD = (
    "inside a shard_map over some of the mesh's axes the kernels need JAX's "
    "partitioner Shardy. "
)
WHAT_TO_DO = "Map over all axes or set jax_use_shardy_partitioner."


def test_shard_map():
    results = run("shard_map_in_jit", "shard_map_outside_jit", *PARTIAL)
    for name, may_work in zip(PARTIAL, (True, False)):
        error = results[name]["error"]
        if may_work and error is None:  # where Shardy is the default
            continue
        assert error == (
            f"implementation='metal' cannot run this call: {LOST_TO_GSPMD}{WHAT_TO_DO} "
            "implementation=None or 'xla' runs everywhere."
        )


def test_the_default_on_the_cpu():
    """The native kernels, split in the same way; never an error."""
    cases = ("batch_and_heads", "one_kv_head", "bias_of_everything", "vmapped")
    results = run(*cases, "shard_map_in_jit", *PARTIAL, implementation=None)
    assert results["batch_and_heads"]["collectives"] == []
    for name in cases[1:]:
        assert set(results[name]["collectives"]) == {"all-reduce"}
    assert (
        results["batch_and_heads"]["specs"]
        == run("batch_and_heads")["batch_and_heads"]["specs"]
    )
    for name in PARTIAL:
        assert results[name]["error"] is None
    (warning,) = {w for name in PARTIAL for w in results[name]["warnings"]}
    assert warning.startswith(f"jax_flash_metal: {LOST_TO_GSPMD}Such calls take")
    assert warning.endswith(WHAT_TO_DO)


@pytest.mark.slow
def test_the_older_partitioner():
    result = run("shared_bias_gspmd")["shared_bias_gspmd"]
    if result is not None:
        assert set(result["collectives"]) == {"all-reduce"}
        assert result["specs"] == SPLIT | {
            "sinks": ["y"],
            "alibi_slopes": ["y"],
            "bias": [],
        }
