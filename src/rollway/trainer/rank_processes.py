"""The processes of the ranks, as the front sees them, and the messages between front and rank."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct, msgpack

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


class RankDone(Struct, frozen=True, tag="done"):
    """The model is loaded, or a step is taken. The first rank adds the record of the new weights."""

    published: Published | None = None


class RankFailed(Struct, frozen=True, tag="failed"):
    error: str


RankAnswer = RankDone | RankFailed

ENTRY = "rollway.trainer.rank:serve_rank"
HINDSIGHT_S = 0.5
"""How long to wait for other failures after one: the first to be noticed is not always the cause."""

_answers: msgpack.Decoder[RankAnswer] = msgpack.Decoder(RankAnswer)


class RankProcesses:
    """The front's view of all ranks: processes that have loaded the model and wait for batches. If one
    dies, no step can be taken. `Collective` is the view that each rank has of the others."""

    def __init__(self, processes: list[child.Child]) -> None:
        self.processes = processes

    async def train(self, batch: Batch) -> Published:
        """Have all ranks take one step. Return the record of the weights, which are complete on disk."""
        frame = msgpack.encode(batch)
        first, *_ = await _gather([_ask(process, frame) for process in self.processes])
        assert first.published is not None
        return first.published


@asynccontextmanager
async def start_ranks(spec: TrainerSpec) -> AsyncIterator[RankProcesses]:
    """Start all ranks, and wait until each has loaded the model and found the others."""
    async with AsyncExitStack() as stack:
        processes = []
        for rank in range(spec.trainer.ranks):
            name = f"trainer-rank.{rank}" if rank else "trainer-rank"
            started = child.start(name, ENTRY, computes=True)
            processes.append(await stack.enter_async_context(started))
        with TemporaryDirectory(prefix="rollway-ranks-") as folder:
            starts = [
                RankStart(spec, rank, f"{folder}/meeting") for rank in range(len(processes))
            ]
            frames = map(msgpack.encode, starts)
            await _gather(list(map(_ask, processes, frames)))
        yield RankProcesses(processes)


async def _gather(questions: list[Coroutine[Any, Any, RankDone]]) -> list[RankDone]:
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


def _failures(done: "set[asyncio.Task[RankDone]]") -> list[PartDied]:
    return [error for task in done if isinstance(error := task.exception(), PartDied)]


async def _ask(rank: child.Child, frame: bytes) -> RankDone:
    try:
        await rank.pipe.send(frame)
        reply = await rank.pipe.receive()
    except ConnectionError:
        reply = None
    if reply is None:
        code = await rank.wait()
        process = f"the trainer's process {rank.name} (pid {rank.pid})"
        raise PartDied(f"{process} {describe_exit(code)}", code=code)
    answer = _answers.decode(reply)
    if isinstance(answer, RankFailed):
        raise PartDied(answer.error)
    return answer
