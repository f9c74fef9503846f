"""`python -m jax_flash_metal doctor` as users call it, on all sorts of installs."""

import json
import os
import shutil

import pytest

from jax_flash_metal import doctor, hosts, platforms
from jax_flash_metal.attention_library import DTYPES, PASSES, AttentionLibrary
from jax_flash_metal.variant_table import variants
from tests.support.package_copy import PackageCopy, broken_kernels
from tests.support.shared_library import compile_library

pytestmark = pytest.mark.xdist_group("doctor")

NAMES = [
    *("platform", "packages", "host plugin", "jax", "library", "device"),
    *("self-test", "cpu self-test", "hand-over", "training", "tuning", "timing"),
]
WITHOUT_TIMING = ("--time-budget", "0")

try:
    HAS_HOST = bool(hosts.find())
except hosts.HostError:
    HAS_HOST = False


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(kernels, library) of a small table of variants, without bugs."""
    return broken_kernels(tmp_path_factory.mktemp("small"), [])


@pytest.fixture
def copy(small, tmp_path):
    """The package with these, to be edited."""
    kernels, library = small
    return PackageCopy(tmp_path / "site", kernels=kernels, library=library)


def run(copy, *arguments, code, **settings):
    """doctor --json: its checks by name, and what it says on stderr."""
    done = copy.run("-m", "jax_flash_metal", "doctor", "--json", *arguments, **settings)
    assert done.returncode == code, done.stdout + done.stderr
    content = json.loads(done.stdout)
    assert content["status"] == "fail" if code else content["status"] in ("ok", "warn")
    return {check["name"]: check for check in content["checks"]}, done.stderr


def test_this_installation(tmp_path):
    """The whole package, every kernel; both outputs."""
    kernels = None  # the tree's
    copy = PackageCopy(tmp_path / "site", kernels=kernels, library=platforms.LIBRARY)
    report = tmp_path / "report.txt"
    done = copy.run(
        *("-m", "jax_flash_metal", "doctor", "--time-budget", "2"),
        *("--report", str(report)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "doctor" in done.stdout
    assert done.stderr.startswith(
        f"Everything that was tried works. The report is in {report}. ("
    )
    text = report.read_text()
    assert text.startswith(f"jax-flash-metal {doctor.__version__} doctor")
    check_schema(json.loads(text[text.index("{\n") :]))


def cpu_isas():
    """The instruction sets of this machine, best last."""
    return AttentionLibrary(platforms.load_library(), backend="cpu").cpu_isas()


def check_schema(content):
    """What docs/doctor.md promises to programs."""
    assert set(content) == {
        *("schema", "status", "package_version", "created", "command"),
        *("checks", "seconds"),
    }
    assert content["schema"] == 1
    assert content["status"] in ("ok", "warn")
    assert [check["name"] for check in content["checks"]] == NAMES
    for check in content["checks"]:
        assert set(check) == {"name", "status", "message", "seconds", "facts", "rows"}
        assert check["status"] in ("ok", "warn", "fail")
        assert check["message"].endswith((".", ")"))
        assert check["seconds"] >= 0
    checks = {check["name"]: check for check in content["checks"]}
    self_test = checks["self-test"]
    assert {row["name"] for row in self_test["rows"]} == {
        v.host_name for v in variants()
    }
    for row in self_test["rows"]:
        assert set(row) == {"name", "kernel", "compile_ms", "error", "failure"}
        assert row["failure"] is None
        assert 0 <= row["error"] < 1
        assert row["compile_ms"] >= 0
    on_cpu = checks["cpu self-test"]
    assert {row["name"] for row in on_cpu["rows"]} == {
        f"cpu_{which}_{dtype}_{instruction_set}"
        for which in PASSES
        for dtype in DTYPES
        for instruction_set in cpu_isas()
    }
    for row in on_cpu["rows"]:
        assert set(row) == {"name", "kernel", "error", "failure"}
        assert row["failure"] is None
        assert 0 <= row["error"] < 1
        assert row["name"].endswith(f"_{row['kernel']}")
    assert on_cpu["facts"]["family"] == cpu_isas()[-1]
    facts = checks["device"]["facts"]
    assert {"device", "name", "family", "system", "num_cores"} <= set(facts)
    timing = checks["timing"]
    assert timing["rows"]
    for row in timing["rows"]:
        assert set(row) == {
            *("shape", "pass", "fused_ms", "unfused_ms", "ratio", "noise", "rounds"),
        }
    assert len(timing["rows"]) + len(timing["facts"]["not_timed"]) == 34
    if HAS_HOST:
        sizes = [row["bytes"] for row in checks["hand-over"]["rows"]]
        page = os.sysconf("SC_PAGE_SIZE")
        assert {0, 2, page - 2, page, page + 2} <= set(sizes)
        assert max(sizes) >= 4 << 20
        assert not any(row["different"] for row in checks["hand-over"]["rows"])


@pytest.mark.slow
def test_small_table(copy):
    # A terminal without Unicode.
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    checks, said = run(copy, *WITHOUT_TIMING, code=0, **ascii_only)
    assert list(checks) == NAMES
    assert checks["self-test"]["message"].startswith("All 14 kernels compile (")
    assert checks["timing"]["message"] == "Not run: --time-budget is 0."
    assert said.startswith("Everything that was tried works. (")
    platform = "flash_metal" if HAS_HOST else "cpu"
    assert checks["training"]["facts"]["platform"] == platform


def test_shapes_without_a_kernel_are_named(copy):
    """The table ends at head_dim 32; nothing there has that."""
    table = copy.package / "metal_kernels" / "variants.toml"
    table.write_text(table.read_text().replace("head_dim = 64", "head_dim = 32"))
    options = {"shapes": "small", "time_budget": 5, "device": "a device"}
    (check,) = run_section(copy, "timing", "cpu", **options)
    assert check["status"] == "warn"
    assert "head_dim 64 is above 32" in check["message"]
    assert len(check["rows"]) == 6
    assert all("NotImplementedError" in row["failure"] for row in check["rows"])


def test_no_host(copy):
    copy.edit("hosts", "def find() -> Host:", "KNOWN_HOSTS = ()\n\ndef find() -> Host:")
    checks, _ = run(copy, *WITHOUT_TIMING, code=0)
    assert checks["host plugin"]["status"] == "warn"
    assert checks["host plugin"]["message"].startswith(
        "Platform flash_metal runs over a host plugin, and none is installed: "
    )
    assert checks["hand-over"]["status"] == "warn"
    assert checks["hand-over"]["message"].startswith("Not run: ")
    assert checks["training"]["status"] == "ok"
    assert checks["training"]["facts"]["platform"] == "cpu"


@pytest.mark.slow
def test_a_named_host_that_is_not_there(copy):
    setting = {"JAX_FLASH_METAL_HOST": "/no/such/plugin.so"}
    checks, said = run(copy, *WITHOUT_TIMING, code=1, **setting)
    assert checks["host plugin"]["status"] == "fail"
    assert "/no/such/plugin.so" in checks["host plugin"]["message"]
    assert said.startswith("FAILED: host plugin. ")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HOST, reason="it needs a host plugin")
def test_a_host_that_does_not_start(copy, tmp_path):
    """A shared library for this machine that is no PJRT plugin: our own C ABI's."""
    setting = {"JAX_FLASH_METAL_HOST": str(platforms.LIBRARY)}
    copy.edit("hosts", "    check_library(host.path)\n    return host\n",
              "    return Host('none', Path('/dev/null'), {})\n")  # fmt: skip
    checks, _ = run(copy, *WITHOUT_TIMING, code=1, **setting)
    assert checks["hand-over"]["status"] == "fail"
    assert checks["hand-over"]["message"].startswith(
        "Platform flash_metal does not start: "
    )
    # The rest of the report comes from the other platform.
    assert checks["training"]["facts"]["platform"] == "cpu"
    assert checks["training"]["status"] == "ok"


@pytest.mark.skipif(not HAS_HOST, reason="it needs a host plugin")
def test_values_that_change_on_their_way(copy):
    copy.edit("doctor_checks", "return jnp.flip(out)", "return jnp.flip(out) + 1e-2")
    (check,) = run_section(copy, "hand-over", "flash_metal")
    assert check["status"] == "fail"
    # 4 bytes are there twice, 0 bytes cannot change.
    assert check["message"].startswith(
        "Values change on their way from the host plugin to the kernels and back: 4 "
        "bytes of float32, 4 bytes of float32, 420 bytes of float32, "
    )


@pytest.mark.skipif(not HAS_HOST, reason="it needs a host plugin")
def test_a_host_that_overwrites_what_it_must_not(copy):
    copy.edit("doctor_checks", "-np.asarray(y), x]", "-np.asarray(y), negative(x)]")
    (check,) = run_section(copy, "hand-over", "flash_metal")
    assert check["status"] == "fail"
    assert (
        "and back: 420 bytes of float32 (reusing), 4096 bytes of float32 (reusing). "
        in check["message"]
    )


@pytest.mark.slow  # 16 s; test_this_installation has one host, test_no_host none
@pytest.mark.skipif(not HAS_HOST, reason="it needs a host plugin")
def test_another_host_that_works(copy):
    """The first in the table is a library that is no plugin."""
    package = copy.folder / "no_host"
    package.mkdir()
    (package / "__init__.py").touch()
    library = compile_library("int nothing() { return 0; }")
    shutil.copy2(library, package / "library.so")
    here = hosts._hosts_here()[0]
    copy.edit(
        "hosts",
        "KNOWN_HOSTS = (\n",
        f"KNOWN_HOSTS = (\n    KnownHost('no-host', {here.system!r}, {here.machine!r}, "
        "'no_host', 'library.so', {}),\n",
    )
    works = hosts.find().name
    checks, _ = run(copy, *WITHOUT_TIMING, code=1)
    assert checks["host plugin"]["facts"]["name"] == "no-host"
    hand_over = checks["hand-over"]
    assert hand_over["status"] == "fail"
    assert hand_over["message"].startswith(
        f"Over the host plugin no-host it fails, over {works}, which is installed too, "
        f"it works: set JAX_FLASH_METAL_HOST={works}. Platform flash_metal does not "
    )
    # Doctor itself does not choose it.
    assert checks["training"]["facts"]["platform"] == "cpu"


def test_a_training_step_that_differs(copy):
    copy.edit("doctor_checks", "losses.append(float(value))",
              "losses.append(value + 2e-4 * (implementation == 'metal'))")  # fmt: skip
    (check,) = run_section(copy, "training", "cpu")
    assert check["status"] == "fail"
    assert "of implementation='xla' by 2.0e-04 (allowed 1e-04)" in check["message"]


@pytest.mark.slow
def test_gradients_that_differ(copy):
    copy.edit("doctor_checks", "jax.tree.map(np.asarray, gradients)",
              "{n: np.asarray(g) + np.nan for n, g in gradients.items()}")  # fmt: skip
    (check,) = run_section(copy, "training", "cpu")
    assert check["status"] == "fail"
    assert "gradients by nan (allowed 1e-03)" in check["message"]


def test_an_unexpected_error_of_a_section(copy):
    copy.edit(
        "doctor_checks", "    def initial() ->", "    1 / 0\n\n    def initial() ->"
    )
    (check,) = run_section(copy, "training", "cpu")
    assert check["message"].startswith("ZeroDivisionError: division by zero")
    assert "in check_training" in check["facts"]["traceback"]


def test_an_unexpected_error_of_the_cpu_kernels(copy):
    """It is of the check that it kept from being made."""
    copy.edit("doctor_checks", "library.cpu_isas()", "library.no_such_thing()")
    (check,) = run_section(copy, "cpu kernels", "cpu")
    assert (check["name"], check["status"]) == ("cpu self-test", "fail")
    assert check["message"].startswith("AttributeError: ")


def run_section(copy, name, platform, **options):
    """The checks of one section, run as doctor runs it."""
    events = copy.folder / "events"
    options = json.dumps({"platform": platform, **options})
    arguments = ("-m", "jax_flash_metal.doctor_checks", name, str(events), options)
    done = copy.run(*arguments, JAX_PLATFORMS=f"{platform},cpu")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return [line["check"] for line in lines if "check" in line]


def test_no_library(small, tmp_path):
    copy = PackageCopy(tmp_path / "site", kernels=small[0], library=None)
    checks, said = run(copy, code=1)
    assert checks["library"]["status"] == "fail"
    assert "is missing" in checks["library"]["message"]
    assert "Reinstall jax-flash-metal" in checks["library"]["message"]
    for name in ("cpu self-test", "hand-over", "training", "tuning", "timing"):
        assert checks[name]["message"].startswith("Not run: ")
    assert said.startswith("FAILED: library. Please attach the report")
    assert (copy.folder / doctor.DEFAULT_REPORT).is_file()


def test_a_broken_library(small, tmp_path):
    wrong = tmp_path / platforms.LIBRARY.name
    wrong.write_bytes(b"\x7fELF but no more")
    copy = PackageCopy(tmp_path / "site", kernels=small[0], library=wrong)
    checks, _ = run(copy, code=1)
    assert checks["library"]["message"].startswith("Cannot load the native library: ")


def test_no_jax(copy):
    """A folder that is called jax and is not."""
    (copy.folder / "jax").mkdir()
    (copy.folder / "jax" / "__init__.py").write_text("raise ImportError('broken jax')")
    checks, _ = run(copy, code=1)
    assert checks["jax"]["status"] == "fail"
    assert checks["jax"]["message"].startswith(
        "JAX cannot be imported: ImportError: broken jax; install jax and jaxlib "
    )


def test_no_device(copy):
    copy.edit(
        "attention_library",
        "        function = self._library.jfm_device_facts\n",
        '        if self._backend == "metal":\n'
        '            raise AttentionError(5, "no Metal device: none.")\n'
        "        function = self._library.jfm_device_facts\n",
    )
    checks, _ = run(copy, code=1)
    assert checks["cpu self-test"]["status"] == "ok"
    assert checks["device"]["status"] == "fail"
    assert checks["device"]["message"].startswith(
        "The kernels have no device to run on: no Metal device: none. Please attach "
    )
    training = checks["training"]
    assert training["status"] == "ok"
    assert training["message"].startswith("3 steps, CPU kernels on platform cpu: ")
    assert checks["timing"]["message"].startswith("Not run: ")


@pytest.mark.parametrize(
    ("crash", "how"),
    [
        ("os.abort()", "crashed (SIGABRT)"),
        pytest.param(
            *("os.kill(os.getpid(), 11)", "crashed (SIGSEGV)"), marks=pytest.mark.slow
        ),
        pytest.param(
            *("os._exit(3)", "ended with exit code 3"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_crash_of_a_section(copy, crash, how):
    """The kernels' process dies in the midst: what was found before stays."""
    copy.edit(
        "doctor_checks",
        'events.progress("opening the device")',
        'events.progress("opening the device")\n'
        f'    print("a last word", flush=True); {crash}',
    )
    checks, said = run(copy, code=1)
    assert checks["library"]["status"] == "ok"
    device = checks["device"]
    assert device["status"] == "fail"
    assert device["message"].startswith(f"The process {how} while opening the device. ")
    assert device["facts"]["output"] == "a last word\n"
    assert said.startswith("FAILED: device. ")


def test_kernels_that_crash(copy):
    """They are named, the others are tested, and programs do without them."""
    wrong = f"cpu_backward_float16_{cpu_isas()[0]}"
    copy.edit(
        "kernel_cases",
        "    names = list(keys)\n",
        "    names = list(keys)\n"
        "    more = (case.is_short, case.is_aligned)\n"
        "    more += (case.is_grouped, case.has_options)\n"
        "    if case.which == 'backward' and not any(more):\n"
        f"        if case.backend == 'metal' or '{wrong}' in names[0]:\n"
        "            import os; os.abort()\n",
    )
    checks, said = run(copy, *WITHOUT_TIMING, code=1)
    assert sorted(checks) == sorted(NAMES)
    on_cpu = checks["cpu self-test"]
    assert {
        row["name"]: row["failure"] for row in on_cpu["rows"] if row["failure"]
    } == {wrong: "its test crashed (SIGABRT)"}
    self_test = checks["self-test"]
    assert "kernels fail and are disabled" in self_test["message"]
    failures = {row["kernel"]: row["failure"] for row in self_test["rows"]}
    crashed = {
        f"attention_{kernel}"  # of both forms
        for kernel in ("delta", "backward_dq", "backward_dkv", "backward_dq_product")
    }
    for kernel, failure in failures.items():
        expected = "its test crashed (SIGABRT)" if kernel in crashed else None
        assert failure == expected
    first = self_test["facts"]["crashes"][0]
    assert first["doing"].startswith("testing attention_delta_float32_")
    assert (
        "is disabled on software Metal device: its test crashed (SIGABRT)"
        in (checks["training"]["message"])
    )
    assert said.startswith("FAILED: self-test, cpu self-test, ")


def test_a_wrong_cpu_kernel(copy):
    """Also of an instruction set that calls do not use here."""
    isas = cpu_isas()
    kernel = f"cpu_backward_bfloat16_{isas[0]}"
    copy.edit(
        "kernel_cases",
        "    tolerances = TOLERANCES[case.dtype]\n",
        f"    if '{kernel}' in case.kernels(library):\n"
        "        actual['dkey'] = -actual['dkey']\n"
        "    tolerances = TOLERANCES[case.dtype]\n",
    )
    (check,) = run_section(copy, "cpu kernels", "cpu")
    assert check["status"] == "fail"
    wrong = [row["name"] for row in check["rows"] if row["failure"]]
    assert wrong == [kernel]
    fate = "calls that need them take the reference"
    if len(isas) > 1:
        fate = f"calls here take those of {isas[-1]}, which are right"
    assert check["message"].startswith(
        f"1 of {len(check['rows'])} kernels fail and are disabled, {fate}: {kernel}: "
        "its dkey is wrong: "
    )


@pytest.mark.slow  # 10 s; test_a_crash_of_a_section shows how a crash is told
def test_a_crash_of_the_training(copy):
    """The other sections still run."""
    copy.edit(
        "doctor_checks",
        "    def initial() ->",
        "    os.abort()\n\n    def initial() ->",
    )
    checks, _ = run(copy, *WITHOUT_TIMING, code=1)
    assert list(checks) == NAMES
    assert checks["training"]["status"] == "fail"
    assert (
        "crashed (SIGABRT) while training on platform"
        in (checks["training"]["message"])
    )
