"""What calls take of measurements: the real planner, kernels, lowering and explain."""

import dataclasses
import doctest
import functools
import inspect
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash_metal
from jax_flash_metal import (
    autotuner,
    kernel_cases,
    kernel_choices,
    kernel_proof,
    lowering,
    platforms,
    tunings,
)
from jax_flash_metal.attention_library import AttentionLibrary
from jax_flash_metal.kernel_choices import Choice
from tests.support import native
from tests.support.processes import ROOT, output_of, run_python

SHAPES = ((2, 37, 6, 40), (2, 53, 3, 40), (2, 53, 3, 40))
CLASS = "float16 d40 v40 q64 k64 n16 g2"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """Nothing is measured; kernels that others have proven stay so."""
    monkeypatch.setattr(tunings, "_in_use", None)
    monkeypatch.setattr(tunings, "_warned", set())
    monkeypatch.setattr(tunings, "_folder", lambda: tmp_path / "autotune")
    yield
    kernel_choices.use(tunings.library(), {})


def structs(dtype=jnp.float16, shapes=SHAPES):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def arrays(dtype=jnp.float16, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def seconds_of(candidate):
    """The last rows of the table are the fastest, and so is the form that has them."""
    table = [v.host_name for v in kernel_choices.variants()]
    return 1 / (1 + sum(table.index(kernel) for kernel in candidate.kernels))


def last_rows(candidates, budget_seconds):
    """A measure; of whole calls the kernels win."""
    return [
        {"fused": 1.0, "unfused": 2.0}.get(candidate.form) or seconds_of(candidate)
        for candidate in candidates
    ]


def tune(measure=last_rows, operands=None, **options):
    options = {"implementation": "metal", "platform": "cpu"} | options
    return jax_flash_metal.autotune(
        *(operands or structs()), measure=measure, **options
    )


def plan(which, **options):
    """Of the tuned call, as the library makes it."""
    operands, config = jax_flash_metal.api.prepare_abstract(*structs(), **options)
    problem = kernel_choices.problem_of(config, operands._asdict())
    return AttentionLibrary(native.load()).plan(problem, which)


def test_the_planner_takes_what_was_chosen():
    before = {which: plan(which) for which in ("forward", "backward")}
    assert {p["origin"] for p in before.values()} == {"default"}
    result = tune()
    assert result.shape_class == CLASS
    after = {which: plan(which) for which in before}
    assert {p["origin"] for p in after.values()} == {"measured"}
    rows = kernel_choices.rows_of("attention_forward", "float16", 40)
    assert len(rows) > 1
    names = after["forward"]["kernels"]
    assert rows[-1] in names and rows[-1] == result.forward.kernels[0]
    names = set(after["backward"]["kernels"])
    assert names >= set(result.backward.kernels)
    assert after["backward"]["form"] == result.backward.form
    assert kernel_choices.choice_of(after["backward"], "backward") == (
        result.backward.choice
    )
    # Calls of another class do not.
    assert plan("forward", is_causal=True)["origin"] == "default"


def test_the_problem_is_that_of_the_call():
    """The class that is asked for is the one that a run of the call has."""
    operands, config = jax_flash_metal.api.prepare_abstract(
        *structs(),
        bias=jax.ShapeDtypeStruct((6, 1, 53), jnp.float32),
        mask=jax.ShapeDtypeStruct((2, 1, 37, 53), bool),
        segment_ids=(
            jax.ShapeDtypeStruct((2, 37), jnp.int32),
            jax.ShapeDtypeStruct((2, 53), jnp.int32),
        ),
        q_offset=jax.ShapeDtypeStruct((), jnp.int32),
        is_causal=True,
        logits_soft_cap=3.0,
        dropout_rate=0.25,
        dropout_key=jax.ShapeDtypeStruct((2,), jnp.uint32),
    )
    given = {n: x for n, x in operands._asdict().items() if x is not None}
    phantom = kernel_choices.problem_of(config, given)
    real = autotuner.random_operands(operands)
    options = kernel_choices.options_of(config) | real
    required = {name: options.pop(name) for name in ("query", "key", "value")}
    problem = native.make_problem(required, **options)
    native.attach_results(problem, required, native.FORWARD_RESULTS)
    for field, _ in problem._fields_:
        ours, theirs = getattr(phantom, field), getattr(problem, field)
        if isinstance(ours, (int, float)):
            assert ours == theirs, field
        elif field in given:
            assert list(ours.batch_strides[:1]) == list(theirs.batch_strides[:1])
            strides = ("head_stride", "row_stride", "col_stride")
            assert all(getattr(ours, s) == getattr(theirs, s) for s in strides), field
    text = tunings.shape_class_of(config, given)
    assert text.startswith(f"{CLASS} causal ")
    assert {"bias", "mask", "softcap", "dropout_key"} <= set(text.split())


def test_results_stay_right():
    """Of a call with the chosen kernels, and of its gradients."""
    result = tune()
    operands = arrays()

    def total(implementation):
        def f(*qkv):
            out = jax_flash_metal.flash_attention(*qkv, implementation=implementation)
            return jnp.square(out.astype(jnp.float32)).sum(), out

        return jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))

    gradients, out = total("metal")(*operands)
    expected_gradients, expected = total("xla")(*operands)
    np.testing.assert_allclose(out, expected, atol=2e-3, rtol=1e-3)
    for actual, right in zip(gradients, expected_gradients):
        np.testing.assert_allclose(actual, right, atol=1e-2, rtol=1e-2)
    assert tunings.load() == {CLASS: result}


def test_a_compiled_program_takes_a_new_choice():
    """The forms of the backward pass round differently; nothing is traced again."""
    traced = []

    def total(*qkv):
        traced.append(qkv)
        out = jax_flash_metal.flash_attention(*qkv, implementation="metal")
        return out.astype(jnp.float32).sum()

    step = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    operands = arrays(jnp.bfloat16)  # whose dS is rounded in the scratch
    gradients = {}
    for form in ("A", "B", "A again"):
        (choice, *_) = (
            choice
            for choice in kernel_choices.every_choice(
                "backward", "bfloat16", 64, for_few_queries=False
            )
            if choice.form == form[0]
        )
        key = (CLASS.replace("float16", "bfloat16"), "backward")
        kernel_choices.use(tunings.library(), {key: choice})
        gradients[form] = np.asarray(step(*operands)[0], np.float32)
    assert len(traced) == 1
    assert (gradients["A"] == gradients["A again"]).all()
    assert (gradients["A"] != gradients["B"]).any()
    np.testing.assert_allclose(gradients["A"], gradients["B"], atol=5e-2, rtol=5e-2)


def test_docstring(monkeypatch):
    """The example, and every argument."""
    monkeypatch.setattr(autotuner, "measure_in_turn", last_rows)
    function = jax_flash_metal.autotune
    (test,) = doctest.DocTestFinder(recurse=False).find(function, "autotune")
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"  \**{parameter}: ", inspect.getdoc(function))


def test_explain():
    explain = jax_flash_metal.explain
    options = {"implementation": "metal", "platform": "cpu"}
    before = explain(*structs(), **options)
    rows = kernel_choices.rows_of("attention_forward", "float16", 40)
    short = rows[0].removeprefix("attention_forward_float16_")
    assert before.kernels.startswith(f"forward {short}; backward form ")
    assert before.origin == "default: the table's, not measured here"
    assert str(before) == (
        "metal: the kernels run on the software Metal device. "
        f"Rows: {before.kernels} ({before.origin})."
    )
    result = tune()
    after = explain(*structs(), **options)
    assert after.kernels == "; ".join(
        tunings.describe(which, chosen.choice)
        for which, chosen in (
            ("forward", result.forward),
            ("backward", result.backward),
        )
    )
    assert after.kernels != before.kernels
    assert re.fullmatch(
        r"measured 20\d\d-\d\d-\d\d, times as fast as the default: "
        rf"forward {result.forward.gain:.2f}, backward {result.backward.gain:.2f}",
        after.origin,
    )
    # Of another class, and of what are no Metal kernels.
    other = explain(*structs(), is_causal=True, **options)
    assert other.origin == before.origin
    assert explain(*structs(), platform="cpu").kernels == ""
    assert explain(*structs(), implementation="xla").kernels == ""


def test_explain_on_a_gpu_of_a_known_family():
    library = AttentionLibrary(native.load())
    library.set_gpu_family(8)
    try:
        explanation = jax_flash_metal.explain(
            *structs(), implementation="metal", platform="cpu"
        )
    finally:
        library.set_gpu_family(-1)
    assert explanation.origin == (
        "modelled: the table's for Apple GPU family 8, not measured here"
    )


PROGRAM = """
import jax, jax.numpy as jnp
import jax_flash_metal
from jax_flash_metal import tunings
shapes = {shapes}
q, k, v = (jnp.ones(shape, jnp.float16) for shape in shapes)
f = jax.jit(lambda *x: jax_flash_metal.flash_attention(*x, implementation="metal"))
f(q, k, v)
print(tunings._in_use is not None and list(tunings._in_use))
"""


def test_a_program_loads_it_before_its_first_call(tmp_path, monkeypatch):
    """Without explain or autotune."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(tunings, "_folder", lambda: folder / "autotune")
    tune()
    program = PROGRAM.format(shapes=SHAPES)
    setting = {platforms.CACHE_SETTING: str(folder)}
    assert output_of(program, **setting) == str([CLASS])


def test_kernels_are_really_measured():
    """By the clock, on the software device: the only test that does."""
    operands = structs(shapes=((1, 16, 2, 8), (1, 24, 1, 8), (1, 24, 1, 8)))
    result = tune(None, operands, budget_seconds=2.0)
    assert 0 < result.forward.seconds <= result.forward.default_seconds
    assert 0 < result.backward.seconds <= result.backward.default_seconds
    assert tunings.store().read() == {result.shape_class: result}


# -- Wrong kernels ---------------------------------------------------------------------


class Planted(AttentionLibrary):
    """The results of a pass with one of these kernels are off by a little."""

    def __init__(self, *kernels):
        super().__init__(native.load())
        self.kernels_off = set(kernels)
        self.ran = []

    def run(self, problem, which):
        super().run(problem, which)
        kernels = self.kernels(problem, which)
        self.ran += kernels
        if self.kernels_off.intersection(kernels):
            name = {"forward": "out", "backward": "dkey"}[which]
            tensor = getattr(problem, name)
            memory = (native.ctypes.c_char * tensor.size_bytes).from_address(
                tensor.data
            )
            values = np.frombuffer(memory, np.float16)
            values[:] = values * np.float16(1.5)


def test_a_wrong_kernel_is_not_chosen(monkeypatch):
    wrong = kernel_choices.rows_of("attention_forward", "float16", 40)[-1]
    library = Planted(wrong)
    monkeypatch.setattr(tunings, "library", lambda: library)
    result = tune()
    assert wrong in library.ran  # it was tried
    assert wrong not in result.forward.kernels
    (timing,) = (t for t in result.timings if t.failure is not None)
    assert timing.kernels == (wrong,)
    assert timing.failure.startswith("its out is wrong: ")
    assert wrong not in plan("forward")["kernels"]


@pytest.fixture
def stored():
    """A result of another process for causal calls, which are of no tiny case's class:
    the last rows.
    """
    library = tunings.library()
    chosen = {
        which: tunings.Chosen(choice.form, choice.kernels, 1.0, 2.0)
        for which in ("forward", "backward")
        for choice in kernel_choices.every_choice(
            which, "float16", 64, for_few_queries=False
        )
    }
    name = library.device_facts().get("name", "")
    tuning = tunings.Tuning(
        f"{CLASS} causal", "now", name, **chosen, unfused=None, timings=()
    )
    tunings.store().add(tuning)
    return tuning


def test_the_rows_that_run_are_proven(monkeypatch, tmp_path, stored):
    """By the first program of a process that finds a stored result, before it runs."""
    monkeypatch.setenv(platforms.CACHE_SETTING, str(tmp_path / "cache"))
    proofs = kernel_proof._Proofs(AttentionLibrary(native.load()))
    monkeypatch.setattr(kernel_proof, "_only_proofs", lambda backend: proofs)
    assert not proofs._verdicts
    program = lowered(is_causal=True, implementation="metal")
    assert has_kernels(program)
    for which in ("forward", "backward"):
        kernels = set(getattr(stored, which).kernels)
        assert kernels <= set(plan(which, is_causal=True)["kernels"])
        proven = {kernel_cases.kernel_of_key(k) for k in proofs._verdicts}
        assert kernels <= proven


@pytest.mark.parametrize("asked", ["lowering", "explain"])
def test_a_row_that_fails_its_proof_is_not_used(monkeypatch, stored, asked):
    """Stored by a process where it did not: the pass takes the table's rows."""
    bad = stored.forward.kernels[0]
    verdicts = {bad: kernel_proof.Verdict(None, "planted")}
    monkeypatch.setattr(
        kernel_proof, "prove", lambda case: verdicts if bad in case.choice else {}
    )
    expected = (
        f"the forward pass of {CLASS} causal is not used: the kernel {bad} is "
        "disabled: planted. To measure it anew, "
    )
    with pytest.warns(tunings.TuningWarning, match=expected):
        if asked == "lowering":
            assert has_kernels(lowered(is_causal=True, implementation="metal"))
        else:
            explanation = jax_flash_metal.explain(
                *structs(), is_causal=True, implementation="metal", platform="cpu"
            )
            assert explanation.origin.endswith("as the default: backward 2.00")
    assert tunings.load() == {stored.shape_class: stored.without("forward")}
    assert plan("forward", is_causal=True)["origin"] == "default"
    assert plan("backward", is_causal=True)["origin"] == "measured"


@pytest.mark.usefixtures("stored")
def test_a_compiled_program_keeps_its_rows_if_the_gradients_fail(monkeypatch, stored):
    """The table's may be wrong: nobody has proven them."""
    attend = functools.partial(
        jax_flash_metal.flash_attention, is_causal=True, implementation="metal"
    )
    jax.jit(attend).lower(*structs())
    bad = stored.backward.kernels[0]
    verdicts = {bad: kernel_proof.Verdict(None, "planted")}
    monkeypatch.setattr(
        kernel_proof, "prove", lambda case: verdicts if bad in case.choice else {}
    )
    with pytest.warns(tunings.TuningWarning, match="the backward pass of .* planted"):
        assert has_kernels(lowered(is_causal=True, implementation="metal"))
    assert stored.forward.kernels[0] in plan("forward", is_causal=True)["kernels"]
    assert plan("backward", is_causal=True)["origin"] == "default"


def plant(monkeypatch, tmp_path, *kernels):
    """These kernels fail their proofs, and platform cpu is one like flash_metal."""
    row = {"metal": "the device of this test"}
    monkeypatch.setitem(lowering.KERNEL_PLATFORMS, "cpu", row)
    monkeypatch.setenv(platforms.CACHE_SETTING, str(tmp_path / "cache"))
    proofs = kernel_proof._Proofs(Planted(*kernels))
    monkeypatch.setattr(kernel_proof, "_only_proofs", lambda backend: proofs)
    monkeypatch.setattr(kernel_proof, "_warned", set())
    return proofs


def chosen_by_table():
    """The rows that calls take of which nothing is measured."""
    plans = {which: plan(which) for which in ("forward", "backward")}
    choices = [kernel_choices.choice_of(p, which) for which, p in plans.items()]
    return [name for choice in choices for name in choice.kernels]


def kernels_of(tuning):
    return [name for choice in tuning.choices().values() for name in choice.kernels]


def explained(**options):
    return jax_flash_metal.explain(*structs(), platform="cpu", **options)


@pytest.mark.filterwarnings("error::jax_flash_metal.kernel_proof.KernelWarning")
@pytest.mark.filterwarnings("error::jax_flash_metal.tunings.TuningWarning")
def test_measured_rows_serve_where_those_of_the_table_are_wrong(
    monkeypatch, tmp_path, stored
):
    wrong = [name for name in chosen_by_table() if name not in kernels_of(stored)]
    templates = [kernel_choices.template_of()[name] for name in wrong]
    assert templates == ["attention_forward", "attention_backward_dkv"]
    plant(monkeypatch, tmp_path, *wrong)
    assert has_kernels(lowered(is_causal=True))
    explanation = explained(is_causal=True)
    assert explanation.origin.startswith("measured")
    assert "takes the reference" not in explanation.reason
    attend = jax_flash_metal.flash_attention
    np.testing.assert_allclose(
        jax.jit(functools.partial(attend, is_causal=True))(*arrays()),
        attend(*arrays(), is_causal=True, implementation="xla"),
        atol=2e-3,
        rtol=1e-3,
    )
    # Of another class.
    with pytest.warns(kernel_proof.KernelWarning, match="is disabled on"):
        assert not has_kernels(lowered())
    assert explained().reason.startswith(f"the kernel {wrong[0]} is disabled on ")


@pytest.mark.filterwarnings("error::jax_flash_metal.kernel_proof.KernelWarning")
@pytest.mark.filterwarnings("error::jax_flash_metal.tunings.TuningWarning")
def test_wrong_rows_of_another_class_are_not_asked_of(monkeypatch, tmp_path, stored):
    """Of that of the call's shape without its batch, for one."""
    alone = "float16 d40 v40 q64 k64 n8 g2"
    tunings.store().add(dataclasses.replace(stored, shape_class=alone))
    wrong = [name for name in kernels_of(stored) if name not in chosen_by_table()]
    assert len(wrong) == 2
    proofs = plant(monkeypatch, tmp_path, *wrong)
    assert has_kernels(lowered())
    assert explained().origin.startswith("default")
    assert tunings.load().keys() == {alone, stored.shape_class}
    assert not {kernel_cases.kernel_of_key(key) for key in proofs._verdicts} & {*wrong}


def test_what_is_wrong_with_options_alone_is_not_held_against_plain_calls(
    monkeypatch, tmp_path, stored
):
    options = f"{stored.shape_class} bias"
    tunings.store().add(dataclasses.replace(stored, shape_class=options))
    proofs = plant(monkeypatch, tmp_path)
    wrong = f"{stored.forward.kernels[0]} with options"
    proofs.add({wrong: kernel_proof.Verdict(None, "planted")})
    assert tunings.load() == {
        stored.shape_class: stored,
        options: dataclasses.replace(stored.without("forward"), shape_class=options),
    }


def test_the_tables_rows_are_proven_before_they_are_measured(monkeypatch):
    """Whatever was measured before; other threads go on with that meanwhile."""
    result = tune()
    asked, meanwhile = [], []

    def objection(backend, problem, which, has_features, found):
        asked.append((found["class"], which, found["origin"]))
        meanwhile.append(tunings.library().outline(problem, which)["origin"])

    monkeypatch.setattr(kernel_proof, "objection", objection)
    assert plan("forward")["origin"] == "measured"
    assert tune(again=True).forward == result.forward
    assert asked == [(CLASS, which, "default") for which in ("forward", "backward")]
    assert meanwhile == ["measured"] * 2
    assert plan("forward")["origin"] == "measured"


def stored_for(stored, shapes):
    """The same rows for causal calls of these shapes; their class, and the key of their
    sums in parts.
    """
    operands, config = jax_flash_metal.api.prepare_abstract(
        *structs(shapes=shapes), is_causal=True
    )
    shape_class = tunings.shape_class_of(config, operands._asdict())
    tunings.store().add(dataclasses.replace(stored, shape_class=shape_class))
    (dkv,) = (name for name in stored.backward.kernels if "_dkv_" in name)
    assert stored.backward.form == "B"
    return shape_class, f"{dkv} of form B in parts"


def plant_in_parts(monkeypatch, tmp_path, wrong):
    """Platform cpu is one like flash_metal, and these sums in parts are known to be
    wrong.
    """
    proofs = plant(monkeypatch, tmp_path)
    verdicts = {wrong: kernel_proof.Verdict(None, "planted")}
    proofs.add(verdicts)
    prove = proofs.prove
    monkeypatch.setattr(
        proofs,
        "prove",
        lambda case: verdicts if case.is_grouped and case.choice else prove(case),
    )


@pytest.mark.filterwarnings("error::jax_flash_metal.kernel_proof.KernelWarning")
@pytest.mark.filterwarnings("error::jax_flash_metal.tunings.TuningWarning")
def test_sums_in_parts_that_are_wrong_are_not_held_against_others(
    monkeypatch, tmp_path, stored
):
    _, wrong = stored_for(stored, SHAPES)
    plant_in_parts(monkeypatch, tmp_path, wrong)
    assert has_kernels(lowered(is_causal=True))
    assert plan("backward", is_causal=True)["origin"] == "measured"


@pytest.mark.filterwarnings("error::jax_flash_metal.kernel_proof.KernelWarning")
def test_rows_whose_sums_in_parts_are_wrong_do_not_make_any(
    monkeypatch, tmp_path, stored
):
    shapes = ((1, 100, 100, 40), (1, 120, 2, 40), (1, 120, 2, 40))
    shape_class, wrong = stored_for(stored, shapes)
    plant_in_parts(monkeypatch, tmp_path, wrong)
    expected = f"backward pass of {shape_class} is not used: the kernel {wrong} is "
    with pytest.warns(tunings.TuningWarning, match=expected):
        assert has_kernels(lowered(structs(shapes=shapes), is_causal=True))
    assert tunings.load() == {
        stored.shape_class: stored,
        shape_class: dataclasses.replace(stored, shape_class=shape_class).without(
            "backward"
        ),
    }


def planned(monkeypatch):
    """What the planner is asked from now on of calls like the tuned one: the pass, and
    whether the batch is there.
    """
    asked = []
    real = AttentionLibrary._plan

    def record(self, problem, which, size):
        if problem.q_len == SHAPES[0][1]:
            asked.append((which, problem.num_batch_dims > 0))
        return real(self, problem, which, size)

    monkeypatch.setattr(AttentionLibrary, "_plan", record)
    return asked


@pytest.mark.usefixtures("stored")
def test_a_call_of_another_class_is_planned_without_its_batch(monkeypatch):
    """With it that takes seconds; the class alone is asked for with it, once a pass."""
    operands, config = jax_flash_metal.api.prepare_abstract(*structs())
    asked = planned(monkeypatch)
    tunings.prove_rows(config, operands._asdict(), "backward", has_features=False)
    assert asked == [("forward", True), ("forward", False)]
    asked.clear()
    lowered(implementation="metal")
    assert ("backward", False) in asked and ("backward", True) not in asked
    assert asked.count(("forward", True)) == 2


@pytest.mark.parametrize("what", ["this pass", "another class"])
@pytest.mark.filterwarnings("error::jax_flash_metal.tunings.TuningWarning")
def test_what_is_measured_during_a_proof_is_not_dropped(monkeypatch, stored, what):
    bad, *others = kernel_choices.rows_of("attention_forward", "float16", 64)[::-1]
    assert stored.forward.kernels == (bad,)
    chosen = dataclasses.replace(stored.forward, kernels=(others[0],))
    new = dataclasses.replace(stored, created="then", forward=chosen)
    if what == "another class":
        new = dataclasses.replace(new, shape_class=CLASS)

    def prove(case):
        if bad not in case.choice:
            return {}
        if new not in tunings.load().values():
            tunings.keep(new)
        return {bad: kernel_proof.Verdict(None, "planted")}

    monkeypatch.setattr(kernel_proof, "prove", prove)
    if what == "this pass":
        lowered(is_causal=True, implementation="metal")
        assert tunings.load() == {new.shape_class: new}
        return
    with pytest.warns(tunings.TuningWarning, match="planted"):
        lowered(is_causal=True, implementation="metal")
    assert tunings.load() == {
        CLASS: new,
        stored.shape_class: stored.without("forward"),
    }


# -- Programs for several devices ------------------------------------------------------


def test_each_part_of_a_partitioned_program_is_asked_for(stored, tmp_path):
    """By its own class, whatever that of the whole arrays would take."""
    wrong = [name for name in chosen_by_table() if name not in kernels_of(stored)]
    done = run_python(
        "from tests.autotune import test_calls; "
        f"test_calls.run_partitioned({str(tmp_path)!r}, {wrong})",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stderr
    tuned, untuned, demanded = map(json.loads, done.stdout.splitlines())
    assert tuned == {"kernels": True, "warnings": []}
    assert not untuned["kernels"]
    assert len(untuned["warnings"]) == len(wrong) == 2  # a pass each
    for name, warning in zip(wrong, untuned["warnings"]):
        assert f"the kernel {name}" in warning and " is disabled on " in warning
    text = f"implementation='metal' cannot run this call: the kernel {wrong[0]} is "
    assert text in demanded["error"]


def run_partitioned(folder, wrong):
    """Prints a line each of three programs, run in a process with four devices."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tunings, "_folder", lambda: ROOT / folder / "autotune")
        plant(monkeypatch, ROOT / folder, *wrong)
        for options in (
            {"is_causal": True},
            {},
            {"implementation": "metal"},
        ):
            print(json.dumps(partitioned(**options)), flush=True)


def partitioned(**options):
    """Of gradients of a call whose parts have SHAPES: are they by kernels?"""

    def total(*qkv, **more):
        out = jax_flash_metal.flash_attention(*qkv, **{**options, **more})
        return jnp.square(out.astype(jnp.float32)).sum()

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    operands = arrays(shapes=[(4 * batch, *others) for batch, *others in SHAPES])
    step = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_devices = [jax.device_put(x, split) for x in operands]
        program = step.lower(*on_devices)
        try:
            program = program.compile()
        except RuntimeError as error:
            return {"error": str(error)}
    reference = functools.partial(total, implementation="xla")
    expected = jax.grad(reference, argnums=(0, 1, 2))(*operands)
    for actual, right in zip(program(*on_devices), expected):
        np.testing.assert_allclose(actual, right, atol=1e-2, rtol=1e-2)
    ours = (kernel_proof.KernelWarning, tunings.TuningWarning)
    return {
        "kernels": has_kernels(program.as_text()),
        "warnings": [str(w.message) for w in caught if issubclass(w.category, ours)],
    }


# -- The reference ---------------------------------------------------------------------


@pytest.fixture
def metal_by_default(monkeypatch):
    """Platform cpu is one like flash_metal, and every kernel is right."""
    row = {"metal": "the device of this test"}
    monkeypatch.setitem(lowering.KERNEL_PLATFORMS, "cpu", row)
    monkeypatch.setattr(kernel_proof, "objection", lambda *call: None)
    monkeypatch.setattr(kernel_proof, "known_failure", lambda *choice: None)
    monkeypatch.setattr(kernel_proof, "prove", lambda case: {})


def unfused_wins(candidates, budget_seconds):
    times = {"fused": 3e-3, "unfused": 2e-3}
    return [times.get(candidate.form, 1.0) for candidate in candidates]


def lowered(operands=None, *, implementation=None, batched=False, **options):
    """The program of a gradient; its text."""

    def total(*qkv):
        attend = lambda *x: jax_flash_metal.flash_attention(  # noqa: E731
            *x, implementation=implementation, **options
        )
        return (jax.vmap(attend) if batched else attend)(*qkv).sum()

    step = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return step.lower(*(operands or structs())).as_text()


TARGETS = ("jax_flash_metal_forward", "jax_flash_metal_backward")


def has_kernels(text):
    found = {target in text for target in TARGETS}
    assert len(found) == 1  # both or none
    return found.pop()


@pytest.mark.usefixtures("metal_by_default")
def test_a_call_takes_the_reference_where_that_is_faster():
    assert has_kernels(lowered())
    result = tune(unfused_wins, implementation=None)
    assert result.unfused.is_taken
    assert not has_kernels(lowered())
    # Of the same class, also by vmap.
    near = ((3, 33, 4, 40), (3, 63, 2, 40), (3, 63, 2, 40))
    assert not has_kernels(lowered(structs(shapes=near)))
    outer = structs(shapes=((2, 1, 37, 6, 40), (2, 1, 53, 3, 40), (2, 1, 53, 3, 40)))
    assert not has_kernels(lowered(outer, batched=True))
    # Another class, and a call that demands the kernels.
    assert has_kernels(lowered(is_causal=True))
    assert has_kernels(lowered(implementation="metal"))
    explanation = jax_flash_metal.explain(*structs(), platform="cpu")
    assert str(explanation) == (
        "xla: measured on this machine, forward and backward take 2 ms by the "
        "reference, which keeps 0.0898 MiB of scores, and 3 ms by the kernels."
    )
    forced = jax_flash_metal.explain(*structs(), platform="cpu", implementation="metal")
    assert forced.implementation == "metal"


@pytest.mark.usefixtures("metal_by_default")
def test_a_forward_pass_that_is_slower_by_the_reference_keeps_the_kernels():
    """Although forward and backward together are faster by it."""

    def measure(candidates, budget_seconds):
        times = {
            ("forward", "fused"): 1e-3,
            ("forward", "unfused"): 2e-3,
            ("forward+backward", "fused"): 9e-3,
            ("forward+backward", "unfused"): 6e-3,
        }
        return [times.get((c.which, c.form), 1.0) for c in candidates]

    result = tune(measure, implementation=None)
    assert result.unfused.is_taken and not result.unfused.is_taken_forward
    assert "unfused is taken by the gradient" in str(result)
    call = jax.jit(jax_flash_metal.flash_attention)
    assert TARGETS[0] in call.lower(*structs()).as_text()
    gradient = lowered()
    assert TARGETS[0] in gradient and TARGETS[1] not in gradient
    explanation = jax_flash_metal.explain(*structs(), platform="cpu")
    assert explanation.implementation == "metal"
    assert (
        "The gradient takes the reference: measured on this machine, forward and "
        "backward take 6 ms by the reference"
    ) in explanation.reason


@pytest.mark.usefixtures("metal_by_default")
def test_the_reference_is_not_taken_where_its_scores_are_large(monkeypatch):
    """A call's own, not those of the call that was measured."""
    tune(unfused_wins, implementation=None)
    assert not has_kernels(lowered())
    monkeypatch.setattr(tunings, "MAX_SCORES_BYTES", 4 * 2 * 6 * 37 * 53 - 1)
    assert has_kernels(lowered())


@pytest.mark.usefixtures("metal_by_default")
def test_the_reference_is_taken_on_the_platform_of_the_measurement_only(monkeypatch):
    tune(unfused_wins, implementation=None)
    operands, config = jax_flash_metal.api.prepare_abstract(*structs())
    on = {
        platform: tunings.unfused_reason(config, operands._asdict(), platform)
        for platform in ("cpu", "flash_metal")
    }
    assert on["cpu"] is not None and on["flash_metal"] is None
    # Where it was measured elsewhere, a call there is measured anew.
    assert tune(unfused_wins, implementation=None).origin == "measured"


@pytest.mark.usefixtures("metal_by_default")
def test_the_setting_turns_the_reference_off(monkeypatch):
    tune(unfused_wins, implementation=None)
    monkeypatch.setattr(tunings, "_in_use", None)
    monkeypatch.setenv(tunings.SETTING, "off")
    assert has_kernels(lowered())


@pytest.mark.usefixtures("metal_by_default")
def test_a_kernel_that_ties_with_the_reference_stays():
    def tie(candidates, budget_seconds):
        return [1.0] * len(candidates)

    tune(tie, implementation=None)
    assert has_kernels(lowered())


def test_forced_choices_end():
    """With an error too; and others stay."""
    library = tunings.library()
    rows = kernel_choices.rows_of("attention_forward", "float16", 40)
    keys = ((CLASS, "forward"), (f"{CLASS} causal", "forward"))
    kernel_choices.use(library, {keys[1]: Choice("-", (rows[-1],))})

    def names(**options):
        return plan("forward", **options)["kernels"]

    default = names()

    def force_and_fail():
        with kernel_choices.forced(library, keys[0], Choice("-", (rows[-1],))):
            assert rows[-1] in names() and rows[-1] in names(is_causal=True)
            with kernel_choices.forced(library, keys[1], None):
                assert rows[-1] in names() and rows[-1] not in names(is_causal=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        force_and_fail()
    assert names() == default
    assert rows[-1] in names(is_causal=True)
    nothing = kernel_choices.forced(library, keys[0], Choice("-", ("nothing",)))
    with pytest.raises(native.NativeError, match='"nothing"'), nothing:
        pass
    assert names() == default


def test_the_rows_in_the_docs_exist():
    text = (ROOT / "docs" / "autotune.md").read_text(encoding="utf-8")
    example = text[text.index("    metal: ") : text.index("(The rows exist")]
    shown = re.findall(r"(forward|dkv|dq_product) (d\d\w+)", " ".join(example.split()))
    assert [part for part, _ in shown] == ["forward", "dkv", "dq_product"]
    for part, row in shown:
        kernel = "attention_" + ("" if part == "forward" else "backward_") + part
        names = kernel_choices.rows_of(kernel, "float16", 128)
        assert f"{kernel}_float16_{row}" in names
