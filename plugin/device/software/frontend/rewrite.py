"""Preprocessed Metal Shading Language to C++ for OpenCL, by passes over tokens.

clang's C++ for OpenCL has MSL's address spaces and vector types under other names
(msl_shim.h maps them). What is left to do on the text: attributes, kernel entry
points, function constants, threadgroup variables and vector constructors. Lines keep
their numbers, so that diagnostics name the line of the .metal file. Not a type checker:
clang and lint.py find what is wrong beyond the structural errors reported here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

# -- Results -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FunctionConstant:
    """A `constant T name [[function_constant(index)]]`."""

    name: str
    type: str
    index: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel function. `attribute` is "" if it has none."""

    name: str
    type: str
    attribute: str
    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class KernelFunction:
    """A kernel function as written: a template, or a plain function."""

    name: str
    is_template: bool
    parameters: tuple[Parameter, ...]
    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """An instantiated kernel: the name the host asks for and its C entry point."""

    host_name: str
    symbol: str
    function: str
    expression: str


@dataclasses.dataclass(frozen=True, order=True)
class SourceError:
    """A violation of MSL, at a place in the Metal source."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: error: {self.message}"


@dataclasses.dataclass(frozen=True)
class Translation:
    """The result for one unit. `text` is only meaningful if `errors` is empty."""

    text: str
    kernels: list[KernelInfo]
    constants: list[FunctionConstant]
    errors: list[SourceError]
    functions: list[KernelFunction] = dataclasses.field(default_factory=list)


def translate(preprocessed_text: str, unit_name: str) -> Translation:
    """Translates one preprocessed unit. `unit_name` names it in the entry points."""
    return _Unit(preprocessed_text, unit_name).translate()


# -- Tokens --------------------------------------------------------------------------


@dataclasses.dataclass
class Token:
    """`value` is what the source says, `text` what the output gets in its place."""

    kind: str  # "name", "number", "string", "mark", "attribute", "space", "marker"
    value: str
    text: str
    file: str
    line: int


_TOKEN = re.compile(
    r"""
      (?P<marker>^[ \t]*\#[^\n]*)
    | (?P<space>\s+|//[^\n]*|/\*.*?\*/)
    | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    | (?P<name>[A-Za-z_]\w*)
    | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    | (?P<mark>::|->|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_LINE_MARKER = re.compile(r'^[ \t]*#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')


def tokenize(text: str) -> list[Token]:
    """Tokens with their place in the original files; attributes are one token each."""
    tokens = []
    file, line = "?", 1
    for match in _TOKEN.finditer(text):
        kind, value = str(match.lastgroup), match[0]
        tokens.append(Token(kind, value, value, file, line))
        line += value.count("\n")
        if kind == "marker" and (marker := _LINE_MARKER.match(value)):
            # The marker speaks of the line after it, whose newline is yet to come.
            line, file = int(marker[1]) - 1, marker[2]
    return _merge_attributes(tokens)


def _merge_attributes(tokens: list[Token]) -> list[Token]:
    merged: list[Token] = []
    i = 0
    while i < len(tokens):
        # `[[` can only begin an attribute; `]]` can also end two subscripts.
        if [token.value for token in tokens[i : i + 2]] != ["[", "["]:
            merged.append(tokens[i])
            i += 1
            continue
        depth, end = 0, i
        while end < len(tokens):
            depth += {"[": 1, "]": -1}.get(tokens[end].value, 0)
            end += 1
            if depth == 0:
                break
        source = "".join(t.value for t in tokens[i:end] if t.kind != "marker")
        newlines = "\n" * source.count("\n")
        value = source[2:-2].strip()
        first = tokens[i]
        merged.append(Token("attribute", value, newlines, first.file, first.line))
        i = end
    return merged


_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}

# -- Tables --------------------------------------------------------------------------

# Attribute of a kernel parameter: the expression that its argument comes from.
POSITION_ATTRIBUTES = {
    "dispatch_threads_per_threadgroup": "threads_per_threadgroup()",
    "simdgroup_index_in_threadgroup": "simdgroup_index()",
    "simdgroups_per_threadgroup": "simdgroups()",
    "thread_index_in_simdgroup": "lane_index()",
    "thread_index_in_threadgroup": "thread_index()",
    "thread_position_in_grid": "thread_in_grid()",
    "thread_position_in_threadgroup": "thread_in_threadgroup()",
    "threadgroup_position_in_grid": "threadgroup_in_grid()",
    "threadgroups_per_grid": "threadgroups()",
    "threads_per_grid": "threads_per_grid()",
    "threads_per_simdgroup": "threads_per_simdgroup()",
    "threads_per_threadgroup": "threads_per_threadgroup()",
}
ADDRESS_SPACES = ("thread", "threadgroup", "device", "constant")
_NOT_IN_MSL = {
    *("asm", "catch", "delete", "double", "dynamic_cast", "free", "goto", "malloc"),
    *("new", "printf", "std", "thread_local", "throw", "try", "typeid", "virtual"),
}
_VECTOR = re.compile(
    r"(bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat)[234]"
)
_BUFFER = re.compile(r"buffer\(\s*(\d+)\s*\)")
_FUNCTION_CONSTANT = re.compile(r"function_constant\(\s*(\d+)\s*\)")
# On a kernel parameter, which exists only where the constant of this name is true.
_CONDITION = re.compile(r"function_constant\(\s*([A-Za-z_]\w*)\s*\)")
_HOST_NAME = re.compile(r'host_name\(\s*((?:"[^"]*"\s*)+)\)')
# Prepended to the entry points; also keeps them out of the last file's lines.
_ENTRY_MARKER = '\n# 1 "<kernel entry points>"\n'


def entry_symbol(host_name: str) -> str:
    """The C symbol of a kernel's entry point."""
    return "msl_kernel_" + re.sub(r"\W", "_", host_name)


# -- The passes ----------------------------------------------------------------------


class _Unit:
    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.tokens = tokenize(text)
        self.code = [t for t in self.tokens if t.kind not in ("space", "marker")]
        self.kernels: list[KernelInfo] = []
        self.constants: list[FunctionConstant] = []
        self.functions: dict[str, KernelFunction] = {}
        self.bodies: list[range] = []  # of kernel functions, as indices into code
        self.errors: list[SourceError] = []

    def translate(self) -> Translation:
        self.report_words()
        self.rewrite_function_constants()
        self.find_kernels()
        self.rewrite_threadgroup_variables()
        self.report_held_elements()
        self.drop_constructor_qualifiers()
        self.rewrite_vector_constructors()
        entries = self.entry_points()
        text = "".join(token.text for token in self.tokens) + _ENTRY_MARKER + entries
        return Translation(
            text,
            self.kernels,
            self.constants,
            sorted(self.errors, key=lambda e: (e.file, e.line)),
            list(self.functions.values()),
        )

    # helpers

    def error(self, i: int, message: str) -> None:
        token = self.code[i]
        self.errors.append(SourceError(token.file, token.line, message))

    def value(self, i: int) -> str:
        return self.code[i].value if 0 <= i < len(self.code) else ""

    def find(self, i: int, *values: str) -> int:
        """The first of `values` at or after i, or the end of the unit."""
        while i < len(self.code) and self.code[i].value not in values:
            i += 1
        return i

    def closing(self, i: int) -> int:
        """The index of the bracket that closes the one at i."""
        opening, closing = self.code[i].value, _CLOSING[self.code[i].value]
        depth = 0
        for j in range(i, len(self.code)):
            depth += {opening: 1, closing: -1}.get(self.code[j].value, 0)
            if depth == 0:
                return j
        self.error(i, f"'{opening}' is never closed")
        return len(self.code) - 1

    def opening(self, i: int) -> int:
        """The index of the '(' that the ')' at i closes."""
        depth = 0
        for j in range(i, -1, -1):
            depth += {")": 1, "(": -1}.get(self.code[j].value, 0)
            if depth == 0:
                return j
        return 0

    def source(self, start: int, end: int) -> str:
        """The text of code[start:end] on one line, without attributes."""
        words = (t.value for t in self.code[start:end] if t.kind != "attribute")
        return " ".join(words)

    def replace(self, start: int, end: int, text: str) -> None:
        """Puts `text` in the place of code[start:end]; newlines stay."""
        for token in self.code[start:end]:
            token.text = "\n" * token.text.count("\n")
        self.code[start].text = text + self.code[start].text

    def statement_start(self, i: int) -> int:
        """The index of the first token of the declaration that i is in."""
        while i > 0 and self.value(i - 1) not in (";", "{", "}"):
            i -= 1
        return i

    # passes

    def report_words(self) -> None:
        for i, token in enumerate(self.code):
            if token.kind != "name":
                continue
            word = token.value
            # METAL_FUNC expands to the one reserved word that MSL allows.
            reserved = word.startswith("__") and word != "__attribute__"
            deleted = word == "delete" and self.value(i - 1) == "="
            if (word in _NOT_IN_MSL and not deleted) or reserved:
                self.error(i, f"'{word}' is not available in MSL")
            if word in ("reinterpret_cast", "static_cast", "const_cast"):
                self.check_cast(i)

    def check_cast(self, i: int) -> None:
        if self.value(i + 1) != "<":
            return
        end = self.closing(i + 1)
        target = [token.value for token in self.code[i + 2 : end]]
        if target[-1:] in (["*"], ["&"]) and not set(target) & set(ADDRESS_SPACES):
            self.error(i, "cast to a pointer or reference without an address space")

    def rewrite_function_constants(self) -> None:
        for i, token in enumerate(self.code):
            match = _FUNCTION_CONSTANT.search(token.value)
            if token.kind != "attribute" or not match:
                continue
            start = self.statement_start(i)
            if self.value(start) != "constant" or self.value(i + 1) != ";":
                continue  # an optional kernel parameter
            name = self.value(i - 1)
            msl_type = self.source(start + 1, i - 1)
            self.constants.append(FunctionConstant(name, msl_type, int(match[1])))
            if msl_type not in ("bool", "int"):
                self.error(i, f"function constant '{name}' must be bool or int")
            function_constant = f"metal::__msl_constant<{msl_type}, {match[1]}>"
            self.replace(
                start, i + 1, f"constexpr constant {function_constant} {name}{{}}"
            )

    def find_kernels(self) -> None:
        done = 0
        for i, token in enumerate(self.code):
            if i < done:
                continue
            is_attribute = token.kind == "attribute"
            words = re.findall(r"\w+", token.value) if is_attribute else [token.value]
            if "kernel" in words or (is_attribute and "host_name" in words):
                done = self.kernel_declaration(self.statement_start(i))

    def kernel_declaration(self, start: int) -> int:
        """Handles the kernel declared at start; returns where to read on."""
        is_template = self.value(start) == "template" and self.value(start + 1) == "<"
        is_instantiation = self.value(start) == "template" and not is_template
        i = start
        if is_template:
            i = self.closing(start + 1) + 1
        elif is_instantiation:
            i = start + 1
        host_name = ""
        while self.is_specifier(i):
            if self.code[i].kind == "attribute":
                if match := _HOST_NAME.search(self.value(i)):
                    host_name = "".join(re.findall(r'"([^"]*)"', match[1]))
            elif self.value(i) == "kernel":
                self.code[i].text = "inline"
            i += 1
        if is_instantiation and self.value(i) == "decltype":
            expression = self.source(i + 2, self.closing(i + 1))
            return self.instantiation(start, host_name, expression)

        if self.value(i) != "void":
            self.error(i, f"a kernel function must return void, not {self.value(i)}")
        parenthesis = self.find(i, "(", "{", ";")
        if self.value(parenthesis) != "(":
            self.error(i, "expected a kernel function")
            return parenthesis
        if is_instantiation:
            expression = self.source(i + 1, parenthesis)
            return self.instantiation(start, host_name, expression)
        name = self.value(parenthesis - 1)
        end = self.closing(parenthesis)
        parameters = tuple(self.parameters(parenthesis + 1, end))
        where = self.code[parenthesis - 1]
        self.functions[name] = KernelFunction(
            name, is_template, parameters, where.file, where.line
        )
        body = self.find(end, "{", ";")
        if self.value(body) == "{":
            self.bodies.append(range(body, self.closing(body) + 1))
            if not is_template:
                self.add_kernel(parenthesis - 1, host_name or name, name)
        return body

    def is_specifier(self, i: int) -> bool:
        return self.code[i].kind == "attribute" or self.value(i) in (
            "kernel",
            "inline",
            "static",
        )

    def instantiation(self, start: int, host_name: str, expression: str) -> int:
        """Drops the explicit instantiation at start: its entry point makes another."""
        end = self.find(start, ";") + 1
        if host_name:
            self.add_kernel(start, host_name, expression)
        else:
            self.error(start, f"the instantiation {expression} has no host_name")
        self.replace(start, end, "")
        return end

    def add_kernel(self, i: int, host_name: str, expression: str) -> None:
        function = expression.split("<")[0].split("::")[-1].strip()
        symbol = entry_symbol(host_name)
        if any(kernel.symbol == symbol for kernel in self.kernels):
            self.error(i, f"there are two kernels with the host_name '{host_name}'")
        if function not in self.functions:
            self.error(i, f"no kernel function '{function}' is defined above")
        self.kernels.append(KernelInfo(host_name, symbol, function, expression))

    def parameters(self, start: int, end: int) -> Iterator[Parameter]:
        """The parameters in code[start:end], which is between parentheses."""
        depth, first = 0, start
        for i in range(start, end + 1):
            value = self.value(i)
            if depth == 0 and (value == "," or i == end):
                if i > first:
                    yield self.parameter(first, i)
                first = i + 1
            depth += (value in ("(", "[", "{", "<")) - (value in (")", "]", "}", ">"))

    def parameter(self, start: int, end: int) -> Parameter:
        attributes = [t.value for t in self.code[start:end] if t.kind == "attribute"]
        names = [i for i in range(start, end) if self.code[i].kind == "name"]
        name = self.value(names[-1]) if names else ""
        where = self.code[start]
        attribute = ", ".join(attributes)
        is_known = attribute in POSITION_ATTRIBUTES or _BUFFER.search(attribute)
        if not attribute:
            self.error(start, f"kernel parameter '{name}' has no attribute")
        elif not is_known:
            self.error(start, f"unknown parameter attribute [[{attribute}]]")
        if condition := _CONDITION.search(attribute):
            booleans = {c.name for c in self.constants if c.type == "bool"}
            if condition[1] not in booleans:
                self.error(
                    start, f"'{condition[1]}' is not a function constant of type bool"
                )
        msl_type = self.source(start, names[-1]) if names else ""
        return Parameter(name, msl_type, attribute, where.file, where.line)

    def rewrite_threadgroup_variables(self) -> None:
        for i, token in enumerate(self.code):
            is_statement = self.value(i - 1) in ("{", "}", ";", ")")
            if token.value != "threadgroup" or token.kind != "name" or not is_statement:
                continue
            end = self.find(i, ";")
            name = self.find(i, "[", "=", "(", ";", ",") - 1
            declarator = [t.value for t in self.code[i:name]]
            if "*" in declarator or "&" in declarator or "operator" in declarator:
                continue  # a pointer or reference, or a function that returns one
            if self.value(name + 1) != "(":
                self.threadgroup_variable(i, name, end)

    def threadgroup_variable(self, start: int, name: int, end: int) -> None:
        variable = self.value(name)
        if not any(start in body for body in self.bodies):
            self.error(
                start, f"threadgroup variable '{variable}' outside a kernel function"
            )
            return
        dimensions = name + 1
        while self.value(dimensions) == "[":
            dimensions = self.closing(dimensions) + 1
        if self.value(dimensions) == "=" or self.value(dimensions) == "{":
            self.error(start, f"threadgroup variable '{variable}' has an initializer")
            return
        if dimensions != end:
            self.error(start, "declare one threadgroup variable per statement")
            return
        element = self.source(start + 1, name)
        extent = self.source(name + 1, dimensions)
        # Every lane asks the runtime, which gives all of a threadgroup the same memory.
        self.replace(
            start,
            end,
            f"threadgroup {element} (&{variable}){extent} = "
            f"*(threadgroup {element} (*){extent})__msl_threadgroup_memory("
            f"{start}u, sizeof({element}{extent}), __alignof__({element}), "
            f'"{variable}")',
        )

    def report_held_elements(self) -> None:
        """thread_elements() may not be bound to a reference.

        The software device runs matrix products late, when their result is asked for;
        a reference taken before a product would miss it.
        """
        for i in range(len(self.code)):
            if self.value(i) != "thread_elements":
                continue
            start = self.statement_start(i)
            for j in range(start + 1, i):
                if (
                    self.value(j + 1) == "="
                    and self.value(j - 1) == "&"
                    and self.code[j].kind == "name"
                ):
                    self.error(
                        i,
                        "the software device cannot bind thread_elements() to a "
                        "reference: call it where the elements are used",
                    )

    def drop_constructor_qualifiers(self) -> None:
        """`Name(...) thread` -> `Name(...)`: clang has constructors without a space."""
        structs = {
            self.value(i + 1)
            for i in range(len(self.code))
            if self.value(i) in ("struct", "class")
        }
        for i, token in enumerate(self.code):
            is_qualifier = token.value == "thread" and self.value(i - 1) == ")"
            if is_qualifier and self.value(self.opening(i - 1) - 1) in structs:
                token.text = ""

    def rewrite_vector_constructors(self) -> None:
        """`float4(a, b)` -> `__msl_make<float4>(a, b)`; clang has no constructor."""
        aliases = self.vector_aliases()
        for i, token in enumerate(self.code):
            is_vec = token.value == "vec" and self.value(i + 1) == "<"
            is_alias = _VECTOR.fullmatch(token.value) or token.value in aliases
            if token.kind != "name" or not (is_vec or is_alias):
                continue
            last = self.closing(i + 1) if is_vec else i
            is_declarator = self.value(last + 2) in ("*", "&", ")") and (
                self.code[i - 1].kind == "name" or self.value(i - 1) in ("(", ",")
            )
            is_empty = self.value(last + 2) == ")" and self.value(i - 1) != "operator"
            if self.value(last + 1) != "(" or self.value(i - 1) == "operator":
                continue
            if is_declarator and not is_empty:
                continue
            token.text = "metal::__msl_make<" + token.text
            self.code[last].text += ">"

    def vector_aliases(self) -> set[str]:
        """Names that the unit gives to vector types with using or typedef."""
        aliases = set()
        for i in range(len(self.code)):
            if self.value(i) == "using" and self.value(i + 2) == "=":
                target = self.value(i + 3)
                if target == "vec" or _VECTOR.fullmatch(target):
                    aliases.add(self.value(i + 1))
            elif self.value(i) == "typedef":
                target = self.value(i + 1)
                if target == "vec" or _VECTOR.fullmatch(target):
                    aliases.add(self.value(self.find(i, ";") - 1))
        return aliases

    def entry_points(self) -> str:
        """A C function per kernel that calls it with the arguments of a thread."""
        lines = []
        for kernel in self.kernels:
            function = self.functions.get(kernel.function)
            if function is None:
                continue
            arguments = ", ".join(
                self.argument(parameter) for parameter in function.parameters
            )
            lines.append(
                f'extern "C" void {kernel.symbol}'
                f"(const thread metal::__msl_thread* thread_) "
                f"{{ {kernel.expression}({arguments}); }}\n"
            )
        return "".join(lines)

    def argument(self, parameter: Parameter) -> str:
        if match := _BUFFER.search(parameter.attribute):
            condition = _CONDITION.search(parameter.attribute)
            # One that does not exist has no memory: reading it is found.
            exists = f", {condition[1]}" if condition else ""
            return f"thread_->buffer({match[1]}{exists})"
        return (
            f"thread_->{POSITION_ATTRIBUTES.get(parameter.attribute, 'lane_index()')}"
        )
