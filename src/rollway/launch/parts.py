"""Starts the parts of a run. If one of them dies, all of them end, and the error names the cause."""

import asyncio
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
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PartDied
from ..loop.processes.part import Part, describe_exit, start_part
from ..records.lag import ProcessStats

ENDS_THE_RUN = "orchestrator"
"""The one part that may end: its end is the run's. The others serve until they are stopped."""
HINDSIGHT_S = 0.5
"""How long to wait for other deaths after the first: the first to be noticed is not always the cause."""
MAX_DEATHS, WITHIN_S = 5, 300.0
"""A part that died this often within this time is not restarted any more."""

T = TypeVar("T")
NextConfig = Callable[[], Awaitable[Any]]


def _distance_from_cause(death: tuple[Part, PartDied]) -> tuple[bool, bool]:
    """Sort deaths by how likely they caused the others: a killed process explains errors elsewhere, an
    error of the orchestrator explains none."""
    part, error = death
    return not error.was_killed, part.name == ENDS_THE_RUN


class RunningParts:
    """Starts parts, each with a log in `logs`, and listens to all of them until the run ends."""

    def __init__(
        self,
        logs: Path,
        tasks: asyncio.TaskGroup,
        stack: AsyncExitStack,
        on_stats: Callable[[ProcessStats], None],
        on_message: Callable[[bytes], None],
        say: Callable[[str], None],
    ) -> None:
        self._logs = logs
        self._tasks = tasks
        self._stack = stack
        self._on_stats = on_stats
        self._on_message = on_message
        self._say = say
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._deaths: list[tuple[Part, PartDied]] = []

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
        opening = self._open(name, entry, config, pass_fds)
        part = await self._stack.enter_async_context(opening)
        if next_config is None:
            listener = self._listen(part)
        else:
            listener = self._listen_and_restart(part, entry, next_config, pass_fds)
        self._listeners[name] = self._tasks.create_task(listener, name=name)
        return part

    def _open(
        self, name: str, entry: str, config: Any, pass_fds: Sequence[int]
    ) -> AbstractAsyncContextManager[Part]:
        log = self._logs / f"{name}.log"
        return start_part(name, entry, config, log=log, pass_fds=pass_fds)

    async def _listen(self, part: Part) -> None:
        """Listen until the part ends. If several parts die, raise the death that explains the others."""
        death = await self._wait_for_death(part)
        if death is not None:
            self._deaths.append((part, death))
            await asyncio.sleep(HINDSIGHT_S)
            raise min(self._deaths, key=_distance_from_cause)[1]

    async def _listen_and_restart(
        self, part: Part, entry: str, next_config: NextConfig, pass_fds: Sequence[int]
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
            async with self._open(part.name, entry, await next_config(), pass_fds) as part:
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

    def stop_listening(self) -> None:
        for task in self._listeners.values():
            task.cancel()


@asynccontextmanager
async def open_parts(
    logs: Path,
    on_stats: Callable[[ProcessStats], None],
    on_message: Callable[[bytes], None],
    say: Callable[[str], None],
) -> AsyncIterator[RunningParts]:
    """Run parts while the block lasts. Its end stops them, the last first. A part that dies ends it.

    `on_stats` and `on_message` get what the parts report, `say` gets a line for each restart.
    """
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        parts = RunningParts(logs, tasks, stack, on_stats, on_message, say)
        yield parts
        parts.stop_listening()
