"""Tasks that user code starts and does not wait for: they end with their rollout."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar
from typing import Any

END_DEADLINE_S = 10.0

_mine: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("tasks of this rollout", default=None)


def keep_track(loop: asyncio.AbstractEventLoop) -> None:
    """From now on it is known of every task of a loop which rollout it belongs to. Tasks that are given
    a context of their own belong to none."""
    make: Any = loop.get_task_factory() or _task

    def factory(
        loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        if context is not None:
            options["context"] = context
        task: asyncio.Task[Any] = make(loop, coro, **options)
        mine = _mine.get() if context is None else context.get(_mine)
        if mine is not None:
            mine.add(task)
            task.add_done_callback(mine.discard)
        return task

    loop.set_task_factory(factory)


def _task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coro, loop=loop, **options)


@contextmanager
def unowned() -> Iterator[None]:
    """Tasks that are started within the block belong to no rollout: what a tool starts is its own."""
    token = _mine.set(None)
    try:
        yield
    finally:
        _mine.reset(token)


@asynccontextmanager
async def no_strays() -> AsyncIterator[None]:
    """Leaving the block cancels tasks that were started within it, and waits for their end."""
    mine: set[asyncio.Task[Any]] = set()
    token = _mine.set(mine)
    try:
        yield
    finally:
        _mine.reset(token)
        left = list(mine)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=END_DEADLINE_S)
