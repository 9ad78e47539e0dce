"""Names of things, so that a step is never passed where a version is meant."""

from typing import Annotated, NewType

from msgspec import Meta

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


LARGEST = 2**53
"""Whole numbers up to this are exact wherever they go, also as floats."""
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Label = Annotated[str, Meta(max_length=1_000)]
"""A name or a reason: something for a log line."""
ID_PATTERN = r"^[!-~]{1,200}\Z"
"""Ids are printable and without blanks, so that they can stand in a log line."""
FILE_PATTERN = r"^(?!\.)[^/\\\x00-\x1f]{0,200}\Z"
"""A file's own name: it leads to no other folder. Empty for none."""
