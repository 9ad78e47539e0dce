"""Asyncio tasks that user code starts and does not wait for: they end with their rollout."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar
from typing import Any

from ..loop.bounded_code import GRACE_S, note_left_code
from ..loop.watch.stacks import where_awaiting

AnyTask = asyncio.Task[Any]
_rollout_tasks: ContextVar[set[AnyTask] | None] = ContextVar(
    "tasks of this rollout", default=None
)


def keep_track(loop: asyncio.AbstractEventLoop) -> None:
    """Record for each task that starts from now on the rollout that it, or its context, belongs to."""
    make_task: Any = loop.get_task_factory() or _make_task

    def factory(
        loop: asyncio.AbstractEventLoop,
        coro: Any,
        *,
        context: Context | None = None,
        **options: Any,
    ) -> AnyTask:
        if context is not None:
            options["context"] = context
        task: AnyTask = make_task(loop, coro, **options)
        tasks = _rollout_tasks.get() if context is None else context.get(_rollout_tasks)
        if tasks is not None:
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    loop.set_task_factory(factory)


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> AnyTask:
    return asyncio.Task(coro, loop=loop, **options)


@contextmanager
def outside_rollouts() -> Iterator[None]:
    """Let tasks started within the block belong to no rollout: a toolset may outlive its caller."""
    token = _rollout_tasks.set(None)
    try:
        yield
    finally:
        _rollout_tasks.reset(token)


@asynccontextmanager
async def cancel_leftover_tasks() -> AsyncIterator[None]:
    """On leaving the block, cancel the tasks that were started within it and wait until they end. Those
    that refuse to are left behind."""
    tasks: set[AnyTask] = set()
    token = _rollout_tasks.set(tasks)
    try:
        yield
    finally:
        _rollout_tasks.reset(token)
        left = list(tasks)
        for task in left:
            task.cancel()
        if left:
            _, refusing = await asyncio.wait(left, timeout=GRACE_S)
            for task in refusing:
                note_left_code(where_awaiting(task))
