"""The board shows whose code runs, also when nobody is left to say so."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rollway.loop.processes.board import SIZE, Board, BoardReading, new_board, owned_by

pytestmark = pytest.mark.anyio


@pytest.fixture
def board() -> Iterator[Board]:
    with new_board() as (made, _):
        yield made


@pytest.fixture
async def marking(board: Board) -> "Board":
    board.mark_tasks_of(asyncio.get_running_loop())
    return board


def owner(board: Board) -> int:
    shown = board.read()
    return shown.owner if shown else 0


async def test_a_task_is_shown_while_it_runs_and_not_while_it_waits(marking: Board) -> None:
    seen: list[int] = []

    async def work() -> str:
        seen.append(owner(marking))
        await asyncio.sleep(0.01)
        seen.append(owner(marking))
        return "done"

    task = asyncio.create_task(work(), context=owned_by(7))
    await asyncio.sleep(0)
    assert owner(marking) == 0
    assert await task == "done"
    await asyncio.create_task(work())
    assert seen == [7, 7, 0, 0], "one without an owner is not marked"


async def test_tasks_of_a_task_have_its_owner(marking: Board) -> None:
    async def child() -> int:
        await asyncio.sleep(0)
        return owner(marking)

    async def parent() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            inner = tasks.create_task(child())
        return [await inner, *await asyncio.gather(child(), asyncio.ensure_future(child()))]

    assert await asyncio.create_task(parent(), context=owned_by(3)) == [3, 3, 3]


async def test_errors_and_cancellation_pass_through(marking: Board) -> None:
    cleaned: list[int] = []

    async def fails() -> None:
        raise KeyError("x")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(owner(marking))

    with pytest.raises(KeyError):
        await asyncio.create_task(fails(), context=owned_by(1))
    task = asyncio.create_task(waits(), context=owned_by(2))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [2]
    assert owner(marking) == 0


async def test_a_marked_coroutine_is_one_to_whoever_asks(marking: Board) -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    task = asyncio.create_task(work(), context=owned_by(1))
    coro = task.get_coro()
    assert asyncio.iscoroutine(coro)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CREATED  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_SUSPENDED  # type: ignore[arg-type]
    assert "work" in repr(task)
    await task


async def test_a_line_belongs_to_the_step_it_was_seen_in(marking: Board) -> None:
    seen: list[BoardReading | None] = []

    async def work() -> None:
        marking.show_line("file.py:3 in work")
        seen.append(marking.read())
        await asyncio.sleep(0.001)
        seen.append(marking.read())
        marking.show_line("x" * 2 * SIZE)
        seen.append(marking.read())

    await asyncio.create_task(work(), context=owned_by(5))
    assert [one.where if one else None for one in seen[:2]] == ["file.py:3 in work", ""]
    assert seen[2] is not None
    assert 0 < len(seen[2].where) < SIZE, "a long one is cut"


CHILD = """
import asyncio, os, sys
from rollway.loop.processes.board import Board, owned_by
board = Board(int(sys.argv[1]))
async def main():
    board.mark_tasks_of(asyncio.get_running_loop())
    async def other():
        await asyncio.sleep(60)
    async def bad():
        await asyncio.sleep(0)
        {bad}
    kept = [asyncio.create_task(other(), context=owned_by(n)) for n in (1, 3)]
    await asyncio.create_task(bad(), context=owned_by(2))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "bad", ["os._exit(4)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)", "sys.exit(0)"]
)
def test_who_ran_when_the_process_ended(bad: str) -> None:
    with new_board() as (board, fd):
        subprocess.run(
            [sys.executable, "-c", CHILD.format(bad=bad), str(fd)], pass_fds=[fd],
            stderr=subprocess.DEVNULL, check=False, env=os.environ,
        )  # fmt: skip
        assert owner(board) == 2


def test_nobody_ran_when_the_process_ended() -> None:
    with new_board() as (board, fd):
        subprocess.run(
            [sys.executable, "-c", CHILD.format(bad="pass"), str(fd)], pass_fds=[fd], check=True
        )
        assert board.read() is None
