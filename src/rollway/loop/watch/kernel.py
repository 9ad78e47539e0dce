"""What the kernel says of threads: how long they ran, and how long they waited for a core."""

import gc
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

try:
    _OF_THREAD = resource.RUSAGE_THREAD
except AttributeError:  # only Linux knows it
    _OF_THREAD = resource.RUSAGE_SELF
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Beat(NamedTuple):
    """One moment of a thread, and what it has used and waited for until then."""

    time_s: float
    cpu_s: float
    core_s: float
    """How long it waited for a core."""
    num_faults: int
    """How often it waited for a page to be read from a disk."""
    collector_s: float
    """How long the garbage collector ran, in any thread."""


class CollectorClock:
    """Measures how long the garbage collector runs in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started_s = 0.0

    def __enter__(self) -> "CollectorClock":
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._started_s = now_s
        else:
            self.seconds += now_s - self._started_s


class SchedStat:
    """How long one thread of this process ran and waited for a core; zeros where no kernel tells it."""

    def __init__(self, native_id: int) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)

    def read(self) -> tuple[float, float]:
        try:
            ran, waited, _ = os.pread(self._file, 80, 0).split()
        except (OSError, ValueError):  # not Linux, or the thread has ended
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class OwnClock:
    """Tells of the thread that calls `now`, which is always the same one."""

    def __init__(self, collector: CollectorClock) -> None:
        self._scheduled = SchedStat(threading.get_native_id())
        self._collector = collector

    def now(self) -> Beat:
        used = resource.getrusage(_OF_THREAD)
        cpu_s = used.ru_utime + used.ru_stime
        _, waited_s = self._scheduled.read()
        collector_s = self._collector.seconds
        return Beat(time.monotonic(), cpu_s, waited_s, used.ru_majflt, collector_s)

    def close(self) -> None:
        self._scheduled.close()


class Usage(NamedTuple):
    """What a thread did between two looks at it."""

    ident: int
    name: str
    cpu_s: float
    core_s: float


class OtherThreads:
    """Looks at all threads of this process but some, again and again."""

    def __init__(self, without: set[int]) -> None:
        self._without = without
        self._files: dict[int, SchedStat] = {}
        self._last: dict[int, tuple[float, float]] = {}
        self._unseen: tuple[float, float] | None = None
        """What a thread had done at the last look that did not exist then."""

    def look(self) -> Usage | None:
        """Return the thread that has run, or waited for a core, longest since the last look."""
        busiest: Usage | None = None
        here: set[int] = set()
        for thread in threading.enumerate():
            native_id, ident = thread.native_id, thread.ident
            if native_id is None or ident is None or ident in self._without:
                continue
            here.add(native_id)
            file = self._files.get(native_id) or SchedStat(native_id)
            self._files[native_id] = file
            now = file.read()
            before = self._last.get(native_id, self._unseen or now)
            self._last[native_id] = now
            usage = Usage(ident, thread.name, now[0] - before[0], now[1] - before[1])
            if busiest is None or usage.cpu_s + usage.core_s > busiest.cpu_s + busiest.core_s:
                busiest = usage
        self._unseen = 0.0, 0.0
        for gone in self._files.keys() - here:
            self._files.pop(gone).close()
            self._last.pop(gone, None)
        return busiest

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def stolen_s() -> float:
    """Return how long the machine's cores have run something else than this system, each on average."""
    with suppress(OSError, ValueError, IndexError), Path("/proc/stat").open() as file:
        return int(file.readline().split()[8]) / TICKS_A_SECOND / (os.cpu_count() or 1)
    return 0.0
