"""The orchestrator's side of a socket to the trainer: keeps batches until their versions are there."""

import asyncio
import logging
from typing import Any

import msgspec
import zmq
from crc32c import crc32c
from msgspec import Struct

from ..errors import ProtocolError
from ..loop.coroutines import FairLoop
from ..loop.lanes.lanes import thread
from ..loop.watch.rarely import is_news
from ..payload.reader import SegmentReader
from ..payload.store import ByteWindow
from ..records.batch import BatchManifest
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..records.payload import PayloadRef
from ..rundir.rundir import RunDir
from ..wire.port import BoundPort
from .files import FileSender, mark_stable
from .messages import (
    PROTOCOL,
    BlobHead,
    BytesTaken,
    FromTrainer,
    PublishVersion,
    ShippedBatch,
    ToTrainer,
    TrainerHello,
    TrainerRefused,
    TrainerWelcome,
    VersionNoted,
    WantBatch,
    encode,
    from_trainer,
)

log = logging.getLogger(__name__)

TAKEN_OVER = "another trainer has connected to this run since"


class _UnpublishedBatch(Struct, frozen=True):
    """A batch that was shipped and whose version is not published."""

    encoded: bytes
    checksum: int
    refs: tuple[PayloadRef, ...]


class _TrainerSession:
    """One connection of a trainer: which batch it is sent, and the bytes on their way."""

    def __init__(self, peer: bytes, window_bytes: int) -> None:
        self.peer = peer
        self.window = ByteWindow(window_bytes)
        self.step: int | None = None
        self.sending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        if self.sending is not None:
            self.sending.cancel()


class ZmqSender:
    """Serves one trainer at a time; whoever says TrainerHello last is it.

    A batch, and word of a version, are in the run directory before the other side hears of them, so
    that neither is lost with this process. As many batches are kept as the core ships ahead of the
    trainer; as many bytes of payload are on their way as the window holds.
    """

    def __init__(self, run: RunDir, port: BoundPort, window_bytes: int, first: Step, last: int) -> None:
        self.address = port.address
        self._run = run
        self._files = FileSender(run)
        self._port = port
        self._window_bytes = window_bytes
        self._last = last
        self._published = PolicyVersion(first - 1)
        self._kept: dict[int, asyncio.Future[_UnpublishedBatch]] = {}
        self._versions: dict[int, asyncio.Future[Published]] = {}
        self._session: _TrainerSession | None = None
        self._turns = FairLoop()
        self._num_bad = 0

    async def ship(self, manifest: BatchManifest) -> None:
        encoded = msgspec.json.encode(manifest)
        await self._files.write(manifest.step, encoded)
        kept = _UnpublishedBatch(encoded, crc32c(encoded), manifest.refs)
        _future(self._kept, manifest.step).set_result(kept)

    async def next_version(self, version: PolicyVersion) -> Published:
        published: Published = await _future(self._versions, version)
        del self._versions[version]
        return published

    async def serve(self) -> None:
        """Hear and answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for guard in self._port.guards:
                tasks.create_task(guard())
            while True:
                peer, *frames = await self._port.wire.recv_multipart()
                await self._turns.let_others()
                try:
                    await self._hear(peer, from_trainer(frames), tasks)
                except ProtocolError as error:
                    self._num_bad += 1
                    if is_news(self._num_bad - 1, self._num_bad):
                        log.warning("dropped bad message %d: %s", self._num_bad, error)

    async def _hear(self, peer: bytes, message: FromTrainer, tasks: asyncio.TaskGroup) -> None:
        session = self._session
        if isinstance(message, TrainerHello):
            await self._welcome(peer, message)
        elif session is None or session.peer != peer:
            raise ProtocolError(f"a {type(message).__name__} of somebody who has not said TrainerHello")
        elif isinstance(message, WantBatch):
            await self._want(session, message, tasks)
        elif isinstance(message, BytesTaken):
            session.window.give(min(message.num_bytes, session.window.num_bytes))
        elif isinstance(message, PublishVersion):
            await self._note(peer, message)

    async def _welcome(self, peer: bytes, hello: TrainerHello) -> None:
        if hello.protocol != PROTOCOL:
            reason = f"this run speaks version {PROTOCOL} of the protocol, the trainer {hello.protocol}"
            await self._say(peer, TrainerRefused(f"{reason}: install the same rollway on both sides"))
            return
        if self._session is not None:
            self._session.stop()
            await self._say(self._session.peer, TrainerRefused(TAKEN_OVER))
        self._session = _TrainerSession(peer, self._window_bytes)
        log.info("trainer '%s' is here; step %d is next", ascii(hello.name), self._published + 1)
        await self._say(peer, TrainerWelcome(self._published + 1, self._last, str(self._run.payload)))

    async def _want(self, session: _TrainerSession, want: WantBatch, tasks: asyncio.TaskGroup) -> None:
        if want.step == session.step:
            return  # it is on its way
        if not self._published < want.step <= self._last:
            reason = (
                f"it wants step {want.step}; the next to be trained is {self._published + 1}, the last "
                f"{self._last}: start it from version {self._published}"
            )
            await self._say(session.peer, TrainerRefused(reason))
            return
        session.stop()
        session.step = want.step
        session.sending = tasks.create_task(self._send(session, want))

    async def _send(self, session: _TrainerSession, want: WantBatch) -> None:
        """A batch as soon as it is shipped. Its blobs are read one by one, as the window has room."""
        kept = await asyncio.shield(_future(self._kept, want.step))
        refs = kept.refs if want.frames else ()
        await self._say(session.peer, ShippedBatch(want.step, kept.encoded, len(refs)))
        have = set(want.have) if want.checksum == kept.checksum else set()
        reader = SegmentReader(self._run.payload)
        for index, ref in enumerate(refs):
            if index in have:
                continue
            await session.window.take(ref.length)
            is_sent = False
            try:
                frame = await thread(reader.copy, ref)
                is_sent = await self._say(session.peer, BlobHead(want.step, index), frame)
            finally:
                if not is_sent:
                    session.window.give(ref.length)
            if not is_sent:
                return

    async def _note(self, peer: bytes, message: PublishVersion) -> None:
        """Take a version in, once: a trainer says it again until it is told that it was heard."""
        version = message.published.version
        if version > self._published:
            if reason := self._why_not(message):
                await self._say(peer, TrainerRefused(reason))
                return
            await mark_stable(self._run, message.published)
            self._published = version
            del self._kept[version]
            _future(self._versions, version).set_result(message.published)
        await self._say(peer, VersionNoted(version))

    def _why_not(self, message: PublishVersion) -> str:
        version = message.published.version
        kept = self._kept.get(version)
        if version != self._published + 1 or kept is None or not kept.done():
            return f"it publishes version {version}, and the last one was {self._published}"
        if kept.result().checksum != message.checksum:
            return (
                f"version {version} was trained on a batch that this run has made anew since: start the "
                f"trainer from version {self._published}"
            )
        return ""

    async def _say(self, peer: bytes, message: ToTrainer, frame: memoryview | None = None) -> bool:
        """Whether there is still somebody to say it to."""
        parts: list[Any] = [peer, encode(message)]
        try:
            await self._port.wire.send_multipart(
                parts if frame is None else [*parts, frame], copy=frame is None, flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True


def _future(known: dict[int, Any], number: int) -> Any:
    """What will be known of a step or version, whoever asks for it first."""
    if number not in known:
        known[number] = asyncio.get_running_loop().create_future()
    return known[number]
