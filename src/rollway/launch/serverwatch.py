"""What is shown of an env server that runs on its own."""

import asyncio

from ..observe.complaints import Complaints
from ..observe.console import Screen, lag_line
from ..records.lag import ProcessStats

STATUS_EVERY_S = 10.0


class ServerWatch:
    """Keeps the last word of the router and of each worker; says what held them when it happens."""

    def __init__(self, screen: Screen, num_workers: int) -> None:
        self._screen = screen
        self._num_workers = num_workers
        self._now: dict[str, ProcessStats] = {}
        self._complaints = Complaints(screen)

    def on_stats(self, stats: ProcessStats) -> None:
        self._now[stats.process] = stats
        self._complaints.hear(stats)

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
