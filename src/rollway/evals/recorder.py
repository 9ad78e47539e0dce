"""Writes results as they arrive, off the event loop. Transcripts are copied from payload, not parsed."""

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
NO_MESSAGES = Raw(b"[]")


class QueuedResult(Struct, frozen=True):
    """A result, and the place of its transcript if it has one."""

    result: EvalResult
    ref: PayloadRef | None


class ResultRecorder:
    """Appends one line a rollout to `results.jsonl`. A crash can leave only the last line incomplete."""

    def __init__(self, folder: EvalFolder, file: FileIO) -> None:
        self._path = folder.results
        self._file = file
        self._segments = SegmentReader(folder.payload)
        self._keeper = SegmentKeeper(self._segments)
        self._queue: asyncio.Queue[QueuedResult | None] = asyncio.Queue(MAX_QUEUED)
        self._error: RunDirError | None = None

    async def add(self, result: EvalResult, ref: PayloadRef | None) -> None:
        """Queue a result; wait while the queue is full because the disk is slow."""
        if self._error is not None:
            raise self._error
        if ref is not None:
            await self._keeper.hold(ref)
        await self._queue.put(QueuedResult(result, ref))

    async def write_all(self) -> None:
        """Write queued results until `stop` is called, as many as are queued in one call of a thread."""
        stopped = False
        while not stopped:
            taken = [await self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get_nowait())
            stopped = None in taken
            batch = [queued for queued in taken if queued is not None]
            try:
                await thread_to_the_end(self._write, batch)
            except (OSError, PayloadError) as error:
                self._error = RunDirError(f"cannot write to {self._path}: {error}")
                self._drop_queued()
                raise self._error from None
            await self._keeper.release(queued.ref for queued in batch if queued.ref is not None)

    def _drop_queued(self) -> None:
        """Empty the queue after an error, so that no caller of `add` waits for room in vain."""
        while not self._queue.empty():
            self._queue.get_nowait()

    def _write(self, batch: list[QueuedResult]) -> None:
        unwritten = memoryview(b"".join(self._line(queued) for queued in batch))
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    def _line(self, queued: QueuedResult) -> bytes:
        messages = NO_MESSAGES
        if queued.ref is not None:
            messages = Raw(self._segments.open(queued.ref)["transcript"].tobytes())
        result = msgspec.json.encode(queued.result)
        transcript = msgspec.json.encode(TranscriptLine(messages))
        return result[:-1] + b"," + transcript[1:] + b"\n"

    async def stop(self) -> None:
        await self._queue.put(None)


@asynccontextmanager
async def open_recorder(folder: EvalFolder) -> AsyncIterator[ResultRecorder]:
    """Yield a recorder for this folder; on leaving the block, write what is still queued."""
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
