"""A lane's process that may take only so much memory."""

import os

import pytest

from rollway.errors import LaneRaised
from rollway.loop.lanes.lanes import ProcessLane
from rollway.loop.lanes.memory import bounded

pytestmark = pytest.mark.anyio

kept: list[bytearray] = []


def nothing() -> None:
    pass


def take(mb: int) -> int:
    kept.append(bytearray(mb << 20))
    return os.getpid()


def take_and_stumble(mb: int) -> str:
    """User code may live with it."""
    try:
        take(mb)
    except MemoryError:
        return "made do with less"
    return "had it all"


async def test_what_wants_more_than_it_may_fails_and_is_replaced() -> None:
    warm = (bounded, 64, "some.key", nothing)
    async with ProcessLane("m", 1, warm=warm) as lane:
        first = await lane.call(take, 16, deadline_s=60)
        with pytest.raises(
            LaneRaised, match=r"MemoryError at .*test_memory.py:\d+ in take: .*64 MB.*some.key"
        ):
            await lane.call(take, 60, deadline_s=60)
        second = await lane.call(take, 60, deadline_s=60)
        assert second != first, "a process that had run out has made room for another"
        assert await lane.call(take_and_stumble, 60, deadline_s=60) == "made do with less"
