"""Writes down what happens in a run: in the ledger, in saved rollouts, in metrics, and for `rollway
why`."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ...config.sections import OrchestratorConfig
from ...envserver.failures import FailureLog
from ...ledger.ledger import Ledger
from ...loop.coroutines import FairLoop
from ...observe.step_metrics import StepTally
from ...observe.upkeep import Upkeep
from ...payload.in_use import SegmentKeeper
from ...payload.reader import SegmentReader
from ...records.batch import BatchManifest
from ...records.group import ClosedGroup, Member
from ...records.ids import PolicyVersion, Step
from ...records.restored import RestoredBatch
from ...records.rollout import Scored, Settled
from ...rundir.metrics_file import append_whole
from ...rundir.rundir import RunDir, write_whole
from ...rundir.saved_rollouts import decode_saved, group_to_save
from ..core.commands import Dispatch
from .step_log import StepLog
from .tracker import RolloutTracker


class Bookkeeper:
    """The memory of a run. The ledger has every rollout of a batch before the trainer gets the batch.
    That the batch was shipped is recorded afterwards; a resume learns it from the manifest."""

    def __init__(
        self,
        run: RunDir,
        ledger: Ledger,
        tracker: RolloutTracker,
        steps: StepLog,
        config: OrchestratorConfig,
        upkeep: Upkeep,
    ) -> None:
        self._run = run
        self.logs = run.logs
        self._config = config
        self.ledger = ledger
        self.tracker = tracker
        self.steps = steps
        self._upkeep = upkeep
        self.segments = SegmentKeeper(SegmentReader(run.payload), upkeep.attempt)
        self.failures = FailureLog()
        self._saving = asyncio.Lock()
        self._reports: defaultdict[int, asyncio.Future[dict[str, float]]]
        self._reports = defaultdict(asyncio.Future)
        """The metrics of batches, which may be asked for before they are known."""

    async def dispatched(self, order: Dispatch) -> None:
        group_id, env, task, version = order.group_id, order.env, order.task, order.version
        await self.ledger.record_group(
            group_id, env, task, version, order.position, order.split
        )
        for rollout_id in order.rollout_ids:
            await self.ledger.record_dispatch(rollout_id, group_id, env, task.id, version)
            self.tracker.started(rollout_id, group_id, env, task)

    async def settled(self, settled: Settled) -> None:
        """Note a rollout's end before the core hears of it."""
        outcome = settled.outcome
        self.tracker.settled(settled.rollout_id, outcome)
        if isinstance(outcome, Scored):
            await self.segments.hold(outcome.ref)
        await self.ledger.record_settled(settled)

    async def _tally(
        self, manifest: BatchManifest, groups: Iterable[ClosedGroup]
    ) -> dict[str, float]:
        """Sum up a batch. Other coroutines get the loop in between, however large the batch is."""
        tally, fair = StepTally(manifest, self._config.correct_at), FairLoop()
        for closed in groups:
            tally.add(closed)
            await fair.breathe()
        return tally.metrics()

    async def shipped(
        self,
        manifest: BatchManifest,
        groups: tuple[ClosedGroup, ...],
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Note a batch that the trainer has, and all groups that closed since the last one."""
        metrics, step = metrics or await self._tally(manifest, groups), manifest.step
        trained = dict.fromkeys(row.rollout_id for row in manifest.rows)
        await self.ledger.record_shipped(step, trained, metrics)
        kept = [closed for closed in groups if closed.fate == "trained"]
        await self._save(self._run.saved_rollouts(step), kept)
        self._reports[step].set_result(metrics)

    async def published(
        self, step: Step, trained: dict[str, float], arrived_s: float
    ) -> None:
        """Report a trained step, once everything that reads its payload has done so. Its version arrived
        at `arrived_s`."""
        batch = await self._reports[step]
        del self._reports[step]
        await self.ledger.record_published(step)
        self.tracker.published()
        await self.steps.report(step, batch, trained, arrived_s)

    async def discarded(self, step: Step, closed: ClosedGroup) -> None:
        await self._save(self._run.saved_rollouts(step), [closed])
        await self.ledger.record_fate(closed.group.id, closed.fate)
        await self.segments.release(closed.refs)

    async def evaluated(self, version: PolicyVersion, closed: ClosedGroup) -> None:
        await self._save(self._run.saved_evals(version), [closed])
        await self.segments.release(closed.refs)

    async def eval_ended(
        self, version: PolicyVersion, groups: tuple[ClosedGroup, ...]
    ) -> None:
        await self.steps.report_eval(version, groups)
        await self.ledger.record_eval(version)

    async def prune_weights(self, applied: PolicyVersion) -> None:
        """Remove versions that no engine will load again."""
        keep = self._config.keep_weights
        await self._upkeep.attempt(
            "Removing old weights", self._run.prune_weights, applied, keep
        )

    async def restored(self, batch: RestoredBatch) -> None:
        """Note a batch that was shipped before a restart: its rollouts are saved again."""
        path = self._run.saved_rollouts(batch.manifest.step)
        await self._upkeep.attempt("Saving rollouts", _remove_trained, path)
        await self.shipped(batch.manifest, batch.closed, batch.metrics)

    async def _save(self, path: Path, groups: list[ClosedGroup]) -> None:
        if self._config.save_rollouts:
            async with self._saving:
                payload = self._run.payload
                await self._upkeep.attempt(
                    "Saving rollouts", _append_rollouts, payload, path, groups
                )


def _append_rollouts(payload: Path, path: Path, groups: list[ClosedGroup]) -> None:
    """Append a line for each rollout. Transcripts are copied from the payload as bytes, never parsed."""
    reader = SegmentReader(payload)

    def read_transcript(member: Member) -> msgspec.Raw:
        return msgspec.Raw(reader.open(member.scored.ref)["transcript"].tobytes())

    path.parent.mkdir(parents=True, exist_ok=True)
    for closed in groups:
        saved = [msgspec.json.encode(line) for line in group_to_save(closed, read_transcript)]
        append_whole(path, b"".join(line + b"\n" for line in saved))


def _remove_trained(path: Path) -> None:
    """Remove the lines of a batch that is about to be saved again, and a torn last line."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        saved = [(line, decode_saved(line)) for line in lines]
        kept = [line for line, rollout in saved if rollout and rollout.fate != "trained"]
        write_whole(path, b"".join(kept))
