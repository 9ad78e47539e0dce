"""Where work runs. Callers say what; this module alone knows executors and worker processes.

loop      under 1 ms: just call it
thread    `await thread(call, …)`: only calls that release the GIL (files, mmap, sqlite, sockets)
process   `await lane.call(function, …)`: everything else, with a deadline that kills
"""

import asyncio
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, ParamSpec, TypeVar

from ..errors import LaneCrashed, LaneRaised, LaneTimeout
from ..wire.pipe import BlockingPipe
from .child import Child, start

P = ParamSpec("P")
T = TypeVar("T")

MAX_QUEUE_S = 300.0
START_DEADLINE_S = 300.0
"""For starting a process and warming it: an environment may load a large dataset."""


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
        raise cancelled
    return running.result()


class ProcessLane:
    """A few warm processes. Each runs one call at a time; callers wait for a free one.

    A call is a module-level function and small arguments. A call that passes its deadline, or whose
    caller is cancelled, is killed with its process; the next call gets a new one.
    """

    def __init__(self, name: str, size: int, warm: tuple[Any, ...] | None = None) -> None:
        """`warm` is a function and its arguments, called in each process before its first call."""
        self._name = name
        self._size = size
        self._warm = warm
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()

    async def call(
        self, function: Callable[..., T], *args: Any, deadline_s: float, queue_s: float = MAX_QUEUE_S
    ) -> T:
        """The function's result; LaneTimeout, LaneCrashed or LaneRaised say why there is none.

        `deadline_s` counts from when it runs, `queue_s` bounds how long it waits for that.
        """
        try:
            async with asyncio.timeout(queue_s):
                slot = await self._idle.get()
        except TimeoutError:
            raise LaneTimeout(f"no process of {self._name} was free within {queue_s:g} s") from None
        try:
            return await slot.call(function, args, deadline_s)
        finally:
            self._idle.put_nowait(slot)

    async def __aenter__(self) -> "ProcessLane":
        for index in range(self._size):
            self._idle.put_nowait(_Slot(f"{self._name}{index}", self._warm))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for _ in range(self._size):
            await (await self._idle.get()).end()


class _Slot:
    """One place of a lane: a process from its first call on, a new one after a kill."""

    def __init__(self, name: str, warm: tuple[Any, ...] | None) -> None:
        self._name = name
        self._warm = warm
        self._stack = AsyncExitStack()
        self._child: Child | None = None

    async def call(self, function: Callable[..., T], args: tuple[Any, ...], deadline_s: float) -> T:
        if self._child is None:
            self._child = await self._stack.enter_async_context(
                start(self._name, "rollway.loop.lanes:serve_lane", grace_s=0, computes=True)
            )
            warm, *warm_args = self._warm or (_awake,)
            await self._ask(self._child, warm, tuple(warm_args), START_DEADLINE_S)
        result: T = await self._ask(self._child, function, args, deadline_s)
        return result

    async def _ask(
        self, child: Child, function: Callable[..., Any], args: tuple[Any, ...], deadline_s: float
    ) -> Any:
        """One call and its answer; without an answer the process is gone."""
        call = pickle.dumps((function, args), protocol=pickle.HIGHEST_PROTOCOL)
        what = f"{function.__module__}.{function.__qualname__}"
        answered = False
        try:
            async with asyncio.timeout(deadline_s):
                await child.pipe.send(call)
                answer = await child.pipe.receive()
            if answer is None:
                code = await child.wait()
                raise LaneCrashed(f"{what} ended its process with exit code {code}")
            answered = True
        except TimeoutError:
            raise LaneTimeout(f"{what} ran longer than {deadline_s:g} s and was killed") from None
        except ConnectionError as error:
            raise LaneCrashed(f"{what} lost its process: {error}") from None
        finally:
            if not answered:
                await self.end()
        ok, value, remote = pickle.loads(answer)
        if not ok:
            raise LaneRaised(value, remote)
        return value

    async def end(self) -> None:
        stack, self._stack, self._child = self._stack, AsyncExitStack(), None
        await stack.aclose()


def _awake() -> None:
    """Answered once the process is up."""


def serve_lane(name: str, sock: socket.socket) -> None:
    """A lane's process: take a call, answer it, until the parent is gone."""
    pipe = BlockingPipe(sock)
    while (frame := pipe.receive()) is not None:
        pipe.send(pickle.dumps(_answer(frame), protocol=pickle.HIGHEST_PROTOCOL))


def _answer(frame: bytes) -> tuple[bool, Any, str]:
    try:
        function, args = pickle.loads(frame)
        return True, function(*args), ""
    except Exception as error:
        return False, f"{type(error).__name__}: {error}", traceback.format_exc()
