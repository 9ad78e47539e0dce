"""The memory of one process: freed buffers are kept for reuse, and a lane's process can have a limit."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt."""
MAX_RECYCLED_BYTES = 32768 << 10
"""Buffers up to this size (glibc's own limit) come from memory that was used before, if there is any."""
MAX_IDLE_BYTES = 256 << 20
"""Free memory at the top of the heap beyond this goes back to the system."""


def recycle_buffers() -> None:
    """Keep freed buffers for reuse. Without glibc nothing changes. By default glibc maps and unmaps
    every buffer of 128 KB and more, which makes filling it 4 to 6 times slower."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_RECYCLED_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_IDLE_BYTES)
        # without this limit each thread would keep its own arena of free memory
        mallopt(M_ARENA_MAX, 2)


def rss_bytes() -> int:
    """Return the resident memory: the current one on Linux, the peak on other systems."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_limit = ""


def load_and_limit(extra_mb: int, load: Callable[..., Any], *args: Any) -> None:
    """Call `load`, then limit this process to `extra_mb` more memory than it has then. Code that wants
    more gets a MemoryError. On systems without /proc nothing is limited."""
    global _limit
    load(*args)
    taken = _data_bytes()
    if taken:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (taken + (extra_mb << 20), hard))
        _limit = f"{extra_mb} MB more than at its start"


def lift_limit() -> str:
    """Lift the limit, so that a process that reached it can still report it; return it in words."""
    if _limit:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return _limit


def _data_bytes() -> int:
    """Return the bytes that count against RLIMIT_DATA, or 0 where the system does not say."""
    try:
        with open("/proc/self/status") as status:
            return next(
                int(line.split()[1]) << 10 for line in status if line.startswith("VmData")
            )
    except (OSError, StopIteration):
        return 0
