"""Where events come from: env servers, engines, the trainer, the parent process."""

import asyncio
from time import monotonic

import msgspec

from ...config.plan import env_name
from ...envserver.client import EnvClient
from ...errors import ConfigError, RunStuck
from ...loop.processes.part import Parent
from ...observe.health import Lags
from ...observe.report import Notice
from ...observe.upkeep import is_worth_a_line
from ...records.engine import Published
from ...records.ids import PolicyVersion, Step
from ...records.lag import ProcessStats
from ...records.rollout import Failed, Scored, Settled
from ...records.text import one_line
from ...transport.batch import BatchSender
from ...wire.messages import RolloutPhases, ServerStats, Tasks, WorkerLost
from ..core.events import Event, PayloadGrew, TasksArrived, VersionPublished, WorkerLag
from .bookkeeper import Bookkeeper
from .fleet import LOOK_EVERY_S, EngineFleet

Events = asyncio.Queue[Event]


async def from_env(
    env: str,
    client: EnvClient,
    events: Events,
    books: Bookkeeper,
    parent: Parent,
    fleet: EngineFleet,
) -> None:
    while True:
        match await client.receive():
            case Settled(outcome=Scored(rows=())) as settled:
                raise ConfigError(
                    f"environment '{client.env}' returns rollouts without token ids ({settled.worker}): "
                    "its engine is a chat endpoint, and nothing can be trained from messages alone; "
                    "serve the environment with a vLLM or SGLang engine, or with --fill-ids"
                )
            case Settled() as received:
                await settle(events, books, parent, env, await fleet.vet(received))
            case Tasks(error=error) if error:
                raise RunStuck(
                    f"environment '{env}' cannot give tasks: {error}; its worker's log has the traceback"
                )
            case Tasks(start=start, tasks=tasks, exhausted=exhausted, split=split):
                await events.put(TasksArrived(env, start, tasks, exhausted, split))
            case RolloutPhases() as progress:
                books.tracker.progressed(progress)
                sizes = {report.rollout_id: report.num_bytes for report in progress.rollouts}
                await events.put(PayloadGrew(sizes))
            case ServerStats(stats=stats):
                await parent.on_stats(stats)
                await events.put(WorkerLag(stats.lag.p90))
            case WorkerLost() as lost:
                await parent.send(Notice(lost.text))


async def settle(
    events: Events, books: Bookkeeper, parent: Parent, env: str, settled: Settled
) -> None:
    """Write down how a rollout of an environment ended, say so if it failed, and tell the core."""
    if isinstance(settled.outcome, Failed):
        whose = (
            f"environment '{env}', attempt {settled.attempt}, {settled.worker or 'not sent'}"
        )
        books.failures.add(settled.rollout_id, settled.outcome, whose)
        await _tell(parent, env_name(env), settled, settled.outcome, books)
    await books.settled(settled)
    await events.put(settled)


async def _tell(
    parent: Parent, env: str, settled: Settled, failed: Failed, books: Bookkeeper
) -> None:
    """Say the first failure of each kind at once, and then how often it has come again."""
    tracker = books.tracker
    count = tracker.failures.next_count(env, failed)
    if not is_worth_a_line(count):
        return
    task_id = one_line(tracker.task_of(settled.rollout_id))
    task = f"task '{task_id}', {settled.rollout_id}"
    text = f"A rollout of '{env}' failed ({task}): {failed.text}"
    if count > 1:
        text = f"{count} rollouts of '{env}' have failed in this way, the last {task}: {failed.text}"
    place = settled.worker.rpartition(".")[0] or settled.worker or "orchestrator"
    await parent.send(Notice(f"{text}; log: {books.logs / place}.log"))


async def from_engines(fleet: EngineFleet, events: Events) -> None:
    """Pass on how busy the engines are, once a second, while they report it."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if (load := fleet.load) is not None:
            await events.put(load)


async def from_trainer(
    trainer: BatchSender, steps: range, events: Events, books: Bookkeeper, fleet: EngineFleet
) -> None:
    """Pass on every version, in order, once its weights are complete and its rollouts are saved. A step
    ends when its version arrives, also if the one before is still being reported."""
    arrived: asyncio.Queue[tuple[Published, float]] = asyncio.Queue()

    async def wait_for_versions() -> None:
        for step in steps:
            published = await trainer.wait_for_version(PolicyVersion(step))
            arrived.put_nowait((published, monotonic()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait_for_versions())
        for step in steps:
            published, arrived_s = await arrived.get()
            await books.published(Step(step), published.metrics, arrived_s)
            await fleet.compare_kls(published.version, published.metrics)
            await events.put(
                VersionPublished(published.version, published.path, published.saved)
            )


async def from_parent(parent: Parent, lags: Lags) -> None:
    """Take in the lag of processes that this one has no connection to. Ends when the parent is gone."""
    while (body := await parent.receive()) is not None:
        lags.add(msgspec.msgpack.decode(body, type=ProcessStats))
