"""Where events come from: env servers, the trainer, the parent."""

import asyncio
import logging
from collections import Counter

import msgspec

from ...envserver.client import EnvClient
from ...errors import RunStuck
from ...loop.part import Parent
from ...observe.lags import Lags
from ...observe.report import Notice
from ...records.ids import PolicyVersion, Step
from ...records.lag import ProcessStats
from ...records.rollout import Failed, Scored, Settled
from ...rundir.rundir import RunDir
from ...transport import filesystem
from ...wire.messages import Progress as EnvProgress
from ...wire.messages import Stats, Tasks, WorkerLost
from ..core.events import Event, TasksArrived, VersionPublished
from .perform import Performer
from .steplog import StepLog

log = logging.getLogger(__name__)

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
                    failures.add(settled, settled.outcome)
                await performer.settled(settled)
                await events.put(settled)
            case Tasks(error=error) if error:
                raise RunStuck(f"environment '{env}' cannot give tasks: {error}")
            case Tasks(start=start, tasks=tasks, exhausted=exhausted):
                await events.put(TasksArrived(env, start, tasks, exhausted))
            case EnvProgress() as moved:
                performer.moved(moved)
            case Stats(stats=stats):
                lags.add(stats)
                await parent.stats(stats)
            case WorkerLost(worker=worker, num_moved=moved, num_failed=failed):
                await parent.say(Notice(f"{worker} died: {moved} rollouts moved, {failed} failed"))


class FailureLog:
    """The first failures of a kind in full, then ever fewer: a log stays readable and bounded."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def add(self, settled: Settled, failed: Failed) -> None:
        self._seen[failed.boundary] += 1
        count = self._seen[failed.boundary]
        if count <= 10 or count % 10 ** (len(str(count)) - 1) == 0:
            _log_failure(count, settled, failed)


def _log_failure(count: int, settled: Settled, failed: Failed) -> None:
    log.warning(
        "rollout %s failed (%s number %d, attempt %d, %s): %s%s",
        settled.rollout_id, failed.boundary, count, settled.attempt, settled.worker, failed.error,
        f"\n{failed.traceback}" if failed.traceback else "",
    )  # fmt: skip


async def from_trainer(
    run: RunDir, first: Step, last: int, events: Events, performer: Performer, steps: StepLog
) -> None:
    """Every version, in order, once its weights are complete and its rollouts are saved."""
    for step in range(first, last + 1):
        published = await filesystem.next_version(run, PolicyVersion(step))
        batch = await performer.published(Step(step))
        await steps.done(Step(step), batch, published.metrics)
        await events.put(VersionPublished(published.version, published.path))


async def from_parent(parent: Parent, lags: Lags) -> None:
    """The lag of processes the orchestrator has no wire to; ends when the parent is gone."""
    while (body := await parent.told()) is not None:
        lags.add(msgspec.msgpack.decode(body, type=ProcessStats))
