"""The lines that a worker writes into its log about itself."""

import logging

from ...loop.watch.lag import merge
from ...loop.watch.stall_text import ms
from ...records.lag import LagStats, ProcessStats

log = logging.getLogger(__name__)

WINDOWS = 10
"""One line sums up this many windows of statistics, each a second long."""


class WorkerLog:
    """Writes one line every ten seconds. For place 3: `W3 | 41 active | Lag: … | RSS 312MB`."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._lag = LagStats()
        self._num_windows = 0

    def add(self, stats: ProcessStats) -> None:
        self._lag = merge(self._lag, stats.lag)
        self._num_windows += 1
        if self._num_windows == WINDOWS:
            log.info("%s", self._line(stats))
            self._lag, self._num_windows = LagStats(), 0

    def _line(self, stats: ProcessStats) -> str:
        lag = self._lag
        names = ("med", "p90", "p99", "max")
        shown = " ".join(f"{name}={ms(getattr(lag, name))}ms" for name in names)
        rss = f"{stats.rss_bytes / 1e6:,.0f}MB"
        return f"W{self._place} | {stats.in_flight} active | Lag: {shown} | RSS {rss}"
