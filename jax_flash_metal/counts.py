"""`python -m jax_flash_metal counts`: what the kernels do, counted, not timed.

Runs small problems on the software device's checker build, which counts every launch
exactly, and sets the counts beside the least that the tiling allows. Needs a source
tree, where that build can be made. For users: docs/counts.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_flash_metal import command_options, gpu_counts, gpu_planner
from jax_flash_metal.benchmark_shapes import DTYPES, AttentionShape
from jax_flash_metal.variant_table import Variant, variants

# Apple's GPU families: 7 is M1, 8 M2, 9 M3 and M4. 0 is none of them, as the software
# device: the rows that a GPU takes of which nothing is known.
FAMILIES = (0, 7, 8, 9)
FORMS = ("A", "B")
DEFAULT_SHAPES = ((1, 2, 256, 64), (1, 2, 256, 128))  # B N L D: seconds each
# Estimates of registers and code size, where tools/kernel_resources.py has made them.
RESOURCES = Path(__file__).parent / "kernel_resources.json"

_FRAGMENT = 8  # rows and columns of a matrix product's operands


class CountsError(Exception):
    """Nothing can be counted here; the message says why."""


# -- The least that a tiling allows ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a kernel reads and writes for one head, in words of its block of rows.

    Attributes:
      rows: Whose rows a simdgroup owns, "query" or "key".
      products: For each visible block of scores, over the columns of one operand each.
      owned: Operands of which a simdgroup owns rows.
      sums: Results that it sums in registers meanwhile; with two roles, one of them.
      blocks_of_scores: How many it has at a time, of the other side's fragments.
      owned_statistics: What is read once for each owned row besides.
      shared: Operands of the other side, of which a block is read for each block of
        scores: how many products read it.
      statistics: Bytes per row of the other side beside these, read once per block.
      results: What each owned row is written to.
      reads_scores: Whether it reads dS from scratch.
    """

    rows: str
    products: int
    owned: tuple[str, ...]
    sums: int
    blocks_of_scores: int
    shared: Mapping[str, int]
    owned_statistics: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    reads_scores: bool = False


TILINGS = {
    "attention_forward": Tiling(
        rows="query",
        products=2,
        owned=("query",),
        sums=1,
        blocks_of_scores=1,
        shared={"key": 1, "value": 1},
        results=("out", "logsumexp"),
    ),
    "attention_backward_dq": Tiling(
        rows="query",
        products=3,
        owned=("query", "dout"),
        sums=1,
        blocks_of_scores=2,
        owned_statistics=("statistics",),
        shared={"value": 1, "key": 2},
        results=("dquery",),
    ),
    "attention_backward_dkv": Tiling(
        rows="key",
        products=4,
        owned=("key", "value"),
        sums=2,
        blocks_of_scores=2,
        shared={"query": 2, "dout": 2},
        statistics=("statistics",),
        results=("dkey", "dvalue"),
    ),
    "attention_backward_dq_product": Tiling(
        rows="query",
        products=1,
        owned=(),
        sums=1,
        blocks_of_scores=0,
        shared={"key": 1},
        results=("dquery",),
        reads_scores=True,
    ),
}
# Bytes of a row of what is not a matrix of the operands' dtype. The statistics are what
# attention_delta writes.
_STATISTICS_BYTES = {"logsumexp": 4, "dlogsumexp": 4, "statistics": 16}
# Kernels that go once over the rows of queries: what they read and write.
_ROWWISE = {
    "attention_delta": (
        ("out", "dout", "logsumexp", "dlogsumexp"),
        ("statistics",),
    )
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call, without options but for causality.

    Attributes:
      shape: Sizes; a causal mask lets the last query see the last key.
      dtype: Of the operands.
    """

    shape: AttentionShape
    dtype: str
    is_causal: bool = False

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, over batch and heads."""
        heads = self.shape.batch_size * self.shape.num_heads
        return heads * self.shape.visible_pairs(is_causal=self.is_causal)

    def visible_blocks(self, block_q: int, block_kv: int) -> list[tuple[int, int]]:
        """(queries, keys) of each block of one head's scores with a visible element."""
        shape = self.shape
        found = []
        for first_query in range(0, shape.num_queries, block_q):
            queries = min(block_q, shape.num_queries - first_query)
            last_key = shape.length - 1
            if self.is_causal:
                last_key = min(last_key, first_query + queries - 1 + shape.q_offset)
            found += [
                (queries, min(block_kv, shape.length - first_key))
                for first_key in range(0, last_key + 1, block_kv)
            ]
        return found

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"{self.shape} {self.dtype} {mask}"


def scores_block(variant: Variant) -> tuple[int, int]:
    """(queries, keys) of the blocks of scores that a kernel visits or leaves out.

    The simdgroups of dq_product share nothing, and visit 8 keys at a time.
    """
    if variant.kernel == "attention_backward_dq_product":
        return variant.block_q // variant.num_simdgroups, _FRAGMENT
    return variant.block_q, variant.block_kv


def keeps_rows(variant: Variant) -> bool:
    """Whether a simdgroup keeps the rows it owns; of a pair, each its half of them."""
    tiling = TILINGS[variant.kernel]
    numbers = (len(tiling.owned), tiling.sums, tiling.blocks_of_scores)
    return gpu_counts.keeps_rows(variant, *(n // variant.roles for n in numbers))


def least_device_bytes(
    problem: Problem,
    variant: Variant,
    *,
    writes_scores: bool = False,
    num_parts: int = 0,
) -> tuple[int, int] | None:
    """(read, written) by all launches of a kernel that its tiling cannot do without.

    * A row that a simdgroup owns is read once if registers keep it, else per block.
    * A block of the other side's rows is read once for each visible block of scores by
      everyone who keeps it for himself: the threadgroup if tiles are in threadgroup
      memory; else each simdgroup, or pair of them, from device memory.
    * It stays for the second product that reads it where the tile has all columns.
      Where columns are blocked, or in registers, which are full, each product reads it.
    * Results, and dS in scratch, are written once and read once.

    Caches change nothing: this is what is asked of the memory.

    Args:
      writes_scores: Whether dkv writes dS to scratch.
      num_parts: Of dK's and dV's sums, which are then written in float32; 0: not cut.

    Returns:
      None for a kernel that this does not describe.
    """
    shape, item = problem.shape, gpu_planner.ITEM_BYTES[problem.dtype]
    matrix_row = item * shape.head_dim

    def row_bytes(names: Sequence[str]) -> int:
        return sum(_STATISTICS_BYTES.get(name, matrix_row) for name in names)

    heads = shape.batch_size * shape.num_heads
    kv_heads = shape.batch_size * shape.num_kv_heads
    sums = num_parts * kv_heads * shape.length * 2 * shape.head_dim * 4  # dK and dV
    if variant.kernel in _ROWWISE:
        operands, results = (row_bytes(names) for names in _ROWWISE[variant.kernel])
        return heads * shape.num_queries * operands, heads * shape.num_queries * results
    if variant.kernel == "attention_backward_dkv_combine":
        return sums, kv_heads * shape.length * 2 * matrix_row
    tiling = TILINGS.get(variant.kernel)
    if tiling is None:
        return None
    owns_queries = tiling.rows == "query"
    rows = heads * shape.num_queries if owns_queries else kv_heads * shape.length
    # Over the visible blocks of scores, of all heads.
    blocks = problem.visible_blocks(*scores_block(variant))
    query_rows = heads * sum(queries for queries, _ in blocks)
    key_rows = heads * sum(keys for _, keys in blocks)
    owned_rows, shared_rows = query_rows, key_rows
    if not owns_queries:
        owned_rows, shared_rows = shared_rows, owned_rows

    is_staged = variant.loads == "threadgroup"
    readers = 1 if is_staged else variant.num_simdgroups // variant.roles
    if variant.kernel == "attention_backward_dq_product":
        readers = 1  # its blocks are a simdgroup's already
    stays = is_staged and variant.block_d == variant.head_dim
    per_shared_row = row_bytes(tiling.statistics) + sum(
        matrix_row * (1 if stays else times) for times in tiling.shared.values()
    )
    read = rows * row_bytes(tiling.owned_statistics)
    if keeps_rows(variant):
        owned_rows = rows * max(num_parts, 1)
    read += owned_rows * row_bytes(tiling.owned)
    read += readers * per_shared_row * shared_rows
    written = sums or rows * row_bytes(tiling.results)

    def score_bytes(blocks: Sequence[tuple[int, int]]) -> int:
        size = gpu_planner.GRADIENT_BYTES[problem.dtype]
        return heads * size * sum(queries * keys for queries, keys in blocks)

    if tiling.reads_scores:  # fragments; for each block of the columns that a grid has
        fragments = problem.visible_blocks(_FRAGMENT, _FRAGMENT)
        read += score_bytes(fragments) * -(-shape.head_dim // variant.block_d)
    if writes_scores:
        written += score_bytes(blocks)
    return read, written


def least_products(problem: Problem, variant: Variant) -> int | None:
    """Matrix products of all launches of a kernel: those of its visible blocks.

    A block at the end of a length is computed whole, and columns up to a multiple of 8.
    None: a kernel that this does not describe.
    """
    tiling = TILINGS.get(variant.kernel)
    if tiling is None:
        return None
    block_q, block_kv = scores_block(variant)
    blocks = problem.visible_blocks(block_q, block_kv)
    columns = -(-problem.shape.head_dim // _FRAGMENT)
    heads = problem.shape.batch_size * problem.shape.num_heads
    fragments = len(blocks) * (block_q // _FRAGMENT) * (block_kv // _FRAGMENT)
    return heads * fragments * columns * tiling.products


# -- Counting --------------------------------------------------------------------------


@dataclasses.dataclass
class KernelCounts:
    """Of all launches of one kernel in a pass, added.

    Attributes:
      kernel: Its name in the library.
      pass_: "forward" or "backward".
      launches: How many.
      counts: Those of the checker (checker.h: DispatchCounts), but for threadgroup
        memory, of which it is the largest.
      visible_pairs: Of the problem.
      blocks: Blocks of scores that it visits, over batch and heads; None: not tiled.
      least_device_bytes: (read, written), see least_device_bytes().
      least_products: See least_products().
      resources: Estimates of registers and code size; empty: not known.
    """

    kernel: str
    pass_: str
    launches: int
    counts: dict[str, Any]
    visible_pairs: int
    head_dim: int
    blocks: int | None = None
    least_device_bytes: tuple[int, int] | None = None
    least_products: int | None = None
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def products_per_score(self) -> float:
        """Matrix products as multiples of one over all visible scores.

        An 8x8 product is 512 multiply-adds; a product of the algorithm takes head_dim
        of them for each visible pair.
        """
        return float(self.counts["products"] * self.per_product)

    @property
    def per_product(self) -> float:
        """What one 8x8 product adds to products_per_score."""
        return 512 / (self.visible_pairs * self.head_dim)

    @property
    def exp2_per_score(self) -> float:
        """Calls of exp2 by lanes, per visible pair."""
        return float(self.counts["calls"]["exp2"] / self.visible_pairs)

    def per_block(self, name: str) -> float | None:
        """A count per visited block of scores."""
        return self.counts[name] / self.blocks if self.blocks else None

    @property
    def device_bytes(self) -> int:
        read, written = (self.counts[f"device_bytes_{x}"] for x in ("read", "written"))
        return int(read + written)

    @property
    def device_ratio(self) -> float | None:
        """Device bytes as a multiple of the least."""
        if not self.least_device_bytes:
            return None
        return self.device_bytes / sum(self.least_device_bytes)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "products_per_score": self.products_per_score,
            "exp2_per_score": self.exp2_per_score,
            "device_bytes": self.device_bytes,
            "device_ratio": self.device_ratio,
        }


class CountingLibrary:
    """A checker build of the native library.

    Args:
      library: Loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        from jax_flash_metal.attention_library import AttentionLibrary

        self._library = library
        self.attention = AttentionLibrary(library)

    def clear(self) -> None:
        """Forgets what was counted."""
        self._library.jfm_software_clear()

    def launches(self) -> list[dict[str, Any]]:
        """What each launch since clear() did, in order."""
        function = self._library.jfm_software_counts
        function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        function.restype = ctypes.c_size_t
        text = ctypes.create_string_buffer(function(None, 0) + 1)
        function(text, len(text))
        return [json.loads(line) for line in text.value.decode().splitlines()]


def load_library() -> CountingLibrary:
    """Builds the checker library, or finds it built.

    Raises:
      CountsError: There is no source tree, or what it takes to build.
    """
    root = Path(__file__).parent.parent
    if not (root / "plugin" / "build.py").is_file():
        raise CountsError(
            "counts needs the checker build of the software device, which is made in a "
            "source tree of jax-flash-metal, and this is an installed copy."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    build = importlib.import_module("plugin.build")
    try:
        path = build.build(flavour="checker", output=build.CHECKER_LIBRARY)
    except build.BuildError as error:
        raise CountsError(f"the checker build failed: {error}") from error
    except importlib.metadata.PackageNotFoundError as error:
        raise CountsError(
            "counts builds the software device and needs ziglang: pip install ziglang"
        ) from error
    from jax_flash_metal import attention_library, platforms

    return CountingLibrary(attention_library.declare(platforms.load_library(path)))


def count(
    library: CountingLibrary,
    problem: Problem,
    *,
    family: int = -1,
    form: str | None = None,
    passes: Sequence[str] = ("forward", "backward"),
) -> list[KernelCounts]:
    """What the kernels of a call do, in the order of their first launches.

    Args:
      family: The Apple GPU family that the kernels are chosen for; -1: the device's.
      form: Of the backward pass; None: the table's.
      passes: Which to count; the forward pass runs in any case.
    """
    import numpy as np

    from jax_flash_metal.attention_library import NUMPY_DTYPES

    shape = problem.shape
    random = np.random.default_rng(0)

    def operand(length: int, heads: int) -> Any:
        sizes = (shape.batch_size, length, heads, shape.head_dim)
        return random.standard_normal(sizes).astype(NUMPY_DTYPES[problem.dtype])

    query, dout = (operand(shape.num_queries, shape.num_heads) for _ in range(2))
    key, value = (operand(shape.length, shape.num_kv_heads) for _ in range(2))
    options: dict[str, Any] = {}
    if problem.is_causal:
        options = {"is_causal": True, "q_offset": shape.q_offset}
    found: list[KernelCounts] = []
    with _planned(library, problem, family, form):
        library.clear()
        out, logsumexp = library.attention.run_forward(query, key, value, **options)
        if "forward" in passes:
            found += _summarise(library.launches(), problem, "forward")
        if "backward" in passes:
            library.clear()
            library.attention.run_backward(
                query, key, value, out, logsumexp, dout, **options
            )
            found += _summarise(library.launches(), problem, "backward")
    return found


@contextlib.contextmanager
def _planned(
    library: CountingLibrary, problem: Problem, family: int, form: str | None
) -> Iterator[None]:
    """Kernels for a GPU family and a form of the backward pass, meanwhile."""
    from jax_flash_metal.attention_library import CallShape, shape_problem

    shape, attention = problem.shape, library.attention
    attention.set_gpu_family(family)
    try:
        if form is not None:
            call = CallShape(
                problem.dtype,
                shape.num_queries,
                shape.length,
                shape.batch_size * shape.num_heads,
                shape.batch_size * shape.num_kv_heads,
                shape.head_dim,
                shape.head_dim,
            )
            q_offset = shape.q_offset if problem.is_causal else 0
            plan = attention.plan(
                shape_problem(call, is_causal=problem.is_causal, q_offset=q_offset),
                "backward",
            )
            attention.set_kernel_choices(f"{plan['class']}\tbackward\t{form}\t\n")
        yield
    finally:
        attention.set_kernel_choices("")
        attention.set_gpu_family(-1)


def _summarise(
    launches: Sequence[Mapping[str, Any]], problem: Problem, pass_: str
) -> list[KernelCounts]:
    rows = {variant.host_name: variant for variant in variants()}
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for launch in launches:
        by_name.setdefault(launch["kernel"], []).append(launch)
    kernels = {rows[name].kernel: of_name for name, of_name in by_name.items()}
    num_parts = 0
    if "attention_backward_dkv_combine" in kernels:  # a part is a row of threadgroups
        grid = kernels["attention_backward_dkv"][0]["grid"]
        num_parts = grid[1] // problem.shape.num_kv_heads
    heads = problem.shape.batch_size * problem.shape.num_heads
    resources = kernel_resources()
    found = []
    for name, of_name in by_name.items():
        variant = rows[name]
        is_dkv = variant.kernel == "attention_backward_dkv"
        is_of_sums = variant.kernel.startswith("attention_backward_dkv")
        blocks = None
        if variant.kernel in TILINGS:
            blocks = heads * len(problem.visible_blocks(*scores_block(variant)))
        found.append(
            KernelCounts(
                kernel=name,
                pass_=pass_,
                launches=len(of_name),
                counts=_added(of_name),
                visible_pairs=problem.visible_pairs,
                head_dim=problem.shape.head_dim,
                blocks=blocks,
                least_device_bytes=least_device_bytes(
                    problem,
                    variant,
                    writes_scores=is_dkv and "attention_backward_dq_product" in kernels,
                    num_parts=num_parts if is_of_sums else 0,
                ),
                least_products=least_products(problem, variant),
                resources=resources.get(name, {}),
            )
        )
    return found


def _added(launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of the counts of launches, but for the memory of a threadgroup."""
    total: dict[str, Any] = {"calls": {}, "buffers": {}}
    for launch in launches:
        for name, value in launch.items():
            if name == "calls":
                for function, calls in value.items():
                    total[name][function] = total[name].get(function, 0) + calls
            elif name == "buffers":
                for index, (read, written) in value.items():
                    before = total[name].get(index, (0, 0))
                    total[name][index] = (before[0] + read, before[1] + written)
            elif name in ("threads", "threadgroup_memory_bytes"):
                total[name] = max(total.get(name, 0), value)
            elif name not in ("kernel", "grid"):
                total[name] = total.get(name, 0) + value
    return total


def kernel_resources(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Estimates of registers and code size by kernel, where they were made."""
    path = path or RESOURCES
    if not path.is_file():
        return {}
    kernels: dict[str, dict[str, Any]]
    kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    return kernels


# -- The command -----------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """Adds `counts` to the subcommands of argparse."""
    parser = commands.add_parser(
        "counts",
        help="count what the kernels do: products, exp2, bytes, barriers",
        description="Counts what the kernels do, on the software device, exactly. "
        "Needs a source tree and ziglang.",
    )
    parser.set_defaults(run=run_command)
    add = parser.add_argument
    add(
        "--shape",
        type=command_options.count,
        nargs=4,
        action="append",
        metavar=("B", "N", "L", "D"),
        help="batch, heads, length, head_dim; may be given again (default: "
        + " and ".join(" ".join(map(str, shape)) for shape in DEFAULT_SHAPES)
        + ")",
    )
    add(
        "--num-kv-heads",
        type=command_options.count,
        metavar="K",
        help="(as many as heads)",
    )
    add(
        "--q-len",
        type=command_options.count,
        metavar="T",
        help="of queries (the length)",
    )
    add("--dtype", choices=DTYPES, nargs="+", default=["float32"], help="(float32)")
    add("--causal", action="store_true", help="with a causal mask")
    add(
        "--family",
        type=int,
        choices=FAMILIES,
        default=0,
        help="kernels for this Apple GPU family (default: %(default)s, any)",
    )
    add("--form", choices=FORMS, help="of the backward pass (the table's)")
    add("--json", action="store_true", help="everything that was counted, as JSON")


def run_command(options: argparse.Namespace) -> int:
    """Counts and prints; the exit status."""
    try:
        problems = _problems(options)
    except ValueError as error:
        print(f"counts: {error}", file=sys.stderr)
        return 2
    try:
        library = load_library()
        results = [
            (problem, count(library, problem, family=options.family, form=options.form))
            for problem in problems
        ]
    except CountsError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        rows = [
            {
                "problem": dataclasses.asdict(problem),
                "kernels": [kernel.as_json() for kernel in kernels],
            }
            for problem, kernels in results
        ]
        print(json.dumps(rows, indent=1))
    else:
        _print_tables(results)
    return 0


def _problems(options: argparse.Namespace) -> list[Problem]:
    """Those that are asked for.

    Raises:
      ValueError: One that cannot be counted.
    """
    problems = []
    for sizes in options.shape or DEFAULT_SHAPES:
        shape = _shape(options, sizes)
        command_options.check_size(shape, _MAX_WORK, "the kernels run on this CPU")
        if options.form is not None and shape.num_queries <= gpu_counts.SHORT_QUERY:
            where = f"this is {shape}"
            if options.q_len:
                where = f"--q-len is {options.q_len}"
            raise ValueError(
                f"--form {options.form} is for more than {gpu_counts.SHORT_QUERY} "
                f"queries, fewer have kernels of their own, but {where}."
            )
        for dtype in options.dtype:
            command_options.check_head_dim(shape, dtype)
            problems.append(Problem(shape, dtype, options.causal))
    return problems


# Ten minutes or so; the defaults are 8e6 and 2e7.
_MAX_WORK = 4 * 10**9


def _shape(options: argparse.Namespace, sizes: Sequence[int]) -> AttentionShape:
    batch_size, num_heads, length, head_dim = sizes
    num_kv_heads = options.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"--num-kv-heads must divide the number of heads, but is {num_kv_heads} of "
            f"{num_heads}."
        )
    return AttentionShape(
        batch_size, num_heads, num_kv_heads, length, head_dim, options.q_len
    )


_NOTES = """\
products: of all scores, as multiples of one over the visible ones; least: of visible
blocks. exp2: per visible score. shuffles, barriers: per block of scores. device KB:
asked for; x least: as a multiple of what the tiling cannot do without. tile KB, memory
KB: moved in threadgroup memory, and its size. registers, code KB: estimates."""


def _print_tables(results: Sequence[tuple[Problem, list[KernelCounts]]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 200)  # a terminal cuts lines, not numbers
    columns = (
        *("products", "least", "exp2", "shuffles", "barriers", "device KB", "x least"),
        *("tile KB", "memory KB", "groups", "registers", "code KB"),
    )
    for problem, kernels in results:
        table = Table(
            title=str(problem),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("kernel", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for kernel in kernels:
            name = kernel.kernel.removeprefix("attention_")
            table.add_row(name.replace(f"_{problem.dtype}", ""), *_cells(kernel))
        console.print(table)
    console.print(_NOTES)


def _cells(kernel: KernelCounts) -> list[str]:
    counts, resources = kernel.counts, kernel.resources
    least = None
    if kernel.least_products is not None:
        least = kernel.least_products * kernel.per_product
    code = resources.get("code_bytes")
    tile_bytes = counts["threadgroup_bytes_read"] + counts["threadgroup_bytes_written"]
    return [
        _number(kernel.products_per_score),
        _number(least),
        _number(kernel.exp2_per_score),
        _number(kernel.per_block("shuffles")),
        _number(kernel.per_block("threadgroup_barriers")),
        _number(kernel.device_bytes / 1e3),
        _number(kernel.device_ratio),
        _number(tile_bytes / 1e3),
        _number(counts["threadgroup_memory_bytes"] / 1024),
        str(counts["threadgroups"]),
        _number(resources.get("registers")),
        _number(None if code is None else code / 1024),
    ]


def _number(value: float | None) -> str:
    """With three digits; a dash if it is not known."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
