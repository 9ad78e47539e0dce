"""Carries out what the core commands."""

from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from ...envserver.client import EnvClient
from ...errors import RunStuck
from ...loop.coroutines import run_in_slices
from ...records.ids import PolicyVersion
from ...records.restored import Restored
from ...records.rollout import Settled
from ...records.task import Split
from ...records.turn import Sampling
from ...transport.batch import BatchSender
from ...wire.messages import Cancel, NewPolicy, NextTasks, Run
from ..core import commands
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
        self,
        peers: Peers,
        books: Bookkeeper,
        events: Events,
        samplings: Mapping[Split, Sampling],
        version: PolicyVersion,
        on_unsent: Callable[[str, Settled], Awaitable[None]],
    ) -> None:
        """`on_unsent` gets the ends of rollouts that could not be sent to their environment."""
        self._on_unsent = on_unsent
        self._peers = peers
        self._books = books
        self._events = events
        self._samplings = samplings
        self._version = version

    async def perform(self, command: commands.Command) -> None:
        books, clients = self._books, self._peers.clients
        match command:
            case commands.Dispatch():
                await self._dispatch(command)
            case commands.PullTasks(env=env, start=start, count=count, split=split):
                await clients[env].send(NextTasks(start, count, split))
            case commands.CancelRollout(env=env, rollout_id=rollout_id, reason=reason):
                await clients[env].send(Cancel(rollout_id, reason))
            case commands.Credit():
                await self._ask_for_credit(command)
            case commands.Ship():
                await self._ship(command)
            case commands.UpdateWeights():
                await self._update_weights(command)
            case commands.DiscardGroup(step=step, closed=closed):
                await books.discarded(step, closed)
            case commands.ReleasePayload(refs=refs):
                await books.segments.release(refs)
            case commands.PoolTask(env=env, task=task, pool=pool):
                await books.ledger.record_pool(env, task, pool)
            case commands.RecordEvalGroup(version=version, closed=closed):
                await books.evaluated(version, closed)
            case commands.ReportEval(version=version, closed=groups):
                await books.eval_ended(version, groups)
            case commands.GiveUp(reason=reason):
                raise RunStuck(reason)
            case commands.Finish():
                pass  # the core's own flag ends the run

    async def _dispatch(self, order: commands.Dispatch) -> None:
        """Send the rollouts of one group to its environment."""
        client = self._peers.clients[order.env]
        await self._books.dispatched(order)
        sampling = self._samplings[order.split]
        runs = [
            Run(rollout_id, 1, order.task, sampling, order.version, order.group_id)
            for rollout_id in order.rollout_ids
        ]
        for settled in await client.send_runs(runs):
            await self._on_unsent(order.env, settled)

    async def _ask_for_credit(self, order: commands.Credit) -> None:
        assert self._peers.credit is not None
        with self._books.steps.phases.crediting():
            advantages = await self._peers.credit.credit(order)
        await self._events.put(Credited(order.group_id, advantages))

    async def _ship(self, ship: commands.Ship) -> None:
        with self._books.steps.phases.shipping(ship.step):
            manifest = await run_in_slices(ship.plan())
            # before the trainer gets the batch, the ledger must have every rollout that is in it
            await self._books.ledger.flush()
            await self._peers.trainer.ship(manifest)
        await self._books.shipped(manifest, ship.closed)

    async def _update_weights(self, update: commands.UpdateWeights) -> None:
        with self._books.steps.phases.updating():
            await self._peers.fleet.update(update)
        self._books.steps.phases.verify_s = self._peers.fleet.verify_s
        self._version = update.version
        await self.send_policy()
        await self._events.put(WeightsApplied(update.version))
        await self._books.prune_weights(update.version)

    async def send_policy(self) -> None:
        """Tell all env servers which version engines have, and which engines may not be asked."""
        policy = NewPolicy(self._version, self._peers.fleet.refused)
        for client in self._peers.clients.values():
            await client.send(policy)

    async def resume(self, restored: Restored) -> None:
        """Hold what an interrupted run left, and ship its untrained batches again."""
        for ref in restored.refs:
            self._books.segments.hold_old(ref)
        for batch in restored.batches:
            await self._peers.trainer.ship(batch.manifest)
            await self._books.restored(batch)
