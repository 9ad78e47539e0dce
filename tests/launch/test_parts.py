"""Parts that are restarted when they die: real processes, killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.doubles.mortal import MortalPart

from rollway.errors import PartDied
from rollway.launch.parts import MAX_DEATHS, RunningParts
from rollway.loop.processes.part import first_cause

pytestmark = pytest.mark.anyio

MORTAL = "tests.doubles.mortal:main"


class Lives:
    """The lives that a part reported, and the lines printed about its restarts."""

    def __init__(self) -> None:
        self.reported: asyncio.Queue[int] = asyncio.Queue()
        self.lines: list[str] = []

    def on_message(self, body: bytes) -> None:
        self.reported.put_nowait(msgspec.msgpack.decode(body, type=MortalPart).life)


@asynccontextmanager
async def parts_of(lives: Lives, folder: Path) -> AsyncIterator[RunningParts]:
    parts = RunningParts(folder, lambda stats: None, lives.on_message, lives.lines.append)
    async with parts.run():
        yield parts


async def test_a_restartable_part_that_is_killed_is_started_again(tmp_path: Path) -> None:
    lives, count = Lives(), 0

    async def next_config() -> MortalPart:
        nonlocal count
        count += 1
        return MortalPart(count)

    async with parts_of(lives, tmp_path) as parts:
        part = await parts.start("mortal", MORTAL, MortalPart(0), next_config)
        assert await part.ready() == "0"
        assert await lives.reported.get() == 0
        os.kill(part.pid, signal.SIGKILL)
        assert await lives.reported.get() == 1
    assert lives.lines == [
        f"mortal (pid {part.pid}) was killed by SIGKILL and is started again"
    ]


async def test_a_part_that_dies_too_often_ends_the_run(tmp_path: Path) -> None:
    lives = Lives()

    async def next_config() -> MortalPart:
        return MortalPart(0, "after")

    async def run() -> None:
        async with parts_of(lives, tmp_path) as parts:
            await parts.start("mortal", MORTAL, MortalPart(0, "after"), next_config)
            await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as raised:
        await run()
    error = first_cause(raised.value)
    assert isinstance(error, PartDied)
    assert str(error).startswith(
        f"mortal died {MAX_DEATHS} times within 300 s; the last time mortal ("
    )
    assert "exited with 4" in str(error)
    assert len(lives.lines) == MAX_DEATHS - 1


async def test_a_part_that_was_never_ready_is_not_started_again(tmp_path: Path) -> None:
    lives = Lives()

    async def next_config() -> MortalPart:
        raise AssertionError("not called")

    async def run() -> None:
        async with parts_of(lives, tmp_path) as parts:
            part = await parts.start("mortal", MORTAL, MortalPart(0, "before"), next_config)
            await part.ready()

    with pytest.raises(BaseExceptionGroup) as raised:
        await run()
    assert "exited with 3" in str(first_cause(raised.value))
    assert lives.lines == []


async def test_parts_end_together_after_the_orchestrator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two parts that wait for each other's end would be killed if they were ended one by one."""
    fifo, diary = tmp_path / "fifo", tmp_path / "diary"
    os.mkfifo(fifo)

    async def fail() -> None:
        raise OSError("cannot be ended")

    async with parts_of(Lives(), tmp_path) as parts:
        for life, name in enumerate(["orchestrator", "reader", "writer"]):
            meets = str(fifo) if life else ""
            part = MortalPart(life, meets=meets, reads=name == "reader", diary=str(diary))
            started = await parts.start(name, MORTAL, part)
            await started.ready()
        parts._started["reader"].push_async_callback(fail)
    lives = diary.read_text().split()
    assert (lives[0], sorted(lives)) == ("0", ["0", "1", "2"])
    assert "reader could not be ended" in caplog.text
