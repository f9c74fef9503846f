"""What is remembered of proven kernels, where, and for how long."""

import json
import os
import threading
import warnings
from pathlib import Path

import jax
import pytest

import jax_flash_metal
from jax_flash_metal import kernel_proof, platforms
from jax_flash_metal.attention_library import (
    RESOURCE_EXHAUSTED,
    AttentionError,
    AttentionLibrary,
    CallShape,
)
from jax_flash_metal.kernel_cases import Verdict
from tests.support import native
from tests.support.processes import run_python

SHAPE = CallShape("float32", 100, 100, 2, 2, 64, 64)
FORWARD = "attention_forward_float32_d64_q32_k32_s4"
INTERNAL = 13


class Library(AttentionLibrary):
    """The library, with other facts and errors; counts its runs."""

    def __init__(self, *, error=None, facts=None, digest="digest"):
        super().__init__(native.load())
        self.runs = 0
        self.error = error
        self._facts, self._digest = facts, digest

    def run(self, problem, backward):
        self.runs += 1
        if self.error:
            raise self.error
        super().run(problem, backward)

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


def objection(library, shape=SHAPE, *, backward=False):
    return kernel_proof._Proofs(library).objection(shape, backward)


def test_a_kernel_is_proven_once(cache):
    library = Library()
    proofs = kernel_proof._Proofs(library)
    for _ in range(3):
        assert proofs.objection(SHAPE, False) is None
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
    assert proofs.objection(SHAPE, False) is None
    assert proofs.objection(SHAPE, True) is None
    assert library.runs == 2
    short = CallShape("float16", 3, 100, 2, 2, 200, 64)
    assert proofs.objection(short, False) is None
    assert library.runs == 3
    names = {*json.loads(next((cache / "proofs").iterdir()).read_text())["verdicts"]}
    assert names == {
        FORWARD,
        "attention_delta_float32_d256_q4_k8_s4",
        "attention_backward_dq_float32_d64_q32_k32_s4",
        "attention_backward_dkv_float32_d64_q16_k32_s4",
        "attention_short_forward_float16_d256_q8_k32_s4",
        "attention_short_forward_combine_float16_d256_q4_k8_s4",
    }


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
        assert proofs.objection(SHAPE, False) is None
    assert library.runs == 1


def test_without_a_cache_folder_a_process_remembers(monkeypatch):
    monkeypatch.setattr(platforms, "cache_folder", lambda: None)
    library = Library()
    proofs = kernel_proof._Proofs(library)
    for _ in range(2):
        assert proofs.objection(SHAPE, False) is None
    assert library.runs == 1


def test_a_failure_is_remembered():
    error = AttentionError(INTERNAL, "the GPU timed out")
    text = objection(Library(error=error))
    assert text == (
        f"the kernel {FORWARD} is disabled on software Metal device: it does not run: "
        "the GPU timed out"
    )
    later = Library()
    assert objection(later) == text
    assert later.runs == 0


def test_out_of_memory_is_not_remembered():
    error = AttentionError(RESOURCE_EXHAUSTED, "no memory")
    assert "no memory" in objection(Library(error=error))
    later = Library()
    assert objection(later) is None
    assert later.runs == 1


def test_an_error_that_names_a_kernel_blames_only_that():
    dq = "attention_backward_dq_float32_d64_q32_k32_s4"
    error = AttentionError(INTERNAL, f"the Metal compiler rejects {dq}: line 3: …")
    library = Library(error=error)
    proofs = kernel_proof._Proofs(library)
    assert "another kernel failed" in proofs.objection(SHAPE, True)
    # delta was asked first and has no verdict of its own: it is tested again.
    library.error = None
    later = Library()
    text = objection(later, backward=True)
    assert dq in text and "the Metal compiler rejects" in text


CRASH = """
import os, sys
sys.path.insert(0, {root!r})
from jax_flash_metal import kernel_proof
from tests.proof import test_kernel_proof as tests

class Crashing(tests.Library):
    def run(self, problem, backward):
        {crash}

print(tests.objection(Crashing()))
"""


def crash(how):
    root = str(Path(__file__).parents[2])
    program = CRASH.format(root=root, crash=how)
    cache_setting = {name: os.environ[name] for name in (platforms.CACHE_SETTING,)}
    return run_python(program, JAX_PLATFORMS="cpu", **cache_setting)


def test_a_kernel_that_crashes_the_process_does_so_once(cache):
    done = crash("os.abort()")
    assert done.returncode == -6
    library = Library()
    text = objection(library)
    assert text == (
        f"the kernel {FORWARD} is disabled on software Metal device: the process that "
        "tested it ended in the midst: it crashed or was killed"
    )
    assert library.runs == 0
    assert not list((cache / "proofs").glob("*.running"))
    # From now on it is in the file, as any failure.
    assert objection(Library()) == text


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "sys.exit(1)"])
def test_an_interrupted_proof_is_made_again(cache, how):
    assert crash(how).returncode != 0
    library = Library()
    assert objection(library) is None
    assert library.runs == 1


def test_a_proof_of_a_running_process_says_nothing(cache):
    """It may well be in the midst of it."""
    assert objection(Library(), SHAPE, backward=True) is None
    (file,) = (cache / "proofs").iterdir()
    mark = file.with_suffix(f".{os.getpid()}.running")
    mark.write_text(FORWARD)
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
    shape = CallShape("float32", 5, 5, 3, 2, 64, 64)
    assert objection(library, shape) is None
    assert library.runs == 0


def test_a_call_without_work_needs_no_proof():
    library = Library()
    assert objection(library, CallShape("float32", 0, 5, 2, 2, 64, 64)) is None


def test_explain_without_a_library(monkeypatch, tmp_path):
    monkeypatch.setattr(platforms, "LIBRARY", tmp_path / "none.so")
    kernel_proof._proofs.cache_clear()
    x = jax.ShapeDtypeStruct((2, 5, 4, 64), "float32")
    explanation = jax_flash_metal.explain(x, x, x, implementation="metal")
    assert explanation.implementation == "unsupported"
    assert explanation.reason.startswith("the native library ")
    assert explanation.reason.endswith("implementation='xla' needs no library.")


def test_doctor_replaces_what_is_known(monkeypatch):
    error = AttentionError(INTERNAL, "the GPU timed out")
    assert objection(Library(error=error)) is not None
    proofs = kernel_proof._Proofs(Library())
    monkeypatch.setattr(kernel_proof, "_proofs", lambda: proofs)
    kernel_proof.replace({FORWARD: Verdict(0.1)})
    assert kernel_proof.objection(SHAPE, backward=False) is None
    later = Library()
    assert objection(later) is None
    assert later.runs == 0


def test_many_threads_prove_once():
    library = Library()
    proofs = kernel_proof._Proofs(library)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(proofs.objection(SHAPE, False)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None] * 8
    assert library.runs == 1


def test_one_warning_per_reason(monkeypatch):
    monkeypatch.setattr(kernel_proof, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("a", "a", "b", "a"):
            kernel_proof.warn(f"the kernel {reason} is disabled")
    assert [w.category for w in caught] == [kernel_proof.KernelWarning] * 2
    assert str(caught[0].message) == (
        "jax_flash_metal: the kernel a is disabled. Calls that need it take the "
        "reference, which is right, but slower and with memory for q_len * kv_len "
        "scores. Please run `python -m jax_flash_metal doctor --report report.txt`, "
        "which tests the kernels again, and attach report.txt to an issue of "
        "jax-flash-metal."
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
