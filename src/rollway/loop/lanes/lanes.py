"""Decides where work runs. This package alone knows executors and worker processes.

loop      under 1 ms: just call the function
thread    `await thread(call, …)`: only calls that release the GIL (files, mmap, sqlite, sockets)
process   `await lane.call(function, …)`: everything else, with a deadline that kills
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ...errors import LaneClosed, LaneFull, LaneTimeout
from ..watch.run import LoopWatch
from .call_watch import UNNAMED, CallBudget
from .slot import LaneCall, LaneSlot, Replier

T = TypeVar("T")

MAX_QUEUE_S = 300.0
MAX_WAITING = 1_000


class Lane(Protocol):
    """A place to run functions. `ProcessLane` explains the parameters of `call`."""

    async def call(
        self, function: Callable[..., T], *args: Any, deadline_s: float, queue_s: float = MAX_QUEUE_S,
        replier: Replier | None = None, on_start: Callable[[], None] = lambda: None,
    ) -> T: ...  # fmt: skip


class ProcessLane:
    """A few warm processes. Each runs one call at a time; callers get a free one in the order they came.

    A call is a module-level function with small arguments. A call that passes its deadline, or whose
    caller is cancelled, is killed together with its process and everything that process started; the
    next call gets a new process. A call slower than `watch` allows is reported to `watch`, with the
    file:line where it spent its time.
    """

    def __init__(
        self, name: str, size: int, *, warm: LaneCall | None = None, label: str = UNNAMED,
        watch: LoopWatch | None = None, max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        """`warm` is called in each process before its first call. With it processes start at once, in
        the background; without it each starts when it is first needed. Reports name calls by `label`."""
        budget = CallBudget(label)
        if watch is not None:
            budget = CallBudget(label, watch.budget_s, watch.slow_call)
        self._name = name
        self._is_eager = warm is not None
        self._slots = [LaneSlot(f"{name}{index}", warm, budget) for index in range(size)]
        self._free_slots: FairQueue[LaneSlot] = FairQueue(name, max_waiting)

    async def call(
        self, function: Callable[..., T], *args: Any, deadline_s: float, queue_s: float = MAX_QUEUE_S,
        replier: Replier | None = None, on_start: Callable[[], None] = lambda: None,
    ) -> T:  # fmt: skip
        """Return the function's result, or raise the LaneError that says why there is none. `deadline_s`
        counts from the moment the function runs; `queue_s` bounds the wait for a free process. `replier`
        answers the questions the function asks through `server.find_caller`. `on_start` is called once a
        process is free."""
        try:
            async with asyncio.timeout(queue_s):
                slot = await self._free_slots.take()
        except TimeoutError:
            raise LaneTimeout(
                f"no process of {self._name} was free within {queue_s:g} s"
            ) from None
        on_start()
        try:
            result: T = await slot.call((function, *args), deadline_s, replier)
            return result
        finally:
            self._free_slots.free(slot)

    async def where(self) -> str:
        """Return the lines that the running calls are at, of processes that show theirs."""
        lines = await asyncio.gather(*(slot.where() for slot in self._slots))
        return ", ".join(filter(None, lines))

    async def __aenter__(self) -> "ProcessLane":
        for slot in self._slots:
            if self._is_eager:
                slot.begin()
            self._free_slots.free(slot)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Kill the running calls; callers that wait get LaneClosed."""
        self._free_slots.close()
        for slot in self._slots:
            await slot.close()


class FairQueue(Generic[T]):
    """Hands free items to callers, first come, first served. At most `max_waiting` callers wait. This is
    not an `asyncio.Queue`: there a newcomer may overtake a waiter that was woken and has not run yet.
    Here a freed item goes straight to the caller that waited longest."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._free: deque[T] = deque()
        self._waiting: dict[asyncio.Future[T], None] = {}
        self._closed = False

    def free(self, item: T) -> None:
        """Give an item to the first caller that waits, or keep it for the next one."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(item)
                return
        self._free.append(item)

    async def take(self) -> T:
        """Wait until an item is free and all earlier callers have theirs; return the item."""
        if self._closed:
            raise LaneClosed(f"{self._name} is closed")
        if self._free:
            return self._free.popleft()
        if len(self._waiting) >= self._max_waiting:
            raise LaneFull(f"{self._name} already has {self._max_waiting} callers waiting")
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiting.pop(waiter, None)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # the item was given to this caller just as it was cancelled
                self.free(waiter.result())
            raise

    def close(self) -> None:
        """Hand out nothing more. Callers that wait get LaneClosed."""
        self._closed = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(LaneClosed(f"{self._name} is closed"))
        self._waiting.clear()
