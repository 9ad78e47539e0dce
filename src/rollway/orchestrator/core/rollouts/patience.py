"""Who has been silent for so long that nobody waits any more."""

from collections import Counter

from ....records.group import ClosedGroup


class Patience:
    """An environment is lost when it owes something and has given nothing for `patience_s`. That what it
    owed was cancelled is no answer: it goes on where it was when it owes something again. A run is
    stuck when nothing at all has moved for `quiet_s`."""

    def __init__(self, patience_s: float, quiet_s: float) -> None:
        self._patience_s = patience_s
        self._quiet_s = quiet_s
        self._now_s: float | None = None
        self._owes_since_s: dict[str, float] = {}
        self._owed_s: dict[str, float] = {}
        """Of those that owe nothing now, and gave nothing when they did."""
        self._moved_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._now_s is None:
            self._owes_since_s = dict.fromkeys(self._owes_since_s, now_s)
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

    def asked(self, env: str) -> None:
        """It owes something from now on, if it did not before."""
        self._owes_since_s.setdefault(env, self.now_s - self._owed_s.pop(env, 0.0))

    def heard(self, env: str, *, owes: bool) -> None:
        """It gave something; whether it owes more."""
        self.moved()
        self._owed_s.pop(env, None)
        self._owes_since_s.pop(env, None)
        if owes:
            self._owes_since_s[env] = self.now_s

    def let_off(self, env: str) -> None:
        """What it owed was cancelled."""
        since_s = self._owes_since_s.pop(env, None)
        if since_s is not None:
            self._owed_s[env] = self.now_s - since_s

    def is_lost_with(self, env: str) -> bool:
        since_s = self._owes_since_s.get(env)
        if self._now_s is None or since_s is None:
            return False
        return self._now_s - since_s >= self._patience_s


class UselessStreak:
    """Counts them by reason; a group that trains ends the row, one that was cancelled does not count."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._reasons: Counter[str] = Counter()

    def closed(self, closed: ClosedGroup) -> None:
        if closed.fate == "trained":
            self._count = 0
            self._reasons.clear()
        elif not closed.group.cancelled:
            self._count += 1
            self._reasons[_why(closed)] += 1

    @property
    def reason(self) -> str:
        """Why the run is stuck; empty while it is not."""
        if self._count < self._most:
            return ""
        kinds = ", ".join(f"{count} × {why}" for why, count in self._reasons.most_common(3))
        return f"{self._count} groups in a row gave nothing to train on: {kinds}"


def _why(closed: ClosedGroup) -> str:
    if closed.fate == "zero_advantage":
        reward = closed.group.members[0].scored.reward
        return f"all rewards equal ({reward:g})"
    if closed.fate == "filtered":
        return "every rollout filtered"
    if closed.group.failed:
        _, failed = closed.group.failed[0]
        return f"{failed.boundary}: {failed.error}"
    return "too few scored"
