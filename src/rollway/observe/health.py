"""Keeps how the processes of a run do: the lag of their event loops, and what held them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from ..loop.processes.part import STATS_EVERY_S
from ..loop.watch.causes import added
from ..loop.watch.lag import merge
from ..loop.watch.run import LoopWatch
from ..loop.watch.stall_text import late_text
from ..loop.watch.stalls import StallTotals
from ..records.lag import LagStats, ProcessStats, Stall, Waits
from .console import Screen, stall_line
from .cores import CoreWatch

Listener = Callable[[ProcessStats], None]


class ProcessHealth:
    """How the processes that a command watches do: the last report and the lag of each. What held a
    process is printed, less and less often for the same culprit. `on_heard` gets every report too."""

    def __init__(self, screen: Screen, on_heard: Listener = lambda stats: None) -> None:
        self._screen = screen
        self._on_heard = on_heard
        self._culprits: defaultdict[str, StallTotals] = defaultdict(StallTotals)
        self._cores = CoreWatch()
        self.latest: dict[str, ProcessStats] = {}
        """The last report of each process."""
        self.whole_run: defaultdict[str, LagStats] = defaultdict(LagStats)
        """The lag of each process since the start."""

    @property
    def now(self) -> dict[str, LagStats]:
        """The lag of each process in its last report."""
        return {name: stats.lag for name, stats in self.latest.items()}

    def hear(self, stats: ProcessStats) -> None:
        name = stats.process
        self.latest[name] = stats
        self._cores.hear(stats)
        self.whole_run[name] = merge(self.whole_run[name], stats.lag)
        for stall in stats.stalls:
            total, is_worth_a_line = self._culprits[name].add(stall)
            if is_worth_a_line:
                self._screen.line(stall_line(name, total))
        if stats.late is not None:
            self._screen.line(f"{name}: {late_text(stats.late)}")
        self._on_heard(stats)

    def worst(self) -> list[tuple[str, Stall]]:
        """Return every process with what held it, those that were held longest in all first."""
        culprits = self._culprits.items()
        held = [(name, stall) for name, totals in culprits for stall in totals.seen()]
        return sorted(held, key=lambda culprit: -culprit[1].total_s)

    async def watch_own_loop(self, loop_watch: LoopWatch) -> None:
        """Hear the reports of this process, too, and say if cores are missing, until cancelled."""
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            self.hear(loop_watch.take())
            if line := await self._cores.look():
                self._screen.line(line)


class Lags:
    """Lags and stalls of all processes, merged until they are taken for the metrics of a step."""

    def __init__(self) -> None:
        self._since: defaultdict[str, LagStats] = defaultdict(LagStats)
        self._last: dict[str, LagStats] = {}
        self._stalls: defaultdict[str, StallTotals] = defaultdict(StallTotals)
        self._waits: defaultdict[str, Waits] = defaultdict(Waits)
        self.rss_bytes: dict[str, int] = {}

    def add(self, stats: ProcessStats) -> None:
        name = stats.process
        self.rss_bytes |= {name: stats.rss_bytes, **stats.children}
        for stall in stats.stalls:
            self._stalls[name].add(stall)
        self._waits[name] = added(self._waits[name], stats.waits)
        self._since[name] = merge(self._since[name], stats.lag)

    def take(self) -> dict[str, LagStats]:
        """Return each process's lag since the last call; without a new report, its lag before that."""
        self._last.update(self._since)
        self._since.clear()
        return dict(sorted(self._last.items()))

    def take_waits(self) -> dict[str, Waits]:
        """Return why each process was late since the last call."""
        taken, self._waits = dict(sorted(self._waits.items())), defaultdict(Waits)
        return taken

    def take_stalls(self) -> dict[str, tuple[Stall, ...]]:
        """Return what held each process since the last call, without processes that were not held."""
        taken = {
            process: culprits.take() for process, culprits in sorted(self._stalls.items())
        }
        self._stalls.clear()
        return taken
