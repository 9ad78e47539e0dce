"""Lets others have their turn of the loop, where what is awaited is often there already."""

import asyncio
import time

MAX_TURN_S = 0.001


class FairLoop:
    """For loops that take messages one after the other: an `await` of what is there does not let go of
    the loop, so a thousand waiting messages would hold it a thousand times as long as one."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    async def let_others(self) -> None:
        """Go on at once, or after all others if this has had the loop for long enough."""
        if time.monotonic() - self._since_s > MAX_TURN_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()


def is_cancelled() -> bool:
    """Whether the running task is being cancelled, rather than something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
