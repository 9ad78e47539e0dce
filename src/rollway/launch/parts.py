"""Starts the parts of a run. If one of them dies, all of them end, and the error names the cause."""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ..errors import PartDied
from ..loop.processes.part import Part, describe_exit, start_part
from ..records.lag import ProcessStats

ENDS_THE_RUN = "orchestrator"
"""The one part that may end: its end is the run's. The others serve until they are stopped."""
HINDSIGHT_S = 0.5
"""How long to wait for other deaths after the first: the first to be noticed is not always the cause."""
MAX_DEATHS, WITHIN_S = 5, 300.0
"""A part that died this often within this time is not restarted any more."""

log = logging.getLogger(__name__)

T = TypeVar("T")
NextConfig = Callable[[], Awaitable[Any]]
OpenPart = Callable[[Any], AbstractAsyncContextManager[Part]]


def _distance_from_cause(death: tuple[Part, PartDied]) -> tuple[bool, bool]:
    """Sort deaths by how likely they caused the others: a killed process explains errors elsewhere, an
    error of the orchestrator explains none."""
    part, error = death
    return not error.was_killed, part.name == ENDS_THE_RUN


async def _end(part: AsyncExitStack, name: str) -> None:
    """End a part. What goes wrong keeps no other part from ending."""
    try:
        await part.aclose()
    except Exception:
        log.exception("%s could not be ended", name)


class RunningParts:
    """Starts parts, each with a log in `logs`, and listens to all of them until the run ends."""

    def __init__(
        self,
        logs: Path,
        on_stats: Callable[[ProcessStats], None],
        on_message: Callable[[bytes], None],
        say: Callable[[str], None],
    ) -> None:
        """`on_stats` and `on_message` get what parts report, `say` gets a line for each restart."""
        self._logs = logs
        self._on_stats = on_stats
        self._on_message = on_message
        self._say = say
        self._tasks = asyncio.TaskGroup()
        self._stack = AsyncExitStack()
        self._started: dict[str, AsyncExitStack] = {}
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._deaths: list[tuple[Part, PartDied]] = []

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Self]:
        """Run parts while the block lasts. Its end stops them. A dead part ends it."""
        async with self._stack:
            try:
                async with self._tasks:
                    yield self
                    for task in self._listeners.values():
                        task.cancel()
            finally:
                await self._end_started()

    async def _end_started(self) -> None:
        """End the orchestrator, which would take other ends for failures, then all others together."""
        first = self._started.pop(ENDS_THE_RUN, AsyncExitStack())
        try:
            await _end(first, ENDS_THE_RUN)
        finally:
            async with asyncio.TaskGroup() as ending:
                for name, part in self._started.items():
                    ending.create_task(_end(part, name))

    def keep_open(self, resource: AbstractContextManager[T]) -> T:
        """Enter a context that parts need, and leave it when all of them have ended."""
        return self._stack.enter_context(resource)

    async def start(
        self,
        name: str,
        entry: str,
        config: Any,
        next_config: NextConfig | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Part:
        """Start a part. If it dies, it starts again with what `next_config` returns, or the run ends."""
        log = self._logs / f"{name}.log"
        open_part = partial(start_part, name, entry, log=log, pass_fds=pass_fds)
        opened = AsyncExitStack()
        part = await opened.enter_async_context(open_part(config))
        self._started[name] = opened
        if next_config is None:
            listener = self._listen(part)
        else:
            listener = self._listen_and_restart(part, open_part, next_config)
        self._listeners[name] = self._tasks.create_task(listener, name=name)
        return part

    async def _listen(self, part: Part) -> None:
        """Listen until the part ends. If several parts die, raise the death that explains the others."""
        death = await self._wait_for_death(part)
        if death is not None:
            self._deaths.append((part, death))
            await asyncio.sleep(HINDSIGHT_S)
            raise min(self._deaths, key=_distance_from_cause)[1]

    async def _listen_and_restart(
        self, part: Part, open_part: OpenPart, next_config: NextConfig
    ) -> None:
        """Listen to a part and its successors. Raise if the first was never ready or many die."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        death = await self._wait_for_death(part)
        while death is not None:
            deaths.append(time.monotonic())
            if not part.was_ready and len(deaths) == 1:
                raise death
            if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < WITHIN_S:
                often = f"{part.name} died {MAX_DEATHS} times within {WITHIN_S:g} s"
                raise PartDied(f"{often}; the last time {death}", code=death.code)
            how = describe_exit(death.code)
            self._say(f"{part.name} (pid {part.pid}) {how} and is started again")
            async with open_part(await next_config()) as part:
                death = await self._wait_for_death(part)

    async def _wait_for_death(self, part: Part) -> PartDied | None:
        """Listen until the part ends. Return how it died, or None if its end is the run's."""
        try:
            await part.listen(self._on_stats, self._on_message)
        except PartDied as error:
            return error
        if part.name == ENDS_THE_RUN:
            return None
        text = f"{part.name} (pid {part.pid}) was stopped from outside"
        return PartDied(text, code=-signal.SIGTERM)

    async def wait_for(self, part: Part) -> None:
        await self._listeners[part.name]
