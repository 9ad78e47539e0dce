"""The thread lane: for calls that release the GIL while they wait or copy."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that releases the GIL while it waits or copies."""
    return await asyncio.to_thread(call, *args, **kwargs)


async def thread_to_the_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `thread`, but a cancelled caller waits until the call has ended. A thread cannot be stopped,
    so the buffers it writes to must not be reused while it runs."""
    return await to_the_end(asyncio.ensure_future(thread(call, *args, **kwargs)))


async def to_the_end(running: asyncio.Future[T]) -> T:
    """Wait for a result. A cancelled caller waits for it too, and is cancelled then."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # mark it as seen: the caller is cancelled and will not look
        raise cancelled
    return running.result()
