"""Groups in a row that gave nothing to train on."""

from collections import Counter

from ...records.group import ClosedGroup


class Fruitless:
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
