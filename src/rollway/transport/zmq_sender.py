"""The orchestrator's end of the transport through a socket."""

import asyncio
import logging
from typing import TypeVar

import msgspec
from crc32c import crc32c
from msgspec import Struct

from ..errors import ProtocolError
from ..loop.coroutines import FairLoop
from ..loop.lanes.threads import thread
from ..loop.watch.rarely import Rarely
from ..payload.reader import SegmentReader
from ..payload.store import ByteWindow
from ..records.batch import BatchManifest
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..records.payload import PayloadRef
from ..rundir.rundir import RunDir
from ..wire.messages import encode
from ..wire.port import BoundPort, send_to
from .files import FileSender, record_published
from .messages import (
    PROTOCOL,
    BlobHead,
    BytesTaken,
    FromTrainer,
    PublishVersion,
    RefusedByOrchestrator,
    ShippedBatch,
    ToTrainer,
    TrainerHello,
    TrainerWelcome,
    VersionNoted,
    WantBatch,
    decode_from_trainer,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

TAKEN_OVER = "another trainer has connected to this run, which serves one at a time"


class _UnpublishedBatch(Struct, frozen=True):
    """A batch that was shipped and whose version is not published yet."""

    encoded: bytes
    checksum: int
    refs: tuple[PayloadRef, ...]


class _TrainerSession:
    """One connection of a trainer: the batch that it is sent, and the bytes on their way to it."""

    def __init__(self, peer: bytes, window_bytes: int) -> None:
        self.peer = peer
        self.window = ByteWindow(window_bytes)
        self.step: int | None = None
        self.sending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        if self.sending is not None:
            self.sending.cancel()


class ZmqSender:
    """Serves one trainer at a time: the last one that sent TrainerHello. Batches and published versions
    are in the run directory before the other side hears of them, so that neither is lost with this
    process. At most a window of payload is on its way."""

    def __init__(
        self, run: RunDir, port: BoundPort, window_bytes: int, first: Step, last: int
    ) -> None:
        self.address = port.address
        self._run = run
        self._files = FileSender(run)
        self._port = port
        self._window_bytes = window_bytes
        self._last = last
        self._published = PolicyVersion(first - 1)
        self._batches: dict[int, asyncio.Future[_UnpublishedBatch]] = {}
        self._versions: dict[int, asyncio.Future[Published]] = {}
        self._session: _TrainerSession | None = None
        self._fair = FairLoop()
        self._bad_messages = Rarely()

    async def ship(self, manifest: BatchManifest) -> None:
        encoded = msgspec.json.encode(manifest)
        await self._files.write_manifest(manifest.step, encoded)
        batch = _UnpublishedBatch(encoded, crc32c(encoded), manifest.refs)
        _future_of(self._batches, manifest.step).set_result(batch)

    async def wait_for_version(self, version: PolicyVersion) -> Published:
        published = await _future_of(self._versions, version)
        del self._versions[version]
        return published

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for guard in self._port.guards:
                tasks.create_task(guard())
            while True:
                peer, *frames = await self._port.wire.recv_multipart()
                await self._fair.breathe()
                try:
                    await self._on_message(peer, decode_from_trainer(frames), tasks)
                except ProtocolError as error:
                    if self._bad_messages.add():
                        log.warning(
                            "dropped bad message %d: %s", self._bad_messages.count, error
                        )

    async def _on_message(
        self, peer: bytes, message: FromTrainer, tasks: asyncio.TaskGroup
    ) -> None:
        session = self._session
        if isinstance(message, TrainerHello):
            await self._on_hello(peer, message)
            return
        if session is None or session.peer != peer:
            raise ProtocolError(f"{type(message).__name__} came before TrainerHello")
        match message:
            case WantBatch():
                await self._on_want(session, message, tasks)
            case BytesTaken(num_bytes):
                session.window.give(min(num_bytes, session.window.num_bytes))
            case PublishVersion():
                await self._on_publish(peer, message)

    async def _on_hello(self, peer: bytes, hello: TrainerHello) -> None:
        if hello.protocol != PROTOCOL:
            reason = f"the run speaks version {PROTOCOL} of the protocol, the trainer {hello.protocol}"
            await self._send(
                peer,
                RefusedByOrchestrator(f"{reason}: install the same rollway on both sides"),
            )
            return
        if self._session is not None:
            self._session.stop()
            await self._send(self._session.peer, RefusedByOrchestrator(TAKEN_OVER))
        self._session = _TrainerSession(peer, self._window_bytes)
        step = self._published + 1
        log.info("trainer %s has connected; step %d is next", ascii(hello.name), step)
        await self._send(peer, TrainerWelcome(step, self._last, str(self._run.payload)))

    async def _on_want(
        self, session: _TrainerSession, want: WantBatch, tasks: asyncio.TaskGroup
    ) -> None:
        if want.step == session.step:
            return  # the batch is on its way
        if not self._published < want.step <= self._last:
            reason = (
                f"the trainer asks for step {want.step}, but step {self._published + 1} is next and "
                f"step {self._last} is the last: start the trainer from version {self._published}"
            )
            await self._send(session.peer, RefusedByOrchestrator(reason))
            return
        session.stop()
        session.step = want.step
        session.sending = tasks.create_task(self._send_batch(session, want))

    async def _send_batch(self, session: _TrainerSession, want: WantBatch) -> None:
        """Send a batch as soon as it is shipped. Blobs are read one by one, as the window has room."""
        batch = await asyncio.shield(_future_of(self._batches, want.step))
        refs = batch.refs if want.frames else ()
        await self._send(session.peer, ShippedBatch(want.step, batch.encoded, len(refs)))
        arrived = set(want.have) if want.checksum == batch.checksum else set()
        reader = SegmentReader(self._run.payload)
        for index, ref in enumerate(refs):
            if index in arrived:
                continue
            await session.window.take(ref.length)
            is_sent = False
            try:
                frame = await thread(reader.copy, ref)
                is_sent = await self._send(session.peer, BlobHead(want.step, index), frame)
            finally:
                if not is_sent:
                    session.window.give(ref.length)
            if not is_sent:
                return

    async def _on_publish(self, peer: bytes, message: PublishVersion) -> None:
        """Record a version once. The trainer sends it again until it gets VersionNoted."""
        version = message.published.version
        if version > self._published:
            if reason := self._reason_to_refuse(message):
                await self._send(peer, RefusedByOrchestrator(reason))
                return
            await record_published(self._run, message.published)
            self._published = version
            del self._batches[version]
            _future_of(self._versions, version).set_result(message.published)
        await self._send(peer, VersionNoted(version))

    def _reason_to_refuse(self, message: PublishVersion) -> str:
        """Return why a version cannot be recorded; empty if it can."""
        version = message.published.version
        batch = self._batches.get(version)
        if version != self._published + 1 or batch is None or not batch.done():
            return (
                f"the trainer publishes version {version}, but the last version is {self._published}: "
                f"start the trainer from version {self._published}"
            )
        if batch.result().checksum != message.checksum:
            return (
                f"version {version} was trained on a batch that this run has made again since: start "
                f"the trainer from version {self._published}"
            )
        return ""

    async def _send(
        self, peer: bytes, message: ToTrainer, frame: memoryview | None = None
    ) -> bool:
        return await send_to(self._port.wire, peer, encode(message), frame)


def _future_of(futures: dict[int, asyncio.Future[T]], number: int) -> asyncio.Future[T]:
    """Return the future of a step or version; the first caller makes it."""
    if number not in futures:
        futures[number] = asyncio.get_running_loop().create_future()
    return futures[number]
