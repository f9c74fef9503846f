"""What is kept of measurements, for whom, and what keeps it from being used."""

import dataclasses
import errno
import fcntl
import json
import logging
import math
import threading

import pytest

from jax_flash_metal import kernel_proof, platforms, tunings
from jax_flash_metal.attention_library import AttentionError
from jax_flash_metal.kernel_choices import Choice
from jax_flash_metal.tunings import (
    Chosen,
    Store,
    Timing,
    Tuning,
    TuningWarning,
    Unfused,
)
from tests.autotune.fake_library import FakeLibrary, disable, install, library, name
from tests.autotune.test_choice import Times, shapes, tune
from tests.support.processes import output_of

__all__ = ["library"]  # a fixture

CLASS = "float16 d64 v64 q64 k64 n16 g2"


def tuning(shape_class=CLASS, block_q=32, unfused=None):
    kernels = (name("forward", block_q),)
    return Tuning(
        shape_class=shape_class,
        created="2026-01-02T03:04:05+00:00",
        device="Fake GPU",
        forward=Chosen("-", kernels, 1.5, 2.0),
        backward=None,
        unfused=unfused,
        timings=(
            Timing("forward", "-", kernels, 1.5),
            Timing("forward", "-", (name("forward", 64),), None, "it is wrong"),
        ),
    )


def restart(monkeypatch, fake=None):
    """As in a new process, with another library of the same kernels."""
    fake = fake or FakeLibrary()
    install(monkeypatch, fake)
    return fake


def files(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "autotune").iterdir())


def test_a_later_process_uses_it(library, monkeypatch):
    result = tune(Times(forward16=0.5, dkv16=0.5))
    later = restart(monkeypatch)
    assert later.choices == {}
    assert tunings.load() == {CLASS: result}
    assert later.choices == library.choices != {}
    times = Times()
    stored = tune(times)
    assert (stored, stored.origin) == (result, "stored")
    assert not times.groups


def test_everything_is_kept(library):
    unfused = Unfused(
        "flash_metal",
        {"forward": 0.25, "forward+backward": 0.5},
        {"forward": 0.5, "forward+backward": 1.0},
    )
    kept = tuning(unfused=unfused)
    tunings.keep(kept)
    assert tunings.store().read() == {CLASS: kept}
    assert kept.unfused.gain == 2.0


def test_a_new_result_replaces_the_old_one_and_no_other(library, monkeypatch):
    other = f"{CLASS} causal"
    tunings.keep(tuning(other, 64))
    tunings.keep(tuning())
    newer = tuning(block_q=64)
    tunings.keep(newer)
    assert library.choices[CLASS, "forward"][1] == [name("forward", 64)]
    restart(monkeypatch)
    assert tunings.load() == {CLASS: newer, other: tuning(other, 64)}


@pytest.mark.parametrize(
    "change",
    [
        {"family": 9},
        {"digest": "other kernels"},
        {"device_facts": lambda: {"name": "Other GPU"}},
        {"device_facts": lambda: {"name": "Fake GPU", "system": "Fake OS 2"}},
    ],
    ids=["family", "kernels", "name", "system"],
)
def test_another_device_or_library_starts_anew(library, monkeypatch, change):
    tunings.keep(tuning())
    other = FakeLibrary()
    for attribute, value in change.items():
        setattr(other, attribute, value)
    restart(monkeypatch, other)
    assert tunings.load() == {}
    assert other.choices == {}
    restart(monkeypatch)
    assert tunings.load() == {CLASS: tuning()}


def test_another_version_starts_anew(library, monkeypatch):
    tunings.keep(tuning())
    restart(monkeypatch)
    monkeypatch.setattr(tunings, "__version__", "99.0")
    assert tunings.load() == {}


@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_the_setting_turns_it_off(library, monkeypatch, value):
    tunings.keep(tuning())
    later = restart(monkeypatch)
    monkeypatch.setenv(tunings.SETTING, value)
    assert tunings.load() == {}
    assert later.choices == {}
    restart(monkeypatch)
    monkeypatch.setenv(tunings.SETTING, "")
    assert tunings.load() == {CLASS: tuning()}


def test_without_a_file_no_device_is_opened(library, monkeypatch):
    def device_facts():
        raise AssertionError

    library.device_facts = device_facts
    assert tunings.load() == {}


def test_without_a_device_nothing_is_used(library, monkeypatch):
    tunings.keep(tuning())
    later = restart(monkeypatch)

    def device_facts():
        raise AttentionError(5, "there is no device")

    later.device_facts = device_facts
    assert tunings.load() == {}


# -- Files that are not what they should be --------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace("Fake OS 1", "Fake OS 2"),
        lambda text: text.replace("1.5", "-1.5"),
        lambda text: text.replace("1.5", '"fast"'),
        lambda text: text.replace('"default_seconds"', '"seconds_by_default"'),
        lambda text: text.replace('"which"', '"pass"'),
        lambda text: "\0",
        lambda text: "[" * 100_000,
        lambda text: text.replace("1.5", "1" + "0" * 400),
        lambda text: text.replace("1.5", "1" + "0" * 5000),
        lambda text: text.replace("1.5", "true"),
        lambda text: text.replace("1.5", "NaN"),
        lambda text: text.replace(CLASS, r"\ud800"),
        lambda text: text.replace(CLASS, r"a\tb"),
        lambda text: text.replace("Fake GPU", r"\ud800"),
        lambda text: text.replace("it is wrong", r"\ud800"),
        lambda text: text.replace('"unfused": null', '"unfused": {}'),
        lambda text: text.replace('"unfused": null', '"unfused": []'),
        lambda text: text.replace('"unfused": null', '"unfused": null, "more": 1'),
        lambda text: text.replace('"backward": null', '"backward": 1'),
        lambda text: text.replace('"form": "-"', '"form": "B"', 1),
        lambda text: text.replace(f'"{name("forward", 32)}"', "1, 2"),
        lambda text: text.replace(f'"{name("forward", 64)}"', "1"),
        lambda text: text.replace(f'"{name("forward", 32)}"', ""),
        lambda text: text.replace('"schema": 1', '"schema": 1, "more": 1'),
    ],
    ids=range(28),
)
def test_a_damaged_file_is_kept_aside(library, monkeypatch, tmp_path, damage):
    tunings.keep(tuning())
    path = tunings.store().path
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    later = restart(monkeypatch)
    text = r"the measurements in .* cannot be read"
    with pytest.warns(TuningWarning, match=text) as warned:
        assert tunings.load() == {}
        assert tunings.store().read() == {}
    assert len(warned) == 1
    str(warned[0].message).encode("ascii", "strict")
    assert path.read_text() == damaged
    assert later.choices == {}
    other = tuning(f"{CLASS} causal")
    tunings.keep(other)
    assert path.with_suffix(".corrupt").read_text() == damaged
    assert tunings.store().read() == {other.shape_class: other}


def test_a_kernel_that_is_not_there_is_left_out(library, monkeypatch):
    tunings.keep(tuning())
    path = tunings.store().path
    other = tuning(f"{CLASS} causal", 64)
    tunings.keep(other)
    path.write_text(path.read_text().replace(name("forward", 32), "no_such_kernel"))
    later = restart(monkeypatch)
    with pytest.warns(TuningWarning, match='what was measured of .* "no_such_kernel"'):
        assert tunings.load() == {other.shape_class: other}
    assert set(later.choices) == {(other.shape_class, "forward")}


def test_a_kernel_that_is_disabled_by_now_is_left_out(library, monkeypatch, caplog):
    tunings.keep(tuning())
    other = tuning(f"{CLASS} causal", 64)
    tunings.keep(other)
    later = restart(monkeypatch)
    disable(monkeypatch, name("forward", 32))
    with caplog.at_level(logging.INFO, logger="jax_flash_metal"):
        assert set(tunings.load()) == {other.shape_class}
    assert f"{name('forward', 32)} is disabled" in caplog.text
    assert set(later.choices) == {(other.shape_class, "forward")}


def test_a_pass_whose_kernels_are_right_keeps_them(library, monkeypatch):
    """A program may have been compiled with them; the table's are not proven then."""
    dq, dkv = name("backward_dq", 32), name("backward_dkv", 64)
    both = dataclasses.replace(tuning(), backward=Chosen("A", (dq, dkv), 1.5, 2.0))
    tunings.keep(both)
    later = restart(monkeypatch)
    disable(monkeypatch, dkv)
    assert tunings.load() == {CLASS: tuning()}
    assert set(later.choices) == {(CLASS, "forward")}
    assert tunings.store().read() == {CLASS: both}


@pytest.mark.parametrize(
    ("options", "has_features"),
    [("", False), (" causal", False), (" causal bias", True)],
)
def test_what_is_known_is_asked_for_the_calls_of_the_class(
    library, monkeypatch, options, has_features
):
    tunings.keep(tuning(f"{CLASS}{options}"))
    restart(monkeypatch)
    asked = []
    monkeypatch.setattr(kernel_proof, "known_failure", lambda *call: asked.append(call))
    tunings.load()
    assert asked == [(Choice("-", (name("forward", 32),)), has_features)]


def test_a_folder_that_cannot_be_written(library, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(TuningWarning, match="used in this process, but not kept"):
        result = tune(Times(forward16=0.5))
    # In this process all the same, beside what was found before.
    with pytest.warns(TuningWarning, match="causal is used in this process"):
        other = tune(Times(), *shapes(), is_causal=True)
    assert tunings.load() == {x.shape_class: x for x in (result, other)}
    assert library.choices[CLASS, "forward"][1] == [name("forward", 32)]
    restart(monkeypatch)
    assert tunings.load() == {}


def test_no_cache_folder(library, monkeypatch):
    monkeypatch.setattr(platforms, "cache_folder", lambda: None)
    result = tune(Times())
    assert tunings.load() == {CLASS: result}


# -- Several at once -------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from jax_flash_metal.tunings import Store, Tuning
store = Store({{"name": "a device"}}, Path({folder!r}))
print("ready", flush=True)
while not Path({folder!r}, "go").exists():
    pass
for i in range({count}):
    store.add(
        Tuning(f"{who} {{i}}", "now", "a device", None, None, None, ())
    )
"""


def test_two_processes_lose_nothing(tmp_path):
    count, people = 40, ("one", "other")
    said = {}

    def run(who):
        program = WRITER.format(folder=str(tmp_path), who=who, count=count)
        said[who] = output_of(program)

    threads = [threading.Thread(target=run, args=(who,)) for who in people]
    for thread in threads:
        thread.start()
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()
    assert said == dict.fromkeys(people, "ready")
    kept = Store({"name": "a device"}, tmp_path).read()
    assert set(kept) == {f"{who} {i}" for who in people for i in range(count)}


def test_without_the_lock_nothing_is_written(library, monkeypatch):
    """Another process keeps it, or the file system has no locks."""
    tunings.keep(tuning())
    path = tunings.store().path
    before = path.read_text()
    monkeypatch.setattr(tunings, "_LOCK_SECONDS", 0.02)
    other = tuning(f"{CLASS} causal", 64)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(
            TuningWarning, match=r"causal is used in .* has locked .*lock"
        ):
            tunings.keep(other)
    assert path.read_text() == before
    assert tunings.load() == {CLASS: tuning(), other.shape_class: other}
    assert (other.shape_class, "forward") in library.choices

    def flock(file, how):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(TuningWarning, match=r"window is used in .* no locks here"):
        tunings.keep(tuning(f"{CLASS} window"))
    assert path.read_text() == before


def test_what_could_not_be_read_again_is_not_written(library):
    tunings.keep(tuning())
    chosen = dataclasses.replace(tuning().forward, seconds=math.nan)
    with pytest.raises(ValueError, match="a time must be positive, but got nan"):
        tunings.keep(dataclasses.replace(tuning(), forward=chosen))
    assert tunings.store().read() == {CLASS: tuning()}


def test_what_others_have_stored_is_taken_along(library, monkeypatch):
    """By a process that stores something itself."""
    assert tunings.load() == {}
    other = tuning(f"{CLASS} causal")
    tunings.store().add(other)  # as another process would
    assert tunings.load() == {}
    tunings.keep(tuning())
    assert tunings.load() == {CLASS: tuning(), other.shape_class: other}


def test_the_file_is_replaced_at_once(library, monkeypatch):
    """A reader never sees half of it: what cannot be written leaves the old one."""
    tunings.keep(tuning())
    before = tunings.store().path.read_text()

    def dump(content, file, indent):
        file.write("half")
        raise OSError("no space")

    monkeypatch.setattr(tunings.json, "dump", dump)
    with pytest.warns(TuningWarning, match="not kept for others: OSError: no space"):
        tunings.keep(tuning(f"{CLASS} causal"))
    assert tunings.store().path.read_text() == before
    assert {p.suffix for p in tunings.store().path.parent.iterdir()} == {
        *(".json", ".lock"),
    }


# -- Texts -----------------------------------------------------------------------------


def test_summary(library):
    unfused = Unfused(
        "flash_metal",
        {"forward": 0.25, "forward+backward": 0.0004},
        {"forward": 0.5, "forward+backward": 0.002},
    )
    assert str(tuning(unfused=unfused)).splitlines() == [
        f"{CLASS} on Fake GPU (stored 2026-01-02T03:04:05+00:00)",
        "  forward d64_q32_k32_b64_s4: 1.5 s, the default 2 s (1 measured)",
        "  backward: not measured, the table's defaults",
        "  whole call, forward+backward: 2 ms by the kernels, 400 µs unfused: unfused "
        "is taken",
        f"  left out: {name('forward', 64)}: it is wrong",
    ]


def test_rows_in_words(library):
    kernels = (name("backward_dkv", 16), name("backward_dq_product", 32))
    assert tunings.describe("backward", Choice("B", kernels)) == (
        "backward form B dkv d64_q16_k32_b64_s4 + dq_product d64_q32_k32_b64_s4"
    )
    forward = Choice("-", (name("forward", 16),))
    assert tunings.describe("forward", forward) == "forward d64_q16_k32_b64_s4"
    short = Choice("-", (name("short_forward", 8),))
    assert tunings.describe("forward", short) == "forward short d64_q8_k32_b64_s4"


def test_the_file_is_as_the_docs_say(library, tmp_path):
    tunings.keep(tuning())
    (path, _) = sorted((tmp_path / "cache" / "autotune").iterdir())
    content = json.loads(path.read_text())
    assert set(content) == {"schema", "identity", "tunings"}
    assert content["identity"] == {
        **{"device": "apple", "name": "Fake GPU", "family": "Apple0"},
        **{"system": "Fake OS 1", "package": tunings.__version__, "kernels": "digest"},
    }
    assert content["tunings"][CLASS]["forward"]["kernels"] == [name("forward", 32)]
