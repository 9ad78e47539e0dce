"""What a worker writes into its log of how it does."""

import logging

from ...loop.watch.lag import merge
from ...loop.watch.stall_text import ms
from ...records.ids import WorkerName
from ...records.lag import LagStats, ProcessStats

log = logging.getLogger(__name__)

WINDOWS = 10
"""Seconds that one line sums up."""


class WorkerLog:
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
