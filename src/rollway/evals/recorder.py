"""Writes results as they arrive, off the event loop. Transcripts are copied from payload, not parsed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import FileIO

import msgspec

from ..errors import PayloadError, RunDirError
from ..loop.lanes.threads import thread, thread_to_the_end
from ..payload.in_use import SegmentKeeper
from ..payload.reader import SegmentReader
from ..records.payload import PayloadRef
from .folder import EvalFolder
from .result import RolloutResult

log = logging.getLogger(__name__)

MAX_QUEUED = 1_000
QueuedResult = tuple[RolloutResult, PayloadRef | None]
"""A result, and the place of its transcript if it has one."""


class ResultRecorder:
    """Appends one line a rollout to `results.jsonl`. A crash can leave only the last line incomplete."""

    def __init__(self, folder: EvalFolder, file: FileIO) -> None:
        self._path = folder.results
        self._file = file
        self._segments = SegmentReader(folder.payload)
        self._keeper = SegmentKeeper(self._segments, _attempt)
        self._queue: asyncio.Queue[QueuedResult | None] = asyncio.Queue(MAX_QUEUED)
        self._error: RunDirError | None = None

    async def add(self, result: RolloutResult, ref: PayloadRef | None) -> None:
        """Queue a result; wait while the queue is full because the disk is slow."""
        if self._error is not None:
            raise self._error
        if ref is not None:
            await self._keeper.hold(ref)
        await self._queue.put((result, ref))

    async def write_all(self) -> None:
        """Write queued results until `stop` is called. One call of the thread writes all that waits."""
        stopped = False
        while not stopped:
            taken = [await self._queue.get(), *self._take_queued()]
            stopped = None in taken
            batch = [queued for queued in taken if queued is not None]
            try:
                await thread_to_the_end(self._write, batch)
            except (OSError, PayloadError) as error:
                self._error = RunDirError(f"cannot write to {self._path}: {error}")
                self._take_queued()  # so that no caller of `add` waits for room in vain
                raise self._error from None
            await self._keeper.release(ref for _, ref in batch if ref is not None)

    def _take_queued(self) -> list[QueuedResult | None]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _write(self, batch: list[QueuedResult]) -> None:
        unwritten = memoryview(b"".join(self._line(result, ref) for result, ref in batch))
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    def _line(self, result: RolloutResult, ref: PayloadRef | None) -> bytes:
        messages = self._segments.open(ref)["transcript"].tobytes() if ref else b"[]"
        return msgspec.json.encode(result)[:-1] + b',"messages":' + messages + b"}\n"

    async def stop(self) -> None:
        await self._queue.put(None)


async def _attempt(what: str, call: Callable[[], None]) -> None:
    """Make a call that an evaluation can do without."""
    try:
        await thread(call)
    except OSError as error:
        log.warning("%s failed: %s", what, error)


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
