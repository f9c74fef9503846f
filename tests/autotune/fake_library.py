"""A native library whose planner knows a small table, and whose kernels take no time.

What the autotuner decides is tested with it: which rows and forms are measured and
chosen, and what is done about wrong ones. That the real planner goes by the choices is
tested with the real one.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from jax_flash_metal import kernel_choices, kernel_proof, tunings
from jax_flash_metal.attention_library import DTYPES, NUMPY_DTYPES, AttentionError
from jax_flash_metal.config import OPTIONAL_OPERANDS
from jax_flash_metal.kernel_choices import FORMS, NO_FORM
from jax_flash_metal.variant_table import Variant

DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
INVALID = 3


def row(part, block_q, head_dim=64, dtype="float16", **more):
    """A row of which only the block of queries says something."""
    return Variant(
        *(f"attention_{part}", dtype, head_dim, block_q, 32, head_dim, 4), **more
    )


# Three rows of most kernels; the second one of the forward pass is a newer GPU's.
TABLE = (
    *(row("forward", q) for q in (16, 32, 64)),
    row("forward", 128, head_dim=128),
    row("forward", 8, dtype="float32"),
    *(row("backward_dq", q) for q in (16, 32, 64)),
    *(row("backward_dkv", q) for q in (16, 32, 64)),
    *(row("backward_dq_product", q) for q in (16, 32)),
    row("short_forward", 8),
    row("short_dq", 8),
)


def name(part, block_q):
    """Of the kernel with this row."""
    return row(part, block_q).host_name


class FakeLibrary:
    """`wrong`: kernels whose results are; `idle`: that write none; `errors`: of those
    that do not run.
    """

    def __init__(self, default_form="A", family=0):
        self.default_form, self.family = default_form, family
        self.wrong, self.idle, self.errors = set(), set(), {}
        self.choices, self.runs = {}, []
        self.digest = "digest"

    # -- The planner -------------------------------------------------------------------

    def set_kernel_choices(self, text):
        names = {v.host_name for v in TABLE}
        choices = {}
        for number, line in enumerate(text.splitlines(), 1):
            shape_class, which, form, kernels = line.split("\t")
            for kernel in kernels.split(","):
                if kernel not in names:
                    text = f'line {number}: there is no kernel "{kernel}".'
                    raise AttentionError(INVALID, text)
            choices[shape_class, which] = (form, kernels.split(","))
        self.choices = choices

    def outline(self, problem, which):
        shape_class = self.shape_class(problem)
        form, chosen = self.choices.get((shape_class, which), (NO_FORM, []))
        parts = self.parts(problem, which, form)
        templates = {v.host_name: v.kernel for v in TABLE}
        by_part = {templates[kernel]: kernel for kernel in chosen}
        launches = [by_part.get(part) or self.default(problem, part) for part in parts]
        is_backward = which == "backward" and problem.q_len > 8
        return {
            "class": shape_class,
            "family": self.family,
            "origin": "measured" if chosen else "default",
            "form": self.form(form) if is_backward else "",
            "kernels": launches,
        }

    def form(self, form):
        return self.default_form if form == NO_FORM else form

    def parts(self, problem, which, form):
        if which == "forward":
            return FORMS["forward"][problem.q_len <= 8][1]
        if problem.q_len <= 8:
            return FORMS["backward"][2][1]
        return dict(FORMS["backward"])[self.form(form)]

    def default(self, problem, part):
        dtype = DTYPE_NAMES[problem.dtype]
        head_dim = max(problem.head_dim, problem.value_head_dim)
        return next(
            v.host_name
            for v in TABLE
            if (v.kernel, v.dtype) == (part, dtype) and v.head_dim >= head_dim
        )

    def shape_class(self, problem):
        batch = problem.batch_sizes[: problem.num_batch_dims]
        pairs = int(np.prod([*batch, problem.num_heads]))

        def rounded(number):
            return 1 << (int(number) - 1).bit_length()

        words = [
            DTYPE_NAMES[problem.dtype],
            f"d{problem.head_dim} v{problem.value_head_dim}",
            f"q{rounded(problem.q_len)} k{rounded(problem.kv_len)} n{rounded(pairs)}",
            f"g{problem.num_heads // problem.num_kv_heads}",
            *["causal"] * problem.is_causal,
            *(
                operand
                for i, operand in enumerate(OPTIONAL_OPERANDS)
                if problem.operands >> i & 1
            ),
        ]
        return " ".join(words)

    def kernels(self, problem, which):
        return self.outline(problem, which)["kernels"]

    # -- Runs --------------------------------------------------------------------------

    def run(self, problem, which):
        kernels = self.kernels(problem, which)
        self.runs.append((which, kernels))
        for kernel in kernels:
            if kernel in self.errors:
                raise AttentionError(INVALID, self.errors[kernel])
        if self.idle.intersection(kernels):
            return
        right = not self.wrong.intersection(kernels)
        results = {"forward": ("out", "logsumexp")}.get(
            which, ("dquery", "dkey", "dvalue")
        )
        for result in results:
            tensor = getattr(problem, result)
            is_float32 = result == "logsumexp"
            dtype = NUMPY_DTYPES[
                "float32" if is_float32 else DTYPE_NAMES[problem.dtype]
            ]
            memory = (ctypes.c_char * tensor.size_bytes).from_address(tensor.data)
            np.frombuffer(memory, dtype)[:] = 0.5 if right else 0.75

    def device_facts(self):
        facts = {"device": "apple", "name": "Fake GPU", "system": "Fake OS 1"}
        return facts | {"family": f"Apple{self.family}"}

    def kernel_digest(self):
        return self.digest


def disable(monkeypatch, *names):
    """These kernels are known to be wrong, with options and without."""

    def known_failure(choice, has_features):
        wrong = [name for name in choice.kernels if name in names]
        return f"the kernel {wrong[0]} is disabled: planted" if wrong else None

    monkeypatch.setattr(kernel_proof, "known_failure", known_failure)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """In the place of the real one, with a cache folder of its own; all is proven."""
    fake = FakeLibrary()
    install(monkeypatch, fake)
    monkeypatch.setenv("JAX_FLASH_METAL_CACHE", str(tmp_path / "cache"))
    yield fake
    kernel_choices.template_of.cache_clear()


def install(monkeypatch, fake):
    """As in a process that has just started."""
    monkeypatch.setattr(tunings, "library", lambda: fake)
    monkeypatch.setattr(tunings, "_in_use", None)
    monkeypatch.setattr(tunings, "_warned", set())
    monkeypatch.setattr(kernel_choices, "_measured", {})
    monkeypatch.setattr(kernel_choices, "variants", lambda: TABLE)
    kernel_choices.template_of.cache_clear()
    monkeypatch.setattr(kernel_proof, "objection", lambda *call: None)
    monkeypatch.setattr(kernel_proof, "known_failure", lambda *choice: None)
    monkeypatch.setattr(kernel_proof, "prove", lambda case: {})
