"""The manifest of a step: every row of every trained rollout, its advantage, and the packing."""

from collections.abc import Iterable

from ...records.batch import BatchManifest, BatchRow
from ...records.group import ClosedGroup
from ...records.ids import PolicyVersion, Step
from .packing import plan_ranks


def plan_batch(
    step: Step, groups: Iterable[ClosedGroup], micro_batch_tokens: int, ranks: int = 1
) -> BatchManifest:
    """Rows of `groups`, in order, with each rollout's advantage on all its rows, packed for `ranks`."""
    rows = tuple(
        BatchRow(
            rollout_id=member.rollout_id,
            ref=member.scored.ref,
            row=index,
            num_tokens=row.num_tokens,
            num_trainable=row.num_trainable,
            advantage=advantage,
        )
        for one in groups
        for member, advantage in zip(one.group.members, one.advantages, strict=True)
        if member.rollout_id not in one.left_out
        for index, row in enumerate(member.scored.rows)
    )
    return BatchManifest(
        step=step,
        trains_version=PolicyVersion(step - 1),
        rows=rows,
        ranks=plan_ranks([row.num_tokens for row in rows], micro_batch_tokens, ranks),
    )
