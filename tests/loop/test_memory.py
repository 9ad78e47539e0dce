"""A lane's process with a limit on its memory."""

import os

import pytest

from rollway.errors import LaneRaised
from rollway.loop.lanes.lanes import ProcessLane
from rollway.loop.lanes.memory import load_and_limit

pytestmark = pytest.mark.anyio

kept: list[bytearray] = []


def nothing() -> None:
    pass


def take(mb: int) -> int:
    kept.append(bytearray(mb << 20))
    return os.getpid()


def take_or_do_without(mb: int) -> str:
    """User code may handle a MemoryError."""
    try:
        take(mb)
    except MemoryError:
        return "made do with less"
    return "had it all"


async def test_a_process_that_passes_its_limit_fails_the_call_and_is_replaced() -> None:
    warm = (load_and_limit, 64, nothing)
    async with ProcessLane("m", 1, warm=warm) as lane:
        first = await lane.call(take, 16, deadline_s=60)
        with pytest.raises(LaneRaised, match="64 MB more") as raised:
            await lane.call(take, 60, deadline_s=60)
        assert raised.value.kind == "MemoryError"
        assert raised.value.where.endswith(" in take")
        second = await lane.call(take, 60, deadline_s=60)
        assert second != first, "a process that ran out of memory is replaced"
        assert await lane.call(take_or_do_without, 60, deadline_s=60) == "made do with less"
