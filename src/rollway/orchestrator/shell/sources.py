"""Where events come from: env servers, engines, the trainer, the parent."""

import asyncio

import msgspec

from ...envserver.client import EnvClient
from ...envserver.failures import FailureLog
from ...errors import RunStuck
from ...loop.processes.part import Parent
from ...observe.health import Lags
from ...observe.report import Notice
from ...records.ids import PolicyVersion, Step
from ...records.lag import ProcessStats
from ...records.rollout import Failed, Scored, Settled
from ...transport.batch import BatchSender
from ...wire.messages import ServerStats, Tasks, WorkerLost
from ...wire.messages import WorkerProgress as EnvProgress
from ..core.events import Event, TasksArrived, VersionPublished, WorkerLag
from .fleet import LOOK_EVERY_S, EngineFleet
from .perform import Performer
from .step_log import StepLog

Events = asyncio.Queue[Event]


async def from_env(
    env: str, client: EnvClient, events: Events, performer: Performer, lags: Lags, parent: Parent
) -> None:
    """What one env server says."""
    failures = FailureLog()
    while True:
        match await client.receive():
            case Settled(outcome=Scored(rows=())) as settled:
                raise RunStuck(
                    f"environment '{client.env}' gives rollouts without token ids ({settled.worker}): "
                    "its engine speaks messages only, and nothing can be trained from those"
                )
            case Settled() as settled:
                if isinstance(settled.outcome, Failed):
                    whose = f"environment '{env}', attempt {settled.attempt}, {settled.worker}"
                    failures.add(settled.rollout_id, settled.outcome, whose)
                await performer.settled(settled)
                await events.put(settled)
            case Tasks(error=error) if error:
                raise RunStuck(f"environment '{env}' cannot give tasks: {error}")
            case Tasks(start=start, tasks=tasks, exhausted=exhausted, split=split):
                await events.put(TasksArrived(env, start, tasks, exhausted, split))
            case EnvProgress() as moved:
                performer.moved(moved)
            case ServerStats(stats=stats):
                lags.add(stats)
                await parent.stats(stats)
                await events.put(WorkerLag(stats.lag.p90))
            case WorkerLost(worker=worker, num_moved=moved, num_failed=failed):
                await parent.say(Notice(f"{worker} died: {moved} rollouts moved, {failed} failed"))


async def from_engines(fleet: EngineFleet, events: Events) -> None:
    """How busy the engines are, once a second, while they say so."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if (load := fleet.load) is not None:
            await events.put(load)


async def from_trainer(
    shipping: BatchSender, first: Step, last: int, events: Events, performer: Performer, steps: StepLog
) -> None:
    """Every version, in order, once its weights are complete and its rollouts are saved."""
    for step in range(first, last + 1):
        published = await shipping.next_version(PolicyVersion(step))
        batch = await performer.published(Step(step))
        await steps.done(Step(step), batch, published.metrics)
        await events.put(VersionPublished(published.version, published.path))


async def from_parent(parent: Parent, lags: Lags) -> None:
    """The lag of processes the orchestrator has no wire to; ends when the parent is gone."""
    while (body := await parent.told()) is not None:
        lags.add(msgspec.msgpack.decode(body, type=ProcessStats))
