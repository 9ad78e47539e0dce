"""One slot of a process lane: it holds a process, and a new one after every kill."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from contextvars import Context
from typing import Any

from msgspec import Struct

from ...errors import LaneClosed, LaneCrashed, LaneRaised, LaneTimeout, ProtocolError
from ...wire.pipe import NOT_A_FRAME
from ..coroutines import is_cancelled
from ..processes.child import Child, signal_name, start
from .call_watch import CallBudget, CallWatch, StackPipe
from .server import LaneAnswer, LaneFailure, LaneQuestion, LaneResult, dumps

SERVER = "rollway.loop.lanes.server:serve_lane"
START_DEADLINE_S = 300.0
"""For starting a process and warming it: an environment may load a large dataset."""
EXIT_S = 1.0
"""How long a process that closed its pipe gets to end, so that its exit code is known."""

LaneCall = tuple[Any, ...]
"""A module-level function and its arguments."""
Replier = Callable[[Any], Awaitable[Any]]
"""Answers the questions that a running call asks its caller."""


class _Process(Struct, frozen=True):
    child: Child
    stack_pipe: StackPipe
    resources: AsyncExitStack


class LaneSlot:
    """Runs one call at a time. A call that gives no answer costs its process."""

    def __init__(self, name: str, warm: LaneCall | None, budget: CallBudget) -> None:
        self._name = name
        self._warm = warm
        self._budget = budget
        self._starting: asyncio.Task[_Process] | None = None
        self._running: CallWatch | None = None
        self._closed = False

    def begin(self) -> "asyncio.Task[_Process]":
        """Start and warm a process unless there is one. A cancelled caller does not stop the start."""
        if self._closed:
            raise LaneClosed(f"{self._name} is closed")
        if self._starting is None:
            self._starting = asyncio.create_task(
                self._start(), name=self._name, context=Context()
            )
            self._starting.add_done_callback(_mark_as_seen)
        return self._starting

    async def call(
        self, call: LaneCall, deadline_s: float, replier: Replier | None = None
    ) -> Any:
        """Return the call's result. A call that cannot be pickled costs no process."""
        frame = _pack(call)
        process = await self._live_process()
        answer: LaneAnswer | None = None
        self._running = CallWatch(process.child.pid, process.stack_pipe, self._budget)
        try:
            answer = await _run(process, call[0], frame, deadline_s, self._running, replier)
        finally:
            self._running = None
            if answer is None or (
                isinstance(answer, LaneFailure) and answer.is_out_of_memory
            ):
                await self.end()
        return answer.take()

    async def where(self) -> str:
        """Return the line that the running call is at; empty if none runs or its line is not shown."""
        return await self._running.look_now() if self._running else ""

    async def _live_process(self) -> _Process:
        """Return a warm process; a new one if the last was killed while it was idle."""
        while True:
            starting = self.begin()
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise LaneClosed(f"{self._name} is closed") from None
            except Exception:  # however the start failed, the next caller tries again
                if self._starting is starting:
                    self._starting = None
                raise
            if not process.child.has_ended:
                return process
            await self.end()

    async def _start(self) -> _Process:
        async with AsyncExitStack() as stack:
            try:
                stack_pipe = stack.enter_context(StackPipe.open())
                fds = [stack_pipe.child_fd]
                server = start(self._name, SERVER, grace_s=0, computes=True, pass_fds=fds)
                child = await stack.enter_async_context(server)
            except OSError as error:
                # no more processes, files or memory: a later call may succeed
                raise LaneCrashed(f"{self._name} could not start: {error}") from None
            await _wait_until_up(child, stack_pipe)
            # `stack` still owns the resources: if warming fails, leaving the block closes them
            process = _Process(child, stack_pipe, AsyncExitStack())
            if self._warm is not None:
                frame, budget = _pack(self._warm), CallBudget(self._budget.label)
                watch = CallWatch(child.pid, stack_pipe, budget)
                answer = await _run(process, self._warm[0], frame, START_DEADLINE_S, watch)
                answer.take()
            process = _Process(child, stack_pipe, stack.pop_all())
        return process

    async def close(self) -> None:
        self._closed = True
        await self.end()

    async def end(self) -> None:
        """Kill the process, also one that is being started."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            process = starting.result()
            process.child.kill()
            await process.resources.aclose()


def _mark_as_seen(task: "asyncio.Task[_Process]") -> None:
    """Keep asyncio from logging a failed start: the next caller gets the error."""
    if not task.cancelled():
        task.exception()


async def _wait_until_up(child: Child, stack_pipe: StackPipe) -> None:
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            await child.send_spec(stack_pipe.child_fd)
            if await child.pipe.receive() is not None:
                return
    except TimeoutError:
        raise LaneTimeout(
            f"{child.name} did not start within {START_DEADLINE_S:g} s"
        ) from None
    raise LaneCrashed(f"{child.name} could not start: it ended {await _how_it_ended(child)}")


def _pack(call: LaneCall) -> bytes:
    function, *args = call
    return dumps((function, args))


async def _run(
    process: _Process, function: Callable[..., Any], frame: bytes, deadline_s: float,
    watch: CallWatch, replier: Replier | None = None,
) -> LaneAnswer:  # fmt: skip
    """Run one call and return its answer. If this raises, the process is of no more use."""
    child = process.child
    name = watch.budget.name_of(function)
    with watch:
        try:
            async with asyncio.timeout(deadline_s):
                await child.pipe.send(frame)
                answer = await _receive_answer(child, name, replier)
        except TimeoutError:
            problem = f"{name} ran longer than {deadline_s:g} s and was killed"
            raise LaneTimeout(problem, where=await watch.last_look()) from None
        except ProtocolError as error:
            child.kill()
            raise LaneCrashed(
                f"{name} was killed: {error}", where=watch.crash_line()
            ) from None
        except ConnectionError:
            answer = None
        if answer is None:
            problem = f"{name} ended its process {await _how_it_ended(child)}"
            raise LaneCrashed(problem, where=watch.crash_line())
    return answer


async def _receive_answer(
    child: Child, name: str, replier: Replier | None
) -> LaneAnswer | None:
    """Wait for the call's answer and answer its questions; None if its process ended. A question without
    a reply is raised as an error: its process waits, and would take the next call for the reply."""
    while (frame := await child.pipe.receive()) is not None:
        message = _unpack(frame, name)
        if isinstance(message, LaneResult | LaneFailure):
            return message
        if not isinstance(message, LaneQuestion):
            raise ProtocolError(NOT_A_FRAME)
        question = _unpack(message.pickled, name)
        if isinstance(question, LaneFailure):
            question.take()
        if replier is None:
            raise LaneRaised("", f"{name} asked its caller, which does not answer questions")
        await child.pipe.send(dumps(await replier(question)))
    return None


async def _how_it_ended(child: Child) -> str:
    await child.end(EXIT_S)
    code = await child.wait()
    return f"by {signal_name(code)}" if code < 0 else f"with exit code {code}"


def _unpack(frame: bytes, name: str) -> Any:
    """Read what the process sent, or return a LaneFailure: user code may send an object of a class that
    only its own process knows."""
    try:
        return pickle.loads(frame)
    except Exception as error:  # unpickling may run code of the user's class
        problem = f"{name} sent a value that this process cannot read"
        return LaneFailure("", f"{problem}: {error!r}")
