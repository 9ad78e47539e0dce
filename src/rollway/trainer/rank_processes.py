"""The trainer's compute processes, one for each rank, as the front sees them."""

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
from ..loop.processes.part import how_it_ended
from ..records.engine import Published
from ..transport.batch import Batch


class RankStart(Struct, frozen=True):
    """What a core is given first: its rank, and the file through which the ranks find each other."""

    part: TrainerSpec
    rank: int = 0
    meeting: str = ""


class TrainBatch(Struct, frozen=True):
    """Take one step from this batch: this rank's part of it."""

    batch: Batch


class RankLoaded(Struct, frozen=True, tag="loaded"):
    """The model is in memory."""


class RankTrained(Struct, frozen=True, tag="trained"):
    """The step is taken and its weights are written."""

    published: Published


class RankTookPart(Struct, frozen=True, tag="took_part"):
    """The step is taken by this rank too; the first one writes its weights."""


class RankFailed(Struct, frozen=True, tag="troubled"):
    """The core ends because of this."""

    error: str


RankAnswer = RankLoaded | RankTrained | RankTookPart | RankFailed


ENTRY = "rollway.trainer.rank:serve_rank"
HINDSIGHT_S = 0.5
"""How long after a failure others are waited for: the first to be noticed is not always the cause."""

_answers: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)


class RankProcesses:
    """Ranks that have loaded the model. If one dies the step cannot be taken."""

    def __init__(self, ranks: list[child.Child]) -> None:
        self.ranks = ranks

    async def train(self, batch: Batch) -> Published:
        """One step of all ranks; its weights lie complete in the returned path."""
        order = msgspec.msgpack.encode(TrainBatch(batch))
        first, *_ = await _all([_asked(one, order) for one in self.ranks])
        assert isinstance(first, RankTrained)
        return first.published


@asynccontextmanager
async def start_ranks(part: TrainerSpec) -> AsyncIterator[RankProcesses]:
    """RankStart every rank, and wait until all have loaded the model and met."""
    async with AsyncExitStack() as stack:
        names = [f"trainer-core{f'.{rank}' * bool(rank)}" for rank in range(part.trainer.ranks)]
        ranks = [
            await stack.enter_async_context(child.start(name, ENTRY, computes=True)) for name in names
        ]
        with TemporaryDirectory(prefix="rollway-ranks-") as folder:
            starts = [RankStart(part, rank, f"{folder}/meeting") for rank in range(len(ranks))]
            orders = [msgspec.msgpack.encode(start) for start in starts]
            await _all([_asked(one, order) for one, order in zip(ranks, orders, strict=True)])
        yield RankProcesses(ranks)


async def _all(asked: list[Coroutine[Any, Any, RankAnswer]]) -> list[RankAnswer]:
    """Every answer, or why one is missing: a rank that was killed makes others fail."""
    waiting = [asyncio.ensure_future(one) for one in asked]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        if first := _failures(done):
            done, _ = await asyncio.wait(waiting, timeout=HINDSIGHT_S)
            killed = [error for error in _failures(done) if error.was_killed]
            raise (killed or first)[0]
        return [one.result() for one in waiting]
    finally:
        for one in waiting:
            one.cancel()


def _failures(done: "set[asyncio.Task[RankAnswer]]") -> list[PartDied]:
    return [error for one in done if isinstance(error := one.exception(), PartDied)]


async def _asked(core: child.Child, frame: bytes) -> RankAnswer:
    try:
        await core.pipe.send(frame)
        answered = await core.pipe.receive()
    except ConnectionError:
        answered = None
    if answered is None:
        code = await core.wait()
        how = how_it_ended(code)
        raise PartDied(f"the trainer's compute process {core.name} (pid {core.pid}) {how}", code=code)
    answer = _answers.decode(answered)
    if isinstance(answer, RankFailed):
        raise PartDied(answer.error)
    return answer
