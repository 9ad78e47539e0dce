"""What is said on a screen of processes whose loop was held or late."""

from ..loop.watch.lag import merge
from ..loop.watch.rarely import is_news
from ..loop.watch.stalls import StallTotals
from ..records.lag import LagStats, ProcessStats, Stall
from .console import Screen, late_line, stall_line


class Complaints:
    """Said when it happens; of a culprit that does it again and again, ever more seldom."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._culprits: dict[str, StallTotals] = {}

    def hear(self, stats: ProcessStats) -> None:
        name = stats.process
        for stall in stats.stalls:
            total = self._culprits.setdefault(name, StallTotals()).add(stall)
            if is_news(total.count - stall.count, total.count):
                self._screen.line(stall_line(name, total))
        if stats.late is not None:
            self._screen.line(late_line(name, stats.late))

    def worst(self) -> list[tuple[str, Stall]]:
        """Which process was held by what, those that took longest in all first."""
        all_of = [(name, one) for name, sums in self._culprits.items() for one in sums.seen()]
        return sorted(all_of, key=lambda one: -one[1].total_s)


class Lags:
    """Merges windows until taken."""

    def __init__(self) -> None:
        self._since: dict[str, LagStats] = {}
        self._last: dict[str, LagStats] = {}
        self._stalls: dict[str, StallTotals] = {}
        self.rss_bytes: dict[str, int] = {}

    def add(self, stats: ProcessStats) -> None:
        self.rss_bytes[stats.process] = stats.rss_bytes
        for stall in stats.stalls:
            self._stalls.setdefault(stats.process, StallTotals()).add(stall)
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
