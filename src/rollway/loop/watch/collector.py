"""Collects garbage in steps that stay short, however many objects a process has.

Python's own collector traverses the objects that are new since its last run. Where thousands of
rollouts are in flight these are hundreds of thousands, and a loop waits up to a second for them. So this
one looks at new objects often, while they are few, and sets aside those that are still in use: no later
step traverses them again. They are freed like all others when the last reference to them goes. Only
cycles that were set aside before they became garbage are left; all objects are traversed for these once
memory has grown by half.
"""

import asyncio
import gc
import logging
import time

from ..lanes.memory import rss_bytes

log = logging.getLogger(__name__)

EVERY_S = 0.005
SHARE = 0.1
"""How much of the loop's time may go into looking for garbage. Objects that came while it was not looked
for are set aside unseen."""
LOOK_AT_MEMORY_S = 60.0
MIN_GROWTH_BYTES = 512 << 20


class Collector:
    """Collects garbage for the length of its block, in place of Python's own collector."""

    def __init__(
        self,
        look_at_memory_s: float = LOOK_AT_MEMORY_S,
        min_growth_bytes: int = MIN_GROWTH_BYTES,
    ) -> None:
        self._next_s = 0.0
        self._look_every_s = look_at_memory_s
        self._min_growth_bytes = min_growth_bytes
        self._look_at_memory_s = time.monotonic() + look_at_memory_s
        self.rss_bytes = 0
        """The memory that the process had when all objects were traversed last."""

    def __enter__(self) -> "Collector":
        gc.disable()
        gc.freeze()  # imported modules live forever
        self.rss_bytes = rss_bytes()
        self._schedule(asyncio.get_running_loop())
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.cancel()
        gc.enable()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = loop.call_later(EVERY_S, self._step, loop)

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        started_s = time.monotonic()
        if started_s >= self._next_s:
            gc.collect(0)
            ended_s = time.monotonic()
            self._next_s = ended_s + (ended_s - started_s) / SHARE
        gc.freeze()
        if started_s > self._look_at_memory_s:
            self._look_at_memory_s = started_s + self._look_every_s
            self._look_at_memory()
        self._schedule(loop)

    def _look_at_memory(self) -> None:
        before = rss_bytes()
        if before < 1.5 * self.rss_bytes + self._min_growth_bytes:
            return
        started_s = time.monotonic()
        gc.unfreeze()
        num_found = gc.collect()
        gc.freeze()
        self.rss_bytes = rss_bytes()
        took_ms = (time.monotonic() - started_s) * 1000
        log.info(
            "memory had grown to %.0f MB: the collector held the loop for %.0f ms and found %d "
            "objects in cycles",
            before / 1e6, took_ms, num_found,
        )  # fmt: skip
