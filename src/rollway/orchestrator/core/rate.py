"""So many rollouts a minute, and no more."""


class Rate:
    """Every rollout that starts takes its share of a minute; until that is over, none starts."""

    def __init__(self, a_minute: float) -> None:
        self._apart_s = 60 / a_minute
        self._now_s: float | None = None
        self._free_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._now_s is None:
            self._free_s += now_s
        self._now_s = now_s

    def started(self, count: int) -> None:
        self._free_s = max(self._free_s, self._now_s or 0.0) + count * self._apart_s

    @property
    def allows(self) -> bool:
        return self._free_s <= (self._now_s or 0.0)
