"""Bugs planted in copies of the CPU kernels: each is caught, by what should catch it.

Only the kernels for any CPU are built: what is planted is in the source that those of
all instruction sets share.
"""

import shutil
from collections.abc import Callable

import numpy as np
import pytest

from plugin import build
from tests.checker.planted import Bug
from tests.kernels.test_poison import HUGE, check_not_silent
from tests.support import native
from tests.support.cases import Case
from tests.support.kernel_check import check
from tests.support.poison import Poison, check_hidden, check_poison, rule_case

pytestmark = pytest.mark.slow

# The only kernel of the Metal library in it: the quickest to build.
_KERNEL = "attention_sinks_gradient"
_SIZES = {"kv_len": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": 20}


def _case(name, q_len=200, **features):
    return Case(f"planted-{name}", q_len=q_len, **_SIZES | features)


PLAIN = _case("plain")
CAUSAL = _case("causal", is_causal=True, q_offset=60)
SEGMENTS = _case("segments", segments="packed")
MASK = _case("mask", mask="random")
KEY_MASK = _case("key-mask", mask="random", mask_ones="nt")
WINDOW = _case("window", sliding_window=(70, 9))
BIAS = _case("bias", bias="float16")
SLOPES = _case("slopes", slopes=True, q_offset=60)
SOFTCAP = _case("softcap", logits_soft_cap=1.5)
DROPOUT = _case("dropout", dropout_rate=0.3)
LENGTHS = _case("lengths", query_lengths="mixed", kv_lengths="mixed")
SINKS = _case("sinks", sinks=True, kv_len=2)
HALF = _case("half", dtype="float16")
HUGE_ROWS = _case("huge-rows", bias="float32", bias_values="huge-rows")
PARTS = _case("parts", batch=(), q_len=3, kv_len=4500)
SHARED_BIAS = _case("shared-bias", bias="float32", bias_ones="nt", batch=(3,),
                    feature_batch={"bias": (1,)})  # fmt: skip
RIGHT = (
    *(PLAIN, CAUSAL, SEGMENTS, MASK, KEY_MASK, WINDOW, BIAS, SLOPES, SOFTCAP, DROPOUT),
    *(LENGTHS, SINKS, HALF, HUGE_ROWS, PARTS, SHARED_BIAS),
)


def judged(case):
    """Caught by the reference, with this case."""
    return lambda kernels: check(kernels, case)


def hidden(rule):
    """Caught because a hidden NaN changes a bit."""
    return lambda kernels: check_hidden(kernels, rule_case(rule, 40), np.nan)


def poisoned(rule):
    """Caught because a row that does not see a NaN value becomes NaN."""
    case = rule_case(rule, 40)
    return lambda kernels: check_poison(kernels, case, Poison("value", 33, np.nan))


def _seen(kernels):
    for operand in ("query", "key", "value", "dout"):
        check_poison(
            kernels, Case("planted-seen", **_SIZES), Poison(operand, 5, np.nan)
        )


def _silent(kernels):
    for query, key in HUGE:
        check_not_silent(kernels, Case("planted-silent", head_dim=16), query, key)


Check = Callable[[native.Recording], object]


def _bug(name: str, file: str, old: str, new: str, caught_by: Check, **places: int):
    return pytest.param(Bug(name, file, old, new, **places), caught_by, id=name)


BUGS = [
    # Who sees whom.
    _bug("causal-off-by-one", "masks.h", "Clamp(position + 1, 0, p.kv_len)",
         "Clamp(position, 0, p.kv_len)", judged(CAUSAL)),
    _bug("window-exclusive", "masks.h", "position - p.window_left,",
         "position - p.window_left + 1,", judged(WINDOW)),
    _bug("kv-lengths-ignored", "masks.h", "? head.kv_length : 0", "? p.kv_len : 0",
         judged(LENGTHS)),
    _bug("query-lengths-ignored", "masks.h", "query < head.query_length", "true",
         judged(LENGTHS)),
    _bug("some-segments-hide-none", "masks.h", "q_min == kv_max && q_max == kv_min",
         "q_min == kv_min", judged(SEGMENTS)),
    _bug("holes-of-a-mask-ignored", "masks.h", "return count == key_end - key_begin",
         "return count >= 0", judged(MASK)),
    _bug("last-key-of-a-mask-dropped", "masks.h", "static_cast<int32_t>(last + 1)",
         "static_cast<int32_t>(last)", judged(KEY_MASK)),
    _bug("mask-of-the-first-query", "masks.h",
         "(tile.first_query + i) * p.mask.row_stride", "i * p.mask.row_stride",
         judged(MASK)),
    _bug("hidden-by-range-only", "scores.h",
         "if (row.visible != nullptr) s.visible &= LoadBytes(row.visible + j);", "",
         judged(MASK)),
    _bug("bias-of-minus-infinity-shows", "masks.h",
         "BiasShows(head, tile.first_query + row, tile.first_key + column)",
         "head.scale >= 0",
         poisoned("hidden-bias")),
    # Scores.
    _bug("slopes-signed", "scores.h",
         "BitsOf(__builtin_convertvector(exact, V)) & 0x7fffffffu",
         "BitsOf(__builtin_convertvector(exact, V))", judged(SLOPES)),
    _bug("softcap-not-differentiated", "scores.h", "scores.tanh * scores.tanh",
         "scores.tanh", judged(SOFTCAP)),
    _bug("tanh-without-sign", "scores.h", "BitsOf(large) | sign",
         "BitsOf(large) | (sign & 1u)",
         judged(SOFTCAP)),
    _bug("dropout-words-swapped", "dropout.h", "(even < threshold) & 1u) | ((U)(odd",
         "(odd < threshold) & 1u) | ((U)(even", judged(DROPOUT)),
    _bug("sum-of-kept-ones", "scores.h", "sums[j / kWidth % 2] += p;",
         "sums[j / kWidth % 2] += r.kept && !r.kept[j] ? V{} : p;", judged(DROPOUT)),
    _bug("dp-not-dropped", "scores.h",
         "gradient = Select(kept, gradient * dropout_scale, V{});", "",
         judged(DROPOUT)),
    _bug("infinite-score-looks-hidden", "scores.h",
         "s.x = Select(IsFinite(s.x), s.x, nan);", "", _silent, occurrences=2),
    # NaN and inf.
    _bug("hidden-gradient-not-selected", "scores.h",
         "Select(scores.visible, gradient, V{})", "gradient", hidden("mask")),
    _bug("products-not-looked-at", "pack.h", "kLargeBits = (127u + 50u) << 23",
         "kLargeBits = 0x7fffffffu", _silent),
    _bug("values-not-sanitised", "pack.h", "bits = 0;", ";", hidden("mask-keys")),
    _bug("nan-of-a-value-swallowed", "forward.h", '= __builtin_nanf("")', "= 1.0f",
         _seen),
    _bug("nan-of-dout-swallowed", "score_gradient.h",
         'Select(is_finite, sum, Broadcast(__builtin_nanf("")))',
         "Select(is_finite, sum, V{})", _seen),
    # Sums and blocks.
    _bug("out-not-corrected", "forward.h", "if (correction == 1.0f) continue;",
         "continue;", judged(PLAIN)),
    _bug("sink-without-a-correction", "forward.h", "sum = sum * correction +",
         "sum = sum +", judged(SINKS)),
    _bug("parts-not-weighted", "forward.h",
         "sum += factor * call.partials.sum[place]", "sum += call.partials.sum[place]",
         judged(PARTS)),
    _bug("dlogsumexp-dropped", "score_gradient.h", "- *dlogsumexp.row(i)",
         "- 0 * *dlogsumexp.row(i)",
         judged(PLAIN)),
    _bug("coarse-rows-not-normalised", "score_gradient.h", "= 1.0f / sums[i]", "= 1.0f",
         judged(HUGE_ROWS)),
    _bug("dquery-of-the-last-block-only", "backward.h",
         "if (!is_first) x += LoadPart(sum, j, p.head_dim);", "(void)is_first;",
         judged(HALF)),
    _bug("one-head-of-a-group", "backward.h", "g < p.num_groups; ++g", "g < 1; ++g",
         judged(_case("one-key", kv_len=1, num_heads=2, num_kv_heads=1))),
    _bug("tail-of-a-row-unwritten", "pack.h",
         "if (col < width) std::memcpy(row + col, part,",
         "if (col < width - 1) std::memcpy(row + col, part,",
         judged(_case("tail", head_dim=17))),
    _bug("bias-gradient-of-one-head", "gradient.h",
         "plan.num_summed = CountPairs(p, false)", "plan.num_summed = 1",
         judged(SHARED_BIAS)),
]  # fmt: skip


def library_with(bug, folder, monkeypatch):
    """The CPU kernels for any CPU with the bug in it; None: with none."""
    tree = folder / "tree"
    shutil.copytree(build.ROOT / "plugin", tree / "plugin")
    for name in ("metal_kernels", "jax_flash_metal"):  # parameters and the version
        (tree / name).symlink_to(build.ROOT / name)
    cpu = tree / "plugin" / "cpu"
    for file in cpu.glob("kernels_avx*.cc"):
        file.unlink()
    for file in ("isa.cc", "kernels.h"):
        path = cpu / file
        path.write_text(path.read_text().replace("defined(__x86_64__)", "0"))
    if bug is not None:
        bug.plant(cpu)
    cache = build.default_cache()  # of the tree, which has all that is not changed
    monkeypatch.setattr(build, "ROOT", tree)
    return build.build(only={_KERNEL}, output=folder / "libplanted.so", cache=cache)


def _kernels(library):
    return native.Recording(native.load(library), backend="cpu")


def test_the_copy_without_a_bug_is_right(tmp_path, monkeypatch):
    kernels = _kernels(library_with(None, tmp_path, monkeypatch))
    for case in RIGHT:
        check(kernels, case)
    for caught_by in {param.values[1] for param in BUGS}:
        caught_by(kernels)


@pytest.mark.parametrize(("bug", "caught_by"), BUGS)
def test_a_bug_is_caught(bug, caught_by, tmp_path, monkeypatch):
    kernels = _kernels(library_with(bug, tmp_path, monkeypatch))
    with pytest.raises(AssertionError):
        caught_by(kernels)
