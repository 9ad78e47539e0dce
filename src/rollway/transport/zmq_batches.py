"""The trainer's side of a socket to the orchestrator: takes batches ahead, says versions until heard."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq.asyncio

from ..errors import ConfigError, ProtocolError
from ..loop.lanes.lanes import thread
from ..records.engine import Published
from ..records.ids import Step
from ..wire.keys import ClientKeys
from .batch import Batch
from .incoming import IncomingBatch, arrive, clear, forget
from .messages import (
    BlobHead,
    BytesTaken,
    PublishVersion,
    ShippedBatch,
    ToTrainer,
    TrainerWelcome,
    VersionNoted,
    WantBatch,
)
from .trainer_connection import TrainerConnection

T = TypeVar("T")


class ZmqBatches:
    """Batches in order, the next one coming while one is trained, and no more than that ahead.

    After a lost connection the batch on its way goes on where it was, and publications that were not
    acknowledged are said again. With `landing` payload comes as frames, and lies below that folder until
    its version is published.
    """

    def __init__(self, line: TrainerConnection, landing: Path | None, first: Step | None) -> None:
        self._line = line
        self._landing = landing
        self._next = first
        self._welcome: asyncio.Future[TrainerWelcome] = asyncio.get_running_loop().create_future()
        self._arriving: IncomingBatch | None = None
        self._ready: asyncio.Queue[Batch] = asyncio.Queue(1)
        self._checksums: dict[int, int] = {}
        self._unheard: dict[int, tuple[PublishVersion, asyncio.Future[None]]] = {}
        self._talking = asyncio.ensure_future(line.talk(self._hear))

    async def greeted(self) -> TrainerWelcome:
        """Where the run stands, once the orchestrator has said so."""
        return await self._unless_ended(asyncio.shield(self._welcome))

    def __aiter__(self) -> "ZmqBatches":
        return self

    async def __anext__(self) -> Batch:
        if self._next_step > self._welcome.result().last_step and self._ready.empty():
            raise StopAsyncIteration
        batch = await self._unless_ended(self._ready.get())
        self._checksums[batch.step] = batch.checksum
        await self._ask()
        return batch

    async def publish(self, published: Published) -> None:
        version = published.version
        if version not in self._checksums:
            raise ProtocolError(f"version {version} is published, and no batch of that step was taken")
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        message = PublishVersion(published, self._checksums[version])
        self._unheard[version] = message, heard
        try:
            await self._line.send(message)
            await self._unless_ended(heard)
        finally:
            del self._unheard[version]
        del self._checksums[version]
        await forget(self._landing, version)

    async def close(self) -> None:
        self._talking.cancel()
        await asyncio.gather(self._talking, return_exceptions=True)

    @property
    def _next_step(self) -> Step:
        """The step whose batch comes next: as asked for, or the first that the run has not trained."""
        return Step(self._welcome.result().first_step) if self._next is None else self._next

    async def _unless_ended(self, awaited: Awaitable[T]) -> T:
        """What is awaited, or why it will never come."""
        waiting = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait([waiting, self._talking], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._talking.result()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _hear(self, message: ToTrainer, frame: Any) -> None:
        match message:
            case TrainerWelcome():
                await self._begin(message)
            case ShippedBatch(step=step) if step == self._next_step and self._ready.empty():
                await self._receive(message)
            case BlobHead(step=step, index=index) if frame is not None:
                if self._arriving is not None and self._arriving.step == step:
                    await self._arriving.land(index, frame.buffer)
                await self._line.send(BytesTaken(len(frame)))
                self._finish()
            case VersionNoted(version=version) if version in self._unheard:
                _, heard = self._unheard[version]
                if not heard.done():
                    heard.set_result(None)

    async def _begin(self, welcome: TrainerWelcome) -> None:
        """A connection is there, the first or a new one: say what the last one left unanswered."""
        if not self._welcome.done():
            self._welcome.set_result(welcome)
        await self._ask()
        for message, _ in self._unheard.values():
            await self._line.send(message)

    async def _ask(self) -> None:
        """Ask for the next batch, unless one lies ready or there is none."""
        step = self._next_step
        if not self._ready.empty() or step > self._welcome.result().last_step:
            return
        has_frames, arriving = self._landing is not None, self._arriving
        if arriving is None:
            await self._line.send(WantBatch(step, has_frames))
        else:
            await self._line.send(WantBatch(step, has_frames, arriving.have, arriving.checksum))

    async def _receive(self, shipped: ShippedBatch) -> None:
        """A manifest: of the batch that is on its way already, or of another that begins."""
        fresh = await arrive(shipped, self._welcome.result().payload, self._landing, self._arriving)
        self._arriving = fresh
        self._finish()

    def _finish(self) -> None:
        if self._arriving is not None and self._arriving.is_whole:
            batch = self._arriving.finish()
            self._ready.put_nowait(batch)
            self._arriving, self._next = None, Step(batch.step + 1)


@asynccontextmanager
async def connect(
    address: str, landing: Path | None, keys: ClientKeys | None, first: Step | None, patience_s: float
) -> AsyncIterator[ZmqBatches]:
    """Batches of the run whose orchestrator waits at `address`, once it has answered."""
    if landing is not None:
        await thread(clear, landing)
    with zmq.asyncio.Context() as context:
        batches = ZmqBatches(TrainerConnection(context, address, keys, patience_s), landing, first)
        try:
            welcome = await batches.greeted()
            if landing is None and not await thread(Path(welcome.payload).is_dir):
                raise ConfigError(
                    f"the run's payload folder {welcome.payload} cannot be seen from here: give a "
                    "'landing' folder, and payload is sent as frames"
                )
            yield batches
        finally:
            await batches.close()
