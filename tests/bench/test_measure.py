"""Statistics, and workers that do well, fail, crash and hang."""

import os
import statistics
import subprocess
import sys

import pytest

from jax_flash_metal import bench_measure
from jax_flash_metal.bench_measure import (
    Comparison,
    Contender,
    Series,
    Settings,
    WorkerError,
    measure,
    noise_floor,
    quartiles,
)

MODULE = "tests.bench.fake_worker"
SETTINGS = Settings(rounds=6, limit=30.0)


def compare(*subjects, seconds=0.002, settings=SETTINGS, cpus=None):
    said = []
    contenders = [Contender(s, s, {"seconds": seconds}, cpus) for s in subjects]
    comparison = measure(contenders, settings, said.append, MODULE)
    assert f"preparing {subjects[-1]}" in said
    return comparison


# -- Statistics ------------------------------------------------------------------------


def test_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_noise_floor():
    assert noise_floor([1.0] * 5) == 0
    assert noise_floor([1.1] * 5) == pytest.approx(0.1)
    # 1.57 · IQR / √n around the median.
    assert noise_floor([0.8, 0.9, 1.0, 1.1, 1.2]) == pytest.approx(1.57 * 0.2 / 5**0.5)


def test_series_and_ratio():
    ours = Series("ours", samples=[1.0, 2.0, 4.0])
    # Twice as slow in every round, though the machine became slower.
    theirs = Series("theirs", samples=[2.0, 4.0, 8.0])
    comparison = Comparison([ours, theirs], Series("ours", samples=[1.0, 2.0, 4.0]))
    assert ours.seconds == 2.0
    assert ours.spread == pytest.approx(1.5 / 2 / 2)
    assert comparison.ratio(theirs) == 2.0
    assert comparison.ratio(ours) == 1.0
    assert comparison.noise == 0.0
    failed = Comparison([Series("ours", failure="no"), theirs], Series("ours"))
    assert failed.ratio(theirs) is None and failed.noise is None


# -- Workers ---------------------------------------------------------------------------


def test_turns():
    comparison = compare("quick", "slow")
    quick, slow = comparison.series
    for series in (quick, slow, comparison.again):
        assert series.failure is None
        assert len(series.samples) == SETTINGS.rounds
        assert series.versions == {"fake": "1.0"}
        assert series.memory_bytes == 1000 and series.error == 1e-6
    assert quick.calls >= 5  # 20 ms
    assert quick.seconds >= 0.002 and slow.seconds >= 0.004
    assert 1.2 < comparison.ratio(slow) < 3
    assert comparison.noise is not None


def test_fewer_rounds_of_long_calls():
    settings = Settings(rounds=50, seconds=0.01, limit=30.0)
    comparison = compare("quick", seconds=0.03, settings=settings)
    assert len(comparison.series[0].samples) == bench_measure.MIN_ROUNDS
    assert comparison.series[0].calls == 1


def test_the_others_go_on():
    comparison = compare("quick", "missing", "wrong", "nan", "crashing", "slow")
    quick, missing, wrong, nan, crashing, _ = comparison.series
    assert len(quick.samples) == SETTINGS.rounds
    assert missing.failure == "ImportError: there is no such package"
    assert (
        wrong.failure == "its results are wrong: the error is 5.0e-01, allowed is 1e-03"
    )
    assert "wrong" in nan.failure
    assert crashing.failure == "crashed (SIGABRT): a last word"
    for series in (missing, wrong, nan, crashing):
        assert series.samples == []
        assert comparison.ratio(series) is None


def test_ours_failed():
    comparison = compare("missing", "quick")
    assert comparison.ratio(comparison.series[1]) is None
    assert len(comparison.series[1].samples) == SETTINGS.rounds


def test_hanging():
    comparison = compare("quick", "hanging", settings=Settings(rounds=2, limit=6.0))
    assert comparison.series[1].failure == "did not answer within 6 s"
    assert len(comparison.series[0].samples) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="CPUs can be chosen on Linux only")
def test_cpus():
    cpu = min(os.sched_getaffinity(0))
    assert compare("quick", cpus=(cpu,)).series[0].runs == "1 CPUs"


def test_a_worker_that_does_not_start():
    with (
        bench_measure.Worker([sys.executable, "-c", "import no_such_thing"]) as worker,
        pytest.raises(WorkerError, match="ended with exit code 1: ModuleNotFound"),
    ):
        worker.ask("load", 30)


def test_order_of_turns_changes():
    """Nobody always comes first, after the pause between rounds."""
    asked = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def ask(self, do, limit, **what):
            asked.append(self.name)
            return {"seconds": 1.0}

    series = [Series("a"), Series("b"), Series("c")]
    workers = {i: Recorded(s.name) for i, s in enumerate(series)}
    pace = dict.fromkeys(workers, 1.0)
    bench_measure._take_turns(series, workers, pace, Settings(rounds=3), asked.append)
    rounds = "".join(name for name in asked if len(name) == 1)
    assert rounds == "abcbcacab"
    assert [statistics.mean(s.samples) for s in series] == [1.0] * 3


def test_bench_is_light():
    """It measures others: nothing of theirs runs in its own process."""
    program = (
        "import sys, jax_flash_metal.bench\n"
        "heavy = {'jax', 'numpy', 'rich', 'torch', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
