"""Where work runs. Callers say what; this module alone knows executors and worker processes.

loop      under 1 ms: just call it
thread    `await thread(call, …)`: only calls that release the GIL (files, mmap, sqlite, sockets)
process   `await lane.call(function, …)`: everything else, with a deadline that kills
"""

import asyncio
import logging
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

START_DEADLINE_S = 60.0


async def thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that releases the GIL while it waits or copies."""
    return await asyncio.to_thread(call, *args, **kwargs)


class ProcessLane:
    """A few warm processes. Each runs one call at a time; callers wait for a free one.

    A call is a module-level function and small arguments. A call that passes its deadline, or whose
    caller is cancelled, is killed with its process; the next call gets a new one.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()

    async def call(self, function: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """The function's result; LaneTimeout, LaneCrashed or LaneRaised say why there is none."""
        slot = await self._idle.get()
        try:
            return await slot.call(function, args, deadline_s)
        finally:
            self._idle.put_nowait(slot)

    async def __aenter__(self) -> "ProcessLane":
        for index in range(self._size):
            self._idle.put_nowait(_Slot(f"{self._name}/lane{index}"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for _ in range(self._size):
            await (await self._idle.get()).end()


class _Slot:
    """One place of a lane: a process from its first call on, a new one after a kill."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack = AsyncExitStack()
        self._child: Child | None = None

    async def call(self, function: Callable[..., T], args: tuple[Any, ...], deadline_s: float) -> T:
        call = pickle.dumps((function, args), protocol=pickle.HIGHEST_PROTOCOL)
        what = f"{function.__module__}.{function.__qualname__}"
        answered = False
        try:
            child = self._child or await self._start()
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
        result: T = value
        return result

    async def _start(self) -> Child:
        child = await self._stack.enter_async_context(
            start(self._name, "rollway.loop.lanes:serve_lane", grace_s=0, computes=True)
        )
        self._child = child
        async with asyncio.timeout(START_DEADLINE_S):
            if await child.pipe.receive() is None:
                raise LaneCrashed(f"{self._name} did not start")
        return child

    async def end(self) -> None:
        stack, self._stack, self._child = self._stack, AsyncExitStack(), None
        await stack.aclose()


def serve_lane(name: str, sock: socket.socket) -> None:
    """A lane's process: take a call, answer it, until the parent is gone."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    pipe = BlockingPipe(sock)
    pipe.send(b"ready")
    while (frame := pipe.receive()) is not None:
        pipe.send(pickle.dumps(_answer(frame), protocol=pickle.HIGHEST_PROTOCOL))


def _answer(frame: bytes) -> tuple[bool, Any, str]:
    try:
        function, args = pickle.loads(frame)
        return True, function(*args), ""
    except Exception as error:
        return False, f"{type(error).__name__}: {error}", traceback.format_exc()
