"""What is said on a screen of processes whose loop was held or late."""

from ..loop.culprits import Culprits
from ..loop.seldom import is_news
from ..records.lag import ProcessStats, Stall
from .console import Screen, late_line, stall_line


class Complaints:
    """Said when it happens; of a culprit that does it again and again, ever more seldom."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._culprits: dict[str, Culprits] = {}

    def hear(self, stats: ProcessStats) -> None:
        name = stats.process
        for stall in stats.stalls:
            total = self._culprits.setdefault(name, Culprits()).add(stall)
            if is_news(total.count - stall.count, total.count):
                self._screen.line(stall_line(name, total))
        if stats.late is not None:
            self._screen.line(late_line(name, stats.late))

    def worst(self) -> list[tuple[str, Stall]]:
        """Which process was held by what, those that took longest in all first."""
        all_of = [(name, one) for name, sums in self._culprits.items() for one in sums.seen()]
        return sorted(all_of, key=lambda one: -one[1].total_s)
