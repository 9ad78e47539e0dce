"""Runs a coroutine on a watched loop (uvloop if installed): its lag is measured, stalls are named."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...config.specs import WatchSpec
from ...records.lag import ProcessStats, Stall
from ..lanes.memory import recycle_buffers, rss_bytes
from .collector import Collector
from .lag import LagMonitor, Lateness
from .stall_text import late_text
from .stalls import StallLog, StallTotals, StallWatch

log = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
"""How long a busy thread may keep a loop waiting each time. Beside two busy threads a loop's lag
p99 is 50-88 ms with Python's 5 ms, 13-22 ms with 1 ms, 7-9 ms with 0.5 ms (bench/tuning.py); shorter
ones cost the threads some of their speed."""


class LoopWatch:
    """Measures this process's loop and the calls in its lanes."""

    def __init__(
        self, name: str, config: WatchSpec, lag: LagMonitor, stalls: StallWatch
    ) -> None:
        self.name = name
        self.budget_s = config.stall_ms / 1000
        self._lag = lag
        self._stalls = stalls
        self._lateness = Lateness(config)
        self._slow_calls, self._slow_call_log = StallTotals(), StallLog()

    def slow_call(self, stall: Stall) -> None:
        self._slow_calls.add(stall)
        self._slow_call_log.add(stall)

    def show_holds(self, show: Callable[[str], None]) -> None:
        """Have another thread call `show` with the line that holds the loop, while it does."""
        self._stalls.on_held = show

    def take(self, in_flight: int = 0) -> ProcessStats:
        """Return the window since the last call. Log a warning if it was too late."""
        lag = self._lag.take()
        stalls, brief, waits = self._stalls.take()
        late = self._lateness.judge(lag, (*stalls, *brief), waits)
        if late is not None:
            log.warning("%s", late_text(late))
        slow = (*stalls, *self._slow_calls.take())
        return ProcessStats(self.name, lag, rss_bytes(), in_flight, slow, late, waits)


WatchedMain = Callable[[LoopWatch], Coroutine[Any, Any, T]]


def run(name: str, config: WatchSpec, main: WatchedMain[T]) -> T:
    """Run `main` to its end on a new loop, watched from its first callback to its last."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    recycle_buffers()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_watched(name, config, main))


def run_unwatched(main: Coroutine[Any, Any, T]) -> T:
    """Run a short piece of a command on a loop of its own, before anything is there to be watched."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


async def _watched(name: str, config: WatchSpec, main: WatchedMain[T]) -> T:
    threads = ThreadPoolExecutor(thread_name_prefix="lane", initializer=_lower_priority)
    asyncio.get_running_loop().set_default_executor(threads)
    tick_s, budget_s = config.tick_ms / 1000, config.stall_ms / 1000
    with (
        Collector(),
        StallWatch(tick_s, budget_s) as stalls,
        LagMonitor(tick_s, stalls.beat) as lag,
    ):
        return await main(LoopWatch(name, config, lag, stalls))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


NICENESS = 10
"""Where every CPU is busy, a thread that writes 10 MB keeps a loop waiting for whole slices of 4 ms.
With this, workers' lag p99 falls from 16-22 ms to 11-12 ms on two full CPUs (bench/envserver.py)."""


def _lower_priority() -> None:
    """Raise this thread's niceness. Only Linux has one per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
