"""AttentionParams of a launch, from the digits of a plan (AttentionLibrary.plan).

The struct's layout is read from metal_kernels/attention_params.h: C's rules hold there,
and ctypes follows them.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

HEADER = Path(__file__).parents[2] / "metal_kernels" / "attention_params.h"

_TYPES: dict[str, Any] = {
    "JFM_INT64": ctypes.c_int64,
    "JFM_INT32": ctypes.c_int32,
    "JFM_UINT32": ctypes.c_uint32,
    "float": ctypes.c_float,
}
_STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_FIELDS = re.compile(r"(\w+)\s+([\w\s,\[\]]+);")
_ARRAY = re.compile(r"(\w+)(?:\[(\w+)\])?")


@functools.cache
def _params() -> Any:
    text = re.sub(r"//.*", "", HEADER.read_text())
    sizes = dict(re.findall(r"#define (\w+) (\d+)", text))
    types = dict(_TYPES)
    for name, body in _STRUCT.findall(text):
        fields = []
        for type_name, names in _FIELDS.findall(body):
            for match in _ARRAY.finditer(names):
                member, size = match.groups()
                kind = types[type_name]
                if size:
                    kind = kind * int(sizes.get(size, size))
                fields.append((member, kind))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types["AttentionParams"]


def params_of(launch: dict[str, Any]) -> Any:
    """The parameters of a launch of a plan, as a structure with the header's names."""
    data = bytes.fromhex(launch["params"])
    assert len(data) == ctypes.sizeof(_params())
    return _params().from_buffer_copy(data)


@functools.cache
def _constants() -> dict[str, int]:
    rows = re.findall(r"X\(\w+, (\w+), (\d+)\)", HEADER.read_text())
    return {name: int(index) for name, index in rows}


def constant_of(launch: dict[str, Any], name: str) -> int:
    """The value of a function constant of a launch."""
    value: int = launch["constants"][_constants()[name]]
    return value
