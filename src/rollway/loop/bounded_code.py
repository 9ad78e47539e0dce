"""Runs user code that ends for its caller even if it refuses to end."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar

from ..errors import CodeRefused
from .watch import stacks

GRACE_S = 5.0
"""Code that goes on for this long after it was cancelled is given up."""

T = TypeVar("T")
_running: ContextVar["BoundedCode[Any] | None"] = ContextVar("bounded task", default=None)


class BoundedCode(Generic[T]):
    """Runs a coroutine of user code. Cancelling a coroutine only asks it to end: it may catch the
    cancellation, or wait forever in a `finally`. So if the code goes on for `grace_s` after it was
    cancelled, or after a deadline within it, it is given up: whoever waits gets CodeRefused, which names
    the line, and the code is left behind. What such code may not do any more asks `is_given_up`."""

    def __init__(
        self, code: Coroutine[Any, Any, T], *, name: str, context: Context | None = None,
        grace_s: float = GRACE_S,
    ) -> None:  # fmt: skip
        self.grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[T] = self._loop.create_future()
        context = context or copy_context()
        context.run(_running.set, self)
        self._task: asyncio.Task[T] | None
        self._task = self._loop.create_task(code, name=name, context=context)
        self._task.add_done_callback(self._pass_on)
        self.is_given_up = False
        self.left_code_at = ""
        """Where code waits that was left behind: this task's, or that of a task which it started."""

    async def wait(self) -> T:
        """Return the code's result, or raise what it raised. Several callers may wait. One that is
        cancelled does not cancel the code."""
        return await asyncio.shield(self._end)

    def cancel(self) -> None:
        """Tell the code to end."""
        if self._task is not None:
            self._task.cancel()
            problem = f"it went on for {self.grace_s:g} s after it was cancelled"
            self._loop.call_later(self.grace_s, self.give_up, problem)

    def give_up(self, problem: str) -> None:
        """Wait for the code no longer."""
        if self._task is None or self._end.done():
            return
        where = stacks.where_awaiting(self._task)
        self.is_given_up, self.left_code_at = True, where or "an unknown line"
        self._end.set_exception(CodeRefused(problem, where))
        self._end.exception()  # mark it as seen: nothing may wait any more
        self._task.cancel()

    def _pass_on(self, task: "asyncio.Task[T]") -> None:
        error = None if task.cancelled() else task.exception()
        self._task = None  # whose context refers to this: a cycle would outlive the rollout
        if self._end.done():
            return
        if task.cancelled():
            self._end.cancel()
        elif error is not None:
            self._end.set_exception(error)
            self._end.exception()
        else:
            self._end.set_result(task.result())


@contextmanager
def must_end_within(limit_s: float, what: str) -> Iterator[None]:
    """Give up the running BoundedCode, if there is one, when the block goes on for its grace after
    `limit_s`. The caller cancels the block at `limit_s`; this is for code that refuses to end then."""
    running = _running.get()
    if running is None:
        yield
        return
    grace_s = running.grace_s
    problem = f"{what} went on for {grace_s:g} s after its deadline of {limit_s:g} s"
    loop = asyncio.get_running_loop()
    timer = loop.call_later(limit_s + grace_s, running.give_up, problem)
    try:
        yield
    finally:
        timer.cancel()


def note_left_code(where: str) -> None:
    """Note that code which the running BoundedCode started is left behind, and where it waits."""
    if (running := _running.get()) is not None:
        running.left_code_at = where or "an unknown line"
