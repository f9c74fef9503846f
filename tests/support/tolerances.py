"""Every tolerance of the test-suite; a test names a class, it never types a number.

Two rules, both must hold (compare.py applies them, in float64):
  relative   err(kernel) <= factor * err(plain attention in the input dtype)
                            + floor * max(size, max |reference|)
  ceiling    |kernel - reference| <= size * atol + rtol * |reference|
where size is 1 or score_gradient_size(), err(x) = max |x - reference| and the reference
is NumPy float64 on the already rounded inputs.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}

# What a compared array is; the keys of the tables below.
OUT, GRADIENT, DBIAS, LOGSUMEXP = "out", "gradient", "dbias", "logsumexp"

BASELINE_FACTOR = {OUT: 2, LOGSUMEXP: 2, GRADIENT: 3, DBIAS: 3}
# For results of size 1; multiplied by the largest |reference| where that is more. (One
# rounding of a float32 result of 24 is 1e-6 already, and a sum over 1600 rows has many:
# dvalue of 200 queries x 8 heads was 4.5e-5 off, 3.4e-5 of it in any sequential sum.)
BASELINE_FLOOR = {FLOAT32: 1e-6, FLOAT16: 1e-5, BFLOAT16: 1e-4}
# Gradients chain three products. With a factor of 1, 42 of the grid's 21870 cases were
# over the limit, by 1.01 to 2 times, where plain attention had been lucky (float32
# dquery of one key, d192: 2.4e-6 against 2.7e-8).
GRADIENT_FLOOR_FACTOR = 3
# Those of bias, sinks and slopes are sums of them. With a factor of 3, 1 of the results
# of 2,000 random cases was over the limit, by 1.0002 times (float16 dsinks: 2.6e-4
# against 3.3e-5 of plain attention, which had been lucky).
DBIAS_FLOOR_FACTOR = 5

# (atol, rtol), for inputs ~ N(0, 1) and q_len * kv_len <= 4096**2.
CEILING = {
    FLOAT32: {
        OUT: (2e-5, 1e-5),
        GRADIENT: (1e-4, 1e-4),
        DBIAS: (2e-4, 1e-4),
        LOGSUMEXP: (1e-5, 1e-5),
    },
    FLOAT16: {
        OUT: (1e-3, 1e-3),
        GRADIENT: (5e-3, 5e-3),
        DBIAS: (1e-2, 5e-3),
        LOGSUMEXP: (1e-4, 1e-4),
    },
    BFLOAT16: {
        OUT: (1e-2, 1e-2),
        GRADIENT: (3e-2, 2e-2),
        DBIAS: (5e-2, 2e-2),
        LOGSUMEXP: (1e-4, 1e-4),
    },
}

# rtol and atol between the CPU kernels of two CPUs, for inputs ~ N(0, 1): the same
# formulas, but vectors of another width add up in another order, 16-bit results may be
# rounded to the next number, and with AVX512-BF16 probabilities and their gradients are
# rounded to bfloat16, by 2^-9 each.
OTHER_CPU = {FLOAT32: 2e-5, FLOAT16: 2e-2, BFLOAT16: 2e-2}


def score_gradient_size(
    scale: float, value_head_dim: int, rows_per_key: float = 1
) -> float:
    """The size of dquery's elements, and with `rows_per_key` of dkey's.

    Their terms have the size of scale * (dout . value), |scale| * sqrt(value_head_dim):
    1 for the default scale and head_dim = value_head_dim, for which the table is made.
    dkey is a random sum over the weight of q_len * num_groups / kv_len rows. The error
    of delta (from the rounded out) grows with both, also where a sum is near 0:
    float16 dkey, head dims 1 and 192, 127 queries x 8 heads on 8 keys: 9e-2.
    """
    return max(1.0, abs(scale) * value_head_dim**0.5) * max(1.0, rows_per_key) ** 0.5


def feature_gradient_size(
    value_head_dim: int, num_rows: float, distance: float = 1
) -> float:
    """The size of the gradients of bias, sinks and slopes.

    An element is a random sum over the weight of `num_rows` rows (of sinks and slopes,
    and of a bias without key dim, whole rows). Their terms have the size of
    dout . value, 8 for the value_head_dim of 64 for which the table is made; those of
    the slopes' gradient are multiplied by distances.
    """
    terms = max(1.0, value_head_dim**0.5 / 8) * max(1.0, distance)
    return terms * max(1.0, num_rows) ** 0.5


def coarser(a: np.dtype, b: np.dtype) -> np.dtype:
    """Of two dtypes that with fewer digits."""
    return max(a, b, key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))


def baseline_floor(dtype: np.dtype, kind: str) -> float:
    factors = {GRADIENT: GRADIENT_FLOOR_FACTOR, DBIAS: DBIAS_FLOOR_FACTOR}
    return factors.get(kind, 1) * BASELINE_FLOOR[dtype]


@dataclass(frozen=True)
class ToleranceClass:
    """Multiplies atol and rtol of the ceiling; `reason` says why that is right.

    `weight_error` is a relative error of the probabilities that cannot be avoided; it
    adds so much of the largest |reference|, or of `size`, to both rules.
    """

    name: str
    ceiling_factor: float
    reason: str
    weight_error: float = 0.0


STANDARD = ToleranceClass("STANDARD", 1, "inputs ~ N(0, 1), default scale")
LARGE_LOGITS = ToleranceClass(
    "LARGE_LOGITS",
    10,
    "Scores of some hundreds have an absolute float32 error of some 1e-5, and p = "
    "exp(score - logsumexp) turns it into a relative error of every probability.",
)
HUGE_LOGITS = ToleranceClass(
    "HUGE_LOGITS",
    10,
    "At the end of float16's range, 65504, neighbouring float32 scores are 2^-8 apart; "
    "score and logsumexp are rounded to them, and some roundings of their products.",
    weight_error=4 * 2.0**-8,
)
