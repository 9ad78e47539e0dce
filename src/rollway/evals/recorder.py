"""Writes results while they come, off the loop: transcripts are copied from payload, never parsed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO

import msgspec
from msgspec import Raw, Struct

from ..errors import PayloadError, RunDirError
from ..loop.lanes.lanes import thread_to_the_end
from ..payload.in_use import SegmentKeeper
from ..payload.reader import SegmentReader
from ..records.payload import PayloadRef
from .folder import EvalFolder
from .result import EvalResult, TranscriptLine

MAX_QUEUED = 1_000
NOTHING_SAID = Raw(b"[]")


class QueuedResult(Struct, frozen=True):
    """A result, and where its transcript lies if it has one."""

    result: EvalResult
    ref: PayloadRef | None


class ResultRecorder:
    """One line a rollout, whole: a crash leaves at most one torn line, the last."""

    def __init__(self, folder: EvalFolder, file: FileIO) -> None:
        self._path = folder.results
        self._file = file
        self._segments = SegmentReader(folder.payload)
        self._keeper = SegmentKeeper(self._segments)
        self._queue: asyncio.Queue[QueuedResult | None] = asyncio.Queue(MAX_QUEUED)
        self._failed: RunDirError | None = None

    async def add(self, result: EvalResult, ref: PayloadRef | None) -> None:
        """Queue a result; waits when the disk is far behind."""
        if self._failed is not None:
            raise self._failed
        if ref is not None:
            await self._keeper.hold(ref)
        await self._queue.put(QueuedResult(result, ref))

    async def write_all(self) -> None:
        """Until told to stop, what has gathered in one call of the thread lane."""
        done = False
        while not done:
            gathered = [await self._queue.get()]
            while not self._queue.empty():
                gathered.append(self._queue.get_nowait())
            done = None in gathered
            batch = [one for one in gathered if one is not None]
            try:
                await thread_to_the_end(self._write, batch)
            except (OSError, PayloadError) as error:
                self._failed = RunDirError(f"cannot write to {self._path}: {error}")
                self._let_go()
                raise self._failed from None
            await self._keeper.release(one.ref for one in batch if one.ref is not None)

    def _let_go(self) -> None:
        """Nothing is written any more: who waits for room need not."""
        while not self._queue.empty():
            self._queue.get_nowait()

    def _write(self, batch: list[QueuedResult]) -> None:
        left = memoryview(b"".join(self._line(one) for one in batch))
        while left:
            left = left[self._file.write(left) :]

    def _line(self, one: QueuedResult) -> bytes:
        said = NOTHING_SAID
        if one.ref is not None:
            said = Raw(self._segments.open(one.ref)["transcript"].tobytes())
        return (
            msgspec.json.encode(one.result)[:-1]
            + b","
            + msgspec.json.encode(TranscriptLine(said))[1:]
            + b"\n"
        )

    async def stop(self) -> None:
        await self._queue.put(None)


@asynccontextmanager
async def open_recorder(folder: EvalFolder) -> AsyncIterator[ResultRecorder]:
    """A recorder of this folder; leaving the block writes what is queued."""
    try:
        file = FileIO(folder.results, "ab")
    except OSError as error:
        raise RunDirError(f"cannot write to {folder.results}: {error}") from None
    with file:
        recorder = ResultRecorder(folder, file)
        writing = asyncio.create_task(recorder.write_all(), name="recorder")
        try:
            yield recorder
        finally:
            if not writing.done():
                await recorder.stop()
            await asyncio.shield(writing)
