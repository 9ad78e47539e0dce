"""Lag of every process over a step, from the windows each reports once a second."""

from ..records.lag import LagStats, ProcessStats


class Lags:
    """Merges windows until taken. Quantiles merge as maxima: never better than the truth."""

    def __init__(self) -> None:
        self._since: dict[str, LagStats] = {}
        self._last: dict[str, LagStats] = {}

    def add(self, stats: ProcessStats) -> None:
        old = self._since.get(stats.process)
        self._since[stats.process] = merge(old, stats.lag) if old else stats.lag

    def take(self) -> dict[str, LagStats]:
        """Each process's lag since the last call; a process that said nothing keeps its last."""
        self._last.update(self._since)
        self._since = {}
        return dict(sorted(self._last.items()))


def merge(a: LagStats, b: LagStats) -> LagStats:
    ticks = a.num_ticks + b.num_ticks
    if not ticks:
        return a
    return LagStats(
        min=min(a.min, b.min),
        mean=(a.mean * a.num_ticks + b.mean * b.num_ticks) / ticks,
        med=max(a.med, b.med),
        p90=max(a.p90, b.p90),
        p99=max(a.p99, b.p99),
        max=max(a.max, b.max),
        num_ticks=ticks,
    )
