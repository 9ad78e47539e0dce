"""Lag and stalls of every process over a step, from the windows each reports once a second."""

from ..loop.culprits import Culprits
from ..loop.lag import merge
from ..records.lag import LagStats, ProcessStats, Stall


class Lags:
    """Merges windows until taken."""

    def __init__(self) -> None:
        self._since: dict[str, LagStats] = {}
        self._last: dict[str, LagStats] = {}
        self._stalls: dict[str, Culprits] = {}
        self.rss_bytes: dict[str, int] = {}

    def add(self, stats: ProcessStats) -> None:
        self.rss_bytes[stats.process] = stats.rss_bytes
        for stall in stats.stalls:
            self._stalls.setdefault(stats.process, Culprits()).add(stall)
        self._since[stats.process] = merge(self._since.get(stats.process, LagStats()), stats.lag)

    def take(self) -> dict[str, LagStats]:
        """Each process's lag since the last call; a process that said nothing keeps its last."""
        self._last.update(self._since)
        self._since = {}
        return dict(sorted(self._last.items()))

    def take_stalls(self) -> dict[str, tuple[Stall, ...]]:
        """What held each process since the last call; processes that were not held are left out."""
        stalls, self._stalls = self._stalls, {}
        return {process: culprits.take() for process, culprits in sorted(stalls.items())}
