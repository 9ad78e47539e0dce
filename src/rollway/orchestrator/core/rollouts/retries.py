"""Rollouts that failed by no fault of their own, run again under a new id."""

from ....records.ids import RolloutId, num_retries, retried
from ....records.rollout import Failed, Outcome
from ..limits import RetryRule

MIN_BUDGET = 8
"""Retries that a run may always make: a share of few rollouts would be none."""


class Retries:
    """A rollout is tried again as often as its boundary allows, and while the budget lasts: where all
    fail, trying everything again would only double the load."""

    def __init__(self, rule: RetryRule) -> None:
        self._rule = rule
        self._num_started = 0
        self.num_made = 0

    def started(self, count: int) -> None:
        self._num_started += count

    def next_id(self, id: RolloutId, outcome: Outcome) -> RolloutId | None:
        """Under which id to run it again; None to leave it at that."""
        if not isinstance(outcome, Failed):
            return None
        if num_retries(id) >= self._rule.times.get(outcome.boundary, 0):
            return None
        if self.num_made >= max(MIN_BUDGET, self._rule.budget * self._num_started):
            return None
        self.num_made += 1
        return retried(id)
