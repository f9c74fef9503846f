"""What is remembered of proven kernels, where, and for how long."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import jax
import pytest

import jax_flash_metal
from jax_flash_metal import kernel_cases, kernel_proof, platforms
from jax_flash_metal.attention_library import (
    RESOURCE_EXHAUSTED,
    AttentionError,
    AttentionLibrary,
    CallShape,
    shape_problem,
)
from jax_flash_metal.config import BACKENDS
from jax_flash_metal.kernel_cases import Verdict
from jax_flash_metal.variant_table import variants
from tests.support import native
from tests.support.processes import run_python


def call(*shape, backend="metal"):
    """A plain call of a CallShape."""
    return shape_problem(CallShape(*shape), backend=backend)


CALL = call("float32", 100, 100, 2, 2, 64, 64)
ON_CPU = call("float32", 100, 100, 2, 2, 64, 64, backend="cpu")


def row(template, dtype="float32", head_dim=64):
    """The name of the kernel that this device takes by default."""
    return next(
        v.host_name
        for v in variants()
        if (v.kernel, v.dtype) == (f"attention_{template}", dtype)
        and v.head_dim >= head_dim
        and (v.min_family, v.is_default) == (0, True)
    )


FORWARD = row("forward")
INTERNAL = 13


class Library(AttentionLibrary):
    """The library, with other facts and errors; counts its runs."""

    def __init__(
        self,
        *,
        errors=(),
        rejection=None,
        facts=None,
        digest="digest",
        backend="metal",
    ):
        """`errors`: of the first runs; `rejection`: of the compiler."""
        super().__init__(native.load(), backend=backend)
        self.runs = 0
        self.errors = list(errors)
        self.rejection = rejection
        self._facts, self._digest = facts, digest

    def compile(self, problem, which):
        if self.rejection and self._is_compiled(problem, which):
            raise self.rejection

    def _is_compiled(self, problem, which):
        """Whether the problem has the kernel that the rejection names, if any."""
        rows = {v.host_name for v in variants()}
        named = {name for name in rows if f"{name}:" in str(self.rejection)}
        return not named or not named.isdisjoint(self.kernels(problem, which))

    def run(self, problem, which):
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        super().run(problem, which)

    def device_facts(self):
        if isinstance(self._facts, AttentionError):
            raise self._facts
        return super().device_facts() | (self._facts or {})

    def kernel_digest(self):
        return self._digest


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv(platforms.CACHE_SETTING, str(folder))
    return folder


def objection(library, problem=CALL, which="forward", has_features=False):
    return kernel_proof._Proofs(library).objection(problem, which, has_features)


def test_a_kernel_is_proven_once(cache):
    library = Library()
    proofs = kernel_proof._Proofs(library)
    for _ in range(3):
        assert proofs.objection(CALL, "forward") is None
    assert library.runs == 1
    # By another process.
    later = Library()
    assert objection(later) is None
    assert later.runs == 0
    (file,) = (cache / "proofs").iterdir()
    content = json.loads(file.read_text())
    assert content["identity"]["kernels"] == "digest"
    assert set(content["verdicts"]) == {FORWARD}


def test_other_kernels_are_proven_when_they_are_needed(cache):
    library = Library()
    proofs = kernel_proof._Proofs(library)
    assert proofs.objection(CALL, "forward") is None
    assert proofs.objection(CALL, "backward") is None
    assert library.runs == 2
    short = call("float16", 3, 100, 2, 2, 200, 64)
    assert proofs.objection(short, "forward") is None
    assert library.runs == 3
    names = {*json.loads(next((cache / "proofs").iterdir()).read_text())["verdicts"]}
    assert names == {
        FORWARD,
        *(row("delta"), row("backward_dq_product")),
        f"{row('backward_dkv')} of form B",
        row("short_forward", "float16", 200),
        row("short_forward_combine", "float16"),
    }


def names_in(cache):
    (file,) = (cache / "proofs").iterdir()
    return set(json.loads(file.read_text())["verdicts"])


def test_a_call_with_options_is_proven_with_them_too(cache):
    library = Library()
    proofs = kernel_proof._Proofs(library)
    for _ in range(2):
        assert proofs.objection(CALL, "forward", True) is None
    # Plain, with options, and the mask's summary by the backward pass of other rows.
    mask_blocks = row("mask_blocks")
    assert library.runs == 3
    assert names_in(cache) >= {FORWARD, f"{FORWARD} with options", mask_blocks}
    # What a plain call asks is known by now.
    assert proofs.objection(CALL, "forward") is None
    assert library.runs == 3
    assert proofs.objection(CALL, "gradient", True) is None
    gradient = row("bias_gradient")
    assert names_in(cache) >= {
        f"{gradient} of bias",
        f"{gradient} of shared bias",
        f"{gradient} of alibi_slopes",
        row("bias_gradient_combine"),
        row("sinks_gradient"),
        row("delta"),
    }
    # By another process.
    later = Library()
    for which in ("forward", "gradient"):
        assert objection(later, which=which, has_features=True) is None
    assert later.runs == 0


def test_a_kernel_that_is_wrong_with_options_serves_plain_calls():
    class Wrong(Library):
        def run_forward(self, *operands, **options):
            out, logsumexp = super().run_forward(*operands, **options)
            return out + (0.5 if "bias" in options else 0), logsumexp

    proofs = kernel_proof._Proofs(Wrong())
    assert proofs.objection(CALL, "forward", False) is None
    text = proofs.objection(CALL, "forward", True)
    assert text.startswith(
        f"the kernel {FORWARD} with options is disabled on software Metal device: its "
        "out is wrong: "
    )
    assert proofs.objection(CALL, "forward", False) is None
    assert proofs.objection(CALL, "backward", True) is None


# -- The native CPU kernels ------------------------------------------------------------


def on_cpu(which, dtype="float32"):
    """The kernel of a pass that this machine's CPU would run."""
    family = AttentionLibrary(native.load(), backend="cpu").device_facts()["family"]
    return f"cpu_{which}_{dtype}_{family}"


def test_cpu_kernels_are_proven_once(cache):
    library = Library(backend="cpu")
    proofs = kernel_proof._Proofs(library, "cpu")
    short = call("float32", 3, 100, 2, 2, 200, 64, backend="cpu")
    for problem in (ON_CPU, short):
        assert proofs.objection(problem, "forward") is None
    kernel = on_cpu("forward")
    plain = {kernel, f"{kernel} for few queries"}
    assert names_in(cache) == plain
    assert library.runs == 2
    assert proofs.objection(ON_CPU, "forward", True) is None
    with_options = {f"{kernel} with options", f"{kernel} with options for few queries"}
    assert names_in(cache) == plain | with_options
    assert library.runs == 4
    # By another process.
    later = kernel_proof._Proofs(Library(backend="cpu"), "cpu")
    assert later.objection(ON_CPU, "forward", True) is None
    assert later.family == kernel.rpartition("float32_")[2]
    assert later._library.runs == 0
    # The Metal kernels are another device's.
    assert objection(Library()) is None
    assert len(list((cache / "proofs").iterdir())) == 2


def test_the_passes_of_the_cpu_kernels_are_proven_when_they_are_needed(cache):
    library = Library(backend="cpu")
    proofs = kernel_proof._Proofs(library, "cpu")
    assert proofs.objection(ON_CPU, "backward") is None
    backward = on_cpu("backward")
    assert names_in(cache) == {backward, f"{backward} for few queries"}
    half = call("bfloat16", 100, 100, 2, 2, 64, 64, backend="cpu")
    assert proofs.objection(half, "gradient", True) is None
    assert library.runs == 6
    gradient = on_cpu("gradient", "bfloat16")
    operands = ("bias", "shared bias", "sinks", "alibi_slopes")
    assert names_in(cache) >= {f"{gradient} of {operand}" for operand in operands}


def test_cpu_kernels_that_are_wrong_with_options_serve_plain_calls():
    class Wrong(Library):
        def run_forward(self, *operands, **options):
            out, logsumexp = super().run_forward(*operands, **options)
            return out + (0.5 if "bias" in options else 0), logsumexp

    proofs = kernel_proof._Proofs(Wrong(backend="cpu"), "cpu")
    assert proofs.objection(ON_CPU, "forward", False) is None
    text = proofs.objection(ON_CPU, "forward", True)
    assert text.startswith(f"the kernel {on_cpu('forward')} with options is disabled ")
    assert ": its out is wrong: " in text
    assert proofs.objection(ON_CPU, "forward", False) is None
    assert proofs.objection(ON_CPU, "backward", True) is None


def test_the_first_call_of_the_cpu_kernels_is_not_slow():
    """30 ms of proofs are to be had; this leaves room for a busy machine."""
    times = []
    for _ in range(3):
        kernel_cases.cpu_cases.cache_clear()
        shutil.rmtree(platforms.cache_folder(), ignore_errors=True)
        started = time.perf_counter()
        assert (
            kernel_proof._Proofs(Library(backend="cpu"), "cpu").objection(
                ON_CPU, "forward"
            )
            is None
        )
        times.append(time.perf_counter() - started)
    assert min(times) < 0.5


def test_a_crash_of_a_cpu_kernel_is_seen_in_another_process(cache, ends):
    """The mark of a process that has not come to its end makes it a process's own."""
    proofs = kernel_proof._Proofs(Library(backend="cpu"), "cpu")
    mark = proofs._path.with_suffix(".other.running")
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert proofs.objection(ON_CPU, "forward") is None  # by a real process
    assert proofs._library.runs == 0
    ends(-signal.SIGILL)
    text = proofs.objection(ON_CPU, "backward")
    assert text.endswith("its test crashed (SIGILL)")
    assert text.startswith(f"the kernel {on_cpu('backward')} is disabled on ")


# -- What the verdicts hold for --------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "another"},
        {"facts": {"name": "Apple M9"}},
        {"facts": {"system": "macOS 99.1 (99A1)"}},
    ],
    ids=str,
)
def test_a_proof_holds_for_one_device_system_and_library(change):
    assert objection(Library()) is None
    changed = Library(**change)
    assert objection(changed) is None
    assert changed.runs == 1


def test_a_proof_holds_for_one_version(monkeypatch):
    assert objection(Library()) is None
    monkeypatch.setattr(kernel_proof, "__version__", "9.9.9")
    changed = Library()
    assert objection(changed) is None
    assert changed.runs == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"identity": null}', '{"verdicts": 3}', "\0"]
)
def test_a_file_that_is_not_ours_is_written_anew(cache, text):
    assert objection(Library()) is None
    (file,) = (cache / "proofs").iterdir()
    good = file.read_text()
    file.write_text(text)
    library = Library()
    assert objection(library) is None
    assert library.runs == 1
    assert file.read_text() == good


def test_broken_verdicts_are_written_anew(cache):
    assert objection(Library()) is None
    (file,) = (cache / "proofs").iterdir()
    content = json.loads(file.read_text())
    content["verdicts"] = {FORWARD: {"error": 0}}
    file.write_text(json.dumps(content))
    library = Library()
    assert objection(library) is None
    assert library.runs == 1


def test_without_a_place_to_write_a_process_remembers(cache):
    cache.write_text("a file where the folder should be")
    library = Library()
    proofs = kernel_proof._Proofs(library)
    for _ in range(2):
        assert proofs.objection(CALL, "forward") is None
    assert library.runs == 1


def test_without_a_cache_folder_a_process_remembers(monkeypatch):
    monkeypatch.setattr(platforms, "cache_folder", lambda: None)
    library = Library()
    proofs = kernel_proof._Proofs(library)
    for _ in range(2):
        assert proofs.objection(CALL, "forward") is None
    assert library.runs == 1


def test_without_room_nothing_is_left_behind(cache, monkeypatch):
    """Of what is written before it is renamed."""

    def no_room(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_proof.os, "replace", no_room)
    assert objection(Library()) is None
    assert not list((cache / "proofs").iterdir())


def rejection(name):
    return AttentionError(INTERNAL, f"the Metal compiler rejects {name}: line 3: …")


def test_a_kernel_that_does_not_compile_is_remembered():
    text = objection(Library(rejection=rejection(FORWARD)))
    assert text == (
        f"the kernel {FORWARD} is disabled on software Metal device: it does not "
        f"compile: the Metal compiler rejects {FORWARD}: line 3: …"
    )
    later = Library()
    assert objection(later) == text
    assert later.runs == 0


def test_a_compiler_without_memory_is_not_remembered():
    no_memory = AttentionError(RESOURCE_EXHAUSTED, "no memory")
    assert "no memory" in objection(Library(rejection=no_memory))
    assert objection(Library()) is None


def gpu_error(reason):
    return AttentionError(INTERNAL, f"a GPU failed: {reason}")


def test_a_kernel_that_does_not_run_is_tried_once_more():
    library = Library(errors=[gpu_error("Innocent Victim")])
    assert objection(library) is None
    assert library.runs == 2


def test_a_kernel_that_does_not_run_is_not_remembered():
    """It may be another's fault: of another program on the same GPU, for one."""
    library = Library(errors=[gpu_error("Innocent Victim"), gpu_error("Timeout")])
    proofs = kernel_proof._Proofs(library)
    for _ in range(2):
        assert proofs.objection(CALL, "forward") == (
            f"the kernel {FORWARD} is disabled on software Metal device in this "
            "process: it does not run: a GPU failed: Timeout"
        )
    assert library.runs == 2
    later = Library()
    assert objection(later) is None
    assert later.runs == 1


def test_an_error_that_names_a_kernel_blames_only_that():
    dq = row("backward_dq_product")
    proofs = kernel_proof._Proofs(Library(rejection=rejection(dq)))
    assert "another kernel failed" in proofs.objection(CALL, "backward")
    # delta proved itself in form A; dkv has no verdict of its own: it is tested again.
    text = objection(Library(), which="backward")
    assert dq in text and "the Metal compiler rejects" in text


# -- Processes that end in the midst ---------------------------------------------------

DYING = """
import os, signal, sys
from tests.proof import test_kernel_proof as tests

class Dying(tests.Library):
    def run(self, problem, which):
        {end}

print(tests.objection(Dying()))
"""


def dying(end, cache):
    setting = {platforms.CACHE_SETTING: str(cache)}
    return run_python(DYING.format(end=end), JAX_PLATFORMS="cpu", **setting)


def marks(cache):
    return [path.name for path in (cache / "proofs").glob("*.running")]


@pytest.mark.parametrize(
    "name",
    [
        *("SIGKILL", "SIGSEGV"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGHUP")),
    ],
)
def test_one_process_that_ends_in_the_midst_says_nothing(cache, name):
    """It may have been killed by a user, by the system, or with its terminal."""
    # What started the tests, nohup for one, may have had the signal ignored.
    restore = f"signal.signal(signal.{name}, signal.SIG_DFL); "
    kill = f"os.kill(os.getpid(), signal.{name})"
    done = dying((restore if name != "SIGKILL" else "") + kill, cache)
    assert done.returncode == -signal.Signals[name]
    assert len(marks(cache)) == 1
    library = Library()
    assert objection(library) is None
    assert library.runs == 0  # in this process: it could crash it
    assert not marks(cache)
    later = Library()
    assert objection(later) is None
    assert later.runs == 0


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "sys.exit(1)"])
def test_an_interrupted_proof_is_made_again(cache, end):
    assert dying(end, cache).returncode != 0
    assert not marks(cache)
    library = Library()
    assert objection(library) is None
    assert library.runs == 1


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """The cache folder of a process that has not come to the end of its proof."""
    folder = tmp_path_factory.mktemp("killed") / "cache"
    dying("os.kill(os.getpid(), signal.SIGKILL)", folder)
    assert len(marks(folder)) == 1
    return folder


@pytest.fixture
def marked(left_behind, cache):
    """A copy of that folder is the one of this process."""
    shutil.copytree(left_behind, cache)
    return cache


@pytest.fixture
def ends(monkeypatch):
    """Gives a function: how processes that test a kernel end."""

    def set_end(code, stdout="", error=None):
        def run(command, **options):
            if error is not None:
                raise error
            return subprocess.CompletedProcess(command, code, stdout, "")

        monkeypatch.setattr(kernel_proof.subprocess, "run", run)

    return set_end


def test_a_crash_that_was_seen_is_remembered(marked, ends):
    ends(-signal.SIGABRT)
    library = Library()
    text = objection(library)
    assert text == (
        f"the kernel {FORWARD} is disabled on software Metal device: its test crashed "
        "(SIGABRT)"
    )
    assert library.runs == 0
    # From now on it is in the file, as any failure.
    assert objection(Library()) == text
    # And no other kernel is trusted not to crash.
    library = Library()
    assert "crashed" in objection(library, which="backward")
    assert library.runs == 0


def test_a_test_that_was_killed_is_made_again(marked, ends):
    """By the system, which had no memory, for one."""
    ends(-signal.SIGKILL)
    assert objection(Library()) == (
        f"the kernel {FORWARD} is disabled on software Metal device in this process: "
        "its test was killed (SIGKILL)"
    )
    # Again not in the process itself.
    ends(-signal.SIGABRT)
    assert "crashed" in objection(Library())


def test_a_test_that_hangs_is_made_again(marked, ends):
    ends(0, error=subprocess.TimeoutExpired("python", 120))
    assert objection(Library()).endswith(
        "in this process: its test did not end within 120 s"
    )
    ends(-signal.SIGABRT)
    assert "crashed" in objection(Library())


@pytest.mark.parametrize(
    "end",
    [
        {"code": 1},
        {"code": 0, "stdout": "a word of another"},
        {"code": 0, "error": PermissionError("no processes here")},
    ],
    ids=str,
)
def test_where_no_process_can_test_it_this_one_does(marked, ends, end):
    ends(**end)
    library = Library()
    assert objection(library) is None
    assert library.runs == 1
    assert not marks(marked)


@pytest.mark.parametrize(
    ("name", "value"), [("frozen", True), ("executable", ""), ("executable", None)]
)
def test_an_application_is_not_started_again(marked, ends, monkeypatch, name, value):
    """Its executable is no Python."""
    ends(0, error=AssertionError("a process was started"))
    monkeypatch.setattr(sys, name, value, raising=False)
    library = Library()
    assert objection(library) is None
    assert library.runs == 1


def test_no_device():
    error = AttentionError(5, "no Metal device: there is none.")
    assert objection(Library(facts=error)) == (
        "the kernels have no device to run on: no Metal device: there is none"
    )


def test_a_call_that_no_kernels_take_is_not_objected_to():
    """Its own error says it better."""
    library = Library()
    assert objection(library, call("float32", 5, 5, 3, 2, 64, 64)) is None
    assert library.runs == 0


def test_a_call_without_work_needs_no_proof():
    library = Library()
    assert objection(library, call("float32", 0, 5, 2, 2, 64, 64)) is None


def test_explain_without_a_library(monkeypatch, tmp_path):
    jax.devices()  # platform flash_metal needs the library to start
    monkeypatch.setattr(platforms, "LIBRARY", tmp_path / "none.so")
    kernel_proof._only_proofs.cache_clear()
    x = jax.ShapeDtypeStruct((2, 5, 4, 64), "float32")
    for backend in BACKENDS:
        explanation = jax_flash_metal.explain(
            x, x, x, implementation=backend, platform="cpu"
        )
        assert explanation.implementation == "unsupported"
        assert explanation.reason.startswith("the native library ")
        assert explanation.reason.endswith("implementation='xla' needs no library.")


def test_doctor_replaces_what_is_known(monkeypatch):
    assert objection(Library(rejection=rejection(FORWARD))) is not None
    proofs = kernel_proof._Proofs(Library())
    monkeypatch.setattr(kernel_proof, "_proofs", {"metal": proofs}.get)
    kernel_proof.replace("metal", {FORWARD: Verdict(0.1)})
    assert kernel_proof.objection("metal", CALL, "forward", False) is None
    later = Library()
    assert objection(later) is None
    assert later.runs == 0


def test_many_threads_prove_once():
    library = Library()
    proofs = kernel_proof._Proofs(library)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(proofs.objection(CALL, "forward")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None] * 8
    assert library.runs == 1


def test_many_threads_share_the_proofs(monkeypatch):
    made = []

    def slow(library, backend):
        time.sleep(0.05)
        made.append(library)
        return library

    kernel_proof._only_proofs.cache_clear()
    monkeypatch.setattr(kernel_proof, "_Proofs", slow)
    threads = [
        threading.Thread(target=kernel_proof._proofs, args=("cpu",)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel_proof._only_proofs.cache_clear()
    assert len(made) == 1


def test_one_warning_per_reason(monkeypatch):
    monkeypatch.setattr(kernel_proof, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("a", "a", "b", "a"):
            kernel_proof.warn(f"the kernel {reason} is disabled")
    assert [w.category for w in caught] == [kernel_proof.KernelWarning] * 2
    assert str(caught[0].message) == (
        "jax_flash_metal: the kernel a is disabled. Such calls take the reference, "
        "which is right, but slower and with memory for q_len * kv_len scores. Please "
        "run `python -m jax_flash_metal doctor --report report.txt`, which tests the "
        "kernels again, and attach report.txt to an issue of jax-flash-metal."
    )


@pytest.mark.parametrize(
    ("system", "settings", "expected"),
    [
        ("linux", {"JAX_FLASH_METAL_CACHE": "/a/b"}, "/a/b"),
        ("darwin", {"JAX_FLASH_METAL_CACHE": "/a/b"}, "/a/b"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/jax-flash-metal"),
        ("linux", {"HOME": "/here/me"}, "/here/me/.cache/jax-flash-metal"),
        ("darwin", {"HOME": "/Users/me"}, "/Users/me/Library/Caches/jax-flash-metal"),
        (
            "darwin",
            {"HOME": "/Users/me", "XDG_CACHE_HOME": "/x"},
            "/Users/me/Library/Caches/jax-flash-metal",
        ),
    ],
)
def test_cache_folder(monkeypatch, system, settings, expected):
    for name in ("JAX_FLASH_METAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platforms.sys, "platform", system)
    assert str(platforms.cache_folder()) == expected


def test_no_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(platforms.CACHE_SETTING)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(platforms.Path, "home", no_home)
    assert platforms.cache_folder() is None


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_user_who_is_not_there(monkeypatch, system):
    """The setting names a home that does not exist: nothing is kept."""
    monkeypatch.setenv(platforms.CACHE_SETTING, "~no-such-user/x")
    monkeypatch.setattr(platforms.sys, "platform", system)
    assert platforms.cache_folder() is None


# -- Texts of the library --------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a\nb\n"])
def test_a_whole_text(text):
    assert CutLibrary(text.encode()).cpu_isas() == text.splitlines()


@pytest.mark.parametrize("text", ["a\nb", "kernel\n" * 10000, "x" * 70000])
def test_a_text_that_was_cut_is_an_error(text):
    with pytest.raises(RuntimeError, match=r"the end is missing: …'.*'$"):
        CutLibrary(text.encode()).cpu_isas()


class CutLibrary(AttentionLibrary):
    """Writes a text as the library's functions do."""

    def __init__(self, text):
        self._text_to_write = text
        self._library = types.SimpleNamespace(jfm_cpu_isas=self._write)

    def _write(self, text, size):
        text.value = self._text_to_write[: size - 1]
        return 0
