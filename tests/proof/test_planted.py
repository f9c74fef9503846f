"""A wrong kernel in an installed package: not used, one warning, everything else works.

The bugs are in copies of the kernels; each program runs in a process of its own.
"""

import json
import signal
import textwrap

import pytest

from jax_flash_metal import platforms
from tests.checker.planted import Bug
from tests.checker.test_planted_bugs import DKV as DKV_FILE
from tests.checker.test_planted_bugs import GUARDS, MASK_BLOCKS
from tests.support.package_copy import PackageCopy, broken_kernels

pytestmark = pytest.mark.xdist_group("planted")

KNOWN = {bug.id: bug for _, bug in GUARDS}
WRONG_FORWARD = KNOWN["wrong-kv-head"]
WRONG_DKV = KNOWN["first-visible-block-skipped"]
BUGS = [
    WRONG_FORWARD,
    WRONG_DKV,
    KNOWN["last-split-dropped"],
    KNOWN["splits-overlap"],
]
# Wrong only where a call has options.
OPTION_BUGS = [
    Bug(
        *("mask-ignored-by-dkv", DKV_FILE),
        *(
            "key_is_seen(params, operands, queries[r], query_index, row, bias)",
            "contains(queries[r], query_index)",
        ),
    ),
    KNOWN["gradient-pair-missing"],
    KNOWN["sinks-of-one-simdgroup"],
]
DKV_ROW = "attention_backward_dkv_float32_d64_q16_k32_b64_s4_paired"
FORWARD_ROW = "attention_forward_float32_d64_q64_k32_b64_s4"
WRONG_SUMMARY = Bug("all-hidden", MASK_BLOCKS, "any ? 1 : 0", "0")

# On platform cpu as on flash_metal, which would need a host plugin.
START = """
import logging, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import jax_flash_metal
from jax_flash_metal import lowering

lowering.KERNEL_PLATFORMS["cpu"] = {"metal": "a device"}
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
def wrong_options(tmp_path_factory):
    """The package that is right only for plain calls."""
    return package_with(tmp_path_factory.mktemp("options"), OPTION_BUGS)


@pytest.fixture(scope="module")
def wrong_forward(tmp_path_factory):
    """The package in which only the forward kernel is wrong."""
    return package_with(tmp_path_factory.mktemp("forward"), [WRONG_FORWARD])


@pytest.fixture(scope="module")
def wrong_gradient(tmp_path_factory):
    """The package in which only the kernel for dkey and dvalue is wrong."""
    return package_with(tmp_path_factory.mktemp("gradient"), [WRONG_DKV])


def package_with(folder, bugs):
    kernels, library = broken_kernels(folder / "build", bugs)
    return PackageCopy(folder / "site", kernels=kernels, library=library)


def run(copy, program):
    done = copy.run("-c", START + textwrap.dedent(program), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    return done


FIND = """
import json
from jax_flash_metal import kernel_cases, platforms
from jax_flash_metal.attention_library import AttentionLibrary

library = AttentionLibrary(platforms.load_library())
found = {}
for case in kernel_cases.every_case("float32", 64):
    for key, verdict in kernel_cases.check(library, case).items():
        name, _, how = key.partition(" ")
        kernel = " ".join((kernel_cases.kernel_of(name), how)).strip()
        kernel = kernel.removeprefix("attention_")
        found[kernel] = found.get(kernel, False) or bool(verdict.failure)
print(json.dumps(found))
"""
DKV = ("backward_dkv", "backward_dkv of form B")
WITH_OPTIONS = (
    *("forward", *DKV, "backward_dq", "backward_dq_product"),
    *("short_forward", "short_forward_combine", "short_dq"),
)
GRADIENTS = [
    f"bias_gradient of {operand}" for operand in ("bias", "shared bias", "alibi_slopes")
]
ALL = {
    *(*WITH_OPTIONS, *(f"{kernel} with options" for kernel in WITH_OPTIONS)),
    *("delta", "short_dq_combine", "mask_blocks", "sinks_gradient"),
    *(*(f"{kernel} in parts" for kernel in DKV), "backward_dkv_combine"),
    *GRADIENTS,
    "bias_gradient_combine",
}


def wrong_kernels(copy):
    found = json.loads(run(copy, FIND).stdout)
    # In form B nothing is known of it beside a wrong kernel of dK and dV.
    assert set(found) == ALL - {"backward_dq_product with options"}
    return {kernel for kernel, is_wrong in found.items() if is_wrong}


def test_the_proof_finds_exactly_the_wrong_kernels(wrong):
    kernels = ("forward", *DKV, "short_forward", "short_dq")
    assert wrong_kernels(wrong) == {
        *(*kernels, *(f"{kernel} with options" for kernel in kernels)),
        *(f"{kernel} in parts" for kernel in DKV),
        # Not to be told apart: one result of two kernels.
        *("short_forward_combine", "short_forward_combine with options"),
        *("short_dq_combine", "backward_dkv_combine"),
    }


def test_the_proof_finds_what_is_wrong_with_options(wrong_options):
    assert wrong_kernels(wrong_options) == {
        *(f"{kernel} with options" for kernel in DKV),
        *(*GRADIENTS, "bias_gradient_combine", "sinks_gradient"),
    }


def test_the_proof_finds_a_wrong_summary_of_the_mask(tmp_path):
    copy = package_with(tmp_path, [WRONG_SUMMARY])
    assert "mask_blocks" in wrong_kernels(copy)


def test_a_call_with_options_takes_the_reference_where_only_that_is_wrong(
    wrong_options,
):
    program = """
    warnings.simplefilter("ignore")
    def text(**options):
        def total(x, bias):
            return attend(x, x, x, bias, **options).sum()
        bias = None if not options else jnp.ones((4, 20, 20))
        gradient = jax.jit(jax.grad(total, (0, 1) if options else 0))
        return gradient.lower(x, bias).as_text()

    def passes(text):
        names = ("forward", "backward", "gradient")
        return [name for name in names if f"metal_{name}_v" in text]

    print(passes(text()), passes(text(sliding_window=5)))
    print(jax_flash_metal.explain(x, x, x, logits_soft_cap=2.0))
    """
    calls, reason = run(wrong_options, program).stdout.splitlines()
    assert calls == "['forward', 'backward'] ['forward']"
    assert reason.startswith(
        "metal: the kernels run on a device. The gradient takes the reference: the "
        f"kernel {DKV_ROW} of form B with options is disabled "
    )


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
            f"jax_flash_metal: the kernel {FORWARD_ROW} is disabled on software Metal "
            "device: its "
        )
        assert " is wrong: " in said
        assert "python -m jax_flash_metal doctor --report" in said
    (file,) = (wrong_forward.folder / "cache" / "proofs").iterdir()
    assert " is wrong: " in file.read_text()


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


def test_a_wrong_gradient_takes_the_reference_and_says_why(wrong_gradient):
    program = """
    warnings.simplefilter("ignore")
    text = gradient(attend).lower(x).as_text()
    assert "jax_flash_metal_forward" in text
    assert "jax_flash_metal_backward" not in text
    difference = gradient(attend)(x) - gradient(attend_xla)(x)
    assert float(jnp.abs(difference).max()) < 1e-4
    explain = jax_flash_metal.explain
    print(explain(x, x, x))
    print(explain(x, x, x, implementation="metal"))
    """
    lines = run(wrong_gradient, program).stdout.splitlines()
    kernel = f"the kernel {DKV_ROW} of form B is disabled on"
    for line, fate in zip(
        lines, ("takes the reference", "is unsupported"), strict=True
    ):
        assert line.startswith(
            f"metal: the kernels run on a device. The gradient {fate}: {kernel} "
        )


def test_explain_and_demanded_kernels_say_why(wrong_forward):
    program = """
    explain = jax_flash_metal.explain
    print(explain(x, x, x))
    print(explain(x, x, x, implementation="metal"))
    short = x[:, :3]
    print(explain(short, x, x))
    try:
        attend(x, x, x, implementation="metal")
    except NotImplementedError as error:
        print(error)
    """
    lines = run(wrong_forward, program).stdout.splitlines()
    assert lines[0].startswith("xla: the kernel attention_forward_float32_d64_")
    assert lines[1].startswith("unsupported: the kernel attention_forward_float32_d64_")
    assert lines[2].startswith("metal: the kernels run on a device. Rows: ")
    assert lines[3].startswith(
        "implementation='metal' cannot run this call: the kernel "
        f"{FORWARD_ROW} is disabled on "
    )
    assert "attach report.txt" in lines[3]


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
        f"xla: the kernel {FORWARD_ROW} is disabled on software Metal device: it does "
        "not compile: "
    )


def test_a_kernel_that_crashes_the_process_does_so_once(wrong_forward, tmp_path):
    """Seen once, it is tested in a process of its own, and then known to all."""
    native = wrong_forward.package / "_native" / platforms.LIBRARY.name
    kernels = wrong_forward.package / "metal_kernels"
    copy = PackageCopy(tmp_path / "site", kernels=kernels, library=native)
    copy.edit(
        "kernel_cases",
        "    names = list(keys)\n",
        "    import os; os.abort()\n    names = list(keys)\n",
    )
    program = START + "print(jax_flash_metal.explain(x, x, x).reason)"
    assert copy.run("-c", program, JAX_PLATFORMS="cpu").returncode == -signal.SIGABRT
    (mark,) = (copy.folder / "cache" / "proofs").iterdir()
    said = run(copy, "print(jax_flash_metal.explain(x, x, x).reason)").stdout
    assert said.startswith(
        f"the kernel {FORWARD_ROW} is disabled on software Metal device: its test "
        "crashed (SIGABRT)"
    )
    assert mark.exists()  # the other kernels were not tested in the process either
    # What is in the file is believed.
    assert run(copy, "print(jax_flash_metal.explain(x, x, x).reason)").stdout == said


@pytest.fixture(scope="module")
def wrong_cpu_forward(tmp_path_factory):
    """The tree's package, whose native CPU kernels of the forward pass are wrong."""
    folder = tmp_path_factory.mktemp("cpu")
    copy = PackageCopy(folder / "site", kernels=None, library=platforms.LIBRARY)
    # What programs run is right; this is about what becomes of a verdict.
    copy.edit(
        "attention_library",
        "        out, logsumexp = results.values()\n",
        "        out, logsumexp = results.values()\n"
        '        out += self._backend == "cpu"\n',
    )
    return copy


def test_a_default_call_on_the_cpu_takes_the_reference_and_warns_once(
    wrong_cpu_forward,
):
    program = """
    lowering.KERNEL_PLATFORMS["cpu"] = {"cpu": "cores", "metal": "a device"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (20, 21):
            operand = x[:, :length]
            out = jax.jit(attend)(operand, operand, operand)
            assert (out == attend_xla(operand, operand, operand)).all()
        text = gradient(attend).lower(x).as_text()
    assert "jax_flash_metal_forward" not in text
    assert "jax_flash_metal_backward" in text
    (warning,) = [w for w in caught if "jax_flash_metal" in str(w.message)]
    print(warning.message)
    print(jax_flash_metal.explain(x, x, x))
    print(jax_flash_metal.explain(x, x, x, implementation="cpu"))
    print(jax_flash_metal.explain(x, x, x, implementation="metal"))
    try:
        attend(x, x, x, implementation="cpu")
    except NotImplementedError as error:
        print(error)
    """
    for _ in range(2):  # the second process has it from the file
        lines = run(wrong_cpu_forward, program).stdout.splitlines()
        wrong = "the kernel cpu_forward_float32_"
        starts = (f"jax_flash_metal: {wrong}", f"xla: {wrong}", f"unsupported: {wrong}",
                  "metal: the kernels run on a device.",
                  f"implementation='cpu' cannot run this call: {wrong}")  # fmt: skip
        for line, start in zip(lines, starts, strict=True):
            assert line.startswith(start)
        assert " is wrong: " in lines[0]


def test_doctor_fails_and_says_what(wrong_forward):
    """And tests disabled kernels again: what a bad moment has disabled comes back."""
    run(wrong_forward, "jax_flash_metal.explain(x, x, x)")
    (file,) = (wrong_forward.folder / "cache" / "proofs").iterdir()
    content = json.loads(file.read_text())
    assert content["verdicts"]
    for verdict in content["verdicts"].values():
        verdict["failure"] = "a bad moment"
    file.write_text(json.dumps(content))
    arguments = ("-m", "jax_flash_metal", "doctor", "--time-budget", "0")
    done = wrong_forward.run(*arguments, PYTHONIOENCODING="ascii")
    assert done.returncode == 1, done.stderr
    assert "1 of 14 kernels fail and are disabled" in " ".join(done.stdout.split())
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
    verdicts = json.loads(file.read_text())["verdicts"]
    failed = [name for name, verdict in verdicts.items() if verdict["failure"]]
    assert {name.split("_float32")[0] for name in failed} == {"attention_forward"}
