"""What a worker writes into its log: how it does, and which rollouts failed."""

import logging
from collections import Counter

from ..loop.lag import merge
from ..loop.seldom import is_news
from ..loop.telling import ms
from ..records.ids import WorkerName
from ..records.lag import LagStats, ProcessStats
from ..records.rollout import Failed
from ..wire.messages import Run

log = logging.getLogger(__name__)

WINDOWS = 10
"""Seconds that one line sums up."""
IN_FULL = 10


class Pulse:
    """One line for every ten seconds: `W3 | 41 active | Lag: … | RSS 312MB`."""

    def __init__(self, worker: WorkerName) -> None:
        self._name = worker.rpartition(".w")[2].partition(".")[0]
        self._lag = LagStats()
        self._num_windows = 0

    def beat(self, stats: ProcessStats) -> None:
        self._lag = merge(self._lag, stats.lag)
        self._num_windows += 1
        if self._num_windows == WINDOWS:
            log.info("%s", self.line(stats))
            self._lag, self._num_windows = LagStats(), 0

    def line(self, stats: ProcessStats) -> str:
        lag = self._lag
        shown = " ".join(
            f"{name}={ms(value)}ms"
            for name, value in (("med", lag.med), ("p90", lag.p90), ("p99", lag.p99), ("max", lag.max))
        )
        rss = f"{stats.rss_bytes / 1e6:,.0f}MB"
        return f"W{self._name} | {stats.in_flight} active | Lag: {shown} | RSS {rss}"


class FailureLog:
    """The first failures of a boundary in full, then ever fewer: a log stays readable and bounded."""

    def __init__(self, env: str) -> None:
        self._env = env
        self._seen: Counter[str] = Counter()

    def add(self, run: Run, failed: Failed) -> None:
        count = self._seen[failed.boundary] = self._seen[failed.boundary] + 1
        if count <= IN_FULL or is_news(count - 1, count):
            traceback = f"\n{failed.traceback}" if failed.traceback else ""
            log.warning(
                "%s failed: boundary %s (number %d), environment '%s', task '%s', attempt %d: %s%s",
                run.rollout_id, failed.boundary, count, self._env, run.task.id, run.attempt,
                failed.error, traceback,
            )  # fmt: skip
