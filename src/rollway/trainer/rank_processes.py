"""The processes of the ranks, as the front sees them, and the messages between front and rank."""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from msgspec import Struct, msgpack

from ..config.sections import TrainerConfig
from ..config.specs import TrainerSpec
from ..errors import (
    GradientError,
    ModelError,
    PartDied,
    RollwayError,
    StateError,
)
from ..loop.processes import child
from ..loop.processes.part import describe_death
from ..loop.processes.scratch import scratch_folder
from ..records.batch import LeftOutRow
from ..records.engine import Published
from ..records.ids import PolicyVersion
from ..rundir.rundir import RunDir
from ..transport.batch import Batch


class RestartPoint(Struct, frozen=True):
    """What ranks start from: the model in `weights`, and the state of version `state` if there is one.
    If the batches since that state are complete, they are trained again, from its weights. If not,
    training continues with `weights` and takes only the optimizer's averages from the state."""

    version: PolicyVersion
    """The version that ranks have once they are loaded."""
    weights: str
    state: PolicyVersion | None = None
    takes_weights: bool = False
    """Take the weights, too, from the state."""


class RankStart(Struct, frozen=True):
    """The first message to a rank: its number, and the file through which the ranks find each other.
    Every later message is a RankOrder."""

    spec: TrainerSpec
    point: RestartPoint
    rank: int = 0
    meeting: str = ""
    packing: Literal["packed", "padded", "single", ""] = ""
    """How rows are computed, if an earlier start has found that out."""


class RankOrder(Struct, frozen=True):
    """Train a batch without some of its rows. `try`: compute its gradients and forget them. `repeat`:
    train it after a restart; its version is published already."""

    batch: Batch
    without: frozenset[int] = frozenset()
    purpose: Literal["train", "repeat", "try"] = "train"


class TrainedBatch(Struct, frozen=True):
    """How a batch was trained, written down for a restart that has to do it again: with these settings,
    without these rows, given as rollout and number, and with some of the weights that it gave."""

    order: RankOrder
    trainer: TrainerConfig
    left_out: frozenset[tuple[str, int]] = frozenset()
    weights: tuple[float, ...] = ()

    def was_repeated(self, done: "list[RankDone]") -> bool:
        """Return whether training it again left out the same rows and gave the same weights. It gives
        others if the model in `model.path` is not the one from which the run began."""
        found = done[0].weights
        if rows_left_out(done) != self.left_out or len(found) != len(self.weights):
            return False
        return math.dist(found, self.weights) <= MAX_CHANGE * math.hypot(*self.weights)


class RankDone(Struct, frozen=True, tag="done"):
    """The model is loaded, or a step is taken. The first rank adds the record of the new weights."""

    published: Published | None = None
    left_out: tuple[LeftOutRow, ...] = ()
    """The rows that this rank could not train."""
    weights: tuple[float, ...] = ()
    """Some of the weights after the step, by which a restart knows whether it has the same."""
    note: str = ""
    """What the user should know about the model, from the first rank."""
    packing: Literal["packed", "padded", "single", ""] = ""
    """How rows are computed. Only the first answer of a rank says it."""


class RankFailed(Struct, frozen=True, tag="failed"):
    error: str
    kind: Literal["model", "gradient", "state"] = "model"
    """`gradient`: the batch gave no usable gradient; the model is unchanged, and the rank goes on.
    `state`: the saved state cannot be read, so the rank cannot start from it."""


RankAnswer = RankDone | RankFailed


def rows_left_out(done: list[RankDone]) -> frozenset[tuple[str, int]]:
    return frozenset((row.rollout_id, row.row) for answer in done for row in answer.left_out)


FAILURES = {"model": ModelError, "gradient": GradientError, "state": StateError}
MAX_CHANGE = 1e-3
"""How far weights that are trained again may be from what they were, as a share of their size."""
PREFIX = "rollway-ranks-"
ENTRY = "rollway.trainer.rank:serve_rank"
HINDSIGHT_S = 0.5
"""How long to wait for other failures after one: the first to be noticed is not always the cause."""

_answers: msgpack.Decoder[RankAnswer] = msgpack.Decoder(RankAnswer)


class RankProcesses:
    """The front's view of all ranks: processes that have loaded the model and wait for batches. If one
    dies, no step can be taken. `Collective` is the view that each rank has of the others."""

    def __init__(self, processes: list[child.Child]) -> None:
        self.processes = processes

    async def train(self, order: RankOrder) -> list[RankDone]:
        """Have all ranks take one step, and return their answers. Raise PartDied if one dies."""
        frame = msgpack.encode(order)
        return await _gather([_ask(process, frame) for process in self.processes])


@asynccontextmanager
async def start_ranks(
    spec: TrainerSpec, point: RestartPoint, before: RankDone | None = None, entry: str = ENTRY
) -> AsyncIterator[tuple[RankProcesses, RankDone]]:
    """Start all ranks, and wait until each has loaded the model and found the others. Yield them, and
    the first answer of the first rank. `before` is that of an earlier start, `entry` what they run."""
    logs = RunDir(spec.run_dir).logs
    async with AsyncExitStack() as stack:
        processes = []
        for rank in range(spec.trainer.ranks):
            name = f"trainer-rank.{rank}" if rank else "trainer-rank"
            started = child.start(name, entry, log=logs / f"{name}.log", computes=True)
            processes.append(await stack.enter_async_context(started))
        with scratch_folder(PREFIX) as folder:
            packing = before.packing if before else ""
            starts = [
                RankStart(spec, point, rank, str(folder / "meeting"), packing)
                for rank in range(len(processes))
            ]
            frames = map(msgpack.encode, starts)
            ready = await _gather(list(map(_ask, processes, frames)))
        yield RankProcesses(processes), ready[0]


async def _gather(questions: list[Coroutine[Any, Any, RankDone]]) -> list[RankDone]:
    """Return the answer of every rank. If several fail, raise the error of one that was killed, because
    its death makes the others fail."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if failures := _failures(done):
            # ranks that live all answer, and none of the answers may be left for the next question
            has_died = any(isinstance(error, PartDied) for error in failures)
            done, _ = await asyncio.wait(tasks, timeout=HINDSIGHT_S if has_died else None)
            deaths = [error for error in _failures(done) if isinstance(error, PartDied)]
            killed = [death for death in deaths if death.was_killed]
            raise (killed or failures)[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _failures(done: "set[asyncio.Task[RankDone]]") -> list[RollwayError]:
    return [error for task in done if isinstance(error := task.exception(), RollwayError)]


async def _ask(rank: child.Child, frame: bytes) -> RankDone:
    try:
        await rank.pipe.send(frame)
        reply = await rank.pipe.receive()
    except ConnectionError:
        reply = None
    if reply is None:
        code = await rank.wait()
        process = f"the trainer's process {rank.name} (pid {rank.pid})"
        raise PartDied(f"{process} {describe_death(rank, code)}", code=code)
    answer = _answers.decode(reply)
    if isinstance(answer, RankFailed):
        raise FAILURES[answer.kind](answer.error)
    return answer
