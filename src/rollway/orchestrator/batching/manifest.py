"""The manifest of a step: every row of every trained rollout, its advantage, and the packing."""

from collections.abc import Iterable

from ...records.batch import BatchManifest, BatchRow
from ...records.group import Group
from ...records.ids import PolicyVersion, Step
from .packing import pack


def plan_batch(
    step: Step, groups: Iterable[tuple[Group, tuple[float, ...]]], micro_batch_tokens: int
) -> BatchManifest:
    """Rows of `groups`, in order, with each rollout's advantage on all its rows."""
    rows = tuple(
        BatchRow(
            rollout_id=member.rollout_id,
            ref=member.scored.ref,
            row=index,
            num_tokens=row.num_tokens,
            num_trainable=row.num_trainable,
            advantage=advantage,
        )
        for group, advantages in groups
        for member, advantage in zip(group.members, advantages, strict=True)
        for index, row in enumerate(member.scored.rows)
    )
    return BatchManifest(
        step=step,
        trains_version=PolicyVersion(step - 1),
        rows=rows,
        micro_batches=pack([row.num_tokens for row in rows], micro_batch_tokens),
    )
