"""One place of a process lane: a process, and a new one after every kill."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import Context
from typing import Any

from msgspec import Struct

from ...errors import LaneClosed, LaneCrashed, LaneRaised, LaneTimeout
from ...records.lag import Stall
from ..coroutines import is_cancelled
from ..processes.child import Child, signal_name, start
from .call_watch import CallWatch, StackPipe
from .server import LaneAnswer, LaneQuestion

START_DEADLINE_S = 300.0
"""For starting a process and warming it: an environment may load a large dataset."""
LAST_BREATH_S = 1.0

LaneCall = tuple[Any, ...]
"""A module-level function and its arguments."""
Replier = Callable[[Any], Awaitable[Any]]
"""Answers what a call asks its caller on the way."""


class CallBudget(Struct, frozen=True):
    """What calls are called, how long one may take, and who hears of those that take longer."""

    what: str
    budget_s: float
    report: Callable[[Stall], None]


class _Process(Struct, frozen=True):
    child: Child
    stack: StackPipe
    open: AsyncExitStack


class LaneSlot:
    """Runs one call at a time. A call that gives no answer takes its process along."""

    def __init__(self, name: str, warm: LaneCall | None, watching: CallBudget) -> None:
        self._name = name
        self._warm = warm
        self._watching = watching
        self._unwatched = CallBudget(watching.what, START_DEADLINE_S, lambda stall: None)
        self._started: asyncio.Task[_Process] | None = None
        self._closed = False

    def begin(self) -> "asyncio.Task[_Process]":
        """Start and warm a process, if there is none. Callers that are cancelled do not stop it."""
        if self._closed:
            raise LaneClosed(f"{self._name} is closed")
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(
                self._start(), name=self._name, context=Context()
            )
            self._started.add_done_callback(_looked_at)
        return self._started

    async def call(self, call: LaneCall, deadline_s: float, replier: Replier | None = None) -> Any:
        """The call's result. It is packed first: one that cannot be must not cost a process."""
        frame = _packed(call)
        process = await self._live_process()
        answer: LaneAnswer | None = None
        try:
            answer = await _ask(process, call[0], frame, deadline_s, self._watching, replier)
        finally:
            if answer is None or answer.is_spent:
                await self.end()
        return _value(answer)

    async def _live_process(self) -> _Process:
        """A warm process; a new one if the last was killed while it had nothing to do."""
        while True:
            started = self.begin()
            try:
                process = await asyncio.shield(started)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise LaneClosed(f"{self._name} is closed") from None
            except Exception:  # however it failed: the next caller tries anew
                if self._started is started:
                    self._started = None
                raise
            if not process.child.has_ended:
                return process
            await self.end()

    async def _start(self) -> _Process:
        async with AsyncExitStack() as stack:
            try:
                written = stack.enter_context(StackPipe.open())
                child = await stack.enter_async_context(
                    start(
                        self._name, "rollway.loop.lanes.server:serve_lane", grace_s=0, computes=True,
                        pass_fds=[written.their_fd],
                    )
                )  # fmt: skip
            except OSError as error:  # no more processes, files or memory: perhaps later
                raise LaneCrashed(f"{self._name} could not start: {error}") from None
            ended = asyncio.ensure_future(child.wait())
            # whatever it had forked holds our pipe open: without this a crash would go unnoticed
            ended.add_done_callback(lambda _: child.kill())
            await _up(child, written)
            process = _Process(child, written, AsyncExitStack())
            if self._warm is not None:
                frame = _packed(self._warm)
                _value(await _ask(process, self._warm[0], frame, START_DEADLINE_S, self._unwatched))
            return _Process(child, written, stack.pop_all())
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the process and start no other."""
        self._closed = True
        await self.end()

    async def end(self) -> None:
        """Kill the process, also one that is being started."""
        started, self._started = self._started, None
        if started is None:
            return
        if not started.done():
            started.cancel()
            await asyncio.wait([started])
        if started.cancelled() or started.exception() is not None:
            return
        started.result().child.kill()
        await started.result().open.aclose()


def _looked_at(task: "asyncio.Task[_Process]") -> None:
    """A failed start is told to the next caller; nobody else needs to hear of it."""
    if not task.cancelled():
        task.exception()


async def _up(child: Child, written: StackPipe) -> None:
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            await child.pipe.send(str(written.their_fd).encode())
            if await child.pipe.receive() is not None:
                return
    except TimeoutError:
        raise LaneTimeout(f"{child.name} did not start within {START_DEADLINE_S:g} s") from None
    except ConnectionError:
        pass
    raise LaneCrashed(f"{child.name} could not start: {await _how_it_ended(child)}")


def _packed(call: LaneCall) -> bytes:
    function, *args = call
    return pickle.dumps((function, args), protocol=pickle.HIGHEST_PROTOCOL)


async def _ask(
    process: _Process, function: Callable[..., Any], frame: bytes, deadline_s: float,
    watching: CallBudget, replier: Replier | None = None,
) -> LaneAnswer:  # fmt: skip
    """One call and its answer; without an answer the process is of no more use."""
    child = process.child
    what = f"{function.__module__}.{function.__qualname__}"
    with CallWatch(child.pid, process.stack, watching.what, watching.budget_s, watching.report) as watch:
        try:
            async with asyncio.timeout(deadline_s):
                await child.pipe.send(frame)
                answered = await _answer(child, what, replier)
        except TimeoutError:
            at = await watch.last_look()
            where = f"; it was at {at}" if at else ""
            raise LaneTimeout(f"{what} ran longer than {deadline_s:g} s and was killed{where}") from None
        except ConnectionError:
            answered = None
        if answered is None:
            how = await _how_it_ended(child)
            at = watch.last_words()
            raise LaneCrashed(f"{what} ended its process {how}" + (f", at {at}" if at else ""))
    return answered


async def _answer(child: Child, what: str, replier: Replier | None) -> LaneAnswer | None:
    """The call's answer, after whatever it asks on the way; None if its process ended."""
    while (frame := await child.pipe.receive()) is not None:
        said = _unpacked(frame, what)
        if isinstance(said, LaneAnswer):
            return said
        if replier is None:
            return LaneAnswer(False, f"{what} asked its caller, who does not answer questions")
        await child.pipe.send(pickle.dumps(await replier(said.value), pickle.HIGHEST_PROTOCOL))
    return None


async def _how_it_ended(child: Child) -> str:
    await child.end(LAST_BREATH_S)
    code = await child.wait()
    return f"by {signal_name(code)}" if code < 0 else f"with exit code {code}"


def _unpacked(frame: bytes, what: str) -> LaneAnswer | LaneQuestion:
    """What user code returns may be of a class that only its own process knows."""
    try:
        said: LaneAnswer | LaneQuestion = pickle.loads(frame)
    except Exception as error:  # unpickling runs whatever the class wants
        return LaneAnswer(False, f"{what} returned what cannot be read here: {error!r}")
    return said


def _value(answer: LaneAnswer) -> Any:
    if not answer.ok:
        raise LaneRaised(answer.value, answer.traceback, answer.where)
    return answer.value
