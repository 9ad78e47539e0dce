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
"""Rollouts do not wait longer for a toolset to close."""


class _SharedToolset:
    """A toolset of several rollouts. The same task opens and closes it: code that uses anyio, for
    example, must leave its cancel scopes in the task that entered them."""

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
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of user code
            if self._opened.done() and isinstance(error, Exception):
                raise
            if self._opened.done():
                # SystemExit, for example, would end the worker from here
                raise RuntimeError(
                    f"{type(self.toolset).__name__} failed: {error!r}"
                ) from error
            self._opened.set_exception(error)
            self._opened.exception()  # mark it as retrieved: rollouts that wait get it from `opened`

    async def opened(self) -> None:
        await asyncio.shield(self._opened)

    async def close(self) -> None:
        self._close.set()
        await _within_deadline(self.toolset, self._task)


class OpenToolsets:
    """A worker's toolsets. Leaving its block closes those of scope `worker`."""

    def __init__(self) -> None:
        self._shared: dict[tuple[str, type[Toolset]], _SharedToolset] = {}
        """By group and class. The group is empty for scope `worker`."""

    @asynccontextmanager
    async def opened(
        self, toolsets: Sequence[Toolset], group: str | None
    ) -> AsyncIterator[tuple[Toolset, ...]]:
        """Open these toolsets for the length of the block. Shared ones may be open already."""
        async with AsyncExitStack() as stack:
            live = []
            for toolset in toolsets:
                is_own = toolset.scope == "rollout"
                opening = _bounded(toolset) if is_own else self._open_shared(toolset, group)
                live.append(await stack.enter_async_context(opening))
            yield tuple(live)

    @asynccontextmanager
    async def _open_shared(
        self, toolset: Toolset, group: str | None
    ) -> AsyncIterator[Toolset]:
        key = self._key(toolset, group)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedToolset(toolset)
        shared.num_users += 1
        try:
            try:
                await shared.opened()
            except BaseException:  # of user code, or cancelled
                if self._shared.get(key) is shared:
                    del self._shared[key]  # the next rollout tries again
                raise
            yield shared.toolset
        finally:
            shared.num_users -= 1
            is_unused = not shared.num_users and self._shared.get(key) is shared
            if toolset.scope == "group" and is_unused:
                del self._shared[key]
                await shared.close()

    def _key(self, toolset: Toolset, group: str | None) -> tuple[str, type[Toolset]]:
        if toolset.scope == "worker":
            return "", type(toolset)
        if group is None:
            raise RuntimeError(
                f"{type(toolset).__name__} has scope 'group': set needs_whole_groups = True in its "
                "environment, so that rollouts of a group run in one worker"
            )
        return group, type(toolset)

    async def __aenter__(self) -> "OpenToolsets":
        return self

    async def __aexit__(self, *_: Any) -> None:
        """Close all shared toolsets, also if one of them cannot be closed."""
        to_close, self._shared = list(self._shared.values()), {}
        async with AsyncExitStack() as stack:
            for shared in to_close:
                stack.push_async_callback(shared.close)


@asynccontextmanager
async def _bounded(toolset: Toolset) -> AsyncIterator[Toolset]:
    """Open a toolset for one rollout. Closing it cannot take forever."""
    await toolset.__aenter__()
    try:
        yield toolset
    finally:
        await _within_deadline(toolset, toolset.__aexit__(None, None, None))


async def _within_deadline(toolset: Toolset, closing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S) as deadline:
            await closing
    except TimeoutError:
        if not deadline.expired():
            raise  # a TimeoutError of the toolset's own code
        log.warning("%s did not close within %g s", type(toolset).__name__, CLOSE_DEADLINE_S)
