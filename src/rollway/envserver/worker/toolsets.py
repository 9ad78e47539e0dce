"""Opens toolsets and closes each exactly once: after its rollout, its group, or with the worker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from typing import Any

from ...envs.tools import Toolset

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 30.0
"""A toolset that takes longer to close is left to itself."""


class _SharedToolset:
    """A toolset that several rollouts share. One task opens and closes it, as context managers want."""

    def __init__(self, toolset: Toolset) -> None:
        loop = asyncio.get_running_loop()
        self.toolset = toolset
        self.num_users = 0
        self._opened: asyncio.Future[None] = loop.create_future()
        self._close = asyncio.Event()
        self._task = loop.create_task(self._hold(), context=Context())

    async def _hold(self) -> None:
        try:
            async with self.toolset:
                self._opened.set_result(None)
                await self._close.wait()
        except Exception as error:  # of user code
            if self._opened.done():
                raise
            self._opened.set_exception(error)
            self._opened.exception()  # whoever waits for it hears of it

    async def opened(self) -> None:
        await asyncio.shield(self._opened)

    async def close(self) -> None:
        self._close.set()
        await _within_deadline(self.toolset, self._task)


class OpenToolsets:
    """A worker's toolsets. Leaving its block closes those of scope `worker`."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, type[Toolset]], _SharedToolset] = {}

    @asynccontextmanager
    async def opened(
        self, toolsets: Sequence[Toolset], group: str | None
    ) -> AsyncIterator[tuple[Toolset, ...]]:
        """These toolsets, open. Of those with a wider scope, the one that is open already."""
        async with AsyncExitStack() as stack:
            live = []
            for toolset in toolsets:
                if toolset.scope == "rollout":
                    live.append(await stack.enter_async_context(_bounded(toolset)))
                else:
                    live.append(await stack.enter_async_context(self._shared(toolset, group)))
            yield tuple(live)

    @asynccontextmanager
    async def _shared(self, toolset: Toolset, group: str | None) -> AsyncIterator[Toolset]:
        if toolset.scope == "group" and group is None:
            raise RuntimeError(
                f"{type(toolset).__name__} has scope 'group': set needs_whole_groups = True in its "
                "environment, so that rollouts of a group run in one worker"
            )
        key = group or "" if toolset.scope == "group" else "", type(toolset)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _SharedToolset(toolset)
        held.num_users += 1
        try:
            try:
                await held.opened()
            except Exception:  # of user code
                if self._held.get(key) is held:
                    del self._held[key]  # the next rollout tries anew
                raise
            yield held.toolset
        finally:
            held.num_users -= 1
            if toolset.scope == "group" and not held.num_users and self._held.get(key) is held:
                del self._held[key]
                await held.close()

    async def __aenter__(self) -> "OpenToolsets":
        return self

    async def __aexit__(self, *_: Any) -> None:
        """One that cannot be closed keeps none of the others open."""
        held, self._held = list(self._held.values()), {}
        async with AsyncExitStack() as stack:
            for one in held:
                stack.push_async_callback(one.close)


@asynccontextmanager
async def _bounded(toolset: Toolset) -> AsyncIterator[Toolset]:
    """A toolset of one rollout; closing it cannot take for ever."""
    live = await toolset.__aenter__()
    try:
        yield live
    finally:
        await _within_deadline(toolset, toolset.__aexit__(None, None, None))


async def _within_deadline(toolset: Toolset, closing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S) as deadline:
            await closing
    except TimeoutError:
        if not deadline.expired():
            raise  # its own
        log.warning("%s did not close within %g s", type(toolset).__name__, CLOSE_DEADLINE_S)
