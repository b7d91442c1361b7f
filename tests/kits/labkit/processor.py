"""Tells whether user-mode Linux, which the lab's small hosts are, can run on this processor.

Debian 12's version sets the extended registers of a process from a buffer of 2,696 bytes, enough
for AVX-512. Where the processor has more of them (AMX), the kernel refuses it, and a host aborts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Callable
from functools import cache

__all__ = ["refusal", "told"]

_ATTACH = 16
_REQUESTS = {"PTRACE_GETREGSET": 0x4204, "PTRACE_SETREGSET": 0x4205}
_NT_X86_XSTATE = 0x202
_STATE_BYTES = 2696


def told(call: Callable[[str], int]) -> str:
    """Return why no host can start, by the ``errno`` of each request; empty if one can."""
    for request in _REQUESTS:
        number = call(request)
        if number in {errno.EFAULT, errno.EINVAL}:
            reason = f"{request}: {os.strerror(number)}"
            return f"the lab's hosts: user-mode Linux cannot run on this processor ({reason})"
    return ""


@cache
def refusal() -> str:
    """Return why this processor runs no host, empty if it does: asked once, with a child."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    state = ctypes.create_string_buffer(_STATE_BYTES)

    def call(request: str) -> int:
        part = (ctypes.c_size_t * 2)(ctypes.addressof(state), _STATE_BYTES)  # an iovec
        kind = ctypes.c_void_p(_NT_X86_XSTATE)
        failed = libc.ptrace(_REQUESTS[request], child.pid, kind, ctypes.byref(part))
        return ctypes.get_errno() if failed else 0

    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            if libc.ptrace(_ATTACH, child.pid, None, None):
                return ""  # the start of a host tells more
            os.waitpid(child.pid, 0)  # it has stopped
            return told(call)
        finally:
            child.kill()
