"""Carries out what the core commands."""

from collections.abc import Mapping

from msgspec import Struct

from ...envserver.client import EnvClient
from ...errors import RunStuck
from ...records.restored import Restored
from ...records.task import Split
from ...records.turn import Sampling
from ...transport.batch import BatchSender
from ...wire.messages import Cancel, NewPolicy, NextTasks, Run, RunGroup
from ..core.commands import (
    CancelRollout,
    Command,
    Credit,
    DiscardGroup,
    Dispatch,
    Finish,
    GiveUp,
    PoolTask,
    PullTasks,
    RecordEvalGroup,
    ReleasePayload,
    ReportEval,
    Ship,
    UpdateWeights,
)
from ..core.events import Credited, WeightsApplied
from .advantage import CreditLane
from .bookkeeper import Bookkeeper
from .fleet import EngineFleet
from .sources import Events


class Peers(Struct, frozen=True):
    """Everything outside this process that a command may reach."""

    clients: Mapping[str, EnvClient]
    fleet: EngineFleet
    trainer: BatchSender
    credit: CreditLane | None


class Performer:
    """Turns commands into messages and requests. What they bring about returns as events."""

    def __init__(
        self, peers: Peers, books: Bookkeeper, events: Events, samplings: Mapping[Split, Sampling]
    ) -> None:
        self._peers = peers
        self._books = books
        self._events = events
        self._samplings = samplings

    async def perform(self, command: Command) -> None:
        match command:
            case Dispatch():
                await self._dispatch(command)
            case PullTasks(env=env, start=start, count=count, split=split):
                await self._peers.clients[env].send(NextTasks(start, count, split))
            case CancelRollout(env=env, rollout_id=rollout_id, reason=reason):
                await self._peers.clients[env].send(Cancel(rollout_id, reason))
            case Credit():
                await self._ask_for_credit(command)
            case Ship():
                await self._ship(command)
            case UpdateWeights():
                await self._update_weights(command)
            case DiscardGroup(step=step, closed=closed):
                await self._books.discarded(step, closed)
            case ReleasePayload(refs=refs):
                await self._books.release(refs)
            case PoolTask(env=env, task=task, pool=pool):
                await self._books.pooled(env, task, pool)
            case RecordEvalGroup(version=version, closed=closed):
                await self._books.evaluated(version, closed)
            case ReportEval(version=version, closed=groups):
                await self._books.eval_ended(version, groups)
            case GiveUp(reason=reason):
                raise RunStuck(reason)
            case Finish():
                pass  # the core's own flag ends the run

    async def _dispatch(self, order: Dispatch) -> None:
        """Send the rollouts of one group: one by one, or together where the environment needs that."""
        client = self._peers.clients[order.env]
        await self._books.dispatched(order)
        sampling = self._samplings[order.split]
        runs = [
            Run(rollout_id, 1, order.task, sampling, order.version, order.group_id)
            for rollout_id in order.rollout_ids
        ]
        if client.whole_groups:
            await client.send(RunGroup(tuple(runs)))
            return
        for run in runs:
            await client.send(run)

    async def _ask_for_credit(self, order: Credit) -> None:
        assert self._peers.credit is not None
        with self._books.steps.phases.crediting():
            advantages = await self._peers.credit.credit(order)
        await self._events.put(Credited(order.group_id, advantages))

    async def _ship(self, ship: Ship) -> None:
        with self._books.steps.phases.shipping(ship.manifest.step):
            await self._books.before_ship()
            await self._peers.trainer.ship(ship.manifest)
        await self._books.shipped(ship)

    async def _update_weights(self, update: UpdateWeights) -> None:
        with self._books.steps.phases.updating():
            await self._peers.fleet.update(update.version, update.path)
        for client in self._peers.clients.values():
            await client.send(NewPolicy(update.version))
        await self._events.put(WeightsApplied(update.version))
        await self._books.prune_weights(update.version)

    async def resume(self, restored: Restored) -> None:
        """Hold what an interrupted run left, and ship its untrained batches again."""
        self._books.hold_restored(restored)
        for batch in restored.batches:
            await self._peers.trainer.ship(batch.manifest)
            await self._books.restored(batch)
