"""Measures how late a loop runs: it asks for a tick every few milliseconds, and notes when it came."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ...config.specs import WatchSpec
from ...records.lag import LagStats, LateWindow, Stall, Waits
from .rarely import Rarely

FINEST_S = 10e-6
GROWTH = 1.05
"""Each bucket is this much wider than the one before, so a merged quantile is at most 5 % too high."""
NONE = Waits()
MAX_TICKS = 1_000
"""The number of lags that are kept one by one before they are summed up."""


class LagWindow:
    """The lags since the last `take()`. If nothing takes them, the window does not grow."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._summed = LagStats()

    def add(self, lag_s: float) -> None:
        self._lags.append(lag_s)
        if len(self._lags) >= MAX_TICKS:
            self._sum_up()

    def take(self) -> LagStats:
        self._sum_up()
        taken, self._summed = self._summed, LagStats()
        return taken

    def _sum_up(self) -> None:
        self._summed = merge(self._summed, summarise(self._lags))
        self._lags.clear()


class LagMonitor(LagWindow):
    """Measures the lateness of ticks; `take()` closes the current window and starts the next."""

    def __init__(self, tick_s: float, on_tick: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._tick_s = tick_s
        self._on_tick = on_tick

    def __enter__(self) -> "LagMonitor":
        self._schedule(asyncio.get_running_loop())
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.cancel()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        # not loop.time(): uvloop's stands still while a callback runs and counts milliseconds
        self._due_s = time.monotonic() + self._tick_s
        self._handle = loop.call_later(self._tick_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.add(max(0.0, time.monotonic() - self._due_s))
        self._on_tick()
        self._schedule(loop)


def summarise(lags: list[float]) -> LagStats:
    """Return the statistics of `lags`, in seconds; without lags all are zero."""
    if not lags:
        return LagStats()
    buckets = Counter(_bucket(lag) for lag in lags)
    return _stats(min(lags), sum(lags) / len(lags), max(lags), buckets)


def merge(a: LagStats, b: LagStats) -> LagStats:
    """Return the statistics of two windows together."""
    if not a.num_ticks or not b.num_ticks:
        return a if a.num_ticks else b
    mean = (a.mean * a.num_ticks + b.mean * b.num_ticks) / (a.num_ticks + b.num_ticks)
    buckets = Counter(a.buckets) + Counter(b.buckets)
    return _stats(min(a.min, b.min), mean, max(a.max, b.max), buckets)


def _stats(least: float, mean: float, most: float, buckets: Counter[int]) -> LagStats:
    total = buckets.total()

    def quantile(q: float) -> float:
        below = 0
        for bucket in sorted(buckets):
            below += buckets[bucket]
            if below >= q * total:
                return min(most, FINEST_S * GROWTH**bucket)
        return most

    med, p90, p99 = quantile(0.5), quantile(0.9), quantile(0.99)
    return LagStats(least, mean, med, p90, p99, most, total, dict(buckets))


def _bucket(lag: float) -> int:
    """Return the number of the bucket whose upper edge is the first at or above `lag`."""
    return max(0, math.ceil(math.log(max(lag, FINEST_S) / FINEST_S, GROWTH)))


class Lateness:
    """Counts windows that were too late, and decides which of them are worth a warning."""

    def __init__(self, config: WatchSpec) -> None:
        limits_ms = {
            "p90": config.warn_p90_ms,
            "p99": config.warn_p99_ms,
            "max": config.warn_max_ms,
        }
        self._limits_s = {stat: limit / 1000 for stat, limit in limits_ms.items() if limit}
        self._late_windows = Rarely()

    def judge(
        self, lag: LagStats, holds: Sequence[Stall], waits: Waits = NONE
    ) -> LateWindow | None:
        """Return a warning if a window with these holds is late, the 1st, 2nd, 4th, 8th, … time."""
        limits_s = self._limits_s
        ratios = [(getattr(lag, stat) / limit_s, stat) for stat, limit_s in limits_s.items()]
        ratio, stat = max(ratios, default=(0.0, ""))
        if ratio <= 1 or not self._late_windows.add():
            return None
        by_code = [stall for stall in holds if stall.where]
        longest = max(by_code, key=lambda stall: stall.total_s, default=None)
        count = self._late_windows.count
        return LateWindow(stat, getattr(lag, stat), limits_s[stat], count, longest, waits)
