"""Keeps the ranks at work: starts them again when one dies, and finds the rows that make them die."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from ..config.sections import TrainerConfig
from ..config.specs import TrainerSpec
from ..errors import GradientError, PartDied
from ..loop.lanes.lanes import thread
from ..loop.processes.part import describe_exit
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..rundir.rundir import RunDir, write_whole
from ..transport.batch import Batch
from .rank_processes import (
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
MAX_NAMED = 3
"""Rows that one line names. The others are only counted."""

Say = Callable[[str], Awaitable[None]]


class RankTeam:
    """Trains batches although ranks die. If they die twice in the same way of one batch, the team
    searches it for the rows that cause this, sets them aside, and trains the rest."""

    def __init__(self, spec: TrainerSpec, say: Say) -> None:
        self._spec = spec
        self._run = RunDir(spec.run_dir)
        self._say = say
        self._stack = AsyncExitStack()
        self._loaded: RankDone | None = None
        """The first answer of the first rank, which knows how the model computes rows."""
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
                await self._report(batch, done)
                trained = TrainedBatch(
                    replace(order, purpose="repeat"), self._spec.trainer, rows_left_out(done)
                )
                encoded = msgspec.msgpack.encode(trained)
                await thread(write_whole, self._run.order_of(batch.step), encoded)
                return _published(done)

    async def forget_before(self, published: Published) -> None:
        """Remove what a restart does not need any more, now that the run has recorded a version."""
        if published.saved is not None:
            await thread(self._run.prune_trainer, published.saved)

    async def _start(self, version: PolicyVersion) -> None:
        """Start all ranks with a version: from the newest state, and the batches since then. If these do
        not give the same weights again, continue with the weights that were published."""
        point, trained = await thread(find_restart_point, self._spec, version)
        try:
            if not await self._start_from(point, trained):
                await self._stack.aclose()
                weights = weights_of(self._spec, version)
                await self._start_from(RestartPoint(version, weights, point.state), [])
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
        starting = start_ranks(self._spec, point, self._loaded)
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
            return
        folder = self._run.set_aside(batch.step)
        names = await thread(copy_rows, batch, sorted(rows), folder)
        await self._say(
            f"Step {batch.step}: {how} with {_list(names)}; set aside in {folder}"
        )

    async def _report(self, batch: Batch, done: list[RankDone]) -> None:
        left_out = [row for answer in done for row in answer.left_out]
        if left_out:
            names = [f"{row.rollout_id}, row {row.row} ({row.reason})" for row in left_out]
            await self._say(f"Step {batch.step} trained without {_list(names)}")


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
    trained = [decode(path.read_bytes()) for path in paths]
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
        config, threads=1, ranks=1, checkpoint_every=1, keep_checkpoints=1, publish_dtype=None
    )


def _describe(failure: PartDied | GradientError) -> str:
    """Return the same text for failures of the same kind."""
    if isinstance(failure, GradientError):
        return "the gradient is not finite"
    return f"the trainer's process {describe_exit(failure.code)}"


def _published(done: list[RankDone]) -> Published:
    (published,) = [answer.published for answer in done if answer.published]
    num_left_out = sum(len(answer.left_out) for answer in done)
    metrics = {**published.metrics, "rows/left_out": float(num_left_out)}
    return replace(published, metrics=metrics)


def _list(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    listed = "; ".join(names[:MAX_NAMED])
    return f"{listed}; and {more} more" if more > 0 else listed


def copy_rows(batch: Batch, rows: list[int], folder: Path) -> list[str]:
    """Copy the blobs of rows into a folder, where 'rollway payload show' reads them. Blocks."""
    manifest, reader, names = batch.manifest(), batch.reader(), []
    for index in rows:
        row = manifest.rows[index]
        write_whole(folder / f"{row.rollout_id}.safetensors", bytes(reader.copy(row.ref)))
        names.append(f"{row.rollout_id}, row {row.row}")
    return names
