"""The workers that are up: how much room each has, and which is next. Pure."""

import statistics
from collections.abc import Iterator

from msgspec import Struct

from ...records.ids import RolloutId, WorkerName
from ...records.lag import ProcessStats

LATE_S, LATE_TIMES = 0.050, 4.0
"""A worker is far later than the others if its lag p99 is above both."""
BIG_BYTES, BIG_TIMES = 512 << 20, 2.0
"""A worker is far bigger than the others if its memory is above theirs by both."""


class PooledWorker(Struct):
    """One worker: what it offered, what it runs, what it last said of itself."""

    credits: int
    running: set[RolloutId]
    lag_s: float = 0.0
    rss_bytes: int = 0
    share: float = 1.0
    """How much of its credits it gets: less while it does worse than the others."""
    is_draining: bool = False
    is_condemned: bool = False
    """To be killed for its silence."""

    @property
    def takes_more(self) -> bool:
        return not (self.is_draining or self.is_condemned)

    @property
    def limit(self) -> int:
        return max(1, int(self.credits * self.share))

    @property
    def room(self) -> int:
        return self.limit - len(self.running)


class WorkerPool:
    """Workers by name."""

    def __init__(self) -> None:
        self._workers: dict[WorkerName, PooledWorker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerName]:
        return iter(self._workers)

    def __contains__(self, name: WorkerName) -> bool:
        return name in self._workers

    def add(self, name: WorkerName, credits: int) -> None:
        self._workers[name] = PooledWorker(credits, set())

    def get(self, name: WorkerName) -> PooledWorker | None:
        return self._workers.get(name)

    def remove(self, name: WorkerName) -> PooledWorker | None:
        removed = self._workers.pop(name, None)
        self._judge()
        return removed

    def give(self, name: WorkerName, key: RolloutId) -> None:
        self._workers[name].running.add(key)

    def give_back(self, name: WorkerName, key: RolloutId) -> bool:
        """A rollout ended there; whether it was running there."""
        one = self._workers.get(name)
        if one is None or key not in one.running:
            return False
        one.running.remove(key)
        return True

    def drain(self, name: WorkerName) -> None:
        """It finishes what it has."""
        self._workers[name].is_draining = True

    def condemn(self, name: WorkerName) -> None:
        self._workers[name].is_condemned = True

    @property
    def open(self) -> dict[WorkerName, PooledWorker]:
        """Those that take more."""
        return {name: one for name, one in self._workers.items() if one.takes_more}

    def freest(self, size: int) -> WorkerName | None:
        """The worker with most room, if it has it for so many at once. More than any worker ever has
        room for go to an empty one. Among equals the more punctual, then the smaller one."""
        best: tuple[tuple[int, float, int], WorkerName] | None = None
        most = 0
        for name, one in self._workers.items():
            if one.takes_more:
                most = max(most, one.limit)
                rank = (one.room, -one.lag_s, -one.rss_bytes)
                if best is None or rank > best[0]:
                    best = rank, name
        if best is None:
            return None
        is_empty = not self._workers[best[1]].running
        return best[1] if best[0][0] >= size or (size > most and is_empty) else None

    def note(self, name: WorkerName, stats: ProcessStats) -> None:
        """What it says of itself. Lag is smoothed: one late second is nobody's character."""
        one = self._workers[name]
        one.lag_s = (one.lag_s + stats.lag.p99) / 2
        one.rss_bytes = stats.rss_bytes
        self._judge()

    def _judge(self) -> None:
        """Half the credits for one that is far later than the others, and half for one far bigger."""
        if not self._workers:
            return
        lag_s = statistics.median_low(one.lag_s for one in self._workers.values())
        size = statistics.median_low(one.rss_bytes for one in self._workers.values())
        for one in self._workers.values():
            is_late = one.lag_s > max(LATE_S, LATE_TIMES * lag_s)
            is_big = one.rss_bytes > max(size + BIG_BYTES, BIG_TIMES * size)
            one.share = (0.5 if is_late else 1.0) * (0.5 if is_big else 1.0)
