"""The parts of a run as one thing: if any of them dies, all end, and the reason is known."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PartDied
from ..loop.processes.part import Part, how_it_ended, start_part
from ..records.lag import ProcessStats

MAY_END = "orchestrator"
"""The one part whose end is the run's; the others serve until they are told to stop."""
HINDSIGHT_S = 0.5
"""How long after a death others are waited for: the first to be noticed is not always the cause."""
MAX_DEATHS, WITHIN_S = 5, 300.0
"""A part that is started again is given up when it dies so often within so long."""

T = TypeVar("T")


def _remoteness(death: tuple[Part, PartDied]) -> tuple[bool, bool]:
    """A killed process explains others' errors; the orchestrator's error explains none."""
    part, error = death
    return not error.was_killed, part.name == MAY_END


class RunningParts:
    """Starts parts, each with a log in `logs`; every one is listened to until the run ends."""

    def __init__(
        self, logs: Path, tasks: asyncio.TaskGroup, stack: AsyncExitStack,
        on_stats: Callable[[ProcessStats], None], on_said: Callable[[bytes], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._logs = logs
        self._tasks = tasks
        self._stack = stack
        self._on_stats = on_stats
        self._on_said = on_said
        self._say = say
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._deaths: list[tuple[Part, PartDied]] = []

    def hold(self, held: AbstractContextManager[T]) -> T:
        """Something that parts need until all of them have ended."""
        return self._stack.enter_context(held)

    async def start(self, name: str, entry: str, config: Any) -> Part:
        part = await self._stack.enter_async_context(self._starting(name, entry, config))
        self._listening[name] = self._tasks.create_task(self._listen(part), name=name)
        return part

    async def start_lasting(
        self, name: str, entry: str, config: Any, again: Callable[[], Awaitable[Any]],
        pass_fds: Sequence[int] = (),
    ) -> Part:  # fmt: skip
        """Start a part that is started again when it dies, with the config that `again` gives."""
        starting = self._starting(name, entry, config, pass_fds)
        part = await self._stack.enter_async_context(starting)
        lasting = self._last(part, entry, again, pass_fds)
        self._listening[name] = self._tasks.create_task(lasting, name=name)
        return part

    @asynccontextmanager
    async def _starting(
        self, name: str, entry: str, config: Any, pass_fds: Sequence[int] = ()
    ) -> AsyncIterator[Part]:
        log = self._logs / f"{name}.log"
        async with start_part(name, entry, config, log=log, pass_fds=pass_fds) as part:
            yield part

    async def _listen(self, part: Part) -> None:
        """Until the part ends. If it failed because another died, that one is the reason."""
        death = await self._end_of(part)
        if death is not None:
            self._deaths.append((part, death))
            await asyncio.sleep(HINDSIGHT_S)
            raise min(self._deaths, key=_remoteness)[1]

    async def _last(
        self, part: Part, entry: str, again: Callable[[], Awaitable[Any]], pass_fds: Sequence[int]
    ) -> None:
        """Listen to one after the other. One that never came up, or dies too often, ends the run."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        death = await self._end_of(part)
        while death is not None:
            deaths.append(time.monotonic())
            if not part.was_ready and len(deaths) == 1:
                raise death
            if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < WITHIN_S:
                many = f"{part.name} died {MAX_DEATHS} times within {WITHIN_S:g} s"
                raise PartDied(f"{many}; the last time {death}", code=death.code)
            how = how_it_ended(death.code)
            self._say(f"{part.name} (pid {part.pid}) {how} and is started again")
            async with self._starting(part.name, entry, await again(), pass_fds) as part:
                death = await self._end_of(part)

    async def _end_of(self, part: Part) -> PartDied | None:
        """How a part came to its end; None if it was its time."""
        try:
            await part.listen(self._on_stats, self._on_said)
        except PartDied as error:
            return error
        if part.name == MAY_END:
            return None
        text = f"{part.name} (pid {part.pid}) was stopped from outside"
        return PartDied(text, code=-signal.SIGTERM)

    async def ended(self, part: Part) -> None:
        """Until a part has ended by itself, and well."""
        await self._listening[part.name]

    def stop_listening(self) -> None:
        for task in self._listening.values():
            task.cancel()


@asynccontextmanager
async def started_parts(
    logs: Path, on_stats: Callable[[ProcessStats], None], on_said: Callable[[bytes], None],
    say: Callable[[str], None],
) -> AsyncIterator[RunningParts]:  # fmt: skip
    """RunningParts started in the block end with it, last first; one that dies ends the block, and `say` hears
    of those that are started again."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        parts = RunningParts(logs, tasks, stack, on_stats, on_said, say)
        yield parts
        parts.stop_listening()
