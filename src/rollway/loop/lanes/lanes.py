"""Where work runs. Callers say what; this module alone knows executors and worker processes.

loop      under 1 ms: just call it
thread    `await thread(call, …)`: only calls that release the GIL (files, mmap, sqlite, sockets)
process   `await lane.call(function, …)`: everything else, with a deadline that kills
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from ...errors import LaneClosed, LaneFull, LaneTimeout
from ..watch.run import LoopWatch
from .slot import START_DEADLINE_S, CallBudget, LaneCall, LaneSlot, Replier

P = ParamSpec("P")
T = TypeVar("T")

MAX_QUEUE_S = 300.0
MAX_WAITING = 1_000


async def thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that releases the GIL while it waits or copies."""
    return await asyncio.to_thread(call, *args, **kwargs)


async def thread_to_the_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `thread`, but a cancelled caller waits for the call to end before it goes.

    A thread cannot be stopped: what it writes to must not be reused while it runs.
    """
    running = asyncio.ensure_future(thread(call, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # nobody is left to hear of it
        raise cancelled
    return running.result()


class Lane(Protocol):
    """Somewhere to run a function; `ProcessLane` says how it is meant."""

    async def call(
        self, function: Callable[..., T], *args: Any, deadline_s: float, queue_s: float = MAX_QUEUE_S,
        replier: Replier | None = None,
    ) -> T: ...  # fmt: skip


class ProcessLane:
    """A few warm processes. Each runs one call at a time; callers get a free one in the order they came.

    A call is a module-level function and small arguments. A call that passes its deadline, or whose
    caller is cancelled, is killed with its process and whatever that has started; the next call gets a
    new one. A call slower than `watch` allows is told to it, with the file:line where it spent its time.
    """

    def __init__(
        self, name: str, size: int, *, warm: LaneCall | None = None, what: str = "call",
        watch: LoopWatch | None = None, max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        """`warm` is a function and its arguments, called in each process before its first call. With
        it processes start at once, in the background; without it each starts when it is first needed.
        """
        watching = CallBudget(what, START_DEADLINE_S, lambda stall: None)
        if watch is not None:
            watching = CallBudget(what, watch.budget_s, watch.slow_call)
        self._name = name
        self._is_eager = warm is not None
        self._slots = [LaneSlot(f"{name}{index}", warm, watching) for index in range(size)]
        self._places: FairQueue[LaneSlot] = FairQueue(name, max_waiting)

    async def call(
        self, function: Callable[..., T], *args: Any, deadline_s: float, queue_s: float = MAX_QUEUE_S,
        replier: Replier | None = None,
    ) -> T:  # fmt: skip
        """The function's result; a LaneError says why there is none.

        `deadline_s` counts from when it runs, `queue_s` bounds how long it waits for that. `replier`
        answers what the function asks through `laneserver.caller`.
        """
        try:
            async with asyncio.timeout(queue_s):
                slot = await self._places.take()
        except TimeoutError:
            raise LaneTimeout(f"no process of {self._name} was free within {queue_s:g} s") from None
        try:
            result: T = await slot.call((function, *args), deadline_s, replier)
            return result
        finally:
            self._places.free(slot)

    async def __aenter__(self) -> "ProcessLane":
        for slot in self._slots:
            if self._is_eager:
                slot.begin()
            self._places.free(slot)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Calls that still run are killed; those that wait are told."""
        self._places.close()
        for slot in self._slots:
            await slot.close()


class FairQueue(Generic[T]):
    """A bounded, fair queue of callers. What is freed goes straight to the one who waited longest.

    Not an `asyncio.Queue`: there a newcomer may overtake a waiter that was woken and has not run yet.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._free: deque[T] = deque()
        self._waiting: dict[asyncio.Future[T], None] = {}
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def free(self, one: T) -> None:
        """Give it to the first who waits, or keep it for the next to come."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(one)
                return
        self._free.append(one)

    async def take(self) -> T:
        """One of what is free, once it is this caller's turn."""
        if self._closed:
            raise LaneClosed(f"{self._name} is closed")
        if self._free:
            return self._free.popleft()
        if len(self._waiting) >= self._max_waiting:
            raise LaneFull(f"{self._name} has {self._max_waiting} callers waiting already")
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            return await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.free(turn.result())  # it was given to a caller that had just gone
            raise

    def close(self) -> None:
        """Nobody gets anything any more; those who wait are told."""
        self._closed = True
        waiting, self._waiting = list(self._waiting), {}
        for turn in waiting:
            if not turn.done():
                turn.set_exception(LaneClosed(f"{self._name} is closed"))
