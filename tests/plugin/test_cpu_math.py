"""The vector functions of the CPU kernels, against NumPy, for every instruction set."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from plugin import build

ISAS = {"plain": (), **build.TARGETS["linux-x86_64"].isa_flags}
SOURCE = build.ROOT / "tests" / "plugin" / "cpu_math.cc"
# What simd.h and scores.h say.
EXP2_RELATIVE_ERROR = 2e-7
TANH_UNITS = 2

pytestmark = pytest.mark.skipif(
    build.host_target() != "linux-x86_64", reason="compiles for x86-64"
)


@pytest.fixture(scope="module", params=ISAS)
def library(request, tmp_path_factory):
    from tests.support import native

    # Of the files' suffix and of the table: "_avx512bf16" and "avx512_bf16".
    isas = [name.replace("_", "") for name in native.cpu.cpu_isas()]
    if request.param.strip("_") not in isas:
        pytest.skip(f"this machine has no {request.param}")
    path = tmp_path_factory.mktemp("math") / "math.so"
    flags = [*build.CXX_FLAGS, "-fvisibility=default", "-Wno-unused-function"]
    command = ["c++", "-target", "x86_64-linux-gnu.2.17", *flags, *ISAS[request.param]]
    build.run_zig([*command, f"-I{build.ROOT}", "-c", str(SOURCE), "-o", f"{path}.o"])
    build.run_zig(
        ["cc", "-target", command[2], "-shared", f"{path}.o", "-o", str(path)]
    )
    return ctypes.CDLL(str(path))


def apply(library, function, x):
    x = np.ascontiguousarray(x, np.float32)
    y = np.full_like(x, np.nan)
    assert x.size % 16 == 0
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, y))
    getattr(library, function)(*pointers, ctypes.c_long(x.size))
    return y


def test_exp2(library):
    x = np.concatenate([np.linspace(-126, 127.4, 1 << 20), np.linspace(-2, 2, 1 << 18)])
    expected = np.exp2(x.astype(np.float32).astype(np.float64))
    error = np.abs(apply(library, "exp2_of", x) / expected - 1)
    assert error.max() < EXP2_RELATIVE_ERROR
    ends = [-np.inf, -1e30, -127.5, 127.6, 1e30, np.inf, np.nan, 0] * 2
    expected = np.array([0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1] * 2, np.float32)
    np.testing.assert_array_equal(apply(library, "exp2_of", ends), expected)


def test_tanh(library):
    positive = np.geomspace(1e-30, 30, 1 << 19)
    x = np.concatenate([positive, -positive]).astype(np.float32)
    expected = np.tanh(x.astype(np.float64))
    error = np.abs(apply(library, "tanh_of", x) - expected)
    assert (error <= TANH_UNITS * np.spacing(np.abs(expected).astype(np.float32))).all()


@pytest.mark.parametrize(
    ("function", "dtype"),
    [("bfloat16_of", ml_dtypes.bfloat16), ("float16_of", np.float16)],
)
def test_rounding(library, function, dtype):
    bits = np.arange(0, 1 << 32, 1009, dtype=np.uint32)[: (1 << 22)]
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(apply(library, function, x), expected)
