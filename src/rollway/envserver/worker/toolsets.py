"""Opens toolsets and closes each exactly once: after its rollout, its group, or with the worker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from typing import Any

from ...envs.tools import Toolset
from ...loop.bounded_code import GRACE_S, must_end_within, note_left_code
from ...loop.watch.stacks import where_awaiting

log = logging.getLogger(__name__)


class _SharedToolset:
    """A toolset of several rollouts. The same task opens and closes it: code that uses anyio, for
    example, must leave its cancel scopes in the task that entered them."""

    def __init__(self, toolset: Toolset, deadline_s: float) -> None:
        self._deadline_s = deadline_s
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
        """Close the toolset. Code that refuses to end is left behind."""
        self._close.set()
        _, late = await asyncio.wait([self._task], timeout=self._deadline_s)
        if late:
            _warn_of_late(self.toolset, self._deadline_s)
            self._task.cancel()
            _, refusing = await asyncio.wait(late, timeout=GRACE_S)
            if refusing:
                note_left_code(where_awaiting(self._task))
        elif not self._task.cancelled() and (error := self._task.exception()):
            raise error


class OpenToolsets:
    """A worker's toolsets. Leaving its block closes those of scope `worker`. Rollouts do not wait for
    longer than `deadline_s` until a toolset is closed."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
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
                opening = (
                    self._open_own(toolset) if is_own else self._open_shared(toolset, group)
                )
                live.append(await stack.enter_async_context(opening))
            yield tuple(live)

    @asynccontextmanager
    async def _open_shared(
        self, toolset: Toolset, group: str | None
    ) -> AsyncIterator[Toolset]:
        key = self._key(toolset, group)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedToolset(toolset, self._deadline_s)
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

    @asynccontextmanager
    async def _open_own(self, toolset: Toolset) -> AsyncIterator[Toolset]:
        """Open a toolset for one rollout. Closing it cannot take forever."""
        limit_s = self._deadline_s
        await toolset.__aenter__()
        try:
            yield toolset
        finally:
            try:
                with must_end_within(limit_s, f"closing {type(toolset).__name__}"):
                    async with asyncio.timeout(limit_s) as deadline:
                        await toolset.__aexit__(None, None, None)
            except TimeoutError:
                if not deadline.expired():
                    raise  # a TimeoutError of the toolset's own code
                _warn_of_late(toolset, limit_s)

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


def _warn_of_late(toolset: Toolset, deadline_s: float) -> None:
    log.warning("%s did not close within %g s", type(toolset).__name__, deadline_s)
