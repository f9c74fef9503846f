"""docs/features.md: what is tested with which implementation, from the tests' tables.

`python -m tests.support.feature_table` writes it. A cell names the dtypes of the
parametrised cases that have the feature, each of which compares the results of the
column with float64: those of tests/semantics/test_against_float64.py (public function),
and for the kernels also those of tests/kernels (C ABI).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_flash_metal.config import BACKENDS
from tests.semantics import attention_cases, test_against_float64
from tests.support import cases, tolerances

FILE = Path(__file__).parents[2] / "docs" / "features.md"
IMPLEMENTATIONS = ("metal", "cpu", "xla")
PASSES = ("out, logsumexp", "dquery, dkey, dvalue", "own gradient")

_STATIC = "a static option, no array"
_INTEGER = "an integer or bool array"


class Feature(NamedTuple):
    """One row. `of_call` and `of_case` say whether a case has it."""

    name: str
    of_call: Callable[[dict[str, Any]], bool]  # options of flash_attention
    of_case: Callable[[cases.Case], bool]
    gradient: str | None  # the result that is its own gradient
    reason: str = ""  # why it has none


def _option(name: str, of_case: Callable[[cases.Case], bool], **others: Any) -> Feature:
    return Feature(f"`{name}`", lambda call: name in call, of_case, **others)


def _has(operand: str) -> Callable[[cases.Case], bool]:
    return lambda case: operand in case.features


FEATURES = (
    _option("bias", _has("bias"), gradient="dbias"),
    _option("mask", _has("mask"), gradient=None, reason=_INTEGER),
    _option("is_causal", lambda c: c.is_causal, gradient=None, reason=_STATIC),
    Feature(
        "`q_offset`, static",
        lambda call: isinstance(call.get("q_offset"), int),
        lambda c: c.q_offset != 0 and not c.traced_offset,
        None,
        _STATIC,
    ),
    Feature(
        "`q_offset`, traced",
        lambda call: "q_offset" in call and not isinstance(call["q_offset"], int),
        _has("q_offset"),
        None,
        _INTEGER,
    ),
    _option(
        "sliding_window",
        lambda c: c.sliding_window is not None,
        gradient=None,
        reason=_STATIC,
    ),
    _option(
        "logits_soft_cap",
        lambda c: c.logits_soft_cap is not None,
        gradient=None,
        reason=_STATIC,
    ),
    _option("segment_ids", _has("q_segment_ids"), gradient=None, reason=_INTEGER),
    _option(
        "query_seq_lengths", _has("query_seq_lengths"), gradient=None, reason=_INTEGER
    ),
    _option(
        "key_value_seq_lengths",
        _has("key_value_seq_lengths"),
        gradient=None,
        reason=_INTEGER,
    ),
    _option("sinks", _has("sinks"), gradient="dsinks"),
    _option("alibi_slopes", _has("alibi_slopes"), gradient="dslopes"),
    Feature(
        "`dropout_rate`, `dropout_key`",
        lambda call: "dropout_rate" in call,
        _has("dropout_key"),
        None,
        "a random key",
    ),
    _option("scale", lambda c: c.scale is not None, gradient=None, reason=_STATIC),
    Feature(
        "cotangent of logsumexp",
        lambda call: True,  # every case has a random one
        lambda c: True,
        None,
        "a cotangent itself",
    ),
    Feature(
        "grouped heads (N > K)",
        lambda call: attention_cases.N > attention_cases.K,
        lambda c: c.num_heads > c.num_kv_heads,
        None,
        "a shape",
    ),
    Feature(
        "value_head_dim ≠ head_dim",
        lambda call: attention_cases.V != attention_cases.H,
        lambda c: c.width != c.head_dim,
        None,
        "a shape",
    ),
    Feature(
        "rows that see no key, with `sinks`",
        lambda call: "sinks" in call and "mask" in call,
        lambda c: c.sinks and c.is_causal and c.q_offset < 0,
        "dsinks",
    ),
)


@functools.cache
def _calls() -> list[tuple[dict[str, Any], str, str]]:
    """(options, implementation, dtype) of the cases of the public function."""
    return [
        (attention_cases.ALL[case](np.random.default_rng(0)), implementation, dtype)
        for case, implementation, dtype in (
            p.values for p in test_against_float64.runs()
        )
    ]


@functools.cache
def _kernel_cases() -> list[cases.Case]:
    return [*cases.CURATED, *cases.FEATURES, *cases.pairwise_features()]


def dtypes(feature: Feature, implementation: str) -> list[str]:
    """Dtypes of the cases that have the feature, in the order of the tolerances."""
    found = {
        dtype
        for call, name, dtype in _calls()
        if name == implementation and feature.of_call(call)
    }
    if implementation in BACKENDS:
        found |= {case.dtype for case in _kernel_cases() if feature.of_case(case)}
    return [dtype for dtype in tolerances.DTYPES if dtype in found]


def cell(feature: Feature, implementation: str, which: str) -> str:
    """The text of a cell; empty where nothing tests it."""
    if which == "own gradient" and feature.gradient is None:
        return f"— ({feature.reason})" if feature.reason else ""
    return ", ".join(dtypes(feature, implementation))


_INTRODUCTION = """\
# What is tested

Written by `python -m tests.support.feature_table` from the parametrised tests; a test
compares this file with what that writes. A cell names the dtypes in which cases with
the feature, alone and with others, compare the results of the column with float64; "—"
gives the reason why there is no such result. `metal`: the Metal kernels, here on the
software Metal device (tests/semantics/test_against_float64.py, and through the C ABI
tests/kernels). `cpu`: the native CPU kernels (the same tests). `xla`: the reference
(the same semantics tests, in float32; in the narrow dtypes random calls,
tests/properties)."""


def text() -> str:
    header = [f"{i}: {p}" for i in IMPLEMENTATIONS for p in PASSES]
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        "| feature | " + " | ".join(header) + " |",
        "| --- |" + " --- |" * len(header),
    ]
    for feature in FEATURES:
        cells = [cell(feature, i, p) for i in IMPLEMENTATIONS for p in PASSES]
        lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Beyond the table: every pair of features and of their values",
        "(tests/kernels/test_features.py), random calls (tests/kernels/test_random.py,",
        "tests/properties), NaN and inf in everything that a rule hides",
        "(tests/kernels/test_poison.py), and public bug reports by number",
        "(`test_report_NN_…`).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
