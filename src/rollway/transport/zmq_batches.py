"""The trainer's end of the transport through a socket."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from crc32c import crc32c
from msgspec.structs import replace
from zmq.asyncio import Context

from ..errors import ConfigError, ProtocolError
from ..loop.lanes.threads import thread
from ..payload.writer import SegmentWriter
from ..records.engine import Published
from ..records.ids import Step
from ..records.payload import PayloadRef, SegmentName
from ..wire.keys import ClientKeys
from .batch import Batch
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
from .orchestrator_connection import OrchestratorConnection

T = TypeVar("T")

SEGMENT_BYTES = 256 << 20
PREFIX = "rollway-batch-"
"""Folders whose names start with this may be removed: the trainer's end made them."""


class IncomingBatch:
    """Writes the blobs of a batch to `folder`. Without a folder no blobs are sent."""

    def __init__(self, shipped: ShippedBatch, payload: str, folder: Path | None) -> None:
        self.step = Step(shipped.step)
        self.checksum = crc32c(shipped.manifest)
        self._shipped = shipped
        self._payload = payload if folder is None else str(folder)
        name = SegmentName("in", 0)
        self._writer = SegmentWriter(folder, name, SEGMENT_BYTES) if folder else None
        self._landed: dict[int, PayloadRef] = {}

    @property
    def arrived(self) -> tuple[int, ...]:
        return tuple(self._landed)

    @property
    def is_complete(self) -> bool:
        return len(self._landed) == self._shipped.num_blobs

    async def write_blob(self, index: int, frame: memoryview) -> None:
        """Write a blob unchanged, in the thread lane. A blob that arrived before is dropped."""
        if index not in self._landed and self._writer is not None:
            self._landed[index] = await self._writer.append_frame(frame)

    def finish(self) -> Batch:
        landed = None
        if self._writer is not None:
            self._writer.close()
            landed = tuple(ref for _, ref in sorted(self._landed.items()))
        return Batch(self.step, self._shipped.manifest, self._payload, time.time(), landed)


class ZmqBatches:
    """Batches in order. While one is trained the next one is received, and no more than that. After a
    lost connection the transfer of a batch continues, and unacknowledged publications are sent again.
    With `landing`, payload comes as frames, and stays in that folder until its version is published, or
    as long as the trainer needs it for a restart (`Published.saved`)."""

    def __init__(
        self, connection: OrchestratorConnection, landing: Path | None, first: Step | None
    ) -> None:
        self._connection = connection
        self._landing = landing
        self._next = first
        self._welcome: asyncio.Future[TrainerWelcome] = (
            asyncio.get_running_loop().create_future()
        )
        self._incoming: IncomingBatch | None = None
        self._ready: asyncio.Queue[Batch] = asyncio.Queue(1)
        self._checksums: dict[int, int] = {}
        self._unacknowledged: dict[int, tuple[PublishVersion, asyncio.Future[None]]] = {}
        self._receiving = asyncio.ensure_future(connection.receive_all(self._on_message))

    async def wait_for_welcome(self) -> TrainerWelcome:
        """Wait for the orchestrator's first answer, which says which step is next."""
        return await self._unless_ended(asyncio.shield(self._welcome))

    def __aiter__(self) -> "ZmqBatches":
        return self

    async def __anext__(self) -> Batch:
        if self._next_step > self._welcome.result().last_step and self._ready.empty():
            raise StopAsyncIteration
        batch = await self._unless_ended(self._ready.get())
        self._checksums[batch.step] = batch.checksum
        await self._request_next()
        return batch

    async def publish(self, published: Published) -> None:
        version = published.version
        if version not in self._checksums:
            raise ProtocolError(
                f"version {version} cannot be published: the batch of step {version} was not taken, or "
                "its version is published already"
            )
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        message = PublishVersion(published, self._checksums[version])
        self._unacknowledged[version] = message, acknowledged
        try:
            await self._connection.send(message)
            await self._unless_ended(acknowledged)
        finally:
            del self._unacknowledged[version]
        del self._checksums[version]
        if self._landing is not None:
            saved = version if published.saved is None else published.saved
            await thread(_remove_batches, self._landing, range(saved + 1))

    async def close(self) -> None:
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)

    @property
    def _next_step(self) -> Step:
        """The step whose batch comes next. At first, the one that the trainer or the run names."""
        return Step(self._welcome.result().first_step) if self._next is None else self._next

    async def _unless_ended(self, awaitable: Awaitable[T]) -> T:
        """Return the result of `awaitable`, or raise the error that ended the connection for good."""
        waiting = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait(
                [waiting, self._receiving], return_when=asyncio.FIRST_COMPLETED
            )
            if not waiting.done():
                self._receiving.result()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _on_message(self, message: ToTrainer, frame: Any) -> None:
        match message:
            case TrainerWelcome():
                await self._on_welcome(message)
            case ShippedBatch(step) if step == self._next_step and self._ready.empty():
                await self._on_shipped(message)
            case BlobHead(step, index) if frame is not None:
                if self._incoming is not None and self._incoming.step == step:
                    await self._incoming.write_blob(index, frame.buffer)
                await self._connection.send(BytesTaken(len(frame)))
                self._finish_incoming()
            case VersionNoted(version) if version in self._unacknowledged:
                _, acknowledged = self._unacknowledged[version]
                if not acknowledged.done():
                    acknowledged.set_result(None)

    async def _on_welcome(self, welcome: TrainerWelcome) -> None:
        """Send what the last connection left unanswered on the new one."""
        if not self._welcome.done():
            self._welcome.set_result(welcome)
        await self._request_next()
        for message, _ in self._unacknowledged.values():
            await self._connection.send(message)

    async def _request_next(self) -> None:
        """Ask for the next batch, unless one is waiting to be taken or the last was received."""
        step = self._next_step
        if not self._ready.empty() or step > self._welcome.result().last_step:
            return
        want, incoming = WantBatch(step, frames=self._landing is not None), self._incoming
        if incoming is not None:
            want = replace(want, have=incoming.arrived, checksum=incoming.checksum)
        await self._connection.send(want)

    async def _on_shipped(self, shipped: ShippedBatch) -> None:
        """Begin to receive a batch, or continue with the one that is on its way."""
        if self._incoming is None or self._incoming.checksum != crc32c(shipped.manifest):
            folder = self._folder_of(shipped.step)
            if folder is not None:
                await thread(_make_empty, folder)
            self._incoming = IncomingBatch(shipped, self._welcome.result().payload, folder)
        self._finish_incoming()

    def _folder_of(self, step: int) -> Path | None:
        return None if self._landing is None else self._landing / f"{PREFIX}{step}"

    def _finish_incoming(self) -> None:
        if self._incoming is not None and self._incoming.is_complete:
            batch = self._incoming.finish()
            self._ready.put_nowait(batch)
            self._incoming, self._next = None, Step(batch.step + 1)


@asynccontextmanager
async def connect(
    address: str,
    landing: Path | None,
    keys: ClientKeys | None,
    first: Step | None,
    patience_s: float,
) -> AsyncIterator[ZmqBatches]:
    """Open the batches of the run whose orchestrator listens at `address`, once it has answered."""
    if landing is not None:
        await thread(_remove_batches, landing, range(first or 0, sys.maxsize))
    with Context() as context:
        connection = OrchestratorConnection(context, address, keys, patience_s)
        batches = ZmqBatches(connection, landing, first)
        try:
            welcome = await batches.wait_for_welcome()
            if landing is None and not await thread(Path(welcome.payload).is_dir):
                raise ConfigError(
                    f"the run's payload folder {welcome.payload} does not exist on this machine: give a "
                    "'landing' folder to open_batches, and payload is sent there"
                )
            yield batches
        finally:
            await batches.close()


def _remove_batches(landing: Path, steps: range) -> None:
    """Remove the payload of some steps, if the disk lets us. A killed trainer may have left it."""
    with suppress(OSError):
        for folder in landing.glob(f"{PREFIX}*"):
            step = folder.name.removeprefix(PREFIX)
            if step.isdigit() and int(step) in steps:
                shutil.rmtree(folder, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
