"""The parts of doctor that load nothing: platform, packages, texts, options, shapes."""

import importlib.metadata
import json
import platform
import sys
import types
from pathlib import Path

import pytest

import jax_flash_metal
from jax_flash_metal import __main__ as command_line
from jax_flash_metal import command_options, crashes, doctor, hosts
from jax_flash_metal.benchmark_shapes import SHAPE_SETS
from jax_flash_metal.doctor_report import Check, Report


def make_report(*checks):
    return Report("1.2.3", "2026-01-01T00:00:00+00:00", "a command", list(checks))


def silent(text):
    pass


# -- Platform --------------------------------------------------------------------------

MAC = {
    "sysctl -n machdep.cpu.brand_string": "Apple M9",
    "sysctl -n sysctl.proc_translated": "0",
    "sw_vers": "ProductVersion: 15.1\nBuildVersion: 24B83",
}


def on_a_mac(monkeypatch, *, machine="arm64", kernel="24.1.0", **answers):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    uname = types.SimpleNamespace(release=kernel)
    monkeypatch.setattr(hosts.os, "uname", lambda: uname)
    said = MAC | {k.replace("_", " "): v for k, v in answers.items()}
    monkeypatch.setattr(doctor, "_output_of", lambda *command: said[" ".join(command)])
    return doctor.check_platform()


def test_a_mac(monkeypatch):
    check = on_a_mac(monkeypatch)
    assert check.status == "ok"
    assert check.message == (
        f"Python {platform.python_version()}, macOS 15.1 on Apple M9."
    )
    assert "24B83" in check.facts["sw_vers"]


def test_rosetta(monkeypatch):
    monkeypatch.setitem(MAC, "sysctl -n sysctl.proc_translated", "1")
    check = on_a_mac(monkeypatch, machine="x86_64")
    assert check.status == "fail"
    assert "runs under Rosetta: install a Python for Apple silicon" in check.message


def test_an_intel_mac(monkeypatch):
    check = on_a_mac(monkeypatch, machine="x86_64")
    assert check.status == "fail"
    assert check.message.endswith(
        "the kernels need Apple silicon; here only implementation='xla' runs."
    )


def test_a_new_macos_and_an_old_python(monkeypatch):
    """Python says 16.0 there if it was built with the SDK of macOS 15 or before."""
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    check = on_a_mac(monkeypatch, kernel="25.0.0")
    assert "macOS 26.0 on Apple M9." in check.message


@pytest.mark.parametrize("kernel", ["22.6.0", "21.0.0"])
def test_an_old_macos(monkeypatch, kernel):
    check = on_a_mac(monkeypatch, kernel=kernel)
    assert check.status == "fail"
    assert check.message.endswith("; the kernels need macOS 14 or newer.")


def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    check = doctor.check_platform()
    assert check.status == "fail"
    assert check.message.endswith(
        "; the kernels need macOS on Apple silicon, or Linux."
    )


def test_settings_are_noted(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("SECRET_TOKEN", "xyz")
    facts = doctor.check_platform().facts
    assert facts["environment"]["JAX_ENABLE_X64"] == "1"
    assert "xyz" not in json.dumps(facts)


def test_a_command_that_is_not_there():
    assert doctor._output_of("no-such-command").startswith("FileNotFoundError")


# -- Packages --------------------------------------------------------------------------


def with_versions(monkeypatch, **versions):
    found = {"jax-flash-metal": doctor.__version__, "jax": "0.10.2", "jaxlib": "0.10.2"}
    found |= {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "_version_of", lambda name: found.get(name))
    return doctor.check_packages()


def test_packages(monkeypatch):
    check = with_versions(monkeypatch)
    assert check.status == "ok"
    assert check.facts["versions"]["jax"] == "0.10.2"


@pytest.mark.parametrize(
    ("versions", "status", "advice"),
    [
        ({"jax": None}, "fail", "JAX is not installed: pip install jax."),
        ({"jaxlib": None}, "fail", "JAX is not installed: pip install jax."),
        (
            {"jax": "0.4.33"},
            "fail",
            "jax is older than 0.4.34: pip install --upgrade jax.",
        ),
        ({"jax": "0.4.34"}, "ok", "."),
        ({"jax": "0.11.0.dev20261101+abc"}, "ok", "."),
        ({"jax_flash_metal": "0.0.1"}, "warn", "uninstall it and install it again."),
    ],
    ids=str,
)
def test_packages_that_do_not_fit(monkeypatch, versions, status, advice):
    check = with_versions(monkeypatch, **versions)
    assert check.status == status
    assert check.message.endswith(advice)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    check = with_versions(monkeypatch)
    assert check.status == "warn"
    assert check.message.endswith("only found: pip install jax-flash-metal.")


# -- Host plugin -----------------------------------------------------------------------


def test_no_host_is_a_warning_unless_one_is_named(monkeypatch):
    def find():
        raise hosts.HostError("there is none: do this")

    monkeypatch.setattr(hosts, "find", find)
    monkeypatch.delenv(hosts.HOST_SETTING, raising=False)
    check = doctor.check_host_plugin()
    assert (check.status, check.message) == ("warn", "There is none: do this.")
    monkeypatch.setenv(hosts.HOST_SETTING, "x")
    assert doctor.check_host_plugin().status == "fail"


def test_a_wrong_setting_of_the_buffers(monkeypatch):
    monkeypatch.setenv(hosts.BUFFERS_SETTING, "guess")
    monkeypatch.setattr(hosts, "find", lambda: hosts.Host("a-host", Path("/p"), {}))
    check = doctor.check_host_plugin()
    assert "must be one of auto, address, copy" in check.message


def test_jax_metal_conflict(monkeypatch):
    monkeypatch.setattr(hosts, "find", lambda: hosts.Host("a-host", Path("/p"), {}))
    monkeypatch.setattr(hosts, "jax_metal_conflict", lambda: "it breaks: do this")
    check = doctor.check_host_plugin()
    assert (check.status, check.message) == ("warn", "a-host. It breaks: do this.")


class Sections:
    """Stands for _Section: hand-overs that fail but over some hosts."""

    def __init__(self, *working):
        self.working, self.tried = working, []

    def __call__(self, name, expected, progress):
        self.checks = []
        return self

    def run(self, limit, options, environment):
        assert options == {"platform": "flash_metal"}
        assert environment["JAX_PLATFORMS"] == "flash_metal,cpu"
        name = environment[hosts.HOST_SETTING]
        self.tried.append(name)
        status = "ok" if name in self.working else "fail"
        self.checks = [Check("hand-over", status, f"{status} over {name}.")]


@pytest.mark.parametrize(
    ("working", "tried", "words"),
    [
        (
            ["jax-graft", "jax-mps"],
            ["jax-graft"],
            "Over the host plugin jax-metal it fails, over jax-graft, which is "
            "installed too, it works: set JAX_FLASH_METAL_HOST=jax-graft. It hangs.",
        ),
        (["jax-mps"], ["jax-graft", "jax-mps"], "set JAX_FLASH_METAL_HOST=jax-mps. It"),
        ([], ["jax-graft", "jax-mps"], "It hangs."),
    ],
    ids=str,
)
def test_other_hosts(monkeypatch, working, tried, words):
    names = ("jax-metal", "jax-graft", "jax-mps")
    installed = [hosts.Host(name, Path("p"), {}) for name in names]
    monkeypatch.setattr(hosts, "fitting", lambda: installed)
    sections = Sections(*working)
    monkeypatch.setattr(doctor, "_Section", sections)
    check = Check("hand-over", "fail", "It hangs.")
    doctor._try_other_hosts(check, "jax-metal", silent)
    assert sections.tried == tried
    assert words in check.message and check.message.endswith("It hangs.")
    assert check.status == "fail"
    assert list(check.facts["other_hosts"]) == tried


def test_a_check_that_breaks():
    def check_something_odd():
        raise KeyError("gone")

    check = doctor._guarded(check_something_odd)
    assert (check.name, check.status) == ("something odd", "fail")
    assert check.message.startswith("KeyError: 'gone'. Please attach the report")


# -- Sections --------------------------------------------------------------------------


def test_a_section_that_hangs():
    section = doctor._Section("kernels", ("jax",), silent)
    section.run(0.0, {}, {})
    (check,) = section.checks
    assert (check.name, check.status) == ("jax", "fail")
    assert check.message.startswith(
        "The process did not end within 0 s while starting section kernels. "
    )


def test_a_section_that_the_user_interrupts(monkeypatch):
    """The report has what was being done, and nothing after it."""

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor.time, "sleep", sleep)
    report = doctor.run("small", 0, silent)
    last = report.checks[-1]
    assert (last.name, last.status) == ("jax", "fail")
    assert last.message.startswith("The process was interrupted while starting ")


class Process:
    """Has ended when it is asked for the third time."""

    def __init__(self):
        self.polls = 0

    def poll(self):
        self.polls += 1
        return 0 if self.polls > 2 else None


class Lines:
    def __init__(self, *texts):
        self.texts = list(texts)

    def read(self):
        return self.texts.pop(0)


def test_a_line_that_comes_in_parts():
    said = []
    section = doctor._Section("kernels", ("jax",), said.append)
    lines = Lines('{"progress": "a"}\n{"prog', "", 'ress": "b"}\n{"progress": "lost')
    assert section._follow(Process(), lines, float("inf"))
    assert said == ["a", "b"]


def test_a_section_without_a_result(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "true")
    section = doctor._Section("kernels", ("jax",), silent)
    section.run(10, {}, {})
    (check,) = section.checks
    assert check.message.startswith("The process ended with exit code 0 while ")


@pytest.mark.parametrize(
    ("code", "how", "is_crash"),
    [
        (-6, "crashed (SIGABRT)", True),
        (-11, "crashed (SIGSEGV)", True),
        (-9, "was killed (SIGKILL)", False),
        (-1, "was killed (SIGHUP)", False),
        (7, "ended with exit code 7", False),
        (0, "ended with exit code 0", False),
        (-99, "was killed (signal 99)", False),
    ],
)
def test_how_a_process_ended(code, how, is_crash):
    assert crashes.ending(code) == how
    assert crashes.is_crash(code) is is_crash


# A process that says what it does and finds, as doctor_checks.py does, and then ends.
TELLING = """#!{python}
import json, os, signal, sys
with open(sys.argv[4], "a") as file:
    for event in {events!r}:
        print(json.dumps(event), file=file)
{end}
"""


def run_telling(monkeypatch, tmp_path, *events, end):
    """A section with the checks a and b whose process does that."""
    program = tmp_path / "telling"
    program.write_text(TELLING.format(python=sys.executable, events=events, end=end))
    program.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(program))
    section = doctor._Section("kernels", ("a", "b"), silent)
    section.run(10, {}, {})
    return section


def found(name, status="ok"):
    return {"check": {"name": name, "status": status, "message": "."}}


AT_CASE = {"progress": "testing k", "case": 3}
DIES = "os.kill(os.getpid(), signal.SIGSEGV)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def test_a_crash_at_a_case_is_that_of_its_kernels(monkeypatch, tmp_path):
    section = run_telling(monkeypatch, tmp_path, found("a"), AT_CASE, end=DIES)
    assert [(c.name, c.status) for c in section.checks] == [("a", "ok"), ("b", "fail")]
    assert section.crash["case"] == 3
    assert section.crash["how"] == "crashed (SIGSEGV)"


def test_a_process_that_is_killed_at_a_case(monkeypatch, tmp_path):
    """The kernels are not to blame: by a user, or the system that has no memory."""
    section = run_telling(monkeypatch, tmp_path, found("a"), AT_CASE, end=KILLED)
    assert section.checks[-1].message.startswith(
        "The process was killed (SIGKILL) while testing k. "
    )
    assert section.crash is None


@pytest.mark.parametrize("end", [DIES, "sys.exit(3)"])
def test_a_crash_after_everything(monkeypatch, tmp_path, end):
    """When the interpreter ends: all that was found stands."""
    events = (found("a"), AT_CASE, found("b"))
    section = run_telling(monkeypatch, tmp_path, *events, end=end)
    assert [(c.name, c.status) for c in section.checks] == [
        *(("a", "ok"), ("b", "ok"), ("end of kernels", "warn")),
    ]
    assert ", after all its checks. " in section.checks[-1].message
    assert section.crash is None


def test_a_crash_after_a_check_that_failed(monkeypatch, tmp_path):
    """Nothing was to follow it."""
    section = run_telling(monkeypatch, tmp_path, found("a", "fail"), end=DIES)
    assert [(c.name, c.status) for c in section.checks] == [
        *(("a", "fail"), ("end of kernels", "warn")),
    ]


# -- The report ------------------------------------------------------------------------


def test_status_is_the_worst():
    ok, warn, fail = (Check("x", status, ".") for status in ("ok", "warn", "fail"))
    assert make_report(ok).status == "ok"
    assert make_report(ok, warn).status == "warn"
    assert make_report(warn, fail, ok).status == "fail"


def test_the_file_does_not_name_the_user(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/somebody"))
    report = make_report(
        Check(
            "x", "ok", "It is in /Users/somebody/env.", facts={"p": "/Users/somebody"}
        )
    )
    text = report.as_file()
    assert "somebody" not in text
    assert "It is in ~/env." in text


def test_a_long_message_is_short_on_the_screen_and_whole_in_the_file():
    log = "program_source:3:1: error: " + "unknown type " * 100 + "the end"
    report = make_report(Check("x", "fail", log))
    assert "the end" not in report.as_screen()
    assert "the report has all of it" in " ".join(report.as_screen().split())
    assert log in json.loads(report.as_json())["checks"][0]["message"]
    assert log in report.as_file()


def test_what_is_no_json():
    facts = {"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("p"), 3: (True,)}
    report = make_report(Check("x", "ok", ".", facts=facts))
    content = json.loads(report.as_json())
    expected = {"a": None, "b": [None, 1.5], "c": "p", "3": [True]}
    assert content["checks"][0]["facts"] == expected


def test_text_is_no_markup():
    assert (
        "[red]/[bold]" in make_report(Check("x", "ok", "a [red]/[bold].")).as_screen()
    )


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    report = make_report(Check("x", "warn", "Something."))
    assert report.as_screen() == "warn x: Something.\n"
    assert report.as_file()


def test_tables_on_the_screen():
    row = {"name": "a_f", "kernel": "a", "compile_ms": 1.5, "error": 0.25}
    self_test = Check(
        "self-test",
        "fail",
        "One fails.",
        rows=[
            row | {"failure": None},
            row | {"error": 0.5, "failure": None},
            row | {"compile_ms": None, "error": None, "failure": "it does not compile"},
        ],
    )
    on_cpu = Check(
        "cpu self-test",
        "ok",
        "All are right.",
        rows=[{"name": "c_a", "kernel": "avx9", "error": 0.125, "failure": None}],
    )
    timed = {"fused_ms": 1.0, "unfused_ms": 2.5, "ratio": 2.5, "noise": 0.1}
    timing = Check(
        "timing",
        "ok",
        "Done.",
        facts={"device": "a device"},
        rows=[
            {"shape": "S1", "pass": "forward", **timed},
            {"shape": "S1", "pass": "gradient", "failure": "no"},
        ],
    )
    screen = make_report(self_test, on_cpu, timing).as_screen()
    assert "2 of 3" in screen and "1.5 … 1.5" in screen and "0.5" in screen
    assert "avx9" in screen and "1 of 1" in screen and "0.12" in screen
    assert "a device" in screen
    assert "1.00 / 2.50" in screen and "2.50 ± 0.25" in screen


def test_a_report_is_written_if_asked_for_or_of_use(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fine, broken = make_report(), make_report(Check("x", "fail", "."))
    assert doctor._save(fine, None) == ""
    assert not list(tmp_path.iterdir())
    assert doctor._save(broken, None) == f"The report is in {doctor.DEFAULT_REPORT}."
    assert (tmp_path / doctor.DEFAULT_REPORT).is_file()
    asked = tmp_path / "asked.txt"
    assert doctor._save(fine, asked) == f"The report is in {asked}."


def test_a_report_that_cannot_be_written(tmp_path, monkeypatch):
    broken = make_report(Check("x", "fail", "."))
    said = doctor._save(broken, tmp_path / "no" / "folder.txt")
    assert said.startswith("The report could not be written: ")
    # Where a folder has the default's name, and where a temporary folder is.
    monkeypatch.chdir(tmp_path)
    (tmp_path / doctor.DEFAULT_REPORT).mkdir()
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    place = tmp_path / "t" / doctor.DEFAULT_REPORT
    assert doctor._save(broken, None) == f"The report is in {place}."


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no/folder.txt", "there is no folder "),
        ("", "it is a folder."),
        ("report.txt", "there is no permission to write there."),
    ],
)
def test_where_the_report_goes_is_looked_at_first(
    tmp_path, monkeypatch, capsys, place, reason
):
    monkeypatch.setattr(doctor, "run", lambda *args, **kwargs: pytest.fail("too late"))
    monkeypatch.setattr(command_options.os, "access", lambda path, mode: False)
    path = str(tmp_path / place)
    assert command_line.main(["doctor", "--report", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"doctor: --report {path} cannot be written: {reason}")
    assert said.count("\n") == 1


# -- Options and shapes ----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nurse"],
        ["doctor", "--shapes", "huge"],
        ["doctor", "--time-budget", "-1"],
        ["doctor", "--time-budget", "soon"],
        ["doctor", "--time-budget", "nan"],
    ],
    ids=str,
)
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: python -m jax_flash_metal" in said
    if "--time-budget" in arguments:
        assert "must be a number of seconds, at least 0, but is " in said


def test_seed_shapes():
    """The tables of the pull request, in its order."""
    shapes = [
        (s.batch_size, s.num_heads, s.num_kv_heads, s.length, s.head_dim)
        for s in SHAPE_SETS["seed"]
    ]
    assert shapes == [
        (2, 8, 8, 1, 64),
        (2, 8, 8, 4, 64),
        (2, 8, 8, 8, 64),
        (2, 8, 8, 8, 128),
        (2, 8, 8, 32, 64),
        (2, 8, 8, 64, 64),
        (2, 8, 8, 128, 64),
        (2, 8, 8, 128, 128),
        (2, 8, 8, 256, 128),
        (1, 32, 8, 512, 64),
        (1, 32, 8, 512, 128),
        (1, 32, 8, 1024, 64),
        (1, 32, 8, 1024, 128),
        (1, 32, 8, 2048, 64),
        (1, 32, 8, 2048, 128),
        (2, 32, 8, 256, 64),
        (2, 32, 4, 256, 64),
    ]
    assert str(SHAPE_SETS["seed"][9]) == "B1 Hq32 Hkv8 L512 D64"


@pytest.mark.parametrize("command", ["doctor", "bench", "counts"])
def test_a_misspelt_option_lists_those_of_its_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([command, "--no-such-option"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"jax_flash_metal {command} [-h]" in said
    assert said.endswith("error: unrecognized arguments: --no-such-option\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == jax_flash_metal.__version__
