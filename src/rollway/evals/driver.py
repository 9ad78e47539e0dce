"""Runs the rollouts of an evaluation through an env server, in task order, some at a time."""

import asyncio
from collections.abc import AsyncIterator

from msgspec import Struct

from ..envserver.client import EnvClient
from ..errors import ConfigError, EnvironmentInvalid, RunDirError, RunStuck
from ..observe.console import Screen
from ..records.first_rollouts import FirstRollouts
from ..records.ids import PolicyVersion, RolloutId
from ..records.rollout import Scored, Settled
from ..records.task import Task
from ..wire.messages import NextTasks, Run, ServerStats, Tasks, WorkerLost
from .folder import EvalFolder
from .progress import EvalProgress
from .recorder import ResultRecorder
from .result import ResultKey, RolloutResults, rollout_result
from .spec import EvalRuntime, EvalSpec

PAGE = 64
"""Tasks requested from the env server at a time."""


class Evaluation(Struct, frozen=True):
    """One evaluation: what was asked for, how it is run, and where it keeps and shows its results."""

    spec: EvalSpec
    runtime: EvalRuntime
    folder: EvalFolder
    previous: RolloutResults
    """The results of the evaluation that is resumed; empty for a new one."""
    progress: EvalProgress
    screen: Screen


class EvalDriver:
    """Runs a bounded number of rollouts. Every rollout sent settles once, and then frees its slot."""

    def __init__(
        self, client: EnvClient, evaluation: Evaluation, recorder: ResultRecorder
    ) -> None:
        self._client = client
        self._spec = evaluation.spec
        self._previous = evaluation.previous
        self._progress = evaluation.progress
        self._screen = evaluation.screen
        self._recorder = recorder
        sent_together = self._spec.num_rollouts if client.whole_groups else 1
        self._num_slots = max(evaluation.runtime.concurrency, sent_together)
        self._slots = asyncio.Semaphore(self._num_slots)
        self._running: dict[RolloutId, tuple[ResultKey, Task]] = {}
        self._page: asyncio.Future[Tasks] = asyncio.Future()
        self._first = FirstRollouts()

    async def drive(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._receive(), name="receive")
            await self._send_all()
            for _ in range(self._num_slots):
                await self._slots.acquire()
            receiving.cancel()

    async def _send_all(self) -> None:
        position, whole_groups = 0, self._client.whole_groups
        count, previous = self._spec.num_rollouts, self._previous
        async for task in self._tasks():
            self._check_same_task(position, task)
            for numbers in missing_rollouts(
                position, count, previous, whole_groups=whole_groups
            ):
                await self._send(position, task, numbers)
            position += 1

    async def _send(self, position: int, task: Task, numbers: tuple[int, ...]) -> None:
        client, sampling = self._client, self._spec.sampling
        runs = []
        for number in numbers:
            await self._slots.acquire()
            rollout_id = RolloutId(f"t{position}.{number}")
            self._running[rollout_id] = ((position, number), task)
            runs.append(Run(rollout_id, 1, task, sampling, PolicyVersion(0), position))
        for settled in await client.send_runs(runs):
            await self._on_settled(settled)

    def _check_same_task(self, position: int, task: Task) -> None:
        """Refuse to resume if the environment's tasks are not those that its results belong to."""
        spec = self._spec
        for number in range(spec.num_rollouts):
            result = self._previous.get((position, number))
            if result and result.task != task.id:
                raise RunDirError(
                    f"task {position} of '{spec.env}' was '{result.task}' and is '{task.id}': the "
                    "environment has changed; start again without --resume"
                )

    async def _tasks(self) -> AsyncIterator[Task]:
        start, num_tasks = 0, self._spec.num_tasks
        while start < num_tasks:
            count = min(PAGE, num_tasks - start)
            self._page = asyncio.Future()
            await self._client.send(NextTasks(start, count, self._spec.split))
            page = await self._page
            if not start:
                self._progress.begin()
            for task in page.tasks:
                yield task
            start += len(page.tasks)
            if len(page.tasks) < count:
                break
        self._check_num_tasks(start)

    def _check_num_tasks(self, num_found: int) -> None:
        spec = self._spec
        split = f"tasks in its split '{spec.split}'"
        if not num_found:
            hint = "choose the other one with --split"
            raise ConfigError(f"environment '{spec.env}' has no {split}; {hint}")
        if num_found < spec.num_tasks:
            self._screen.line(f"'{spec.env}' has {num_found} {split}, not {spec.num_tasks}")

    async def _receive(self) -> None:
        while True:
            match await self._client.receive():
                case Settled() as settled:
                    await self._on_settled(settled)
                case Tasks(error=error) if error:
                    env = self._spec.env
                    raise EnvironmentInvalid(
                        f"environment '{env}' cannot give tasks: {error}"
                    )
                case Tasks() as tasks if not self._page.done():
                    self._page.set_result(tasks)
                case ServerStats(stats=stats):
                    self._progress.health.hear(stats)
                case WorkerLost() as lost:
                    self._screen.line(lost.text)

    async def _on_settled(self, settled: Settled) -> None:
        key, task = self._running.pop(settled.rollout_id)
        outcome = settled.outcome
        result = rollout_result(key, task, outcome)
        ref = outcome.ref if isinstance(outcome, Scored) else None
        await self._recorder.add(result, ref)
        self._progress.on_result(result)
        self._first.settled(outcome)
        if reason := self._first.reason:
            raise RunStuck(reason)
        self._slots.release()


def missing_rollouts(
    position: int, num_rollouts: int, previous: RolloutResults, *, whole_groups: bool
) -> list[tuple[int, ...]]:
    """Return which rollouts of the task at `position` to run, grouped by what is sent together.

    A rollout that failed runs again, and with `whole_groups` all rollouts of its task with it.
    """
    numbers = range(num_rollouts)
    results = [previous.get((position, number)) for number in numbers]
    missing = [
        number for number, result in enumerate(results) if result is None or result.error
    ]
    if whole_groups:
        return [tuple(numbers)] if missing else []
    return [(number,) for number in missing]
