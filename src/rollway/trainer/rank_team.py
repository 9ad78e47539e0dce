"""Keeps the ranks at work: starts them again when one dies, and finds the rows that make them die."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from ..config.sections import TrainerConfig
from ..config.specs import TrainerSpec
from ..errors import UNREADABLE, GradientError, ModelError, PartDied, StateError
from ..loop.lanes.threads import thread
from ..loop.processes.part import describe_exit
from ..observe.upkeep import Upkeep
from ..payload.reader import SegmentReader
from ..records.batch import BatchRow
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..rundir.rundir import RunDir, write_whole
from ..transport.batch import Batch
from .rank_processes import (
    ENTRY,
    RankDone,
    RankOrder,
    RankProcesses,
    RestartPoint,
    TrainedBatch,
    rows_left_out,
    start_ranks,
)

MAX_FAILURES = 4
"""Failures of one step, besides those of the search, after which the trainer gives up."""
MAX_TRIALS = 64
"""Trials of one search. Each that fails costs a start of all ranks."""
MAX_USELESS = 3
"""Batches one after the other without a usable row, after which the trainer gives up."""
MAX_NAMED = 3
"""Rows that one line names. The others are only counted."""

Say = Callable[[str], Awaitable[None]]


class RankTeam:
    """Trains batches although ranks die. If they die twice in the same way of one batch, the team
    searches it for the rows that cause this, sets them aside, and trains the rest."""

    def __init__(self, spec: TrainerSpec, say: Say, entry: str = ENTRY) -> None:
        self._spec = spec
        self._entry = entry
        self._run = RunDir(spec.run_dir)
        self._say = say
        self._upkeep = Upkeep(say)
        self._stack = AsyncExitStack()
        self._loaded: RankDone | None = None
        """The first answer of the first rank, which knows how the model computes rows."""
        self._num_useless = 0
        """Batches in a row of which nothing could be trained."""
        self._ranks: RankProcesses

    async def __aenter__(self) -> Self:
        await self._start(PolicyVersion(self._spec.first_step - 1))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def train(self, batch: Batch) -> Published:
        """Have all ranks take one step. Return the record of the weights, which are complete on disk."""
        order = RankOrder(batch)
        failures: list[str] = []
        while True:
            try:
                done = await self._ranks.train(order)
            except (PartDied, GradientError) as failure:
                if len(failures) == MAX_FAILURES:
                    raise
                how = _describe(failure)
                await self._recover(batch, failure)
                if how in failures:
                    found = await self._find_faulty(order)
                    await self._set_aside(batch, found, how)
                    order = replace(order, without=order.without | found)
                failures.append(how)
            else:
                await self._report(order, done)
                trained = TrainedBatch(
                    replace(order, purpose="repeat"),
                    self._spec.trainer,
                    rows_left_out(done),
                    done[0].weights,
                )
                # without it a restart continues from the published weights, and says so
                what, path = "Writing how a batch was trained", self._run.order_of(batch.step)
                encoded = msgspec.msgpack.encode(trained)
                await self._upkeep.attempt(what, write_whole, path, encoded)
                return _published(order, done)

    async def forget_before(self, published: Published) -> None:
        """Remove what a restart does not need any more, now that the run has recorded a version."""
        attempt, run = self._upkeep.attempt, self._run
        if published.saved is not None:
            await attempt("Removing old trainer states", run.prune_trainer, published.saved)
        keep = self._spec.trainer.keep_checkpoints
        await attempt("Removing old checkpoints", run.prune_checkpoints, keep)

    async def _start(self, version: PolicyVersion) -> None:
        """Start all ranks with a version: from the newest state, and the batches since then. If these do
        not give the same weights again, continue with the weights that were published."""
        point, trained = await thread(find_restart_point, self._spec, version)
        weights = weights_of(self._spec, version)
        try:
            try:
                if await self._start_from(point, trained):
                    return
                point = RestartPoint(version, weights, point.state)
            except StateError as error:
                await self._say(str(error))
                point = RestartPoint(version, weights)
            await self._stack.aclose()
            await self._start_from(point, [])
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start_from(self, point: RestartPoint, trained: list[TrainedBatch]) -> bool:
        """Start all ranks and train batches again. Return False if that cannot give the same weights."""
        if point.version and not point.takes_weights:
            averages = "new averages" if point.state is None else f"averages of {point.state}"
            await self._say(
                f"The batches that led to version {point.version} cannot be trained again: training "
                f"continues from its weights, and the optimizer has {averages}"
            )
        starting = start_ranks(self._spec, point, self._loaded, self._entry)
        self._ranks, loaded = await self._stack.enter_async_context(starting)
        if self._loaded is None:
            self._loaded = loaded
            if loaded.note:
                await self._say(loaded.note)
        for batch in trained:
            if not batch.was_repeated(await self._ranks.train(batch.order)):
                return False
        return True

    async def _recover(self, batch: Batch, failure: PartDied | GradientError) -> None:
        """If ranks died, start all of them again with the version that the batch is trained from."""
        for _ in range(MAX_FAILURES):
            if not isinstance(failure, PartDied):
                return
            await self._stack.aclose()
            version = PolicyVersion(batch.step - 1)
            await self._say(f"{failure}; the trainer starts again from version {version}")
            try:
                return await self._start(version)
            except PartDied as death:
                failure = death
        raise failure

    async def _find_faulty(self, order: RankOrder) -> frozenset[int]:
        """Return the rows of a batch without which the ranks survive it. Split the rows in halves, and
        again each half that makes a rank die, down to single rows."""
        all_rows = frozenset(range(len(order.batch.manifest().rows)))
        faulty, suspects = set(), halves(sorted(all_rows - order.without))
        for _ in range(MAX_TRIALS):
            if not suspects:
                break
            rows = suspects.pop()
            trial = replace(order, without=all_rows - set(rows), purpose="try")
            try:
                await self._ranks.train(trial)
            except (PartDied, GradientError) as failure:
                await self._recover(order.batch, failure)
                if len(rows) == 1:
                    faulty |= {*rows}
                else:
                    suspects += halves(rows)
        return frozenset(faulty)

    async def _set_aside(self, batch: Batch, rows: frozenset[int], how: str) -> None:
        if not rows:
            await self._say(
                f"Step {batch.step}: {how}, but of no single row. If memory runs out, lower "
                "trainer.micro_batch_tokens or set trainer.activation_checkpointing = true"
            )
            return
        folder, found = self._run.set_aside(batch.step), batch.manifest().rows
        named = [found[index] for index in sorted(rows)]
        what, reader = "Copying rows that were set aside", batch.reader()
        is_copied = await self._upkeep.attempt(what, copy_rows, reader, named, folder)
        names = _list([f"{row.rollout_id}, row {row.row}" for row in named])
        where = f"set aside in {folder}" if is_copied else "set aside"
        await self._say(f"Step {batch.step}: {how} with {names}; {where}")

    async def _report(self, order: RankOrder, done: list[RankDone]) -> None:
        """Say which rows were left out. Raise if no row of the last batches could be used."""
        left_out = [row for answer in done for row in answer.left_out]
        if not left_out and not order.without:
            self._num_useless = 0
            return
        batch, reason = order.batch, "the trainer's processes died of it"
        if left_out:
            names = [f"{row.rollout_id}, row {row.row} ({row.reason})" for row in left_out]
            await self._say(f"Step {batch.step} trained without {_list(names)}")
            reason = left_out[0].reason
        is_useless = _num_untrained(order, done) == len(batch.manifest().rows)
        self._num_useless = self._num_useless + 1 if is_useless else 0
        if self._num_useless == MAX_USELESS:
            raise ModelError(
                f"no row of the last {MAX_USELESS} batches could be trained; a row of step "
                f"{batch.step}: {reason}"
            )


def halves(rows: list[int]) -> list[list[int]]:
    """Split rows in two. A single row stays as it is."""
    middle = len(rows) // 2
    return [part for part in (rows[middle:], rows[:middle]) if part]


def find_restart_point(
    spec: TrainerSpec, version: PolicyVersion
) -> tuple[RestartPoint, list[TrainedBatch]]:
    """Return what ranks start from to have `version`, and the batches to train until then. Blocks."""
    run, weights = RunDir(spec.run_dir), weights_of(spec, version)
    state = run.last_state(version)
    base = PolicyVersion(state or 0)
    paths = [run.order_of(Step(step)) for step in range(base + 1, version + 1)]
    gone = RestartPoint(version, weights, state), list[TrainedBatch]()
    if not all(path.exists() for path in paths):
        return gone
    decode = msgspec.msgpack.Decoder(TrainedBatch).decode
    try:
        trained = [decode(path.read_bytes()) for path in paths]
    except UNREADABLE:
        return gone  # a file was not complete when the machine died
    if any(_numerics(batch.trainer) != _numerics(spec.trainer) for batch in trained):
        return gone  # with other settings they would give other weights
    if state is None:
        return RestartPoint(base, spec.model.path), trained
    return RestartPoint(base, weights, state, takes_weights=True), trained


def weights_of(spec: TrainerSpec, version: PolicyVersion) -> str:
    """Return the folder of a version as it was published."""
    is_first = version < spec.first_step
    return spec.weights if is_first else str(RunDir(spec.run_dir).weights_of(version))


def _numerics(config: TrainerConfig) -> TrainerConfig:
    """Return the settings without those that do not change what a step computes."""
    return replace(
        config,
        threads=1,
        ranks=1,
        micro_batch_tokens=1,  # batches in manifests are packed already
        activation_checkpointing=False,
        checkpoint_every=1,
        keep_checkpoints=1,
        publish_dtype=None,
    )


def _describe(failure: PartDied | GradientError) -> str:
    """Return the same text for failures of the same kind."""
    if isinstance(failure, GradientError):
        return "the gradient is not finite"
    return f"the trainer's process {describe_exit(failure.code)}"


def _num_untrained(order: RankOrder, done: list[RankDone]) -> int:
    """Return how many rows of a batch were left out by the ranks, or set aside before."""
    return len(order.without) + sum(len(answer.left_out) for answer in done)


def _published(order: RankOrder, done: list[RankDone]) -> Published:
    (published,) = [answer.published for answer in done if answer.published]
    metrics = {**published.metrics, "rows/left_out": float(_num_untrained(order, done))}
    return replace(published, metrics=metrics)


def _list(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    listed = "; ".join(names[:MAX_NAMED])
    return f"{listed}; and {more} more" if more > 0 else listed


def copy_rows(reader: SegmentReader, rows: list[BatchRow], folder: Path) -> None:
    """Copy the blobs of rows into a folder, where 'rollway payload show' reads them. Blocks."""
    for row in rows:
        write_whole(folder / f"{row.rollout_id}.safetensors", bytes(reader.copy(row.ref)))
