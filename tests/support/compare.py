"""Compares one array with the float64 reference by the two rules of tolerances.py."""

import numpy as np

from tests.support import tolerances

# The names of an array's axes after its batch dims, for the failure report.
_AXES = {tolerances.LOGSUMEXP: "nt", tolerances.DBIAS: ""}


def assert_matches(
    actual,
    expected,
    baseline,
    *,
    name,
    kind,
    dtype,
    context,
    result_dtype=None,
    tolerance=tolerances.STANDARD,
    size=1.0,
):
    """Fails with a report when `actual` is not as good as it must be.

    Args:
      actual: the result under test, of dtype `result_dtype`.
      expected: the float64 reference.
      baseline: plain attention in the input dtype, or None to skip the relative rule.
      name: what it is called in the report, such as "dquery".
      kind: tolerances.OUT, GRADIENT, DBIAS or LOGSUMEXP.
      dtype: the input dtype.
      context: case id and seed, printed in the report.
      result_dtype: None: float32 for logsumexp, else `dtype`. The tolerances are those
        of the coarser of the two dtypes.
      tolerance: a ToleranceClass.
      size: multiplies atol, and is the least size of the floor; see
        tolerances.score_gradient_size.
    """
    dtype = np.dtype(dtype)
    if result_dtype is None:
        result_dtype = tolerances.FLOAT32 if kind == tolerances.LOGSUMEXP else dtype
    assert actual.dtype == result_dtype, (
        f"{name} of {context}: dtype {actual.dtype}, expected {result_dtype}"
    )
    if kind != tolerances.LOGSUMEXP:
        dtype = tolerances.coarser(dtype, np.dtype(result_dtype))
    assert actual.shape == expected.shape, (
        f"{name} of {context}: shape {actual.shape}, expected {expected.shape}"
    )
    if actual.size == 0:
        return
    actual = actual.astype(np.float64)
    error = _error(actual, expected)

    atol, rtol = tolerances.CEILING[dtype][kind]
    finite = np.where(np.isfinite(expected), expected, 0)
    largest = max(size, np.abs(finite).max())
    spread = tolerance.weight_error * largest
    allowed = tolerance.ceiling_factor * (size * atol + rtol * np.abs(finite)) + spread
    within = error <= allowed

    limit = np.inf
    baseline_error = None
    if baseline is not None:
        baseline = baseline.astype(result_dtype).astype(np.float64)
        baseline_error = _error(baseline, expected).max()
        factor = tolerances.BASELINE_FACTOR[kind]
        floor = tolerances.baseline_floor(dtype, kind) * largest
        limit = factor * baseline_error + floor + spread

    broken = []
    if not within.all():
        broken.append("ceiling")
    if not error.max() <= limit:
        broken.append("relative to plain attention")
    if not broken:
        return
    ratio = error / allowed
    index = np.unravel_index(np.argmax(ratio), ratio.shape)
    raise AssertionError(
        f"{name} of {context}: breaks the rule{'s' * (len(broken) > 1)} "
        f"{' and '.join(broken)}\n"
        f"  worst element {_named(index, kind)}: actual {actual[index]!r}, "
        f"expected {expected[index]!r}, error {error[index]:.3e}, "
        f"allowed {allowed[index]:.3e}\n"
        f"  within the ceiling: {100 * within.mean():.3f} % of {within.size}; "
        f"NaN: {np.isnan(actual).sum()}\n"
        f"  largest error {error.max():.3e}, of plain attention "
        f"{'not computed' if baseline_error is None else f'{baseline_error:.3e}'}, "
        f"limit from it {limit:.3e}\n"
        f"  dtype {dtype}, tolerance class {tolerance.name}"
    )


def assert_identical(actual, expected, *, name, context):
    """The same bits; NaN equals NaN only here, and only with the same bits."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{name} of {context}: {actual.dtype}{actual.shape} "
        f"against {expected.dtype}{expected.shape}"
    )
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    a, b = (np.ascontiguousarray(x).view(bits) for x in (actual, expected))
    if np.array_equal(a, b):
        return
    different = a != b
    index = tuple(int(i[0]) for i in np.nonzero(different))
    raise AssertionError(
        f"{name} of {context}: {different.sum()} of {a.size} elements have other bits, "
        f"the first at {index}: {actual[index]!r} against {expected[index]!r}"
    )


def _error(actual, expected):
    """|actual - expected|, infinite where one is NaN or they differ in an infinity."""
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    same_infinity = np.isinf(expected) & (actual == expected)
    return np.where(same_infinity, 0, np.where(np.isfinite(error), error, np.inf))


def _named(index, kind):
    axes = _AXES.get(kind, "tnh")
    names = ["b"] * (len(index) - len(axes)) + list(axes)
    return "(" + ", ".join(f"{n}={i}" for n, i in zip(names, index)) + ")"
