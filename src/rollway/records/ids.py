"""Names of things, so that a step is never passed where a version is meant."""

from typing import NewType

RolloutId = NewType("RolloutId", str)
GroupId = NewType("GroupId", int)
WorkerName = NewType("WorkerName", str)
Step = NewType("Step", int)
PolicyVersion = NewType("PolicyVersion", int)


def rollout_id(group_id: GroupId, member: int) -> RolloutId:
    """The id of the `member`-th rollout of a group: `g12.3`."""
    return RolloutId(f"g{group_id}.{member}")
