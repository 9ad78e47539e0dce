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


def retried(id: RolloutId) -> RolloutId:
    """The id under which a rollout runs once more: `g12.3` is followed by `g12.3+1`."""
    first, _, _ = id.partition("+")
    return RolloutId(f"{first}+{num_retries(id) + 1}")


def num_retries(id: RolloutId) -> int:
    """How often this rollout was tried before."""
    return int(id.partition("+")[2] or 0)
