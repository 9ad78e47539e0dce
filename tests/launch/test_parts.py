"""RunningParts that are started again when they die: real processes, killed."""

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
from rollway.launch.parts import MAX_DEATHS, RunningParts, started_parts
from rollway.loop.processes.part import first_cause

pytestmark = pytest.mark.anyio

MORTAL = "tests.doubles.mortal:main"


class Lives:
    """Which lives were lived, and what was said about their ends."""

    def __init__(self) -> None:
        self.lived: asyncio.Queue[int] = asyncio.Queue()
        self.said: list[str] = []

    def on_said(self, body: bytes) -> None:
        self.lived.put_nowait(msgspec.msgpack.decode(body, type=MortalPart).life)


@asynccontextmanager
async def parts_of(lives: Lives, folder: Path) -> AsyncIterator[RunningParts]:
    async with started_parts(folder, lambda stats: None, lives.on_said, lives.said.append) as parts:
        yield parts


async def test_a_lasting_part_that_is_killed_lives_again(tmp_path: Path) -> None:
    lives, count = Lives(), 0

    async def again() -> MortalPart:
        nonlocal count
        count += 1
        return MortalPart(count)

    async with parts_of(lives, tmp_path) as parts:
        part = await parts.start_lasting("mortal", MORTAL, MortalPart(0), again)
        assert await part.ready() == "0"
        assert await lives.lived.get() == 0
        os.kill(part.pid, signal.SIGKILL)
        assert await lives.lived.get() == 1
    assert lives.said == [f"mortal (pid {part.pid}) was killed by SIGKILL and is started again"]


async def test_one_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    lives = Lives()

    async def again() -> MortalPart:
        return MortalPart(0, "after")

    async def run() -> None:
        async with parts_of(lives, tmp_path) as parts:
            await parts.start_lasting("mortal", MORTAL, MortalPart(0, "after"), again)
            await asyncio.sleep(60)

    with pytest.raises(BaseExceptionGroup) as raised:
        await run()
    error = first_cause(raised.value)
    assert isinstance(error, PartDied)
    assert str(error).startswith(f"mortal died {MAX_DEATHS} times within 300 s; the last time mortal (")
    assert "exited with 4" in str(error)
    assert len(lives.said) == MAX_DEATHS - 1


async def test_one_that_never_came_up_is_not_tried_again(tmp_path: Path) -> None:
    lives = Lives()

    async def again() -> MortalPart:
        raise AssertionError("not asked for")

    async def run() -> None:
        async with parts_of(lives, tmp_path) as parts:
            part = await parts.start_lasting("mortal", MORTAL, MortalPart(0, "before"), again)
            await part.ready()

    with pytest.raises(BaseExceptionGroup) as raised:
        await run()
    assert "exited with 3" in str(first_cause(raised.value))
    assert lives.said == []
