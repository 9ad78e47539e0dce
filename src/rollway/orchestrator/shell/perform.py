"""Does what the core commands."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from ...config.sections import OrchestratorConfig
from ...envserver.client import EnvClient
from ...errors import RunStuck
from ...ledger.ledger import Ledger
from ...loop.coroutines import FairLoop
from ...loop.lanes.lanes import thread
from ...observe.step_metrics import StepTally
from ...payload.in_use import SegmentKeeper
from ...payload.reader import SegmentReader
from ...records.group import ClosedGroup
from ...records.ids import GroupId, PolicyVersion, Step
from ...records.restored import Restored
from ...records.rollout import Scored, Settled
from ...records.task import Split
from ...records.turn import Sampling
from ...rundir.rundir import RunDir
from ...transport.batch import BatchSender
from ...wire.messages import Cancel, NewPolicy, NextTasks, Run, RunGroup, WorkerProgress
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
from ..core.events import Credited, Event, WeightsApplied
from .advantage import CreditLane
from .fleet import EngineFleet
from .saver import forget_trained, save
from .step_log import StepLog, StepPhases
from .tracker import RolloutTracker


class Performer:
    """FairLoop commands into messages, files and requests. What they bring about returns as events."""

    def __init__(
        self, run: RunDir, clients: Mapping[str, EnvClient], fleet: EngineFleet, shipping: BatchSender,
        ledger: Ledger, events: "asyncio.Queue[Event]", sampling: Mapping[Split, Sampling],
        config: OrchestratorConfig, credit: CreditLane | None, phases: StepPhases, lookout: RolloutTracker,
        steps: StepLog,
    ) -> None:  # fmt: skip
        self._run = run
        self._clients = clients
        self._fleet = fleet
        self._shipping = shipping
        self._ledger = ledger
        self._events = events
        self._sampling = sampling
        self._config = config
        self._credit = credit
        self._phases = phases
        self._lookout = lookout
        self._steps = steps
        self._keeper = SegmentKeeper(SegmentReader(run.payload))
        self._saving = asyncio.Lock()
        self._shipped: dict[int, asyncio.Future[dict[str, float]]] = {}

    async def perform(self, command: Command | tuple[Dispatch, ...]) -> None:
        match command:
            case tuple():
                await self._dispatch(command)
            case PullTasks(env=env, start=start, count=count, split=split):
                await self._clients[env].send(NextTasks(start, count, split))
            case CancelRollout(env=env, rollout_id=id, reason=reason):
                await self._clients[env].send(Cancel(id, reason))
            case Credit():
                await self._ask_for_credit(command)
            case Ship():
                await self._ship(command)
            case UpdateWeights(version=version, path=path):
                await self._update_weights(version, path)
            case DiscardGroup(step=step, closed=closed):
                await self._save(self._run.saved_rollouts(step), [closed])
                await self._ledger.closed(closed.group.id, closed.fate)
                await self._keeper.release([member.scored.ref for member in closed.group.members])
            case ReleasePayload(refs=refs):
                await self._keeper.release(refs)
            case PoolTask(env=env, task=task, pool=pool):
                await self._ledger.pooled(env, task, pool)
            case RecordEvalGroup(version=version, closed=closed):
                await self._save(self._run.saved_evals(version), [closed])
                await self._keeper.release([member.scored.ref for member in closed.group.members])
            case ReportEval(version=version, closed=groups):
                await self._steps.evaluated(version, groups)
                await self._ledger.evaluated(version)
            case GiveUp(reason=reason):
                raise RunStuck(reason)
            case Finish():
                pass  # the core says so by itself

    async def _update_weights(self, version: PolicyVersion, path: str) -> None:
        with self._phases.updating():
            await self._fleet.update(version, path)
        for client in self._clients.values():
            await client.send(NewPolicy(version))
        await self._events.put(WeightsApplied(version))
        await thread(self._run.prune_weights, version - self._config.keep_weights)

    async def _ask_for_credit(self, order: Credit) -> None:
        assert self._credit is not None
        with self._phases.crediting():
            advantages = await self._credit.credit(order)
        await self._events.put(Credited(order.group_id, advantages))

    async def _dispatch(self, orders: Sequence[Dispatch]) -> None:
        """Rollouts of one group: one by one, or as one where the environment wants that."""
        first = orders[0]
        client = self._clients[first.env]
        await self._ledger.opened(
            first.group_id, first.env, first.task, first.version, first.position, first.split
        )
        runs = []
        for order in orders:
            id, env, task, version = order.rollout_id, order.env, order.task, order.version
            await self._ledger.dispatched(id, order.group_id, env, task.id, version)
            self._lookout.started(id, order.group_id, env, task)
            runs.append(Run(id, 1, task, self._sampling[order.split], version))
        if client.whole_groups:
            await client.send(RunGroup(tuple(runs)))
            return
        for run in runs:
            await client.send(run)

    async def resume(self, restored: Restored) -> None:
        """Take in use what a run had before; its writers are gone."""
        ends = [one.outcome for group in restored.groups for one in group.settled]
        members = [
            member.scored for batch in restored.batches for one in batch.closed
            for member in one.group.members
        ]  # fmt: skip
        for scored in [*(one for one in ends if isinstance(one, Scored)), *members]:
            self._keeper.hold_old(scored.ref)
        for batch in restored.batches:
            await thread(forget_trained, self._run.saved_rollouts(batch.manifest.step))
            await self._shipping.ship(batch.manifest)
            ship = Ship(batch.manifest, batch.closed)
            await self._after_ship(ship, batch.metrics or await self._tallied(ship))

    async def settled(self, settled: Settled) -> None:
        """Note a rollout's end before the core hears of it."""
        self._lookout.settled(settled.rollout_id, settled.outcome)
        if isinstance(settled.outcome, Scored):
            await self._keeper.hold(settled.outcome.ref)
        await self._ledger.settled(settled)

    def moved(self, progress: WorkerProgress) -> None:
        self._lookout.moved(progress)

    async def _ship(self, ship: Ship) -> None:
        """All that a batch is made of is in the ledger before the trainer sees it; that it was shipped,
        and what was said in it, is written while it trains."""
        step = ship.manifest.step
        with self._phases.shipping(step):
            await self._ledger.flush()
            await self._shipping.ship(ship.manifest)
        await self._after_ship(ship, await self._tallied(ship))

    async def _tallied(self, ship: Ship) -> dict[str, float]:
        """What a batch says; others have the loop in between, however large it is."""
        tally, turns = StepTally(ship.manifest, self._config.correct_at), FairLoop()
        for closed in ship.closed:
            tally.add(closed)
            await turns.let_others()
        return tally.metrics()

    async def _after_ship(self, ship: Ship, metrics: dict[str, float]) -> None:
        step, trained = ship.manifest.step, dict.fromkeys(row.rollout_id for row in ship.manifest.rows)
        await self._ledger.shipped(step, trained, metrics)
        kept = [one for one in ship.closed if one.fate == "trained"]
        await self._save(self._run.saved_rollouts(step), kept)
        self._shipped_of(step).set_result(metrics)

    async def published(self, step: Step) -> dict[str, float]:
        """What the batch of a step says, once everything that reads its payload has done so."""
        metrics = await self._shipped_of(step)
        del self._shipped[step]
        await self._ledger.published(step)
        self._lookout.published()
        return metrics

    def _shipped_of(self, step: int) -> "asyncio.Future[dict[str, float]]":
        if step not in self._shipped:
            self._shipped[step] = asyncio.get_running_loop().create_future()
        return self._shipped[step]

    async def _save(self, path: Path, closed: list[ClosedGroup]) -> None:
        if self._config.save_rollouts:
            async with self._saving:
                await thread(save, self._run.payload, path, closed)


def together(commands: Iterable[Command]) -> Iterator[Command | tuple[Dispatch, ...]]:
    """The same commands, with those that start rollouts of a group in one."""
    for _, several in groupby(commands, _group_of):
        first, *rest = several
        if isinstance(first, Dispatch):
            yield (first, *(one for one in rest if isinstance(one, Dispatch)))
        else:
            yield from (first, *rest)


def _group_of(command: Command) -> GroupId | None:
    return command.group_id if isinstance(command, Dispatch) else None
