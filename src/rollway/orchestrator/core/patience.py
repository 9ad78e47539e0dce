"""Who has been silent for so long that nobody waits any more."""


class Patience:
    """An environment is lost when rollouts of it run and none has settled for `patience_s`. A run is
    stuck when nothing at all has moved for `quiet_s`."""

    def __init__(self, patience_s: float, quiet_s: float) -> None:
        self._patience_s = patience_s
        self._quiet_s = quiet_s
        self._now_s: float | None = None
        self._heard_s: dict[str, float] = {}
        self._moved_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._now_s is None:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
            self._moved_s = now_s
        self._now_s = now_s

    @property
    def now_s(self) -> float:
        """0 until the first tick."""
        return self._now_s or 0.0

    def moved(self) -> None:
        """Something has ended: a rollout, a step, an update of weights."""
        self._moved_s = self.now_s

    @property
    def is_stuck(self) -> bool:
        return self.now_s - self._moved_s >= self._quiet_s

    def began(self, env: str, *, was_idle: bool) -> None:
        """Rollouts start; the wait for the first of them begins."""
        if was_idle or env not in self._heard_s:
            self._heard_s[env] = self.now_s

    def heard(self, env: str) -> None:
        self._heard_s[env] = self.now_s
        self.moved()

    def is_lost_with(self, env: str) -> bool:
        if self._now_s is None or env not in self._heard_s:
            return False
        return self._now_s - self._heard_s[env] >= self._patience_s
