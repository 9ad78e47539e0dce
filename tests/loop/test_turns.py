"""A series of things that are there already lets others have their turn."""

import asyncio
import time

import pytest

from rollway.loop.coroutines import MAX_TURN_S, FairLoop

pytestmark = pytest.mark.anyio


async def test_others_run_while_a_long_series_is_worked_off() -> None:
    turns, beats = FairLoop(), 0

    async def other() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(20):
        until_s = time.monotonic() + MAX_TURN_S * 1.5
        while time.monotonic() < until_s:
            pass
        await turns.let_others()
    task.cancel()
    assert beats == 20


async def test_a_short_series_is_not_interrupted() -> None:
    turns, was_let = FairLoop(), False

    def other() -> None:
        nonlocal was_let
        was_let = True

    await asyncio.sleep(MAX_TURN_S * 2)
    await turns.let_others()
    asyncio.get_running_loop().call_soon(other)
    await turns.let_others()
    assert not was_let
