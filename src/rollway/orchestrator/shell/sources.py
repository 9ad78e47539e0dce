"""Where events come from: env servers, engines, the trainer, the parent process."""

import asyncio

import msgspec

from ...envserver.client import EnvClient
from ...envserver.failures import FailureLog
from ...errors import ConfigError, RunStuck
from ...loop.processes.part import Parent
from ...observe.health import Lags
from ...observe.report import Notice
from ...records.ids import PolicyVersion, Step
from ...records.lag import ProcessStats
from ...records.rollout import Failed, Scored, Settled
from ...transport.batch import BatchSender
from ...wire.messages import RolloutPhases, ServerStats, Tasks, WorkerLost
from ..core.events import Event, TasksArrived, VersionPublished, WorkerLag
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
    failures = FailureLog()
    while True:
        match await client.receive():
            case Settled(outcome=Scored(rows=())) as settled:
                raise ConfigError(
                    f"environment '{client.env}' returns rollouts without token ids ({settled.worker}): "
                    "its engine is a chat endpoint, and nothing can be trained from messages alone; "
                    "serve the environment with a vLLM or SGLang engine, or with --fill-ids"
                )
            case Settled() as received:
                settled = await fleet.vet(received)
                if isinstance(settled.outcome, Failed):
                    whose = (
                        f"environment '{env}', attempt {settled.attempt}, {settled.worker}"
                    )
                    failures.add(settled.rollout_id, settled.outcome, whose)
                await books.settled(settled)
                await events.put(settled)
            case Tasks(error=error) if error:
                raise RunStuck(f"environment '{env}' cannot give tasks: {error}")
            case Tasks(start=start, tasks=tasks, exhausted=exhausted, split=split):
                await events.put(TasksArrived(env, start, tasks, exhausted, split))
            case RolloutPhases() as progress:
                books.tracker.progressed(progress)
            case ServerStats(stats=stats):
                await parent.on_stats(stats)
                await events.put(WorkerLag(stats.lag.p90))
            case WorkerLost(worker=worker, num_moved=moved, num_failed=failed):
                await parent.send(
                    Notice(f"{worker} died: {moved} rollouts moved, {failed} failed")
                )


async def from_engines(fleet: EngineFleet, events: Events) -> None:
    """Pass on how busy the engines are, once a second, while they report it."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if (load := fleet.load) is not None:
            await events.put(load)


async def from_trainer(
    trainer: BatchSender, steps: range, events: Events, books: Bookkeeper, fleet: EngineFleet
) -> None:
    """Pass on every version, in order, once its weights are complete and its rollouts are saved."""
    for step in steps:
        published = await trainer.wait_for_version(PolicyVersion(step))
        await books.published(Step(step), published.metrics)
        await fleet.compare_kls(published.version, published.metrics)
        await events.put(VersionPublished(published.version, published.path, published.saved))


async def from_parent(parent: Parent, lags: Lags) -> None:
    """Take in the lag of processes that this one has no connection to. Ends when the parent is gone."""
    while (body := await parent.receive()) is not None:
        lags.add(msgspec.msgpack.decode(body, type=ProcessStats))
