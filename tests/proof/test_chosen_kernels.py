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
from jax_flash_metal.kernel_cases import KernelCase, kernel_of, kernel_of_key
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


def keys(shape, which="backward", *, has_features=False):
    return kernel_proof._Proofs(LIBRARY)._keys(shape, which, has_features)


def endings(shape, kernel=DKV, **more):
    """What the verdicts that a call needs say beside the kernel's name."""
    return sorted(
        key.removeprefix(kernel_of_key(key))
        for key in keys(shape, **more)
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
        kernels = {kernel_of(kernel_of_key(key)) for key in keys(shape)}
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
                for key in proofs._keys(shape, which, True):
                    case = proofs._case_of(key, shape)
                    assert case.keys(LIBRARY)[kernel_of_key(key)] == key


def test_the_kernels_of_a_family_are_proven():
    with native.planning(family=9):
        names = LIBRARY.kernels(shape_problem(LARGE), "backward")
        proofs = kernel_proof._Proofs(LIBRARY)
        assert proofs.objection(LARGE, "backward") is None
        proven = {kernel_of_key(key) for key in proofs._verdicts}
        assert proven >= set(names)
    assert set(names) != set(LIBRARY.kernels(shape_problem(LARGE), "backward"))


class Wrong(AttentionLibrary):
    """Kernels of dQ from the score gradient give other numbers."""

    def __init__(self):
        super().__init__(native.load())

    def run_backward(self, *operands, **options):
        dquery, *others = super().run_backward(*operands, **options)
        operands = dict(zip(native.BACKWARD_OPERANDS, operands))
        problem = native.make_problem(operands, **options)
        native.attach_results(problem, operands, native.BACKWARD_RESULTS)
        names = self.kernels(problem, "backward")
        if any(kernel_of(name) == PRODUCT for name in names):
            dquery = dquery + np.float16(1)
        return dquery, *others


def test_a_form_that_is_wrong_is_disabled_alone(measured):
    proofs = kernel_proof._Proofs(Wrong())
    text = proofs.objection(LARGE, "backward")
    assert PRODUCT in text and " is disabled on " in text and "dquery is wrong" in text
    assert proofs.objection(SMALL, "backward") is None
    assert proofs.objection(LARGE, "forward") is None
    (name,) = proofs.failures()
    assert kernel_of(name) == PRODUCT
    # Another process knows it without running anything.
    assert kernel_proof._Proofs(LIBRARY).objection(LARGE, "backward") == text


def test_measured_kernels_are_proven():
    """Where a call's class is known without its batch."""
    rows = kernel_choices.rows_of("attention_forward", "float16", 64)
    shape_class = LIBRARY.plan(shape_problem(SMALL), "forward")["class"]
    choice = Choice("-", (rows[-1],))
    with kernel_choices.forced(LIBRARY, (shape_class, "forward"), choice):
        assert keys(SMALL, "forward") == [rows[-1]]
        proofs = kernel_proof._Proofs(LIBRARY)
        assert proofs.objection(SMALL, "forward") is None
        assert set(proofs._verdicts) == {rows[-1]}


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
