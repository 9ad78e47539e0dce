"""The page shows whose code a process runs, even after the process has died."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rollway.errors import CodeQuit
from rollway.loop.processes.running_code import (
    SIZE,
    RunningCodePage,
    RunningOwner,
    new_page,
    owned_by,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def page() -> Iterator[RunningCodePage]:
    with new_page() as (page, _):
        yield page


@pytest.fixture
async def marked_page(page: RunningCodePage) -> RunningCodePage:
    page.mark_tasks_of(asyncio.get_running_loop())
    return page


def owner(page: RunningCodePage) -> int:
    shown = page.read()
    return shown.owner if shown else 0


async def test_a_task_is_shown_while_it_runs_and_not_while_it_waits(
    marked_page: RunningCodePage,
) -> None:
    seen: list[int] = []

    async def work() -> str:
        seen.append(owner(marked_page))
        await asyncio.sleep(0.01)
        seen.append(owner(marked_page))
        return "done"

    task = asyncio.create_task(work(), context=owned_by(7))
    await asyncio.sleep(0)
    assert owner(marked_page) == 0
    assert await task == "done"
    await asyncio.create_task(work())
    assert seen == [7, 7, 0, 0], "a task without an owner is not marked"


async def test_tasks_started_by_a_task_have_its_owner(marked_page: RunningCodePage) -> None:
    async def child() -> int:
        await asyncio.sleep(0)
        return owner(marked_page)

    async def parent() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            inner = tasks.create_task(child())
        return [await inner, *await asyncio.gather(child(), asyncio.ensure_future(child()))]

    assert await asyncio.create_task(parent(), context=owned_by(3)) == [3, 3, 3]


async def test_errors_and_cancellation_pass_through(marked_page: RunningCodePage) -> None:
    cleaned: list[int] = []

    async def fails() -> None:
        raise KeyError("x")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(owner(marked_page))

    with pytest.raises(KeyError):
        await asyncio.create_task(fails(), context=owned_by(1))
    task = asyncio.create_task(waits(), context=owned_by(2))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [2]
    assert owner(marked_page) == 0


async def test_a_marked_coroutine_looks_like_a_coroutine(
    marked_page: RunningCodePage,
) -> None:
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


async def test_a_line_is_shown_only_until_the_task_waits(
    marked_page: RunningCodePage,
) -> None:
    seen: list[RunningOwner | None] = []

    async def work() -> None:
        marked_page.show_line("file.py:3 in work")
        seen.append(marked_page.read())
        await asyncio.sleep(0.001)
        seen.append(marked_page.read())
        marked_page.show_line("x" * 2 * SIZE)
        seen.append(marked_page.read())

    await asyncio.create_task(work(), context=owned_by(5))
    assert [running.where if running else None for running in seen[:2]] == [
        "file.py:3 in work",
        "",
    ]
    assert seen[2] is not None
    assert 0 < len(seen[2].where) < SIZE, "a long line is cut"


CHILD = """
import asyncio, os, sys
from rollway.loop.processes.running_code import RunningCodePage, owned_by
page = RunningCodePage(int(sys.argv[1]))
async def main():
    page.mark_tasks_of(asyncio.get_running_loop())
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
    "bad",
    ["os._exit(4)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)"],
)
def test_the_page_shows_who_ran_when_the_process_died(bad: str) -> None:
    with new_page() as (page, fd):
        subprocess.run(
            [sys.executable, "-c", CHILD.format(bad=bad), str(fd)], pass_fds=[fd],
            stderr=subprocess.DEVNULL, check=False, env=os.environ,
        )  # fmt: skip
        assert owner(page) == 2


@pytest.mark.parametrize("quitting", [SystemExit("enough"), KeyboardInterrupt()])
async def test_an_owners_task_that_quits_ends_alone(quitting: BaseException) -> None:
    async def quit_in_task() -> None:
        raise quitting

    with new_page() as (page, _):
        page.mark_tasks_of(asyncio.get_running_loop())
        try:
            task = asyncio.create_task(quit_in_task(), context=owned_by(2))
            with pytest.raises(CodeQuit, match=type(quitting).__name__):
                await task
        finally:
            asyncio.get_running_loop().set_task_factory(None)


def test_the_page_is_empty_when_no_code_ran_as_the_process_ended() -> None:
    with new_page() as (page, fd):
        subprocess.run(
            [sys.executable, "-c", CHILD.format(bad="pass"), str(fd)],
            pass_fds=[fd],
            check=True,
        )
        assert page.read() is None
