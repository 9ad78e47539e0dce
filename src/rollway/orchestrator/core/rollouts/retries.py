"""Rollouts that failed through no fault of their own, and run again under a new id."""

from ....config.sections import RetriesConfig
from ....records.ids import RolloutId, next_try, num_retries
from ....records.rollout import Failed, Outcome

BUDGET = 0.1
"""The most retries, as a share of the rollouts started: where all fail, retries only add load."""
MIN_BUDGET = 8
"""Retries that a run may always make: a share of few rollouts would be none."""


class Retries:
    """Decides whether a failed rollout runs again: as often as `[retries]` allows for its boundary,
    while the budget lasts. A boundary without a key there is never retried."""

    def __init__(self, config: RetriesConfig) -> None:
        self._config = config
        self.num_started = 0
        self.num_retries = 0

    def next_id(self, rollout_id: RolloutId, outcome: Outcome) -> RolloutId | None:
        """Return the id under which the rollout runs again, or None if it does not."""
        if not isinstance(outcome, Failed):
            return None
        if num_retries(rollout_id) >= getattr(self._config, outcome.boundary, 0):
            return None
        if self.num_retries >= max(MIN_BUDGET, BUDGET * self.num_started):
            return None
        self.num_retries += 1
        return next_try(rollout_id)
