"""What becomes of a group whose rollouts have all settled: its advantages, and whether it trains."""

from collections.abc import Collection, Sequence

from ....config.specs import CoreSpec
from ....records.group import ClosedGroup, Fate, Group
from ....records.ids import GroupId, RolloutId
from ....records.rollout import Detection
from ..commands import Credit
from .credit import BASELINES, TINY, Advantages, penalise_length

MIN_SCORED = 2
"""Fewer scored rollouts than this give no baseline to compare with."""


class GroupCloser:
    """Closes settled groups. Those that need advantages of the user's function wait here for them."""

    def __init__(self, spec: CoreSpec) -> None:
        self._config = spec.orchestrator
        self._filters = spec.filters
        self._waiting: dict[GroupId, Group] = {}

    @property
    def num_groups(self) -> int:
        return len(self._waiting)

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.members) for group in self._waiting.values())

    def close(self, group: Group) -> ClosedGroup | Credit:
        config, scored = self._config, [member.scored for member in group.members]
        rewards = tuple(rollout.reward for rollout in scored)
        num_tokens = tuple(rollout.num_trainable for rollout in scored)
        num_turns = tuple(rollout.num_turns for rollout in scored)
        baseline = BASELINES.get(config.advantage)
        if baseline is None and len(scored) >= MIN_SCORED:
            self._waiting[group.id] = group
            return Credit(group.id, rewards, num_tokens, num_turns)
        penalty = config.length_penalty
        if penalty is not None:
            lengths = num_turns if penalty.by == "turns" else num_tokens
            rewards = penalise_length(rewards, lengths, penalty.weight, config.correct_at)
        # a group with too few scored rollouts never trains, so any baseline will do for it
        baseline = baseline or BASELINES["grpo"]
        return self._judge(group, baseline(rewards))

    def credited(self, group_id: GroupId, advantages: Advantages) -> ClosedGroup | None:
        """Close a group whose advantages have arrived; None if it does not wait for any: a duplicate."""
        group = self._waiting.pop(group_id, None)
        return self._judge(group, advantages) if group else None

    def _judge(self, group: Group, advantages: Advantages) -> ClosedGroup:
        fate: Fate = "trained"
        filtered = filtered_rollouts(group, self._enforced())
        if len(group.members) < MIN_SCORED:
            fate = "too_few"
        elif self._filters.zero_advantage == "enforce" and is_flat(advantages):
            fate = "zero_advantage"
        elif len(filtered) == len(group.members):
            fate = "filtered"
        return ClosedGroup(group, advantages, fate, filtered)

    def _enforced(self) -> list[Detection]:
        detections: tuple[Detection, ...] = ("gibberish", "repetition")
        return [name for name in detections if getattr(self._filters, name) == "enforce"]


def is_flat(advantages_G: Sequence[float]) -> bool:
    """Return whether no advantage differs from zero: such a group teaches nothing."""
    return all(abs(advantage) < TINY for advantage in advantages_G)


def filtered_rollouts(group: Group, enforced: Collection[Detection]) -> tuple[RolloutId, ...]:
    """Return the rollouts that an enforced filter rejects. The baseline still counts their rewards."""
    return tuple(
        member.rollout_id
        for member in group.members
        if any(name in enforced for row in member.scored.rows for name in row.detected)
    )
