"""Callers get free items in the order they came, and no item is lost."""

import asyncio
import random

import pytest

from rollway.errors import LaneClosed, LaneFull
from rollway.loop.lanes.lanes import FairQueue

pytestmark = pytest.mark.anyio


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_callers_are_served_in_order_and_a_newcomer_never_overtakes() -> None:
    queue: FairQueue[int] = FairQueue("test", 10)
    order: list[str] = []

    async def caller(name: str) -> None:
        await queue.take()
        order.append(name)

    waiting = [asyncio.create_task(caller(name)) for name in "abc"]
    await settle()
    queue.free(1)  # `a` is woken and has not run yet when `late` comes
    late = asyncio.create_task(caller("late"))
    await settle()
    for item in (2, 3, 4):
        queue.free(item)
        await settle()
    await asyncio.gather(*waiting, late)
    assert order == ["a", "b", "c", "late"]


async def test_too_many_callers_are_refused() -> None:
    queue: FairQueue[int] = FairQueue("scores", 2)
    waiting = [asyncio.create_task(queue.take()) for _ in range(2)]
    await settle()
    with pytest.raises(LaneFull, match="scores already has 2 callers waiting"):
        await queue.take()
    queue.free(1)
    assert await waiting[0] == 1
    third = asyncio.create_task(queue.take())
    await settle()
    queue.free(2)
    queue.free(3)
    assert [await waiting[1], await third] == [2, 3]


async def test_an_item_given_to_a_cancelled_caller_goes_to_the_next() -> None:
    queue: FairQueue[int] = FairQueue("test", 10)
    cancelled, next_caller = (
        asyncio.create_task(queue.take()),
        asyncio.create_task(queue.take()),
    )
    await settle()
    queue.free(1)
    cancelled.cancel()  # before the task that got the item has run
    assert await next_caller == 1
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_closing_raises_in_callers_that_wait() -> None:
    queue: FairQueue[int] = FairQueue("test", 10)
    waiting = asyncio.create_task(queue.take())
    await settle()
    queue.close()
    for call in (waiting, queue.take()):
        with pytest.raises(LaneClosed):
            await call


@pytest.mark.parametrize("seed", range(20))
async def test_no_item_is_lost_however_callers_are_cancelled(seed: int) -> None:
    chance = random.Random(seed)
    queue: FairQueue[int] = FairQueue("test", 1000)
    for item in range(3):
        queue.free(item)
    busy: set[int] = set()

    async def caller() -> None:
        item = await queue.take()
        assert item not in busy
        busy.add(item)
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            busy.remove(item)
            queue.free(item)

    callers = [asyncio.create_task(caller()) for _ in range(200)]
    while any(not task.done() for task in callers):
        chance.choice(callers).cancel()
        await asyncio.sleep(0)
    assert not queue._waiting
    assert sorted([await queue.take() for _ in range(3)]) == [0, 1, 2]
