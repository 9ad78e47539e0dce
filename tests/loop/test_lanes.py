"""The process lane: results, errors, deadlines and deaths, with real processes."""

import asyncio
import os
import time

import psutil
import pytest

from rollway.errors import LaneCrashed, LaneRaised, LaneTimeout
from rollway.loop.lanes import ProcessLane, thread

pytestmark = pytest.mark.anyio


def pid() -> int:
    return os.getpid()


def fail(message: str) -> None:
    raise ValueError(message)


def spin() -> None:
    while True:
        pass


def die(code: int) -> None:
    os._exit(code)


def double(numbers: list[int]) -> list[int]:
    return [2 * one for one in numbers]


async def test_calls_run_elsewhere_in_a_warm_process() -> None:
    async with ProcessLane("test", size=1) as lane:
        first = await lane.call(pid, deadline_s=30)
        assert first != os.getpid()
        assert await lane.call(pid, deadline_s=30) == first
        big = list(range(200_000))
        assert await lane.call(double, big, deadline_s=30) == double(big)
    assert not psutil.pid_exists(first)


async def test_an_exception_carries_its_traceback_and_the_process_lives() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        with pytest.raises(LaneRaised, match="ValueError: no good") as raised:
            await lane.call(fail, "no good", deadline_s=30)
        assert "in fail" in raised.value.traceback
        assert await lane.call(pid, deadline_s=30) == before


async def test_a_deadline_kills_and_the_next_call_works() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        with pytest.raises(LaneTimeout, match=r"spin ran longer than 0\.2 s"):
            await lane.call(spin, deadline_s=0.2)
        assert not psutil.pid_exists(before)
        assert await lane.call(double, [1], deadline_s=30) == [2]


async def test_a_crash_is_told_apart_and_isolated() -> None:
    async with ProcessLane("test", size=2) as lane:
        crash = asyncio.create_task(lane.call(die, 7, deadline_s=30))
        others = [lane.call(double, [n], deadline_s=30) for n in range(5)]
        assert await asyncio.gather(*others) == [[2 * n] for n in range(5)]
        with pytest.raises(LaneCrashed, match="exit code 7"):
            await crash


async def test_a_cancelled_caller_takes_its_work_along() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        spinning = asyncio.create_task(lane.call(spin, deadline_s=30))
        await asyncio.sleep(0.05)
        spinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spinning
        assert not psutil.pid_exists(before)


async def test_threads_leave_the_loop_free() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await thread(time.sleep, 0.1)
    ticking.cancel()
    assert ticks > 10
