"""How a process ended: by a fault, for which a kernel may be to blame, or by a wish.

For the proof of the kernels (kernel_proof.py) and `doctor`.
"""

from __future__ import annotations

import signal

_FAULTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}


def is_crash(code: int) -> bool:
    """Whether the exit code is that of a fault; being killed is none."""
    return _signal_name(code) in _FAULTS


def ending(code: int) -> str:
    """How a process with this exit code ended, to be put behind "it"."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = _signal_name(code) or f"signal {-code}"
    return f"crashed ({name})" if is_crash(code) else f"was killed ({name})"


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return ""
