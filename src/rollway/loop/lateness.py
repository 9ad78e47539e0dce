"""Compares each window of a loop's lag with what [watch] allows."""

from collections.abc import Sequence

from ..config.sections import WatchConfig
from ..records.lag import LagStats, Late, Stall
from .seldom import is_news


class Lateness:
    """Counts windows that were too late, and says which of them are worth a warning."""

    def __init__(self, config: WatchConfig) -> None:
        limits_ms = {"p90": config.warn_p90_ms, "p99": config.warn_p99_ms, "max": config.warn_max_ms}
        self._limits_s = {stat: limit / 1000 for stat, limit in limits_ms.items() if limit}
        self._num_windows = 0

    def judge(self, lag: LagStats, held: Sequence[Stall]) -> Late | None:
        """A warning if the window passed a limit, and it is the first time, or the 2nd, 4th, 8th, …

        `held` is everything seen holding the loop in that window.
        """
        over = {
            stat: getattr(lag, stat) / limit_s
            for stat, limit_s in self._limits_s.items()
            if getattr(lag, stat) > limit_s
        }
        if not over:
            return None
        self._num_windows += 1
        if not is_news(self._num_windows - 1, self._num_windows):
            return None
        stat = max(over, key=lambda one: over[one])
        culprit = max(held, key=lambda one: one.total_s, default=None)
        return Late(stat, getattr(lag, stat), self._limits_s[stat], self._num_windows, culprit)
