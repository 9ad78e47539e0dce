"""A coroutine with many waiting messages lets other tasks run, but not after every message."""

import asyncio
import time

import pytest

from rollway.loop.coroutines import MAX_HOLD_S, FairLoop

pytestmark = pytest.mark.anyio


async def test_other_tasks_run_during_a_long_series_of_messages() -> None:
    fair, num_beats = FairLoop(), 0

    async def beat() -> None:
        nonlocal num_beats
        while True:
            num_beats += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(beat())
    for _ in range(20):
        until_s = time.monotonic() + MAX_HOLD_S * 1.5
        while time.monotonic() < until_s:
            pass
        await fair.breathe()
    task.cancel()
    assert num_beats == 20


async def test_a_short_series_is_not_interrupted() -> None:
    fair, has_run = FairLoop(), False

    def run() -> None:
        nonlocal has_run
        has_run = True

    await asyncio.sleep(MAX_HOLD_S * 2)
    await fair.breathe()
    asyncio.get_running_loop().call_soon(run)
    await fair.breathe()
    assert not has_run
