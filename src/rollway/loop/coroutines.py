"""Helps coroutines to share the loop, to end together, and to know that they are cancelled."""

import asyncio
import time
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

MAX_HOLD_S = 0.001


class FairLoop:
    """Keeps a coroutine that handles one message after the other from holding the event loop. An `await`
    whose result is already there does not let other tasks run, so a thousand waiting messages would hold
    the loop a thousand times as long as one. Call `breathe()` once per message."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    async def breathe(self) -> None:
        """Let all other tasks run if this coroutine has held the loop for more than a millisecond."""
        if time.monotonic() - self._since_s > MAX_HOLD_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()


async def run_in_slices(slices: Generator[None, None, T]) -> T:
    """Do work that yields now and then, and let all other tasks run in between."""
    fair = FairLoop()
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: T = done.value
            return result
        await fair.breathe()


async def run_until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run these until the first one returns, then cancel the others."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()


def is_cancelled() -> bool:
    """Return whether the running task is being cancelled, rather than something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
