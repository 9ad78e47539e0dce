"""What becomes of a group whose rollouts have all settled: its advantages, and its fate."""

from collections.abc import Collection, Sequence

from ....records.group import ClosedGroup, Fate, Group
from ....records.ids import GroupId, RolloutId
from ....records.rollout import Detection
from ..commands import Credit
from ..limits import Limits
from .credit import BASELINES, shortened

MIN_SCORED = 2
"""Fewer scored rollouts than this make no baseline."""


class GroupCloser:
    """Groups on their way from settled to credited."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[GroupId, Group] = {}

    @property
    def num_groups(self) -> int:
        return len(self._waiting)

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.members) for group in self._waiting.values())

    def close(self, group: Group) -> ClosedGroup | Credit:
        """Closed here, or once its advantages have come."""
        limits = self._limits
        scored = [member.scored for member in group.members]
        rewards = tuple(one.reward for one in scored)
        tokens = tuple(one.num_trainable for one in scored)
        turns = tuple(one.num_turns for one in scored)
        if not limits.asks_for_credit or len(scored) < MIN_SCORED:
            lengths = turns if limits.length_by_turns else tokens
            worth = shortened(rewards, lengths, limits.length_penalty, limits.correct_at)
            return self._judged(group, BASELINES[limits.baseline](worth))
        self._waiting[group.id] = group
        return Credit(group.id, rewards, tokens, turns)

    def credited(self, id: GroupId, advantages: tuple[float, ...]) -> ClosedGroup | None:
        """None for a group that does not wait for any: a duplicate."""
        group = self._waiting.pop(id, None)
        return self._judged(group, advantages) if group else None

    def _judged(self, group: Group, credit: tuple[float, ...]) -> ClosedGroup:
        fate: Fate = "trained"
        filtered = left_out(group, self._limits.enforced)
        if len(group.members) < MIN_SCORED:
            fate = "too_few"
        elif self._limits.drop_zero_advantage and is_flat(credit):
            fate = "zero_advantage"
        elif len(filtered) == len(group.members):
            fate = "filtered"
        return ClosedGroup(group, credit, fate, filtered)


TINY = 1e-9


def is_flat(advantages_G: Sequence[float]) -> bool:
    """Whether no advantage differs from zero: such a group teaches nothing."""
    return all(abs(advantage) < TINY for advantage in advantages_G)


def left_out(group: Group, enforced: Collection[Detection]) -> tuple[RolloutId, ...]:
    """Rollouts with an enforced sign in any of their rows. Their rewards still count in the baseline."""
    return tuple(
        member.rollout_id
        for member in group.members
        if any(sign in enforced for row in member.scored.rows for sign in row.detected)
    )
