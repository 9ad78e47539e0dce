"""Measures the memory of child processes that report nothing themselves: models, lanes, tools."""

import os
from contextlib import suppress
from pathlib import Path

from .child import RUNNING

PAGE = os.sysconf("SC_PAGESIZE")


def child_rss() -> dict[str, int]:
    """Return the resident memory of each child by name, with everything that it has started. Reads a few
    files of /proc for each process; without /proc nothing is returned."""
    silent = [child for child in tuple(RUNNING) if not child.reports_itself]
    return {child.name: sum(map(_rss, _family(child.pid))) for child in silent}


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for member in found:  # grows while it is read
        for tasks in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, tasks.read_text().split())
    return found


def _rss(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0
