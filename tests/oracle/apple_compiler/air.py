"""AIR, what Apple's compiler makes of MSL, turned into LLVM IR that runs on a CPU.

AIR is LLVM bitcode with address spaces, intrinsics "air.*", and metadata that says
where the arguments of a kernel come from. The clang of ziglang reads it. This module
edits the text: pointers lose their address spaces, threadgroup variables and function
constants come from the runtime of the software device, and the kernel gets the entry
point that the device calls. Intrinsics stay calls, of the functions of air_runtime.cc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from plugin import build

RUNTIME = Path(__file__).with_name("air_runtime.cc")


class AirError(Exception):
    """A module has something that is not translated."""


def disassemble(bitcode: Path, machine: str) -> str:
    """The text of a module, with the data layout of `machine`; nothing is optimised."""
    return build.run_zig(
        [
            *("clang", "-x", "ir", str(bitcode), "-S", "-emit-llvm", "-o", "-"),
            *("-target", f"{machine}-linux-gnu", "-Wno-override-module"),
            *("-Xclang", "-disable-llvm-passes"),
        ]
    )


def compile_command(machine: str, source: Path, output: Path) -> list[str]:
    """Arguments for `zig`: compiles the result of translate() to an object."""
    return [
        *("clang", "-x", "ir", str(source), "-c", "-o", str(output), "-O2", "-fPIC"),
        *("-target", f"{machine}-linux-gnu", "-Wno-override-module"),
    ]


def translate(text: str, kernel: str, symbol: str, constants: Mapping[int, int]) -> str:
    """LLVM IR with a function `symbol` that software_device.cc can call.

    Args:
      text: the disassembled module.
      kernel: the name of its kernel.
      symbol: of the entry point, as frontend.entry_symbol makes it.
      constants: indices of function constants in the module to those in the software
        device, which has fewer.

    Raises:
      AirError: the module has an intrinsic, an argument or a function constant that
        is not known here; the message names it and the kernel.
    """
    return _Module(text, kernel, symbol, constants).translate()


def intrinsics(text: str) -> set[str]:
    """The names of the functions "air.*" that a disassembled module declares."""
    return set(re.findall(r"^declare .*@(air\.[\w.]+)\(", text, re.MULTILINE))


# -- What is known -------------------------------------------------------------------

_NAME = r'@(?:"[^"]+"|[\w.$]+)'
_GLOBAL = re.compile(
    rf"^({_NAME}) = .*\baddrspace\((\d)\) "
    r"(?:externally_initialized )?(global|constant) (.+?)"
    r"(?:, section \"[^\"]*\")?, align (\d+)$",
    re.MULTILINE,
)
_THREADGROUP = "3"
_FUNCTION_CONSTANT = re.compile(r"\.MTL_FC_INIT_(\d+)_\w+$")
_NODE = re.compile(r"^!(\d+) = (?:distinct )?!\{(.*)\}$", re.MULTILINE)

_LLVM_TYPES = {"f32": "float", "f16": "half", "bf16": "bfloat"}
_MATRIX = "air.simdgroup_matrix_8x8_"
_MATRIX_TYPE = r"\.v64(f32|f16|bf16)"
_MATRIX_PRODUCT = re.compile(_MATRIX + "multiply_accumulate" + _MATRIX_TYPE * 4)
_MATRIX_FILL = re.compile(_MATRIX + "init_filled" + _MATRIX_TYPE + r"\.\w+")
_MATRIX_MEMORY = re.compile(_MATRIX + "(load|store)" + _MATRIX_TYPE + r"\.p[13]\w+")
_FUSED = re.compile(r"llvm\.fmuladd\.(f32|f16|bf16)")


def _known_functions() -> set[str]:
    return set(re.findall(r'^AIR\("([^"]+)"', RUNTIME.read_text(), re.MULTILINE))


# -- The edits -----------------------------------------------------------------------


class _Parameter(NamedTuple):
    """Of the kernel function: its LLVM type, the text of its metadata."""

    type: str
    metadata: str


class _Module:
    def __init__(
        self, text: str, kernel: str, symbol: str, constants: Mapping[int, int]
    ) -> None:
        self.text = text
        self.kernel, self.symbol, self.constants = kernel, symbol, constants
        self.known = _known_functions()
        self.nodes = dict(_NODE.findall(text))
        self.added: list[str] = []  # functions, and declarations of what they call

    def translate(self) -> str:
        self.check_intrinsics()
        parameters = self.parameters()
        constructor = self.drop_constructor_list()
        variables = self.rewrite_globals()
        self.drop_spaces_and_attributes()
        self.define_matrix_functions()
        self.define_unfused_products()
        self.add_threadgroup_memory(variables)
        self.add_entry_point(parameters, constructor)
        return self.text + "\n".join(["", *self.added, ""])

    def error(self, message: str) -> AirError:
        return AirError(f"{self.kernel}: {message}")

    def check_intrinsics(self) -> None:
        for name in sorted(intrinsics(self.text) - self.known):
            patterns = (_MATRIX_PRODUCT, _MATRIX_FILL, _MATRIX_MEMORY)
            if not any(pattern.fullmatch(name) for pattern in patterns):
                raise self.error(f"the AIR intrinsic {name} is not known.")

    # metadata

    def node(self, reference: str) -> str:
        """The fields of the node that a text like "!12" refers to."""
        return str(self.nodes[reference.strip().removeprefix("!")])

    def parameters(self) -> list[_Parameter]:
        """Of the kernel, from !air.kernel = !{!{function, results, parameters}}."""
        (kernel,) = re.findall(r"^!air\.kernel = !\{(!\d+)\}$", self.text, re.MULTILINE)
        described = self.node(self.node(kernel).split(", ")[2]).split(", ")
        match = re.search(
            rf"^define [^@]*@{re.escape(self.kernel)}\((.*)\) [^()]*\{{$",
            self.text,
            re.MULTILINE,
        )
        if match is None:
            raise self.error("the module does not define its kernel.")
        types = [
            re.match(r"\s*(ptr|<\d+ x \w+>|\w+)", part) for part in _top_level(match[1])
        ]
        if len(types) != len(described):
            raise self.error(f"{len(types)} parameters, but {len(described)} nodes.")
        return [
            _Parameter(str(llvm_type and llvm_type[1]), self.node(reference))
            for llvm_type, reference in zip(types, described)
        ]

    # globals

    def drop_constructor_list(self) -> str:
        """The function that copies function constants, "" if there is none."""
        names = re.findall(
            rf"^@llvm\.global_ctors = .*ptr ({_NAME}), ptr null",
            self.text,
            re.MULTILINE,
        )
        self.text = re.sub(
            r"(?m)^@llvm\.(global_ctors|compiler\.used) = .*$", "", self.text
        )
        return names[0] if names else ""

    def rewrite_globals(self) -> list[tuple[str, str, str]]:
        """Removes threadgroup variables: names, types and alignments.

        Variables in the constant space depend on function constants. They become
        variables of the thread: a lane never leaves the one that it started on.
        """
        variables = []
        self.function_constants: list[tuple[str, str, int]] = []

        def rewrite(match: re.Match[str]) -> str:
            name, space, kind, value, alignment = match.groups()
            llvm_type = value.rsplit(" ", 1)[0]
            if space == _THREADGROUP:
                variables.append((name, llvm_type, alignment))
                return ""
            constant = _FUNCTION_CONSTANT.search(name.strip('@"'))
            if kind == "constant" and not constant:
                return f"{name} = internal constant {value}, align {alignment}"
            if constant:
                index = int(constant[1])
                if index not in self.constants:
                    raise self.error(f"function constant {index} is not known.")
                self.function_constants.append((name, llvm_type, self.constants[index]))
            return (
                f"{name} = internal thread_local global {llvm_type} zeroinitializer, "
                f"align {alignment}"
            )

        self.text = _GLOBAL.sub(rewrite, self.text)
        return variables

    def drop_spaces_and_attributes(self) -> None:
        """What is meant for Apple's back end, or says too much of the intrinsics."""
        text = re.sub(r" addrspace\(\d\)", "", self.text)
        text = re.sub(r' section "air\.[^"]*"', "", text)

        def attributes(match: re.Match[str]) -> str:
            # The software device tells places of meeting apart by their address.
            kept = "convergent noduplicate " if "convergent" in match[2] else ""
            return f"{match[1]} = {{ {kept}nounwind }}"

        text = re.sub(r"(?m)^(attributes #\d+) = \{(.*)\}$", attributes, text)
        # Memory attributes of parameters: matrices are loaded by other functions here.
        self.text = re.sub(r" (nocapture|readonly|writeonly|readnone)\b", "", text)

    # functions

    def called(self, pattern: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
        """The declared functions with such names; their declarations are dropped."""
        found = []

        def drop(match: re.Match[str]) -> str:
            name = pattern.fullmatch(match[1])
            if name is None:
                return match[0]
            found.append((match[1], name))
            return ""

        self.text = re.sub(r"(?m)^declare .*@([\w.]+)\(.*$", drop, self.text)
        return found

    def define_matrix_functions(self) -> None:
        """A lane has elements 0 and 1 of the 64 that AIR gives every matrix."""
        for name, match in self.called(_MATRIX_PRODUCT):
            self.define_matrix_product(name, *match.groups())
        for name, match in self.called(_MATRIX_FILL):
            matrix, element = f"<64 x {_LLVM_TYPES[match[1]]}>", _LLVM_TYPES[match[1]]
            self.define(
                f"{matrix} @{name}({element} %x)",
                f"%v0 = insertelement {matrix} undef, {element} %x, i32 0",
                f"%v1 = insertelement {matrix} %v0, {element} %x, i32 1",
                f"ret {matrix} %v1",
            )
        for name, match in self.called(_MATRIX_MEMORY):
            self.define_matrix_memory(name, match[1], _LLVM_TYPES[match[2]])

    def define_matrix_product(self, name: str, d: str, a: str, b: str, c: str) -> None:
        if (d, c) != ("f32", "f32"):
            raise self.error(f"the AIR intrinsic {name} sums in another type than f32.")
        body = ["%out = alloca [2 x float]"]
        types = {"a": _LLVM_TYPES[a], "b": _LLVM_TYPES[b], "c": "float"}
        for operand, element in types.items():
            for i in (0, 1):
                value = f"%{operand}{i}"
                matrix = f"<64 x {element}>"
                body.append(f"{value}.e = extractelement {matrix} %{operand}, i32 {i}")
                body.append(
                    f"{value} = bitcast float {value}.e to float"
                    if element == "float"
                    else f"{value} = fpext {element} {value}.e to float"
                )
        scalars = ", ".join(f"float %{operand}{i}" for operand in types for i in (0, 1))
        body += [
            f"call void @air_matrix_product({scalars}, ptr %out)",
            "%next = getelementptr float, ptr %out, i64 1",
            "%r0 = load float, ptr %out",
            "%r1 = load float, ptr %next",
            "%v0 = insertelement <64 x float> undef, float %r0, i32 0",
            "%v1 = insertelement <64 x float> %v0, float %r1, i32 1",
            "ret <64 x float> %v1",
        ]
        operands = ", ".join(f"<64 x {t}> %{operand}" for operand, t in types.items())
        self.define(f"<64 x float> @{name}({operands})", *body)
        self.declare(
            "declare void @air_matrix_product(float, float, float, float, float, "
            "float, ptr) convergent noduplicate nounwind"
        )

    def define_matrix_memory(self, name: str, what: str, element: str) -> None:
        matrix = f"<64 x {element}>"
        body = [
            "%column = extractelement <2 x i64> %origin, i32 0",
            "%row = extractelement <2 x i64> %origin, i32 1",
        ]
        for i in (0, 1):
            body += [
                f"%o{i} = call i64 @air_matrix_offset(i32 {i}, i64 %per_row, "
                "i64 %column, i64 %row, i1 zeroext %transposed)",
                f"%p{i} = getelementptr {element}, ptr %memory, i64 %o{i}",
            ]
        memory = "ptr %memory, i64 %per_row, <2 x i64> %origin, i1 %transposed"
        if what == "load":
            body += [
                f"%x0 = load {element}, ptr %p0",
                f"%x1 = load {element}, ptr %p1",
                f"%v0 = insertelement {matrix} undef, {element} %x0, i32 0",
                f"%v1 = insertelement {matrix} %v0, {element} %x1, i32 1",
                f"ret {matrix} %v1",
            ]
            self.define(f"{matrix} @{name}({memory})", *body)
        else:
            for i in (0, 1):
                body += [
                    f"%x{i} = extractelement {matrix} %m, i32 {i}",
                    f"store {element} %x{i}, ptr %p{i}",
                ]
            self.define(f"void @{name}({matrix} %m, {memory})", *body, "ret void")
        self.declare(
            "declare i64 @air_matrix_offset(i32, i64, i64, i64, i1 zeroext) nounwind"
        )

    def define_unfused_products(self) -> None:
        """`a * b + c` that may be fused or not: the software device does not."""
        for name, match in self.called(_FUSED):
            t = _LLVM_TYPES[match[1]]
            replacement = f"air_{name.replace('.', '_')}"
            self.text = self.text.replace(f"@{name}(", f"@{replacement}(")
            self.define(
                f"{t} @{replacement}({t} %a, {t} %b, {t} %c)",
                f"%ab = fmul {t} %a, %b",
                f"%sum = fadd {t} %ab, %c",
                f"ret {t} %sum",
            )

    def define(self, signature: str, *body: str) -> None:
        lines = "\n".join(f"  {line}" for line in body)
        self.added.append(
            f"define internal {signature} alwaysinline nounwind {{\n{lines}\n}}"
        )

    def declare(self, declaration: str) -> None:
        if declaration not in self.added:
            self.added.append(declaration)

    # the kernel

    def add_threadgroup_memory(self, variables: list[tuple[str, str, str]]) -> None:
        """Every lane asks the runtime for the variables when it enters the kernel."""
        lines = []
        for i, (name, llvm_type, alignment) in enumerate(variables):
            local = f"%threadgroup.{i}"
            self.text = re.sub(re.escape(name) + r"(?![\w.$])", local, self.text)
            size = f"ptrtoint (ptr getelementptr ({llvm_type}, ptr null, i32 1) to i64)"
            lines.append(
                f"  {local} = call ptr @__msl_threadgroup_memory(i32 {i}, i64 {size}, "
                f"i64 {alignment}, ptr @threadgroup.name)"
            )
        if lines:
            self.added.append(
                '@threadgroup.name = internal constant [12 x i8] c"threadgroup\\00"'
            )
            self.added.append(
                "declare ptr @__msl_threadgroup_memory(i32, i64, i64, ptr) nounwind"
            )
        definition = rf"(?m)^define [^@]*(@{re.escape(self.kernel)}\(.*\{{)$"
        self.text = re.sub(
            definition,
            lambda match: "\n".join([f"define internal void {match[1]}", *lines]),
            self.text,
        )

    def add_entry_point(self, parameters: list[_Parameter], constructor: str) -> None:
        body = []
        if self.function_constants:
            body.append("%constants = call ptr @__msl_function_constants()")
            self.added.append("declare ptr @__msl_function_constants() nounwind")
        for i, (name, llvm_type, index) in enumerate(self.function_constants):
            body += [
                f"%c{i}.p = getelementptr i32, ptr %constants, i64 {index}",
                f"%c{i} = load i32, ptr %c{i}.p",
                f"%c{i}.v = trunc i32 %c{i} to {llvm_type}"
                if llvm_type != "i32"
                else f"%c{i}.v = add i32 %c{i}, 0",
                f"store {llvm_type} %c{i}.v, ptr {name}",
            ]
        if constructor:
            body.append(f"call void {constructor}()")
        arguments = []
        for i, parameter in enumerate(parameters):
            body += self.argument(i, parameter)
            arguments.append(f"{parameter.type} %a{i}")
        body += [f"call void @{self.kernel}({', '.join(arguments)})", "ret void"]
        lines = "\n".join(f"  {line}" for line in body)
        self.added.append(
            f"define void @{self.symbol}(ptr %thread) nounwind {{\n{lines}\n}}"
        )

    def argument(self, i: int, parameter: _Parameter) -> list[str]:
        """Instructions that put an argument of this thread into %a<i>."""
        fields = parameter.metadata
        kinds = [
            kind
            for kind in re.findall(r'!"(air\.\w+)"', fields)
            if kind != "air.function_constant"
        ]
        kind = kinds[0] if kinds else fields
        if kind == "air.buffer":
            return self.buffer(i, fields)
        if kind not in self.known:
            raise self.error(f"a parameter with the attribute {kind} is not known.")
        function = f"call i32 @{kind}(ptr %thread, i32"
        self.declare(f"declare i32 @{kind}(ptr, i32) nounwind")
        vector = re.fullmatch(r"<(\d) x (i16|i32)>", parameter.type)
        if vector is None:
            if parameter.type not in ("i16", "i32"):
                raise self.error(f"{kind} has the type {parameter.type}.")
            return [
                f"%a{i}.0 = {function} 0)",
                f"%a{i} = {_narrow(parameter.type, f'%a{i}.0')}",
            ]
        lines, before = [], "undef"
        for component in range(int(vector[1])):
            last = component == int(vector[1]) - 1
            after = f"%a{i}" if last else f"%a{i}.v{component}"
            lines += [
                f"%a{i}.{component} = {function} {component})",
                f"%a{i}.n{component} = {_narrow(vector[2], f'%a{i}.{component}')}",
                f"{after} = insertelement {parameter.type} {before}, "
                f"{vector[2]} %a{i}.n{component}, i32 {component}",
            ]
            before = after
        return lines

    def buffer(self, i: int, fields: str) -> list[str]:
        (location,) = re.findall(r'!"air\.location_index", i32 (\d+)', fields)
        lines, exists = [], "true"
        condition = re.search(r'!"air\.function_constant", (!\d+)', fields)
        # Apple's compiler reads references ahead of the condition of their existence.
        is_reference = '"air.buffer_size"' in fields
        if condition and not is_reference:
            match = re.search(rf"ptr addrspace\(2\) ({_NAME})", self.node(condition[1]))
            if match is None:
                raise self.error(
                    "the condition of a parameter is no function constant."
                )
            exists = f"%e{i}"
            lines = [
                f"%e{i}.b = load i8, ptr {match[1]}",
                f"%e{i} = icmp ne i8 %e{i}.b, 0",
            ]
        self.declare("declare ptr @air.buffer(ptr, i32, i1 zeroext) nounwind")
        return [
            *lines,
            f"%a{i} = call ptr @air.buffer(ptr %thread, i32 {location}, "
            f"i1 zeroext {exists})",
        ]


def _narrow(llvm_type: str, value: str) -> str:
    return f"trunc i32 {value} to i16" if llvm_type == "i16" else f"add i32 {value}, 0"


def _top_level(text: str) -> list[str]:
    """The parts between commas that are not within brackets or quotes."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        if not quoted:
            depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts
