"""When to stop waiting: for an environment that does not answer, for a run in which nothing happens, and
for groups that never train."""

from collections import Counter

from ....records.first_rollouts import is_for_lack_of_disk
from ....records.group import ClosedGroup

MAX_QUIET_S = 3600.0
"""A run in which nothing settles, trains or loads for this long stops and says what it waited for."""
MAX_REASONS = 3
"""The commonest reasons that a stuck run names."""


class Patience:
    """Knows since when each environment has owed an answer, and when anything last happened.

    An environment is lost when it has owed an answer for `env_patience_s`. Cancelling what it owes does
    not count as an answer: the clock stops, and continues when the environment owes something again.
    """

    def __init__(self, env_patience_s: float) -> None:
        self._env_patience_s = env_patience_s
        self._now_s: float | None = None
        self._owes_since_s: dict[str, float] = {}
        self._owed_s: dict[str, float] = {}
        """How long environments had owed an answer when all that they owed was cancelled."""
        self._last_change_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._now_s is None:
            self._owes_since_s = dict.fromkeys(self._owes_since_s, now_s)
            self._last_change_s = now_s
        self._now_s = now_s

    @property
    def now_s(self) -> float:
        """The time of the last tick; 0 before the first."""
        return self._now_s or 0.0

    def note_change(self) -> None:
        """Note that a rollout, a step or a weight update has ended."""
        self._last_change_s = self.now_s

    @property
    def is_stuck(self) -> bool:
        return self.now_s - self._last_change_s >= MAX_QUIET_S

    def asked(self, env: str) -> None:
        """The environment owes an answer from now on, if it did not before."""
        self._owes_since_s.setdefault(env, self.now_s - self._owed_s.pop(env, 0.0))

    def answered(self, env: str, *, owes_more: bool) -> None:
        self.note_change()
        self._owed_s.pop(env, None)
        self._owes_since_s.pop(env, None)
        if owes_more:
            self._owes_since_s[env] = self.now_s

    def cancelled(self, env: str) -> None:
        since_s = self._owes_since_s.pop(env, None)
        if since_s is not None:
            self._owed_s[env] = self.now_s - since_s

    def is_lost(self, env: str) -> bool:
        since_s = self._owes_since_s.get(env)
        if self._now_s is None or since_s is None:
            return False
        return self._now_s - since_s >= self._env_patience_s


class UselessStreak:
    """Counts groups in a row that gave nothing to train on, by reason. A group that trains ends the
    streak; a group with cancelled rollouts does not count."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._num_groups = 0
        self._reasons: Counter[str] = Counter()
        self._texts: dict[str, str] = {}

    def closed(self, closed: ClosedGroup) -> None:
        if closed.fate == "trained":
            self._num_groups = 0
            self._reasons.clear()
            self._texts.clear()
        elif not closed.group.cancelled and not _lacked_disk(closed):
            kind, text = _why_useless(closed)
            self._num_groups += 1
            self._reasons[kind] += 1
            self._texts.setdefault(kind, text)

    @property
    def reason(self) -> str:
        """Why the run is stuck; empty while it is not."""
        if self._num_groups < self._max_groups:
            return ""
        commonest = self._reasons.most_common(MAX_REASONS)
        reasons = ", ".join(f"{count} × {self._texts[kind]}" for kind, count in commonest)
        return f"{self._num_groups} groups in a row gave nothing to train on: {reasons}"


def _lacked_disk(closed: ClosedGroup) -> bool:
    return any(is_for_lack_of_disk(failed) for _, failed in closed.group.failed)


def _why_useless(closed: ClosedGroup) -> tuple[str, str]:
    """Return the kind of reason, by which groups are summed up, and the reason in words."""
    if closed.fate == "zero_advantage":
        reward = closed.group.members[0].scored.reward
        return (text := f"all rewards equal ({reward:g})"), text
    if closed.fate == "filtered":
        return "filtered", "every rollout filtered"
    if closed.group.failed:
        _, failed = closed.group.failed[0]
        return failed.kind, failed.text
    return "too few", "too few scored"
