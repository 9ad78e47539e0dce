"""Says once a minute if a machine has too few cores for what runs on it, and what competes for them."""

import asyncio
import os
import time
from collections import defaultdict
from contextlib import suppress
from heapq import nlargest
from pathlib import Path

from ..loop.lanes.threads import thread
from ..loop.watch.kernel import TICKS_A_SECOND
from ..loop.watch.stall_text import ms
from ..records.lag import ProcessStats

EVERY_S = 60.0
LEAST_SHARE = 0.02
"""Loops that waited for a core for less of the time are left alone."""
MEASURE_S = 1.0
MAX_NAMED, LEAST_NAMED = 5, 0.05
PROC = Path("/proc")
CHILD = "rollway.loop.processes.child"
Used = dict[int, tuple[str, float]]
"""The name of each process and its CPU seconds so far, by its number."""


class CoreWatch:
    """Adds up for how long event loops wait for a core."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s
        self._waited_s: defaultdict[str, float] = defaultdict(float)

    def hear(self, stats: ProcessStats) -> None:
        self._waited_s[stats.process] += stats.waits.core_s

    async def look(self) -> str:
        """Return a line if loops have waited for cores since the last call that was due. It measures for
        a second what uses the cores."""
        if time.monotonic() < self._next_s:
            return ""
        self._next_s = time.monotonic() + self._every_s
        waited_s = dict(self._waited_s)
        self._waited_s.clear()
        if max(waited_s.values(), default=0.0) < LEAST_SHARE * self._every_s:
            return ""
        before = await thread(cpu_times)
        await asyncio.sleep(MEASURE_S)
        after = await thread(cpu_times)
        return core_line(waited_s, before, after)


def cpu_times() -> Used:
    """Return what every process of this machine has used, on Linux. This blocks."""
    used: Used = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            user, system = rest.split()[11:13]
            cpu_s = (int(user) + int(system)) / TICKS_A_SECOND
            used[int(folder.name)] = _rollways_name(folder) or name, cpu_s
    return used


def _rollways_name(folder: Path) -> str:
    words = (folder / "cmdline").read_text(errors="replace").split("\0")
    return f"rollway's {words[words.index(CHILD) + 1]}" if CHILD in words[:-1] else ""


def core_line(waited_s: dict[str, float], before: Used, after: Used) -> str:
    """Say who waited, what uses the cores, and what to do."""
    shares = {
        f"{name} (pid {pid})": (cpu_s - before[pid][1]) / MEASURE_S
        for pid, (name, cpu_s) in after.items()
        if pid in before
    }
    names = nlargest(MAX_NAMED, shares, key=lambda name: shares[name])
    busy = {name: shares[name] for name in names if shares[name] > LEAST_NAMED}
    foreign = sum(share for name, share in busy.items() if not name.startswith("rollway"))
    advice = "end the other programs, or use another machine"
    if foreign < sum(busy.values()) / 2:
        advice = "use a machine with more cores, or fewer server.workers and server.scoring_processes"
    process = max(waited_s, key=lambda name: waited_s[name])
    total, longest = ms(sum(waited_s.values())), ms(waited_s[process])
    using = ", ".join(f"{name} {share:.0%}" for name, share in busy.items())
    return (
        f"Too few cores: event loops waited {total} ms for a core in the last minute, "
        f"{process} alone {longest} ms. This machine has {os.cpu_count()}, used by {using}: {advice}"
    )
