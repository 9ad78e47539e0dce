"""The threads of the thread lane. They leave the CPU to loops that want it for a moment."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10
"""Where every CPU is busy, a thread that writes 10 MB keeps a loop waiting for whole slices of 4 ms.
With this, workers' lag p99 falls from 16-22 ms to 11-12 ms on two full CPUs (bench/envserver.py)."""


def polite_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="lane", initializer=_step_aside)


def _step_aside() -> None:
    """On Linux a thread has a niceness of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
