"""Strict lint of Metal kernels: finds what Apple's compiler would reject.

Our clang in "C++ for OpenCL" mode accepts more than Metal does (pointers without an
address space, recursion, mutable globals ...). Three passes over each translation unit:
the rewriter's own rules, rules that tokens show, and rules that clang's syntax tree
shows. Finds, changes nothing; whether a kernel is *right* is the checker's job.

    python -m plugin.device.software.frontend.lint [metal_kernels/*.metal]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plugin import build, kernel_sources
from plugin.device.software import frontend
from plugin.device.software.frontend import rewrite
from plugin.device.software.frontend.rewrite import SourceError

MAX_THREADGROUP_BYTES = 32768
MAX_BUFFER_INDEX = 30


@dataclasses.dataclass(frozen=True)
class Report:
    """What lint_text() has to say about one translation unit."""

    findings: list[SourceError]
    threadgroup_bytes: dict[str, int]  # by host_name


def lint(paths: Iterable[Path]) -> list[SourceError]:
    """Findings of all files, sorted; kernel templates need a variants.toml beside."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lint_file, paths))
    return sorted({finding for report in reports for finding in report.findings})


def lint_file(path: Path, *, all_rows: bool = True) -> Report:
    """Lints one .metal file, instantiated for the rows of the variant table beside it.

    all_rows=False takes only the smallest head_dim per dtype, in a third of the time.
    """
    text = _unit_text(path, all_rows)
    return lint_text(text, path.stem, include_dirs=[path.parent])


def lint_text(text: str, name: str, *, include_dirs: Sequence[Path]) -> Report:
    """Lints one translation unit, given as MSL."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{name}_unit.metal"
        source.write_text(text)
        try:
            command = frontend.preprocess_command(source, include_dirs)
            preprocessed = build.run_zig(command)
        except kernel_sources.BuildError as error:
            return Report(_diagnostics(str(error), {}), {})
        preprocessed = preprocessed.replace(f'"{source}', f'"{name}_unit.metal')
        translation = frontend.translate(preprocessed, name)
        findings = list(translation.errors)
        findings += _word_findings(rewrite.tokenize(preprocessed))
        for kernel in translation.functions:
            findings += _signature_findings(kernel)
        if translation.errors:
            return Report(findings, {})
        translated = Path(folder) / f"{name}.clcpp"
        translated.write_text(translation.text)
        tree, messages = _syntax_tree(translated)
    lines = _LineMap(translation.text)
    findings += _diagnostics(messages, {str(translated): lines})
    symbols = {kernel.symbol for kernel in translation.kernels}
    rules = _TreeRules(str(translated), lines, symbols)
    if tree is not None:
        rules.run(tree)
    used = {
        kernel.host_name: rules.threadgroup_bytes(kernel.symbol)
        for kernel in translation.kernels
    }
    return Report(findings + rules.findings, used)


def _unit_text(path: Path, all_rows: bool) -> str:
    """The file, or the unit that the build would make of it and its rows."""
    rows = []
    if (path.parent / "variants.toml").is_file():
        table = kernel_sources.load_variants(path.parent)
        rows = [row for row in table if row.source == path.stem]
    if not all_rows:
        ordered = sorted(rows, key=lambda row: row.head_dim, reverse=True)
        rows = list({(row.kernel, row.dtype): row for row in ordered}.values())
    instances = "".join(row.instantiation() for row in rows)
    return f'#include "{path.name}"\n{instances}'


# -- Places and diagnostics ----------------------------------------------------------

_MARKER = re.compile(r'^[ \t]*#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
_DIAGNOSTIC = re.compile(r"^(.*?):(\d+):(?:\d+:)? (?:fatal )?(error|warning): (.*)$")


class _LineMap:
    """Lines of a preprocessed text to lines of the files it came from."""

    def __init__(self, text: str) -> None:
        self.places: list[tuple[str, int]] = [("?", 0)]
        file, line = "?", 0
        for row in text.split("\n"):
            marker = _MARKER.match(row)
            if marker:
                file, line = marker[2], int(marker[1]) - 1
            else:
                line += 1
            self.places.append((file, line))

    def __getitem__(self, line: int) -> tuple[str, int]:
        return self.places[line] if line < len(self.places) else ("?", 0)


def _diagnostics(messages: str, maps: dict[str, _LineMap]) -> list[SourceError]:
    """Clang's errors and warnings; places in a mapped file go back to its sources."""
    findings = []
    for row in messages.splitlines():
        match = _DIAGNOSTIC.match(row)
        if match is None:
            continue
        file, line = match[1], int(match[2])
        if file in maps:
            file, line = maps[file][line]
        if file.startswith("<") and match[3] == "warning":
            continue  # in an entry point, which the rewriter wrote
        findings.append(SourceError(file, line, f"{match[4]} [clang]"))
    return findings


# -- Rules that tokens show ----------------------------------------------------------

# Words that C++ for OpenCL knows and Metal does not; the rewriter has more.
_UNAVAILABLE = frozenset(
    (
        *("abort", "calloc", "exit", "longjmp", "realloc", "setjmp"),
        *("char16_t", "char32_t", "wchar_t", "generic", "global", "local"),
        *("co_await", "co_return", "co_yield", "noexcept", "register"),
    )
)
# Keywords of MSL, where they do not say what a function is.
_QUALIFIERS = frozenset(("fragment", "kernel", "vertex"))
_LONG_DOUBLE = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?[lL]")


def _word_findings(tokens: Iterable[rewrite.Token]) -> Iterator[SourceError]:
    """Words and literals that only our compiler knows."""
    code = [token for token in tokens if token.kind not in ("space", "marker")]
    for token, following in zip(code, [*code[1:], code[0]]):
        word = token.value
        problem = ""
        if token.kind == "number" and _LONG_DOUBLE.fullmatch(word):
            problem = "is not available in MSL"
        elif token.kind == "name":
            if word in _UNAVAILABLE or (word == "private" and following.value != ":"):
                problem = "is not available in MSL"
            elif word in _QUALIFIERS and following.value != "void":
                problem = "is a keyword of MSL, and no name"
        if problem:
            yield SourceError(token.file, token.line, f"'{word}' {problem}")


# -- Rules of kernel signatures ------------------------------------------------------

_SCALARS = ("uint", "ushort")
_POSITIONS = tuple(f"{scalar}{n}" for scalar in _SCALARS for n in ("", 2, 3))


def _signature_findings(kernel: rewrite.KernelFunction) -> Iterator[SourceError]:
    """What a kernel's parameters may be, beyond having an attribute at all."""
    used: set[str] = set()
    widths: set[str] = set()
    for parameter in kernel.parameters:
        problem = ""
        buffer = re.search(r"\bbuffer\(\s*(\d+)\s*\)", parameter.attribute)
        if buffer:
            problem = _buffer_problem(parameter, buffer[1], used)
            used.add(buffer[1])
        elif parameter.attribute in rewrite.POSITION_ATTRIBUTES:
            is_index = "_index_" in parameter.attribute or parameter.attribute in (
                "simdgroups_per_threadgroup",
                "threads_per_simdgroup",
            )
            allowed = _SCALARS if is_index else _POSITIONS
            if parameter.type not in allowed:
                problem = (
                    f"[[{parameter.attribute}]] must be one of {', '.join(allowed)}, "
                    f"not {parameter.type}"
                )
            elif not is_index:
                widths.add(parameter.type[-1] if parameter.type[-1] in "23" else "1")
        if problem:
            yield SourceError(parameter.file, parameter.line, problem)
    if len(widths) > 1:
        message = "the positions of a kernel must have the same number of components"
        yield SourceError(kernel.file, kernel.line, message)


def _buffer_problem(parameter: rewrite.Parameter, index: str, used: set[str]) -> str:
    words = parameter.type.split()
    if int(index) > MAX_BUFFER_INDEX:
        return f"buffer index {index} is above {MAX_BUFFER_INDEX}"
    if index in used:
        return f"buffer index {index} is used twice"
    if words[-1] not in ("*", "&") or not {"device", "constant"} & set(words):
        return (
            f"buffer parameter '{parameter.name}' must be a pointer or reference to "
            "device or constant memory"
        )
    return ""


# -- Rules that the syntax tree shows ------------------------------------------------


def _syntax_tree(source: Path) -> tuple[dict[str, Any] | None, str]:
    """Clang's syntax tree as JSON (None if there is none), and its messages."""
    flags = [
        flag
        for flag in frontend.compile_flags("fast", "x86_64")
        if flag not in ("-fPIC", "-O1", "-O2")
    ]
    # Not build.run_zig: a tree is of use beside errors too.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "clang", *flags, "-Wall", "-Wextra"),
            *("-fsyntax-only", "-Xclang", "-ast-dump=json", str(source)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return (json.loads(done.stdout) if done.stdout else None), done.stderr


_SPACE = re.compile(r"__(private|global|local|constant)\b")
_BFLOAT = re.compile(r"\b__bf16\b|\bbfloat")
_WIDE = re.compile(r"\b(long|ulong|double)\b|\b(ulong|long)[234]\b")
_DECLARATIONS = {
    "VarDecl": "variable",
    "ParmVarDecl": "parameter",
    "FieldDecl": "member",
    "TypedefDecl": "typedef",
    "TypeAliasDecl": "alias",
}
_CASTS = frozenset(
    (
        "CStyleCastExpr",
        "CXXReinterpretCastExpr",
        "CXXStaticCastExpr",
        "CXXConstCastExpr",
    )
)
_FUNCTIONS = frozenset(
    ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")
)
_SCOPES = frozenset(
    (
        *("TranslationUnitDecl", "NamespaceDecl", "LinkageSpecDecl"),
        *("CXXRecordDecl", "ClassTemplateSpecializationDecl", "VarTemplateDecl"),
    )
)
_NUMERIC_CASTS = frozenset(
    ("FloatingCast", "IntegralToFloating", "BooleanToFloating", "FloatingToIntegral")
)
_SIZES = {
    **dict.fromkeys(("bool", "char", "uchar"), 1),
    **dict.fromkeys(("short", "ushort", "half", "bfloat", "__bf16"), 2),
    **dict.fromkeys(("int", "uint", "float"), 4),
    **dict.fromkeys(("long", "ulong"), 8),
}
# What the rewriter makes of a threadgroup variable.
_TILE = "__msl_threadgroup_"
_ARRAY = re.compile(
    r"(?:const )?__local (?:const )?(?P<unsigned>unsigned )?(?P<scalar>[a-z_]\w*?)"
    r"(?P<lanes>[234])?(?: __attribute__\(\(ext_vector_type\((?P<n>\d)\)\)\))?"
    r"(?: \(?&?\w*\)?)?(?P<dims>(?:\[\d+\])*)"
)


def has_address_space(type_name: str) -> bool:
    """Whether each pointer and reference of a type (clang's spelling) has a space."""
    depth, segment = 0, ""
    for character in re.sub(r"\[[^]]*\]", "", type_name):
        depth += (character == "<") - (character == ">")
        if depth == 0 and character in "*&":
            if not _SPACE.search(segment) and segment != "&":
                return False
            segment = "&" if character == "&" else ""
        elif depth == 0:
            segment = segment + character if segment != "&" else character
    return True


def threadgroup_bytes(type_name: str) -> int | None:
    """Size of a threadgroup variable in clang's spelling; None if it is a struct's."""
    match = _ARRAY.fullmatch(type_name)
    if match is None or match["scalar"] not in _SIZES:
        return None
    lanes = int(match["lanes"] or match["n"] or 1)
    size = _SIZES[match["scalar"]] * (4 if lanes == 3 else lanes)
    for dimension in re.findall(r"\d+", match["dims"]):
        size *= int(dimension)
    return size


class _TreeRules:
    """Walks the JSON of `clang -ast-dump=json`.

    Locations are relative to the one printed before, so the walk is in document order
    and sees every node, those of the shim included; only the user's are judged.
    """

    def __init__(self, main_file: str, lines: _LineMap, symbols: set[str]) -> None:
        self.main_file = main_file
        self.symbols = symbols  # of the entry points
        self.lines = lines
        self.findings: list[SourceError] = []
        self.file, self.line = "", 0
        self.first_declaration: dict[str, str] = {}  # id: id of the first
        self.names: dict[str, str] = {}
        self.calls: dict[str, dict[str, tuple[str, int]]] = {}  # caller: callee: place
        self.entries: dict[str, set[str]] = {}  # entry point's name: what it calls
        self.tiles: dict[str, tuple[int, tuple[str, int]]] = {}  # kernel: bytes, place
        # A tile of T is unsized in the template and sized in its instantiations.
        self.sized: set[tuple[str, int]] = set()
        self.unsized: dict[tuple[str, int], str] = {}

    def run(self, tree: dict[str, Any]) -> None:
        # Depth first, with a stack of our own: expressions nest deeper than Python.
        stack: list[tuple[dict[str, Any], str, str, bool]] = [(tree, "", "", False)]
        while stack:
            node, parent_kind, function, skipped = stack.pop()
            kind = node.get("kind", "")
            # The compiler's own, such as copy constructors: no text of the user's.
            skipped = skipped or (node.get("isImplicit", False) and kind in _FUNCTIONS)
            place = self._place(node)
            if skipped:
                place = None
            if kind in _FUNCTIONS:
                function = self._enter_function(node)
            if kind.endswith("CallExpr"):
                self._note_call(node, function, place)
            if place is not None:
                self._check(node, kind, parent_kind, function, place)
            children = [c for c in node.get("inner", ()) if c]
            stack += [(child, kind, function, skipped) for child in reversed(children)]
        self._check_recursion()
        self._check_threadgroup_memory()

    def threadgroup_bytes(self, symbol: str) -> int:
        """What the kernel behind an entry point uses, each variable 16-byte aligned."""
        called = self.entries.get(symbol, set())
        return sum(size for kernel, (size, _) in self.tiles.items() if kernel in called)

    # ---- bookkeeping

    def _place(self, node: dict[str, Any]) -> tuple[str, int] | None:
        """Where the node is, or None if that is not in the user's text.

        Of a name that a macro of the shim expands to, the place of the macro.
        """
        own: tuple[str, int] | None = None
        span = node.get("range", {})
        for location in (node.get("loc"), span.get("begin"), span.get("end")):
            here = None
            for point in self._points(location):
                self.file = point.get("file", self.file)
                self.line = point.get("line", self.line)
                if "offset" in point:
                    here = (self.file, self.line)
            own = own or here
        if own is None or own[0] != self.main_file:
            return None
        file, line = self.lines[own[1]]
        return None if file.startswith(("<", "?")) else (file, line)

    @staticmethod
    def _points(location: dict[str, Any] | None) -> list[dict[str, Any]]:
        if not location:
            return []
        nested = [location[k] for k in ("spellingLoc", "expansionLoc") if k in location]
        return nested or [location]

    def _enter_function(self, node: dict[str, Any]) -> str:
        identity: str = node["id"]
        previous = node.get("previousDecl")
        first: str = identity
        if previous:
            first = self.first_declaration.get(previous, previous)
        self.first_declaration[identity] = first
        self.names[first] = node.get("name", "?")
        return first

    def _note_call(
        self, node: dict[str, Any], caller: str, place: tuple[str, int] | None
    ) -> None:
        callee = (node.get("inner") or [{}])[0]
        while callee.get("kind") in ("ImplicitCastExpr", "ParenExpr"):
            callee = callee["inner"][0]
        target = callee.get("referencedMemberDecl")
        if target is None:
            declaration = callee.get("referencedDecl", {})
            target = declaration.get("id")
            self._check_simd_call(node, declaration.get("name", ""), place)
        if target and caller in self.names and self.names[caller] in self.symbols:
            self.entries.setdefault(self.names[caller], set()).add(target)
        if caller and target and place is not None:
            self.calls.setdefault(caller, {}).setdefault(target, place)

    # ---- rules

    def _find(self, place: tuple[str, int], message: str) -> None:
        self.findings.append(SourceError(*place, message))

    def _check(
        self,
        node: dict[str, Any],
        kind: str,
        parent_kind: str,
        function: str,
        place: tuple[str, int],
    ) -> None:
        types = node.get("type", {})
        written = types.get("qualType", "")
        if kind in _DECLARATIONS:
            self._check_space(place, _DECLARATIONS[kind], written)
        elif kind in _CASTS:
            self._check_space(place, "cast", written)
        elif kind in ("FunctionDecl", "CXXMethodDecl"):
            self._check_space(place, "result", written.split(" (")[0])
        elif kind == "LambdaExpr":
            self._find(place, "a lambda needs a later Metal than 3.1")
        elif kind == "ImplicitCastExpr":
            self._check_conversion(node, written, place)
        elif kind == "CompoundAssignOperator":
            computed = node.get("computeResultType", {}).get("qualType", "")
            if _BFLOAT.search(written) and not _BFLOAT.search(computed):
                self._find(place, f"implicit conversion of {computed} to bfloat")
        if kind == "VarDecl":
            desugared = types.get("desugaredQualType", written)
            self._check_variable(node, parent_kind, function, desugared, place)

    def _check_space(self, place: tuple[str, int], what: str, type_name: str) -> None:
        if not has_address_space(type_name):
            self._find(
                place,
                f"{what} is a pointer or reference without an address space: "
                f"{type_name}",
            )

    def _check_conversion(
        self, node: dict[str, Any], target: str, place: tuple[str, int]
    ) -> None:
        source = (node.get("inner") or [{}])[0].get("type", {}).get("qualType", "")
        cast = node.get("castKind")
        if cast == "AddressSpaceConversion":
            space = _SPACE.search(source)
            if space and space[1] != "private":
                self._find(place, "a method of a thread object is called on another's")
        elif cast in _NUMERIC_CASTS and not node.get("isPartOfExplicitCast"):
            if _BFLOAT.search(target):
                self._find(place, f"implicit conversion of {source} to bfloat")
            elif _BFLOAT.search(source) and "float" not in target:
                self._find(place, f"implicit conversion of bfloat to {target}")

    def _check_variable(
        self,
        node: dict[str, Any],
        parent_kind: str,
        function: str,
        type_name: str,
        place: tuple[str, int],
    ) -> None:
        name = node.get("name", "?")
        if parent_kind in _SCOPES:
            if "__constant" not in type_name:
                self._find(
                    place, f"program-scope variable '{name}' must be in constant space"
                )
        elif node.get("storageClass") == "static" and "__constant" not in type_name:
            self._find(place, f"static variable '{name}' must be in constant space")
        if "__local" in type_name and _TILE in json.dumps(node):
            self._add_tile(name, function, type_name, place)

    def _add_tile(
        self, name: str, function: str, type_name: str, place: tuple[str, int]
    ) -> None:
        size = threadgroup_bytes(type_name)
        if size is None:
            self.unsized[place] = name
        else:
            self.sized.add(place)
            before, first_place = self.tiles.get(function, (0, place))
            # 16: the alignment of the largest vector.
            self.tiles[function] = before + (size + 15) // 16 * 16, first_place

    def _check_simd_call(
        self, node: dict[str, Any], name: str, place: tuple[str, int] | None
    ) -> None:
        if place is None or not re.match(r"simd_|quad_", name) or "ballot" in name:
            return
        first_argument = (node.get("inner") or [{}, {}])[1:2]
        for typed in (node, *first_argument):
            types = typed.get("type", {})
            text = types.get("desugaredQualType", types.get("qualType", ""))
            if _WIDE.search(text):
                self._find(place, f"{name} of a 64-bit type is not supported")
                return

    def _check_recursion(self) -> None:
        def first(identity: str) -> str:
            return self.first_declaration.get(identity, identity)

        graph = {
            first(caller): {first(callee): place for callee, place in callees.items()}
            for caller, callees in self.calls.items()
        }
        done: set[str] = set()
        for root in graph:
            path: list[str] = []
            stack: list[tuple[str, bool]] = [(root, False)]
            while stack:
                current, leaving = stack.pop()
                if leaving:
                    path.pop()
                    done.add(current)
                    continue
                if current in done or current in path:
                    continue
                path.append(current)
                stack.append((current, True))
                for callee, place in graph.get(current, {}).items():
                    if callee in path:
                        self._find(place, f"recursion through {self.names.get(callee)}")
                    elif callee not in done:
                        stack.append((callee, False))

    def _check_threadgroup_memory(self) -> None:
        for place, name in self.unsized.items():
            if place not in self.sized:
                self._find(place, f"cannot tell the size of threadgroup '{name}'")
        for size, place in self.tiles.values():
            if size > MAX_THREADGROUP_BYTES:
                message = f"{size} bytes of threadgroup memory, more than "
                self._find(place, f"{message}{MAX_THREADGROUP_BYTES}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="lint", description=__doc__)
    default = sorted(kernel_sources.KERNEL_DIR.glob("*.metal"))
    parser.add_argument("files", nargs="*", type=Path, default=default)
    findings = lint(parser.parse_args(arguments).files)
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
