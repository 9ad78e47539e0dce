"""Runs a coroutine on a watched loop: uvloop where there is one, lag measured, stalls named."""

import asyncio
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from ..config.sections import WatchConfig
from ..records.lag import ProcessStats
from .lag import LagMonitor
from .memory import recycle_buffers
from .stalls import StallWatch

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.001
"""Python's default of 5 ms lets one busy thread hold a loop that long at every turn."""


class Watch:
    """What a process knows of its own loop."""

    def __init__(self, name: str, lag: LagMonitor, stalls: StallWatch) -> None:
        self.name = name
        self._lag = lag
        self._stalls = stalls

    def take(self, in_flight: int = 0) -> ProcessStats:
        """The window since the last call."""
        return ProcessStats(
            process=self.name,
            lag=self._lag.take(),
            rss_bytes=rss_bytes(),
            in_flight=in_flight,
            stalls=self._stalls.take(),
        )


def run(name: str, config: WatchConfig, main: Callable[[Watch], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end on a loop of our own, watched from its first callback to its last."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    recycle_buffers()
    gc.freeze()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_watched(name, config, main))


async def _watched(name: str, config: WatchConfig, main: Callable[[Watch], Coroutine[Any, Any, T]]) -> T:
    tick_s, budget_s = config.tick_ms / 1000, config.stall_ms / 1000
    with ExitStack() as stack:
        stalls = stack.enter_context(StallWatch(tick_s, budget_s))
        lag = stack.enter_context(LagMonitor(tick_s, on_tick=stalls.beat))
        return await main(Watch(name, lag, stalls))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


def rss_bytes() -> int:
    """Resident memory now (on Linux), or at its peak (elsewhere)."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
