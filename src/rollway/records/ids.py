"""Types for ids and numbers, so that a step is never passed where a version is meant."""

from typing import Annotated, NewType

from msgspec import Meta

RolloutId = NewType("RolloutId", str)
GroupId = NewType("GroupId", int)
WorkerName = NewType("WorkerName", str)
Step = NewType("Step", int)
PolicyVersion = NewType("PolicyVersion", int)


def make_rollout_id(group_id: GroupId, member: int) -> RolloutId:
    """Return the id of the `member`-th rollout of a group: `g12.3`."""
    return RolloutId(f"g{group_id}.{member}")


def next_try(rollout_id: RolloutId) -> RolloutId:
    """Return the id under which a rollout runs once more: `g12.3` is followed by `g12.3+1`."""
    first, retries = _split_retries(rollout_id)
    return RolloutId(f"{first}+{retries + 1}")


def num_retries(rollout_id: RolloutId) -> int:
    return _split_retries(rollout_id)[1]


def _split_retries(rollout_id: RolloutId) -> tuple[str, int]:
    first, _, retries = rollout_id.partition("+")
    return first, int(retries or 0)


LARGEST = 2**53
"""Whole numbers up to this are exact everywhere, even as floats."""
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Label = Annotated[str, Meta(max_length=1_000)]
"""A name or a reason, short enough for a log line."""
ID_PATTERN = r"^[!-~]{1,200}\Z"
"""Ids are printable and without blanks, so that they can be part of a log line."""
FILE_PATTERN = r"^(?!\.)[^/\\\x00-\x1f]{0,200}\Z"
"""The name of a file, which cannot lead to another folder; empty for no file."""
