"""What is shown of an env server that runs on its own."""

import asyncio

from ..loop.culprits import Culprits
from ..loop.seldom import is_news
from ..observe.console import Screen, lag_line, late_line, stall_line
from ..records.lag import ProcessStats

STATUS_EVERY_S = 10.0


class ServerWatch:
    """Keeps the last word of the router and of each worker; says what held them when it happens."""

    def __init__(self, screen: Screen, num_workers: int) -> None:
        self._screen = screen
        self._num_workers = num_workers
        self._now: dict[str, ProcessStats] = {}
        self._culprits: dict[str, Culprits] = {}

    def on_stats(self, stats: ProcessStats) -> None:
        name = stats.process
        self._now[name] = stats
        if stats.late is not None:
            self._screen.line(late_line(name, stats.late))
        for stall in stats.stalls:
            total = self._culprits.setdefault(name, Culprits()).add(stall)
            if is_news(total.count - stall.count, total.count):
                self._screen.line(stall_line(name, total))

    async def tell(self, every_s: float) -> None:
        """One line every so often, for ever; processes that said nothing since are not in it."""
        while True:
            await asyncio.sleep(every_s)
            self._screen.line(self.status())
            self._now.clear()

    def status(self) -> str:
        workers = [one for name, one in self._now.items() if not name.endswith(".router")]
        rss_bytes = sum(one.rss_bytes for one in self._now.values())
        return (
            f"{len(workers)}/{self._num_workers} workers · "
            f"{sum(one.in_flight for one in workers)} rollouts running · {rss_bytes / 1e6:.0f} MB · "
            f"lag p99/max ms: {lag_line({name: one.lag for name, one in self._now.items()})}"
        )
