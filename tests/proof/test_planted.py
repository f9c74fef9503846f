"""A wrong kernel in an installed package: not used, one warning, everything else works.

The bugs are in copies of the kernels; each program runs in a process of its own.
"""

import json
import signal
import textwrap

import pytest

from jax_flash_metal import platforms
from tests.checker.planted import Bug
from tests.checker.test_planted_bugs import DKV, FORWARD, SHORT_DQ, SHORT_FORWARD
from tests.support.package_copy import PackageCopy, broken_kernels

pytestmark = pytest.mark.xdist_group("planted")

BUGS = [
    Bug(
        *("wrong-kv-head", FORWARD),
        *("head / params.num_groups", "head % params.num_kv_heads"),
    ),
    Bug(
        *("first-visible-block-skipped", DKV),
        *("first_key - params.q_offset)", "first_key - params.q_offset + 1)"),
    ),
    Bug(
        *("last-split-dropped", SHORT_DQ),
        *("s < params.num_splits", "s + 1 < params.num_splits"),
    ),
    Bug(
        *("splits-overlap", SHORT_FORWARD),
        *("split_start + params.keys_per_split, end", "params.kv_len, end"),
    ),
]

# On platform cpu as on flash_metal, which would need a host plugin.
START = """
import logging, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import jax_flash_metal
from jax_flash_metal import lowering
from jax_flash_metal.lowering import KernelPlatform

lowering.KERNEL_PLATFORMS["cpu"] = KernelPlatform("a device", by_default=True)
x = jax.random.normal(jax.random.key(0), (2, 20, 4, 32))
attend = jax_flash_metal.flash_attention
attend_xla = lambda *x, **options: attend(*x, implementation="xla", **options)

def gradient(function):
    return jax.jit(jax.grad(lambda x: function(x, x, x, is_causal=True).sum()))
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """The package with four wrong kernels."""
    return package_with(tmp_path_factory.mktemp("wrong"), BUGS)


@pytest.fixture(scope="module")
def wrong_forward(tmp_path_factory):
    """The package in which only the forward kernel is wrong."""
    return package_with(tmp_path_factory.mktemp("forward"), BUGS[:1])


@pytest.fixture(scope="module")
def wrong_gradient(tmp_path_factory):
    """The package in which only the kernel for dkey and dvalue is wrong."""
    return package_with(tmp_path_factory.mktemp("gradient"), BUGS[1:2])


def package_with(folder, bugs):
    kernels, library = broken_kernels(folder / "build", bugs)
    return PackageCopy(folder / "site", kernels=kernels, library=library)


def run(copy, program):
    done = copy.run("-c", START + textwrap.dedent(program), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    return done


def test_the_proof_finds_exactly_the_wrong_kernels(wrong):
    program = """
    import json
    from jax_flash_metal import kernel_cases, platforms
    from jax_flash_metal.attention_library import AttentionLibrary
    from jax_flash_metal.kernel_cases import KernelCase

    library = AttentionLibrary(platforms.load_library())
    found = {}
    for is_short in (False, True):
        for backward in (False, True):
            case = KernelCase("float32", 32, is_short, False, backward)
            for name, verdict in kernel_cases.check(library, case).items():
                kernel = name.split("_float32")[0]
                found[kernel] = found.get(kernel, False) or bool(verdict.failure)
    print(json.dumps(found))
    """
    found = json.loads(run(wrong, program).stdout)
    assert found == {
        "attention_forward": True,
        "attention_delta": False,
        "attention_backward_dq": False,
        "attention_backward_dkv": True,
        "attention_short_forward": True,
        # Not to be told apart: one result of two kernels.
        "attention_short_forward_combine": True,
        "attention_short_dq": True,
        "attention_short_dq_combine": True,
    }


def test_a_default_call_takes_the_reference_and_warns_once(wrong_forward):
    program = """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (20, 21):
            operand = x[:, :length]
            out = jax.jit(attend)(operand, operand, operand)
            assert (out == attend_xla(operand, operand, operand)).all()
        text = jax.jit(attend).lower(x, x, x).as_text()
    assert "jax_flash_metal_forward" not in text and "dot_general" in text
    (warning,) = [w for w in caught if "jax_flash_metal" in str(w.message)]
    print(warning.message)
    """
    for _ in range(2):  # the second process has it from the file
        said = run(wrong_forward, program).stdout
        assert said.startswith(
            "jax_flash_metal: the kernel attention_forward_float32_d32_q32_k32_s4 is "
            "disabled on software Metal device: its out is wrong: "
        )
        assert "python -m jax_flash_metal doctor --report" in said
    (file,) = (wrong_forward.folder / "cache" / "proofs").iterdir()
    assert "its out is wrong" in file.read_text()


def test_the_gradient_keeps_its_kernels(wrong_forward):
    program = """
    warnings.simplefilter("ignore")
    text = gradient(attend).lower(x).as_text()
    assert "jax_flash_metal_forward" not in text
    assert "jax_flash_metal_backward" in text
    difference = gradient(attend)(x) - gradient(attend_xla)(x)
    assert float(jnp.abs(difference).max()) < 1e-4
    """
    run(wrong_forward, program)


def test_a_wrong_gradient_takes_the_reference(wrong_gradient):
    program = """
    warnings.simplefilter("ignore")
    text = gradient(attend).lower(x).as_text()
    assert "jax_flash_metal_forward" in text
    assert "jax_flash_metal_backward" not in text
    difference = gradient(attend)(x) - gradient(attend_xla)(x)
    assert float(jnp.abs(difference).max()) < 1e-4
    """
    run(wrong_gradient, program)


def test_demanded_kernels_raise(wrong_forward):
    program = """
    try:
        attend(x, x, x, implementation="metal")
    except NotImplementedError as error:
        print(error)
    """
    said = run(wrong_forward, program).stdout
    assert said.startswith(
        "implementation='metal' cannot run this call: the kernel "
        "attention_forward_float32_d32_q32_k32_s4 is disabled on "
    )
    assert "attach report.txt" in said


def test_explain_says_why(wrong_forward):
    program = """
    explain = jax_flash_metal.explain
    print(explain(x, x, x))
    print(explain(x, x, x, implementation="metal"))
    short = x[:, :3]
    print(explain(short, x, x))
    """
    lines = run(wrong_forward, program).stdout.splitlines()
    assert lines[0].startswith("xla: the kernel attention_forward_float32_d32_")
    assert lines[1].startswith("unsupported: the kernel attention_forward_float32_d32_")
    assert lines[2] == "metal: the kernels run on a device."


def test_explain_says_why_of_the_gradient(wrong_gradient):
    program = """
    explain = jax_flash_metal.explain
    print(explain(x, x, x))
    print(explain(x, x, x, implementation="metal"))
    """
    lines = run(wrong_gradient, program).stdout.splitlines()
    kernel = "the kernel attention_backward_dkv_float32_d32_q32_k32_s4 is disabled on"
    for line, fate in zip(lines, ("takes the reference", "is unsupported")):
        assert line.startswith(
            f"metal: the kernels run on a device. The gradient {fate}: {kernel} "
        )


def test_a_missing_kernel_is_a_failure_with_a_sentence(tmp_path):
    """The library lacks what the table has, as with a compiler that rejects it."""
    from plugin import build
    from tests.checker.planted import copy_of_kernels

    kernels = copy_of_kernels(tmp_path / "build")
    library = tmp_path / "build" / "some.so"
    names = {v.kernel for v in build.load_variants(kernels)} - {"attention_forward"}
    build.build(kernel_dir=kernels, only=names, output=library)
    copy = PackageCopy(tmp_path / "site", kernels=kernels, library=library)
    said = run(copy, "print(jax_flash_metal.explain(x, x, x))").stdout
    assert said.startswith(
        "xla: the kernel attention_forward_float32_d32_q32_k32_s4 is disabled on "
        "software Metal device: it does not compile: "
    )


def test_a_kernel_that_crashes_the_process_does_so_once(wrong_forward, tmp_path):
    """Seen once, it is tested in a process of its own, and then known to all."""
    native = wrong_forward.package / "_native" / platforms.LIBRARY.name
    kernels = wrong_forward.package / "metal_kernels"
    copy = PackageCopy(tmp_path / "site", kernels=kernels, library=native)
    copy.edit(
        "kernel_cases",
        "    names = case.kernels(library)\n",
        "    import os; os.abort()\n    names = case.kernels(library)\n",
    )
    program = START + "print(jax_flash_metal.explain(x, x, x).reason)"
    assert copy.run("-c", program, JAX_PLATFORMS="cpu").returncode == -signal.SIGABRT
    (mark,) = (copy.folder / "cache" / "proofs").iterdir()
    said = run(copy, "print(jax_flash_metal.explain(x, x, x).reason)").stdout
    assert said.startswith(
        "the kernel attention_forward_float32_d32_q32_k32_s4 is disabled on software "
        "Metal device: its test crashed (SIGABRT)"
    )
    assert mark.exists()  # the other kernels were not tested in the process either
    # What is in the file is believed.
    assert run(copy, "print(jax_flash_metal.explain(x, x, x).reason)").stdout == said


def test_doctor_fails_and_says_what(wrong_forward):
    done = wrong_forward.run(
        "-m",
        "jax_flash_metal",
        "doctor",
        "--time-budget",
        "1",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 8 kernels fail and are disabled" in " ".join(done.stdout.split())
    assert "FAILED: self-test, " in done.stderr
    assert "The report is in jax-flash-metal-report.txt." in done.stderr
    report = (wrong_forward.folder / "jax-flash-metal-report.txt").read_text()
    content = json.loads(report[report.index("{\n") :])
    checks = {check["name"]: check for check in content["checks"]}
    assert content["status"] == "fail"
    self_test = checks["self-test"]
    assert self_test["status"] == "fail"
    wrong = [row for row in self_test["rows"] if row["failure"]]
    assert [row["kernel"] for row in wrong] == ["attention_forward"]
    assert "times the allowed error" in wrong[0]["failure"]
    # It demands the kernels: it cannot pass by taking the reference.
    assert checks["training"]["status"] == "fail"
    assert "is disabled on" in checks["training"]["message"]


def test_doctor_tests_disabled_kernels_again(wrong_forward):
    """What a bad moment has disabled comes back."""
    (file,) = (wrong_forward.folder / "cache" / "proofs").iterdir()
    content = json.loads(file.read_text())
    for verdict in content["verdicts"].values():
        verdict["failure"] = "a bad moment"
    file.write_text(json.dumps(content))
    wrong_forward.run("-m", "jax_flash_metal", "doctor", "--time-budget", "0")
    verdicts = json.loads(file.read_text())["verdicts"]
    failed = [name for name, verdict in verdicts.items() if verdict["failure"]]
    assert [name.split("_float32")[0] for name in failed] == ["attention_forward"]
