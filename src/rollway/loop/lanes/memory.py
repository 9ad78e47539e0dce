"""Memory of one process: what is freed is kept for reuse, and what it may take can be bounded."""

import ctypes
import resource
import sys
from collections.abc import Callable
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt."""
MAX_RECYCLED_BYTES = 32768 << 10
"""Buffers up to this size (glibc's own limit) come from memory used before, if there is any."""
MAX_IDLE_BYTES = 256 << 20
"""Free memory at the top of the heap beyond this goes back to the system."""


def recycle_buffers() -> None:
    """By default glibc maps and unmaps every buffer of 128 KB and more: 4 to 6 times slower to fill.

    Without glibc nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_RECYCLED_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_IDLE_BYTES)
        mallopt(M_ARENA_MAX, 2)  # each thread's own arena would keep its own


_bound = ""


def bounded(extra_mb: int, key: str, load: Callable[..., Any], *args: Any) -> None:
    """Call `load`, then let this process take `extra_mb` more than it has, as the config's `key` says.

    Beyond it the code that wants more gets a MemoryError. Where the system does not say what a process
    has, nothing is bounded.
    """
    global _bound
    load(*args)
    taken = _data_bytes()
    if taken:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (taken + (extra_mb << 20), hard))
        _bound = f"{extra_mb} MB more than at its start ({key})"


def unbound() -> str:
    """Lift the bound, so that a process beyond it can still say so; what the bound was, if there was."""
    if _bound:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return _bound


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA; 0 where it is not known."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0
