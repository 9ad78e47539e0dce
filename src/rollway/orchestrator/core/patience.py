"""Which environments have been silent for so long that nobody waits for them."""


class Patience:
    """An environment is silent when rollouts of it run and none has settled for `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._now_s: float | None = None
        self._heard_s: dict[str, float] = {}

    def tick(self, now_s: float) -> None:
        if self._now_s is None:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._now_s = now_s

    def began(self, env: str, *, was_idle: bool) -> None:
        """Rollouts start; the wait for the first of them begins."""
        if was_idle or env not in self._heard_s:
            self.heard(env)

    def heard(self, env: str) -> None:
        self._heard_s[env] = self._now_s or 0.0

    def is_lost_with(self, env: str) -> bool:
        if self._now_s is None or env not in self._heard_s:
            return False
        return self._now_s - self._heard_s[env] >= self._patience_s
