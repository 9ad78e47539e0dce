"""Who gets what is free, and when."""

import asyncio
import random

import pytest

from rollway.errors import LaneClosed, LaneFull
from rollway.loop.lanes.lanes import FairQueue

pytestmark = pytest.mark.anyio


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served_and_nobody_overtakes() -> None:
    places: FairQueue[int] = FairQueue("test", 10)
    order: list[str] = []

    async def caller(name: str) -> None:
        await places.take()
        order.append(name)

    waiting = [asyncio.create_task(caller(name)) for name in "abc"]
    await settle()
    places.free(1)  # `a` is woken and has not run yet when `late` comes
    late = asyncio.create_task(caller("late"))
    await settle()
    for one in (2, 3, 4):
        places.free(one)
        await settle()
    await asyncio.gather(*waiting, late)
    assert order == ["a", "b", "c", "late"]


async def test_too_many_callers_are_refused() -> None:
    places: FairQueue[int] = FairQueue("scores", 2)
    waiting = [asyncio.create_task(places.take()) for _ in range(2)]
    await settle()
    with pytest.raises(LaneFull, match="scores has 2 callers waiting already"):
        await places.take()
    places.free(1)
    assert await waiting[0] == 1
    third = asyncio.create_task(places.take())
    await settle()
    places.free(2)
    places.free(3)
    assert [await waiting[1], await third] == [2, 3]


async def test_what_is_given_to_a_caller_that_has_gone_is_passed_on() -> None:
    places: FairQueue[int] = FairQueue("test", 10)
    gone, next_one = asyncio.create_task(places.take()), asyncio.create_task(places.take())
    await settle()
    places.free(1)
    gone.cancel()  # in the same turn of the loop
    assert await next_one == 1
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_closing_tells_those_who_wait() -> None:
    places: FairQueue[int] = FairQueue("test", 10)
    waiting = asyncio.create_task(places.take())
    await settle()
    places.close()
    for call in (waiting, places.take()):
        with pytest.raises(LaneClosed):
            await call


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_whoever_is_cancelled_when(seed: int) -> None:
    chance = random.Random(seed)
    places: FairQueue[int] = FairQueue("test", 1000)
    for one in range(3):
        places.free(one)
    busy: set[int] = set()

    async def caller() -> None:
        one = await places.take()
        assert one not in busy
        busy.add(one)
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            busy.remove(one)
            places.free(one)

    callers = [asyncio.create_task(caller()) for _ in range(200)]
    while any(not one.done() for one in callers):
        chance.choice(callers).cancel()
        await asyncio.sleep(0)
    assert places.num_waiting == 0
    assert sorted([await places.take() for _ in range(3)]) == [0, 1, 2]
