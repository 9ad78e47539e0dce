"""The processes of the ranks, as the front sees them, and the messages between front and rank."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct

from ..config.specs import TrainerSpec
from ..errors import PartDied
from ..loop.processes import child
from ..loop.processes.part import describe_exit
from ..records.engine import Published
from ..transport.batch import Batch


class RankStart(Struct, frozen=True):
    """The first message to a rank: its number, and the file through which the ranks find each other.
    Every later message is a batch to train."""

    spec: TrainerSpec
    rank: int = 0
    meeting: str = ""


class RankLoaded(Struct, frozen=True, tag="loaded"):
    """The model is in memory."""


class RankTrained(Struct, frozen=True, tag="trained"):
    """The step is taken. The first rank has written its weights, and adds their record."""

    published: Published | None


class RankFailed(Struct, frozen=True, tag="failed"):
    """The rank ends because of this error."""

    error: str


RankAnswer = RankLoaded | RankTrained | RankFailed

ENTRY = "rollway.trainer.rank:serve_rank"
HINDSIGHT_S = 0.5
"""How long to wait for other failures after one: the first to be noticed is not always the cause."""

_answers: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)


class RankProcesses:
    """The front's view of all ranks: processes that have loaded the model and wait for batches.

    `Collective` is the view that each rank has of the others. If one rank dies, no step can be taken.
    """

    def __init__(self, processes: list[child.Child]) -> None:
        self.processes = processes

    async def train(self, batch: Batch) -> Published:
        """Have all ranks take one step. Return the record of the weights, which are complete on disk."""
        frame = msgspec.msgpack.encode(batch)
        first, *_ = await _gather([_ask(process, frame) for process in self.processes])
        assert isinstance(first, RankTrained)
        assert first.published is not None
        return first.published


@asynccontextmanager
async def start_ranks(spec: TrainerSpec) -> AsyncIterator[RankProcesses]:
    """Start all ranks, and wait until each has loaded the model and found the others."""
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(child.start(_name(rank), ENTRY, computes=True))
            for rank in range(spec.trainer.ranks)
        ]
        with TemporaryDirectory(prefix="rollway-ranks-") as folder:
            starts = [RankStart(spec, rank, f"{folder}/meeting") for rank in range(len(processes))]
            frames = map(msgspec.msgpack.encode, starts)
            await _gather(list(map(_ask, processes, frames)))
        yield RankProcesses(processes)


def _name(rank: int) -> str:
    return f"trainer-rank.{rank}" if rank else "trainer-rank"


async def _gather(questions: list[Coroutine[Any, Any, RankAnswer]]) -> list[RankAnswer]:
    """Return the answer of every rank. If several fail, raise the error of one that was killed, because
    its death makes the others fail."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if failures := _failures(done):
            done, _ = await asyncio.wait(tasks, timeout=HINDSIGHT_S)
            killed = [error for error in _failures(done) if error.was_killed]
            raise (killed or failures)[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _failures(done: "set[asyncio.Task[RankAnswer]]") -> list[PartDied]:
    return [error for task in done if isinstance(error := task.exception(), PartDied)]


async def _ask(rank: child.Child, frame: bytes) -> RankAnswer:
    """Send a message to a rank, and return its answer."""
    try:
        await rank.pipe.send(frame)
        reply = await rank.pipe.receive()
    except ConnectionError:
        reply = None
    if reply is None:
        code = await rank.wait()
        how = describe_exit(code)
        raise PartDied(f"the trainer's process {rank.name} (pid {rank.pid}) {how}", code=code)
    answer = _answers.decode(reply)
    if isinstance(answer, RankFailed):
        raise PartDied(answer.error)
    return answer
