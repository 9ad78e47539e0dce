"""Runs an evaluation's rollouts through an env server, in task order, so many at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from msgspec import Struct

from ..envserver.client import EnvClient
from ..errors import RunDirError, RunStuck
from ..records.ids import PolicyVersion, RolloutId
from ..records.lag import ProcessStats
from ..records.payload import PayloadRef
from ..records.rollout import Scored, Settled
from ..records.task import Task
from ..wire.messages import NextTasks, Run, RunGroup, ServerStats, Tasks, WorkerLost
from .result import EvalResult, ResultKey, result_of
from .spec import EvalSpec

PAGE = 64
"""Tasks asked for at a time."""


class EvalListener(Struct, frozen=True):
    """Who hears of what comes back."""

    begun: Callable[[], None]
    """The first tasks are here: workers are up."""
    result: Callable[[EvalResult, PayloadRef | None], Awaitable[None]]
    stats: Callable[[ProcessStats], None]
    notice: Callable[[str], None]


class EvalDriver:
    """At most `concurrency` rollouts run. Every rollout sent settles once, and frees its place."""

    def __init__(
        self, client: EnvClient, asked: EvalSpec, known: Mapping[ResultKey, EvalResult], concurrency: int,
        hears: EvalListener,
    ) -> None:  # fmt: skip
        self._client = client
        self._asked = asked
        self._known = known
        self._hears = hears
        together = asked.num_rollouts if client.whole_groups else 1
        self._num_places = max(concurrency, together)
        self._places = asyncio.Semaphore(self._num_places)
        self._running: dict[RolloutId, tuple[ResultKey, Task]] = {}
        self._page: asyncio.Future[Tasks] = asyncio.get_running_loop().create_future()

    async def drive(self) -> int:
        """All that is missing, to its end; how many tasks there are."""
        async with asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(self._hear(), name="hear")
            num_tasks = await self._send_all()
            for _ in range(self._num_places):
                await self._places.acquire()
            hearing.cancel()
        return num_tasks

    async def _send_all(self) -> int:
        position = 0
        async for task in self._tasks():
            self._check_same(position, task)
            for order in orders(
                position, self._asked.num_rollouts, self._known, whole_groups=self._client.whole_groups
            ):
                await self._send(position, task, order)
            position += 1
        return position

    async def _send(self, position: int, task: Task, order: tuple[int, ...]) -> None:
        runs = []
        for n in order:
            await self._places.acquire()
            id = RolloutId(f"t{position}.{n}")
            self._running[id] = ((position, n), task)
            runs.append(Run(id, 1, task, self._asked.sampling, PolicyVersion(0), position))
        await self._client.send(RunGroup(tuple(runs)) if self._client.whole_groups else runs[0])

    def _check_same(self, position: int, task: Task) -> None:
        """A resume must find the tasks that its results are of."""
        for n in range(self._asked.num_rollouts):
            was = self._known.get((position, n))
            if was is not None and was.task != task.id:
                raise RunDirError(
                    f"task {position} of '{self._asked.env}' was '{was.task}' and is '{task.id}': the "
                    "environment has changed; start anew without --resume"
                )

    async def _tasks(self) -> AsyncIterator[Task]:
        """The tasks in their order, as many as were asked for or there are."""
        start, wanted = 0, self._asked.num_tasks
        while start < wanted:
            count = min(PAGE, wanted - start)
            self._page = asyncio.get_running_loop().create_future()
            await self._client.send(NextTasks(start, count, self._asked.split))
            page = await self._page
            if not start:
                self._hears.begun()
            for task in page.tasks:
                yield task
            start += len(page.tasks)
            if len(page.tasks) < count:
                break
        self._tell_fewer(start)

    def _tell_fewer(self, count: int) -> None:
        env, split, wanted = self._asked.env, self._asked.split, self._asked.num_tasks
        if not count:
            raise RunStuck(f"environment '{env}' has no tasks in its split '{split}'")
        if count < wanted:
            self._hears.notice(f"'{env}' has {count} tasks in its split '{split}', not {wanted}")

    async def _hear(self) -> None:
        while True:
            match await self._client.receive():
                case Settled() as settled:
                    await self._on_settled(settled)
                case Tasks(error=error) if error:
                    raise RunStuck(f"environment '{self._asked.env}' cannot give tasks: {error}")
                case Tasks() as tasks if not self._page.done():
                    self._page.set_result(tasks)
                case ServerStats(stats=stats):
                    self._hears.stats(stats)
                case WorkerLost(worker=worker, num_moved=moved, num_failed=failed):
                    self._hears.notice(f"{worker} died: {moved} rollouts moved, {failed} failed")

    async def _on_settled(self, settled: Settled) -> None:
        key, task = self._running.pop(settled.rollout_id)
        outcome = settled.outcome
        ref = outcome.ref if isinstance(outcome, Scored) else None
        await self._hears.result(result_of(key, task, outcome), ref)
        self._places.release()


def is_done(result: EvalResult | None) -> bool:
    """One that failed runs again."""
    return result is not None and result.error is None


def orders(
    position: int, num_rollouts: int, known: Mapping[ResultKey, EvalResult], *, whole_groups: bool
) -> list[tuple[int, ...]]:
    """The rollouts of the task at `position` that are missing, each sent by itself; or, where an
    environment needs all rollouts of a task together, all of them once more if any is missing."""
    missing = [n for n in range(num_rollouts) if not is_done(known.get((position, n)))]
    if whole_groups:
        return [tuple(range(num_rollouts))] if missing else []
    return [(n,) for n in missing]
