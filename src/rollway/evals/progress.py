"""How far an evaluation is, and how its processes do, while it runs."""

import asyncio
import time
from collections import Counter

from ..loop.lag import merge
from ..loop.part import STATS_EVERY_S
from ..loop.run import Watch
from ..loop.seldom import is_news
from ..observe.complaints import Complaints
from ..observe.console import Screen
from ..records.lag import LagStats, ProcessStats
from .asked import Asked
from .result import Key, Result
from .statistics import Summary, summarise
from .table import status_line, table

SHOW_EVERY_S = 0.25
LINES = 10
"""So many times on the way its state is a line of its own."""


class EvalProgress:
    """All results, those of a resumed evaluation included, and what the screen shows of them."""

    def __init__(self, asked: Asked, known: dict[Key, Result], screen: Screen, pass_at: float) -> None:
        self._asked = asked
        self._screen = screen
        self._pass_at = pass_at
        self._results = {key: one for key, one in known.items() if one.error is None}
        self._rewards = sum(one.reward or 0.0 for one in self._results.values())
        self._errors: Counter[str] = Counter()
        self._start_s: float | None = None
        self._num_turns = 0
        self._lags_now: dict[str, LagStats] = {}
        self._lags: dict[str, LagStats] = {}
        self._complaints = Complaints(screen)

    @property
    def num_done(self) -> int:
        return len(self._results)

    @property
    def num_scored(self) -> int:
        return self.num_done - self._errors.total()

    def begin(self) -> None:
        """Workers are up: time counts from now."""
        self._start_s = time.monotonic()

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._start_s is None else time.monotonic() - self._start_s

    def on_result(self, result: Result) -> None:
        before = self.num_done * LINES // self._asked.total
        old = self._results.get(result.key)
        if old is not None:
            self._rewards -= old.reward or 0.0
        self._results[result.key] = result
        self._rewards += result.reward or 0.0
        self._num_turns += result.num_turns
        if result.error is not None:
            self._on_failed(result)
        if self.num_done * LINES // self._asked.total > before:
            self._screen.line(self.status())

    def _on_failed(self, result: Result) -> None:
        """Said when it happens; one boundary's failures ever more seldom."""
        assert result.error is not None
        boundary = result.error.boundary
        self._errors[boundary] += 1
        count = self._errors[boundary]
        if is_news(count - 1, count):
            self._screen.line(f"failed ({boundary} number {count}): {result.error.error}")

    def on_stats(self, stats: ProcessStats) -> None:
        name = stats.process
        self._lags_now[name] = stats.lag
        self._lags[name] = merge(self._lags.get(name, LagStats()), stats.lag)
        self._complaints.hear(stats)

    def status(self) -> str:
        if self._start_s is None:
            return "starting workers"
        reward = self._rewards / self.num_scored if self.num_scored else None
        turns_per_s = self._num_turns / max(self._elapsed_s, 1e-9)
        done, total = self.num_done, self._asked.total
        return status_line(done, total, reward, self._errors, turns_per_s, self._lags_now)

    async def show(self) -> None:
        """The status line, for ever."""
        while True:
            self._screen.status(self.status())
            await asyncio.sleep(SHOW_EVERY_S)

    async def watch_itself(self, watch: Watch) -> None:
        """This process's own loop, for ever."""
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            self.on_stats(watch.take())

    def summary(self) -> Summary:
        return summarise(self._results.values(), self._pass_at, self._asked.num_rollouts)

    def table(self) -> list[str]:
        return table(self._asked, self.summary(), self._elapsed_s, self._lags)
