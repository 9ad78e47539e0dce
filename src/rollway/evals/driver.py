"""Runs the rollouts of an evaluation through an env server, in task order, some at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from msgspec import Struct

from ..envserver.client import EnvClient
from ..errors import ConfigError, EnvironmentInvalid, RunDirError
from ..records.ids import PolicyVersion, RolloutId
from ..records.lag import ProcessStats
from ..records.payload import PayloadRef
from ..records.rollout import Scored, Settled
from ..records.task import Task
from ..wire.messages import NextTasks, Run, RunGroup, ServerStats, Tasks, WorkerLost
from .result import EvalResult, ResultKey, result_of
from .spec import EvalSpec

PAGE = 64
"""Tasks requested from the env server at a time."""


class EvalListener(Struct, frozen=True):
    """Functions that the driver calls with what comes back from the env server."""

    on_begin: Callable[[], None]
    """Called when the first tasks have arrived, so workers are up."""
    on_result: Callable[[EvalResult, PayloadRef | None], Awaitable[None]]
    on_stats: Callable[[ProcessStats], None]
    on_notice: Callable[[str], None]


class EvalDriver:
    """Runs at most `concurrency` rollouts. Every rollout sent settles once, and then frees its slot.

    `previous` holds the results of the evaluation that is resumed; it is empty for a new one.
    """

    def __init__(
        self,
        client: EnvClient,
        spec: EvalSpec,
        previous: Mapping[ResultKey, EvalResult],
        concurrency: int,
        listener: EvalListener,
    ) -> None:
        self._client = client
        self._spec = spec
        self._previous = previous
        self._listener = listener
        sent_together = spec.num_rollouts if client.whole_groups else 1
        self._num_slots = max(concurrency, sent_together)
        self._slots = asyncio.Semaphore(self._num_slots)
        self._running: dict[RolloutId, tuple[ResultKey, Task]] = {}
        self._page: asyncio.Future[Tasks] = asyncio.get_running_loop().create_future()

    async def drive(self) -> int:
        """Run all rollouts that are missing to their end, and return the number of tasks."""
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._receive(), name="receive")
            num_tasks = await self._send_all()
            for _ in range(self._num_slots):
                await self._slots.acquire()
            receiving.cancel()
        return num_tasks

    async def _send_all(self) -> int:
        position = 0
        async for task in self._tasks():
            self._check_same_task(position, task)
            for numbers in missing_rollouts(
                position,
                self._spec.num_rollouts,
                self._previous,
                whole_groups=self._client.whole_groups,
            ):
                await self._send(position, task, numbers)
            position += 1
        return position

    async def _send(self, position: int, task: Task, numbers: tuple[int, ...]) -> None:
        runs = []
        for number in numbers:
            await self._slots.acquire()
            rollout_id = RolloutId(f"t{position}.{number}")
            self._running[rollout_id] = ((position, number), task)
            runs.append(Run(rollout_id, 1, task, self._spec.sampling, PolicyVersion(0)))
        await self._client.send(RunGroup(tuple(runs)) if self._client.whole_groups else runs[0])

    def _check_same_task(self, position: int, task: Task) -> None:
        """Refuse to resume if the environment's tasks are not those that its results belong to."""
        for number in range(self._spec.num_rollouts):
            result = self._previous.get((position, number))
            if result is not None and result.task != task.id:
                raise RunDirError(
                    f"task {position} of '{self._spec.env}' was '{result.task}' and is '{task.id}': the "
                    "environment has changed; start again without --resume"
                )

    async def _tasks(self) -> AsyncIterator[Task]:
        """Yield the tasks in their order: as many as were asked for, or as many as there are."""
        start, num_tasks = 0, self._spec.num_tasks
        while start < num_tasks:
            count = min(PAGE, num_tasks - start)
            self._page = asyncio.get_running_loop().create_future()
            await self._client.send(NextTasks(start, count, self._spec.split))
            page = await self._page
            if not start:
                self._listener.on_begin()
            for task in page.tasks:
                yield task
            start += len(page.tasks)
            if len(page.tasks) < count:
                break
        self._check_num_tasks(start)

    def _check_num_tasks(self, num_found: int) -> None:
        env, split, num_tasks = self._spec.env, self._spec.split, self._spec.num_tasks
        if not num_found:
            raise ConfigError(
                f"environment '{env}' has no tasks in its split '{split}'; choose the other one with "
                "--split"
            )
        if num_found < num_tasks:
            self._listener.on_notice(
                f"'{env}' has {num_found} tasks in its split '{split}', not {num_tasks}"
            )

    async def _receive(self) -> None:
        while True:
            match await self._client.receive():
                case Settled() as settled:
                    await self._on_settled(settled)
                case Tasks(error=error) if error:
                    raise EnvironmentInvalid(
                        f"environment '{self._spec.env}' cannot give tasks: {error}"
                    )
                case Tasks() as tasks if not self._page.done():
                    self._page.set_result(tasks)
                case ServerStats(stats=stats):
                    self._listener.on_stats(stats)
                case WorkerLost(worker=worker, num_moved=moved, num_failed=failed):
                    self._listener.on_notice(f"{worker} died: {moved} rollouts moved, {failed} failed")

    async def _on_settled(self, settled: Settled) -> None:
        key, task = self._running.pop(settled.rollout_id)
        outcome = settled.outcome
        ref = outcome.ref if isinstance(outcome, Scored) else None
        await self._listener.on_result(result_of(key, task, outcome), ref)
        self._slots.release()


def missing_rollouts(
    position: int, num_rollouts: int, previous: Mapping[ResultKey, EvalResult], *, whole_groups: bool
) -> list[tuple[int, ...]]:
    """Return which rollouts of the task at `position` to run, grouped by what is sent together.

    A rollout that failed runs again. If the environment needs whole groups, all rollouts of the task run
    again as soon as one is missing.
    """
    missing = [
        number for number in range(num_rollouts) if not _is_done(previous.get((position, number)))
    ]
    if whole_groups:
        return [tuple(range(num_rollouts))] if missing else []
    return [(number,) for number in missing]


def _is_done(result: EvalResult | None) -> bool:
    return result is not None and result.error is None
