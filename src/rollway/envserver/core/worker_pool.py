"""The workers that are up: how much room each has, and which gets the next rollout. Pure."""

import statistics
from collections.abc import Iterator

from msgspec import Struct

from ...records.ids import RolloutId, WorkerName
from ...records.lag import ProcessStats

LATE_S, LATE_TIMES = 0.050, 4.0
"""A worker is late if its lag p99 is above LATE_S and above LATE_TIMES the median of all workers."""
BIG_BYTES, BIG_TIMES = 512 << 20, 2.0
"""A worker is big if its memory is BIG_BYTES above the median of all workers, and BIG_TIMES as much."""


class PooledWorker(Struct):
    credits: int
    running: set[RolloutId]
    suspects: dict[RolloutId, int]
    """Those running rollouts that have lost workers for no known reason, and how many each."""
    lag_s: float = 0.0
    rss_bytes: int = 0
    share: float = 1.0
    """How much of its credits the worker may use: less while it does worse than the others."""
    is_draining: bool = False
    empty_since_s: float | None = None
    """Since when it is drained and has nothing to finish."""
    is_being_killed: bool = False
    """The worker is killed for its silence."""

    @property
    def takes_more(self) -> bool:
        return not (self.is_draining or self.is_being_killed)

    @property
    def limit(self) -> int:
        return max(1, int(self.credits * self.share))

    def room(self, num_losses: int = 0) -> int:
        """Return how many more rollouts fit beside one that has lost this many workers for no known
        reason. Each loss halves the company of such a rollout, until it runs alone: if its worker dies
        again, it is to blame."""
        halvings = max((num_losses, *self.suspects.values()))
        return max(1, self.limit >> halvings) - len(self.running)

    def rank(self, num_losses: int) -> tuple[int, float, int]:
        return self.room(num_losses), -self.lag_s, -self.rss_bytes


class WorkerPool:
    def __init__(self) -> None:
        self._workers: dict[WorkerName, PooledWorker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerName]:
        return iter(self._workers)

    def __contains__(self, name: WorkerName) -> bool:
        return name in self._workers

    def add(self, name: WorkerName, credits: int) -> None:
        self._workers[name] = PooledWorker(credits, set(), {})

    def remove(self, name: WorkerName) -> PooledWorker | None:
        removed = self._workers.pop(name, None)
        self._update_shares()
        return removed

    def give(self, name: WorkerName, key: RolloutId, num_losses: int = 0) -> None:
        """Note that a rollout runs in a worker; it has lost `num_losses` workers for no known reason."""
        worker = self._workers[name]
        worker.running.add(key)
        if num_losses:
            worker.suspects[key] = num_losses

    def give_back(self, name: WorkerName, key: RolloutId) -> bool:
        """Note that a rollout ended in a worker. Return False if it did not run there."""
        worker = self._workers.get(name)
        if worker is None or key not in worker.running:
            return False
        worker.running.remove(key)
        worker.suspects.pop(key, None)
        return True

    def drain(self, name: WorkerName) -> None:
        """Give a worker nothing more: it finishes what it has."""
        self._workers[name].is_draining = True

    def mark_for_kill(self, name: WorkerName) -> None:
        self._workers[name].is_being_killed = True

    def not_ending(self, now_s: float, limit_s: float) -> list[WorkerName]:
        """Return the drained workers that had nothing left to finish for `limit_s` and are still up."""
        found = []
        for name, worker in self._workers.items():
            if worker.is_draining and not worker.running and not worker.is_being_killed:
                if worker.empty_since_s is None:
                    worker.empty_since_s = now_s
                if now_s - worker.empty_since_s > limit_s:
                    found.append(name)
        return found

    @property
    def open(self) -> dict[WorkerName, PooledWorker]:
        return {name: worker for name, worker in self._workers.items() if worker.takes_more}

    def freest(self, size: int, num_losses: int = 0) -> WorkerName | None:
        """Return the worker with the most room, if it has room for `size` rollouts at once. These have
        lost up to `num_losses` workers for no known reason. Among equals the worker with less lag is
        better, then the one with less memory. A group that is larger than the limit of every worker goes
        to the best worker once that is empty."""
        takers = [item for item in self._workers.items() if item[1].takes_more]
        if not takers:
            return None
        name, best = max(takers, key=lambda taker: taker[1].rank(num_losses))
        if best.room(num_losses) >= size:
            return name
        is_too_large = all(size > worker.limit >> num_losses for _, worker in takers)
        return name if is_too_large and not best.running else None

    def note(self, name: WorkerName, stats: ProcessStats) -> None:
        """Take in a worker's statistics. Lag is smoothed, because one late second says little."""
        worker = self._workers[name]
        worker.lag_s = (worker.lag_s + stats.lag.p99) / 2
        worker.rss_bytes = stats.rss_bytes
        self._update_shares()

    def _update_shares(self) -> None:
        """Halve the credits of workers far later than the others, and of workers far bigger."""
        workers = self._workers.values()
        if not workers:
            return
        lag_s = statistics.median_low(worker.lag_s for worker in workers)
        size = statistics.median_low(worker.rss_bytes for worker in workers)
        for worker in workers:
            is_late = worker.lag_s > max(LATE_S, LATE_TIMES * lag_s)
            is_big = worker.rss_bytes > max(size + BIG_BYTES, BIG_TIMES * size)
            worker.share = (0.5 if is_late else 1.0) * (0.5 if is_big else 1.0)
