"""The parts of a run as one thing: if any of them dies, all end, and the reason is known."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ..errors import PartDied
from ..loop.part import Part, start_part
from ..records.lag import ProcessStats

MAY_END = "orchestrator"
"""The one part whose end is the run's; the others serve until they are told to stop."""
HINDSIGHT_S = 0.5
"""How long after a death others are waited for: the first to be noticed is not always the cause."""


def _remoteness(death: tuple[Part, PartDied]) -> tuple[bool, bool]:
    """A killed process explains others' errors; the orchestrator's error explains none."""
    part, error = death
    return not error.was_killed, part.name == MAY_END


class Parts:
    """Starts parts, each with a log in `logs`; every one is listened to until the run ends."""

    def __init__(
        self, logs: Path, tasks: asyncio.TaskGroup, stack: AsyncExitStack,
        on_stats: Callable[[ProcessStats], None], on_said: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        self._logs = logs
        self._tasks = tasks
        self._stack = stack
        self._on_stats = on_stats
        self._on_said = on_said
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._deaths: list[tuple[Part, PartDied]] = []

    async def start(self, name: str, entry: str, config: Any) -> Part:
        log = self._logs / f"{name}.log"
        part = await self._stack.enter_async_context(start_part(name, entry, config, log=log))
        self._listening[name] = self._tasks.create_task(self._listen(part), name=name)
        return part

    async def _listen(self, part: Part) -> None:
        """Until the part ends. If it failed because another died, that one is the reason."""
        try:
            await part.listen(self._on_stats, self._on_said)
            if part.name != MAY_END:
                text = f"{part.name} (pid {part.pid}) was stopped from outside"
                raise PartDied(text, code=-signal.SIGTERM)
        except PartDied as error:
            self._deaths.append((part, error))
            await asyncio.sleep(HINDSIGHT_S)
            raise min(self._deaths, key=_remoteness)[1] from None

    async def ended(self, part: Part) -> None:
        """Until a part has ended by itself, and well."""
        await self._listening[part.name]

    def stop_listening(self) -> None:
        for task in self._listening.values():
            task.cancel()


@asynccontextmanager
async def started_parts(
    logs: Path, on_stats: Callable[[ProcessStats], None], on_said: Callable[[bytes], None]
) -> AsyncIterator[Parts]:
    """Parts started in the block end with it, last first; one that dies ends the block."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        parts = Parts(logs, tasks, stack, on_stats, on_said)
        yield parts
        parts.stop_listening()
