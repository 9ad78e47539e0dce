"""Whether a run or an evaluation has a chance, by how its first rollouts ended."""

from collections import Counter

from .rollout import Cancelled, Failed, Outcome

DISK_FULL = ("No space left on device", "Disk quota exceeded")
"""The kernel's words for a disk on which this user has no room left."""
FIRST_ROLLOUTS, SAME_SHARE = 32, 0.9
"""If this share of the first rollouts fails in the same way, a mistake is likelier than an accident."""
FIRST_LOST = 8
"""This many are enough if all of them fail because their workers died, which takes long to repeat."""


def is_for_lack_of_disk(failed: Failed) -> bool:
    """Return whether a rollout failed because a disk was full. That says nothing about the others."""
    is_full = any(words in failed.error for words in DISK_FULL)
    return failed.boundary == "worker" and is_full


class FirstRollouts:
    """Looks at the first rollouts that settle after a start. Cancelled ones do not count."""

    def __init__(self) -> None:
        self._num_settled = 0
        self._failures: Counter[str] = Counter()
        self._failed: dict[str, Failed] = {}

    def settled(self, outcome: Outcome) -> None:
        if (
            isinstance(outcome, Cancelled)
            or self._num_settled >= FIRST_ROLLOUTS
            or self.reason
        ):
            return
        if isinstance(outcome, Failed) and is_for_lack_of_disk(outcome):
            return
        self._num_settled += 1
        if isinstance(outcome, Failed):
            self._failures[outcome.kind] += 1
            self._failed.setdefault(outcome.kind, outcome)

    @property
    def reason(self) -> str:
        """Why the run or evaluation should stop; empty while it may still succeed."""
        if not self._failures:
            return ""
        ((kind, count),) = self._failures.most_common(1)
        failed, num_settled = self._failed[kind], self._num_settled
        kills = failed.boundary == "worker" and count == num_settled
        if num_settled < (FIRST_LOST if kills else FIRST_ROLLOUTS):
            return ""
        if count < SAME_SHARE * num_settled:
            return ""
        return f"{count} of the first {num_settled} rollouts failed in the same way: {failed.text}"
