"""The MSL front end of the software Metal device: Metal text to C++ for OpenCL.

Three steps, run by plugin/build.py with the clang in ziglang: preprocess (user text
only, macros expanded, line markers kept), translate (a token pass, see rewrite.py),
compile with msl_shim.h in place of Apple's standard library. Standard library only.
"""

from plugin.device.software.frontend.compile import (
    compile_command,
    compile_flags,
    preprocess_command,
    registry,
    sources,
)
from plugin.device.software.frontend.rewrite import (
    FunctionConstant,
    KernelFunction,
    KernelInfo,
    Parameter,
    SourceError,
    Translation,
    entry_symbol,
    tokenize,
    translate,
)

__all__ = [
    "FunctionConstant",
    "KernelFunction",
    "KernelInfo",
    "Parameter",
    "SourceError",
    "Translation",
    "compile_command",
    "compile_flags",
    "entry_symbol",
    "preprocess_command",
    "registry",
    "sources",
    "tokenize",
    "translate",
]
