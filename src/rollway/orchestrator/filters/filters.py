"""Which rollouts and groups are worth a step."""

from collections.abc import Collection, Sequence

from ...records.group import Group
from ...records.ids import RolloutId
from ...records.rollout import Detection

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
