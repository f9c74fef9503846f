"""The kernels of large, grouped and measured calls are proven, which tiny ones lack."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from jax_flash_metal import kernel_cases, kernel_choices, kernel_proof, platforms
from jax_flash_metal.attention_library import (
    PASSES,
    AttentionLibrary,
    CallShape,
    shape_problem,
)
from jax_flash_metal.config import AttentionConfig
from jax_flash_metal.kernel_cases import KernelCase, Verdict, kernel_of, kernel_of_key
from jax_flash_metal.kernel_choices import Choice
from tests.support import native

LIBRARY = AttentionLibrary(native.load())
DQ, DKV = "attention_backward_dq", "attention_backward_dkv"
PRODUCT, COMBINE = f"{DQ}_product", f"{DKV}_combine"

# Form A, form B, sums in parts with each, few queries with parts and without. Form A as
# after a measurement: the table has it for none.
SMALL = CallShape("float16", 100, 120, 2, 2, 64, 40)
LARGE = CallShape("float16", 300, 310, 2, 2, 64, 40)
GROUPED = CallShape("float16", 100, 120, 100, 2, 64, 40)
LARGE_GROUPED = dataclasses.replace(LARGE, num_heads=20)
SHORT = CallShape("float16", 3, 500, 4, 2, 64, 40)
SHORT_GROUPED = dataclasses.replace(SHORT, num_heads=260)
SHAPES = (SMALL, LARGE, GROUPED, LARGE_GROUPED, SHORT, SHORT_GROUPED)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(platforms.CACHE_SETTING, str(tmp_path / "cache"))


@contextlib.contextmanager
def form_a(*shapes):
    """Calls of these shapes have been measured."""
    with contextlib.ExitStack() as stack:
        for shape in shapes:
            plan = LIBRARY.outline(shape_problem(shape), "backward")
            key = (plan["class"], "backward")
            choice = Choice("A", ())
            stack.enter_context(kernel_choices.forced(LIBRARY, key, choice))
        yield


@pytest.fixture
def measured():
    with form_a(SMALL, GROUPED):
        yield


def backward(shape):
    """The form of the pass and the kernels that it launches."""
    plan = LIBRARY.plan(shape_problem(shape), "backward")
    return plan["form"], set(map(kernel_of, plan["kernels"]))


def test_the_shapes_are_what_they_are_meant_to_be(measured):
    found = [(form, COMBINE in kernels) for form, kernels in map(backward, SHAPES)]
    assert found == [
        *(("A", False), ("B", False), ("A", True), ("B", True)),
        *(("short", False), ("short", True)),
    ]


def keys(problem, which="backward", *, has_features=False):
    return kernel_proof._Proofs(LIBRARY)._asked(problem, which, has_features)[0]


def endings(shape, kernel=DKV, **more):
    """What the verdicts that a call needs say beside the kernel's name."""
    return sorted(
        key.removeprefix(kernel_of_key(key))
        for key in keys(shape_problem(shape), **more)
        if kernel_of(kernel_of_key(key)) == kernel
    )


def test_what_a_call_asks_of_its_kernels(measured):
    assert endings(SMALL) == [""]
    assert endings(LARGE) == [" of form B"]
    assert endings(SMALL, DQ, has_features=True) == ["", " with options"]
    assert endings(LARGE, PRODUCT, has_features=True) == ["", " with options"]
    assert endings(GROUPED) == ["", " in parts"]
    assert endings(LARGE_GROUPED) == [" of form B", " of form B in parts"]
    assert endings(SHORT) == [""]
    assert endings(SHORT_GROUPED) == ["", " in parts"]
    assert endings(LARGE, has_features=True) == [
        *(" of form B", " of form B with options"),
    ]
    for shape in SHAPES:
        kernels = {kernel_of(kernel_of_key(key)) for key in keys(shape_problem(shape))}
        assert kernels == backward(shape)[1]


@pytest.mark.parametrize(
    ("dtype", "family", "head_dim"),
    [
        ("float16", 9, 100),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in itertools.product(
                ("float32", "bfloat16"), (0, 7, 9), (40, 100, 250)
            )
        ),
    ],
)
def test_everything_that_is_asked_has_a_case(dtype, family, head_dim):
    with native.planning(family=family):
        proofs = kernel_proof._Proofs(LIBRARY)
        shapes = [
            dataclasses.replace(shape, dtype=dtype, head_dim=head_dim)
            for shape in SHAPES
        ]
        with form_a(shapes[0], shapes[2]):
            for shape, which in itertools.product(shapes, PASSES):
                asked, cases = proofs._asked(shape_problem(shape), which, True)
                for key in asked:
                    case = proofs._case_of(key, cases)
                    assert case.keys(LIBRARY)[kernel_of_key(key)] == key


def test_the_kernels_of_a_family_are_proven():
    with native.planning(family=9):
        names = LIBRARY.kernels(shape_problem(LARGE), "backward")
        proofs = kernel_proof._Proofs(LIBRARY)
        assert proofs.objection(shape_problem(LARGE), "backward") is None
        proven = {kernel_of_key(key) for key in proofs._verdicts}
        assert proven >= set(names)
    assert set(names) != set(LIBRARY.kernels(shape_problem(LARGE), "backward"))


class Wrong(AttentionLibrary):
    """The results of passes with these kernels, in some calls, are other numbers."""

    def __init__(self, kernels, *, if_given=()):
        """`if_given`: options without which they are right."""
        super().__init__(native.load())
        self._kernels, self._if_given = set(kernels), set(if_given)

    def run_forward(self, *operands, **options):
        out, *others = super().run_forward(*operands, **options)
        return self._spoilt("forward", operands, out, options), *others

    def run_backward(self, *operands, **options):
        dquery, *others = super().run_backward(*operands, **options)
        return self._spoilt("backward", operands, dquery, options), *others

    def _spoilt(self, which, values, result, options):
        given = {name for name, value in options.items() if value is not None}
        order = getattr(native, f"{which.upper()}_OPERANDS")
        operands = dict(zip(order, values))
        problem = native.make_problem(operands, **options)
        results = getattr(native, f"{which.upper()}_RESULTS")
        native.attach_results(problem, operands, results)
        is_wrong = self._kernels.intersection(self.kernels(problem, which))
        return result + np.float16(bool(is_wrong) and given >= self._if_given)


def rows(kernel):
    """For float16 and the head_dim of SHAPES, the table's default first."""
    names = kernel_choices.rows_of(f"attention_{kernel}", "float16", 64)
    defaults = {v.host_name for v in kernel_choices.variants() if v.is_default}
    return sorted(names, key=lambda name: name not in defaults)


def test_a_form_that_is_wrong_is_disabled_alone(measured):
    proofs = kernel_proof._Proofs(Wrong(rows("backward_dq_product")))
    text = proofs.objection(shape_problem(LARGE), "backward")
    assert PRODUCT in text and " is disabled on " in text and "dquery is wrong" in text
    assert proofs.objection(shape_problem(SMALL), "backward") is None
    assert proofs.objection(shape_problem(LARGE), "forward") is None
    failed = {key for key, verdict in proofs._verdicts.items() if verdict.failure}
    assert {kernel_of(kernel_of_key(key)) for key in failed} == {PRODUCT}
    # Another process knows it without running anything.
    later = kernel_proof._Proofs(LIBRARY)
    assert later.objection(shape_problem(LARGE), "backward") == text


# -- The kernels of a call's class -----------------------------------------------------


@pytest.fixture
def batched():
    """A call of SMALL whose class is not that of the shape alone."""
    x = {
        name: np.zeros((3, *shape), np.float16)
        for name, shape in {
            "query": (100, 2, 64),
            "key": (120, 2, 64),
            "value": (120, 2, 40),
        }.items()
    }
    config = AttentionConfig(scale=0.125, is_causal=True)
    return kernel_choices.problem_of(config, x)


@contextlib.contextmanager
def chosen(problem, which, *kernels, form="-"):
    """It was measured that calls of the problem's class take these."""
    key = (LIBRARY.outline(problem, which)["class"], which)
    with kernel_choices.forced(LIBRARY, key, Choice(form, kernels)):
        yield


def test_measured_kernels_are_proven_and_no_others(batched):
    """With their batch and options the calls are of a class of their own."""
    row = rows("forward")[-1]
    with chosen(batched, "forward", row):
        assert keys(batched, "forward") == [row]
        proofs = kernel_proof._Proofs(LIBRARY)
        assert proofs.objection(batched, "forward") is None
        assert set(proofs._verdicts) == {row}


def test_the_rows_of_another_class_are_not_asked_of(batched):
    default, *_, other = rows("forward")
    plain = shape_problem(SMALL)
    with chosen(plain, "forward", other):
        assert keys(plain, "forward") == [other]
        assert keys(batched, "forward") == [default]
        proofs = kernel_proof._Proofs(Wrong([other]))
        assert other in proofs.objection(plain, "forward")
        assert proofs.objection(batched, "forward") is None


def test_measured_kernels_serve_where_those_of_the_table_are_wrong(batched):
    default, *_, other = rows("forward")
    proofs = kernel_proof._Proofs(Wrong([default]))
    assert default in proofs.objection(batched, "forward")
    with chosen(batched, "forward", other):
        assert proofs.objection(batched, "forward") is None
        assert default in proofs.objection(shape_problem(SMALL), "forward")
    assert default in proofs.objection(batched, "forward")


def test_the_kernels_of_a_plan_are_proven_whatever_calls_take(batched):
    """Of the table's, while other threads run what was measured."""
    default, *_, other = rows("forward")
    plan = LIBRARY.outline(batched, "forward")
    proofs = kernel_proof._Proofs(Wrong([default]))
    with chosen(batched, "forward", other):
        assert proofs.objection(batched, "forward") is None
        assert default in proofs.objection(batched, "forward", plan=plan)


def test_verdicts_are_of_rows_and_not_of_calls(batched):
    """Whatever the class, a row is proven once."""

    class Counting(AttentionLibrary):
        runs = 0

        def run(self, problem, which):
            self.runs += 1
            super().run(problem, which)

    library = Counting(native.load())
    proofs = kernel_proof._Proofs(library)
    row = rows("forward")[-1]
    for problem in (batched, shape_problem(SMALL), shape_problem(LARGE)):
        with chosen(problem, "forward", row):
            assert proofs.objection(problem, "forward") is None
            assert library.runs == 1


def test_a_call_is_planned_once(batched, monkeypatch):
    """Of many launches a plan takes seconds."""
    proofs = kernel_proof._Proofs(LIBRARY)
    for which in PASSES:
        proofs.objection(batched, which)
    planned = []
    plan = AttentionLibrary._plan

    def count(self, problem, which, size):
        planned.extend([which] if problem is batched else [])
        return plan(self, problem, which, size)

    monkeypatch.setattr(AttentionLibrary, "_plan", count)
    for which in ("forward", "backward"):
        proofs.objection(batched, which)
    assert planned == ["forward", "backward"]


# -- What is known of them -------------------------------------------------------------


def test_a_row_that_is_wrong_with_options_serves_plain_choices():
    row = rows("forward")[0]
    choice = Choice("-", (row,))
    proofs = kernel_proof._Proofs(Wrong([row], if_given=["bias"]))
    assert proofs.known_failure(choice, True) is None
    assert proofs.objection(shape_problem(SMALL), "forward", True) is not None
    assert proofs.known_failure(choice, False) is None
    text = proofs.known_failure(choice, True)
    assert text.startswith(f"the kernel {row} with options is disabled: its out is ")
    assert proofs.known_failure(Choice("-", (rows("forward")[-1],)), True) is None


@pytest.mark.parametrize("has_features", [False, True])
def test_a_row_that_is_wrong_without_options_serves_none(has_features):
    row = rows("forward")[0]
    proofs = kernel_proof._Proofs(Wrong([row]))
    assert proofs.objection(shape_problem(SMALL), "forward") is not None
    text = proofs.known_failure(Choice("-", (row,)), has_features)
    assert text.startswith(f"the kernel {row} is disabled: its out is wrong: ")


def test_a_row_that_is_wrong_in_one_form_serves_the_other():
    """Kernels of dK and dV are made once more for form B."""
    dq, dkv, product = (
        rows(f"backward_{part}")[0] for part in ("dq", "dkv", "dq_product")
    )
    in_form = {"A": Choice("A", (dq, dkv)), "B": Choice("B", (dkv, product))}
    proofs = kernel_proof._Proofs(LIBRARY)
    for ending, wrong in ((" of form B", "B"), ("", "A")):
        proofs._verdicts = {f"{dkv}{ending}": Verdict(None, "planted")}
        known = {form: proofs.known_failure(c, False) for form, c in in_form.items()}
        right = "A" if wrong == "B" else "B"
        assert known == {
            wrong: f"the kernel {dkv}{ending} is disabled: planted",
            right: None,
        }


def test_sums_in_parts_that_are_wrong_are_not_held_against_a_choice():
    """Few calls that take it make them; `objection` asks for those."""
    dkv, product = rows("backward_dkv")[0], rows("backward_dq_product")[0]
    proofs = kernel_proof._Proofs(LIBRARY)
    wrong = f"{dkv} of form B in parts"
    proofs.add({wrong: Verdict(None, "planted")})
    assert proofs.known_failure(Choice("B", (dkv, product)), True) is None
    assert proofs.objection(shape_problem(LARGE), "backward") is None
    assert wrong in proofs.objection(shape_problem(LARGE_GROUPED), "backward")


def test_a_case_is_proven_on_request_once():
    proofs = kernel_proof._Proofs(LIBRARY)
    (choice, *_) = kernel_choices.every_choice(
        "backward", "float16", 64, for_few_queries=False
    )
    case = KernelCase("float16", 64, "backward", choice=str(choice))
    found = proofs.prove(case)
    assert found.keys() == set(case.keys(LIBRARY).values())
    assert not any(verdict.failure for verdict in found.values())
    assert {kernel_of(kernel_of_key(key)) for key in found} >= {DKV, "attention_delta"}

    class Idle(AttentionLibrary):
        def run(self, problem, which):
            raise AssertionError

    later = kernel_proof._Proofs(Idle(native.load()))
    assert later.prove(case) == found


def test_a_choice_travels_to_another_process():
    (choice,) = kernel_choices.every_choice(
        "forward", "float16", 64, for_few_queries=True
    )[:1]
    case = KernelCase("float16", 64, "forward", is_short=True, choice=str(choice))
    keys_of_case = list(case.keys(LIBRARY).values())
    found, came_to_its_end = kernel_proof._check_in_a_process(case, keys_of_case)
    assert came_to_its_end
    assert found == kernel_cases.check(LIBRARY, case)
