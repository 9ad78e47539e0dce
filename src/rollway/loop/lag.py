"""Measures how late a loop runs: a tick asked for every few milliseconds, and when it came."""

import asyncio
from collections.abc import Callable

from ..records.lag import LagStats


class LagMonitor:
    """Lateness of ticks over the current window; `take()` closes the window and starts the next."""

    def __init__(self, tick_s: float, on_tick: Callable[[float], None] = lambda now: None) -> None:
        self._tick_s = tick_s
        self._on_tick = on_tick
        self._lags: list[float] = []
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> "LagMonitor":
        self._loop = asyncio.get_running_loop()
        self._schedule(self._loop.time())
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self, now: float) -> None:
        assert self._loop is not None
        self._due = now + self._tick_s
        self._handle = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self._lags.append(max(0.0, now - self._due))
        self._on_tick(now)
        self._schedule(now)

    def take(self) -> LagStats:
        """The statistics since the last call."""
        lags, self._lags = self._lags, []
        return summarise(lags)


def summarise(lags: list[float]) -> LagStats:
    """Order statistics of `lags`, in their unit; all zero when there are none."""
    if not lags:
        return LagStats()
    ordered = sorted(lags)

    def quantile(q: float) -> float:
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    return LagStats(
        min=ordered[0],
        mean=sum(ordered) / len(ordered),
        med=quantile(0.5),
        p90=quantile(0.9),
        p99=quantile(0.99),
        max=ordered[-1],
        num_ticks=len(ordered),
    )
