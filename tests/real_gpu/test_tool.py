"""tools/real_gpu.py without a GPU: bugs fit, runs cover, reports are understood."""

import pytest

from jax_flash_metal import variant_table
from plugin.device.software.frontend import rewrite
from tests.real_gpu import battery, bugs
from tests.support import native
from tools import real_gpu


@pytest.mark.parametrize("bug", bugs.bugs(), ids=lambda bug: bug.id)
def test_bug_is_a_change_of_the_kernels(bug, tmp_path):
    copy = bug.copy_of_kernels(tmp_path)
    changed = [
        path.name
        for path in copy.iterdir()
        if path.read_text() != (bugs.KERNEL_DIR / path.name).read_text()
    ]
    assert changed == [bug.file]
    assert bug.tool in bugs.TOOLS
    names = {v.host_name: v for v in variant_table.variants()}
    for row in bug.rows():
        assert bug.file in bugs.included_files(names[row].kernel)


def test_every_tool_has_a_bug_to_find():
    assert {bug.tool for bug in bugs.bugs()} == set(bugs.TOOLS)


def test_every_barrier_is_deleted_once():
    """Counted by tokens, not by the pattern that the bugs are made with."""
    count = 0
    for path in bugs.KERNEL_DIR.glob("attention_*"):
        names = [t.value for t in rewrite.tokenize(path.read_text())]
        count += names.count("threadgroup_barrier") + names.count("simdgroup_barrier")
    deleted = [bug for bug in bugs.bugs() if bug.id.endswith("-deleted")]
    assert len(deleted) == count > 0
    assert len({(b.file, b.old, b.index) for b in deleted}) == count


def test_runs_choose_every_row_that_can_be_chosen():
    chosen = {row for run in battery.row_runs() for row in run.rows}
    by_default = ("delta", "combine", "mask_blocks", "gradient")
    for variant in variant_table.variants():
        is_default = any(part in variant.kernel for part in by_default)
        assert (variant.host_name in chosen) != is_default, variant.host_name


def test_both_forms_of_the_backward_pass_are_run():
    for runs in (battery.row_runs(), battery.default_runs(), battery.feature_runs()):
        assert {run.form for run in runs} >= {"A", "B"}


class Report:
    def __init__(self, **data):
        self.data, self.said = data, []

    def wrong(self, text):
        self.said.append(text)


def test_a_kernel_that_something_has_not_run_is_wrong():
    numbers = {name: {"used": {name: 1}} for name in ("rows", "defaults", "features")}
    tools = {"memcheck": {"used": {"rows": 1, "defaults": 1, "features": 1}}}
    report = Report(**numbers, sanitizers=tools)
    real_gpu.check_all_ran({"rows", "defaults", "features"}, report)
    assert report.said == []
    tools["racecheck"] = {"used": {"rows": 1, "features": 1}}
    real_gpu.check_all_ran({"rows", "defaults", "features", "large"}, report)
    assert report.said == [
        "no call compared with float64 has run large",
        "no call under memcheck has run large",
        "no call under racecheck has run defaults",
        "no call under racecheck has run large",
    ]


class PlansOnly(battery.ChosenRows):
    """Plans, and launches nothing."""

    def __init__(self):
        super().__init__(native.load(), {}, gpu=object())
        self.planned = set()

    def run(self, problem, which):
        launches = self.plan(problem, which)["launches"]
        self.planned |= {launch["kernel"] for launch in launches}


@pytest.mark.slow
def test_runs_use_every_kernel():
    """What the report's coverage is about, by the plans alone."""
    gpu = PlansOnly()
    for name in ("rows", "defaults", "features"):
        for run in battery.SETS[name]():
            gpu.choose(run)
            battery.kernel_check.run_case(gpu, run.case)
    gpu.choose(None)
    assert gpu.planned == {v.host_name for v in variant_table.variants()}


@pytest.mark.parametrize("form", ["A", "B"])
def test_chosen_rows_are_planned(form):
    gpu = PlansOnly()
    runs = [run for run in battery.row_runs() if run.form == form][:6]
    for run in runs:
        gpu.planned.clear()
        gpu.choose(run)
        battery.kernel_check.run_case(gpu, run.case)
        assert set(run.rows) <= gpu.planned
        assert any("dq_product" in k for k in gpu.planned) == (form == "B")
    gpu.choose(None)


def test_row_that_is_not_used_is_an_error():
    gpu = PlansOnly()
    run = next(run for run in battery.row_runs() if run.form == "B")
    other = next(  # which form B has no use for
        v
        for v in variant_table.variants()
        if v.kernel == "attention_backward_dq" and v.dtype == run.case.dtype
    )
    case = battery.dataclasses.replace(run.case, head_dim=16)
    run = battery.Run(case, rows=(other.host_name,), form="B")
    gpu.choose(run)
    with pytest.raises(AssertionError, match="not as chosen"):
        battery.kernel_check.run_case(gpu, run.case)
    gpu.choose(None)


def test_large_calls_are_large():
    calls = battery.large_calls()
    assert any(call.num_scores > 2**31 for call in calls)
    assert any(call.batch * call.num_heads > 200 for call in calls)
    long = {(c.dtype, c.head_dim, c.is_causal) for c in calls if c.q_len == 16384}
    assert len(long) == 3 * 2 * 2


REPORTS = {
    "========= Error: Race reported between Write access at k+0x10 in tile.h:366\n"
    "=========     and Read access at k+0x20 in tile.h:433 [512 hazards]\n"
    "=========\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)":
        (1, "Error: Race reported between Write access in tile.h:366"),
    "========= Invalid __global__ read of size 4 bytes\n"
    "=========     at k+0x50 in attention_common.h:187\n"
    "========= ERROR SUMMARY: 27 errors":
        (27, "Invalid __global__ read of size 4 bytes attention_common.h:187"),
    "========= Barrier error detected. Divergent thread(s) in warp\n"
    "=========     at k+0x50 in gpu_shim.h:158\n"
    "========= ERROR SUMMARY: 1 error":
        (1, "Barrier error detected. Divergent thread(s) in warp gpu_shim.h:158"),
    "========= ERROR SUMMARY: 0 errors": (0, ""),
    "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)": (0, ""),
}  # fmt: skip


@pytest.mark.parametrize("output", REPORTS)
def test_reports_are_understood(output):
    findings, first = REPORTS[output]
    assert [int(m[1]) for m in real_gpu._SUMMARY.finditer(output)] == [findings]
    assert real_gpu.first_report(output) == first


def test_document(tmp_path, monkeypatch):
    data = {
        "date": "2026-01-01",
        "gpu": "GPU",
        "sanitizer": "1.0",
        "digest": "0123456789abcdef",
        "rows": {"runs": 3, "used": {"a": 2, "b": 1}, "seconds": 1.2},
        "sanitizers": {
            "memcheck": {"findings": 0, "runs": 3, "used": {}, "seconds": 1}
        },
        "bugs": [
            {"id": "x", "tool": "racecheck", "found": False, "findings": 0,
             "first": "", "numbers": "0 of 1"},
        ],
        "wrong": ["the planted bug x was not found by racecheck"],
    }  # fmt: skip
    document = tmp_path / "real-gpu.md"
    document.write_text(f"before\n{real_gpu._BEGIN}\nold\n{real_gpu._END}\nafter\n")
    monkeypatch.setattr(real_gpu, "DOCUMENT", document)
    (tmp_path / "results.json").write_text(real_gpu.json.dumps(data))
    real_gpu.document([tmp_path])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text
    assert "| rows | 3 | 2 | 3 | 1 |" in text
    assert "| x | racecheck **missed** | 0 |" in text
    assert "Wrong: 1." in text
