"""Every tolerance of the test-suite; a test names a class, it never types a number.

Two rules, both must hold (compare.py applies them, in float64):
  relative   err(kernel) <= factor * err(plain attention in the input dtype) + floor
  ceiling    |kernel - reference| <= atol + rtol * |reference|
where err(x) = max |x - reference| and the reference is NumPy float64 on rounded inputs.
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
BASELINE_FLOOR = {FLOAT32: 1e-6, FLOAT16: 1e-5, BFLOAT16: 1e-4}

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


@dataclass(frozen=True)
class ToleranceClass:
    """Multiplies atol and rtol of the ceiling; `reason` says why that is right."""

    name: str
    ceiling_factor: float
    reason: str


STANDARD = ToleranceClass("STANDARD", 1, "inputs ~ N(0, 1), default scale")
LARGE_LOGITS = ToleranceClass(
    "LARGE_LOGITS",
    10,
    "Scores of some hundreds have an absolute float32 error of some 1e-5, and p = "
    "exp(score - logsumexp) turns it into a relative error of every probability.",
)
