"""The routes of one rollout while it runs, in a file that becomes its segment when the rollout commits.

Every reply of the policy is appended as it comes, so a worker's memory does not grow with its rollouts.
The file leaves room for the header of a blob at its start, so nothing is copied at the end.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from pathlib import Path

import numpy as np
from crc32c import crc32c

from ..errors import PayloadError
from ..loop.lanes.threads import thread, thread_to_the_end, to_the_end
from ..records.turn import Routes, SpooledRoutes
from .lock import map_file
from .reuse import SPOOL, make_spare, take_spare
from .segment import write_all

HEAD_BYTES = 16 << 10
"""The room for the header."""
MAX_OPEN = 512
"""Files that stay open between two writes. Where more rollouts run, the others are opened each time."""

PAUSE_S = 0.01
"""How long the first write waits for others, so that one call of the thread lane makes many: each call
makes the loop and a thread wait for each other."""
AT_ONCE = 4
"""Rollouts that go on at the same moment once their writes are done."""

_Write = tuple["Spool", list[memoryview], "asyncio.Future[None]"]


class Spooler:
    """Writes what the spools of a worker take, many in one call of the thread lane."""

    def __init__(self) -> None:
        self._waiting: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self.num_open = 0

    async def write(self, spool: "Spool", data: list[memoryview]) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((spool, data, written))
        if self._writing is None:
            # in a context of its own: it must not end with the rollout that happens to start it
            self._writing = asyncio.create_task(
                self._write_waiting(), name="spooler", context=Context()
            )
        await to_the_end(written)  # the file must not be given away while it is written

    async def _write_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(PAUSE_S)
            taken, self._waiting = self._waiting, []
            errors = await thread_to_the_end(self._write_all, taken)
            for number, (write, error) in enumerate(zip(taken, errors, strict=True)):
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
                _tell(write, error)
        self._writing = None

    def _write_all(self, writes: list[_Write]) -> list[Exception | None]:
        errors: list[Exception | None] = []
        for spool, data, _ in writes:
            try:
                spool.write(data)
                errors.append(None)
            except (
                Exception
            ) as error:  # whatever it is, the one who waits for this write must hear it
                errors.append(error)
        return errors


def _tell(write: _Write, error: Exception | None) -> None:
    _, _, written = write
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


class Spool:
    """Keeps what is appended to it. The file does not exist before the first append. It pays off for
    routes of `least_bytes`."""

    def __init__(self, path: Path, least_bytes: int, spooler: Spooler) -> None:
        self.path = path.with_name(path.name + SPOOL)
        self.least_bytes = least_bytes
        self.num_bytes = 0
        self.checksum = 0
        self._spooler = spooler
        self._file: int | None = None
        self._exists = False
        self._lock = asyncio.Lock()
        self._has_ended = False

    async def append(self, chunks: Sequence[Routes]) -> list[SpooledRoutes]:
        """Write routes behind those before, and return where they are. An append that raises OSError
        changes nothing."""
        data = [np.ascontiguousarray(chunk).data.cast("B") for chunk in chunks]
        async with self._lock:
            if self._has_ended:
                raise PayloadError(f"the rollout of {self.path} has ended")
            await self._spooler.write(self, data)
            spooled = []
            for chunk, raw in zip(chunks, data, strict=True):
                spooled.append(SpooledRoutes(self.num_bytes, chunk.shape, chunk.dtype))
                self.checksum = crc32c(raw, self.checksum)
                self.num_bytes += raw.nbytes
            return spooled

    def write(self, data: list[memoryview]) -> None:
        """Write behind what was appended. Runs in the thread lane."""
        file = self._file
        if file is None:
            flags = os.O_RDWR
            if not self._exists and not take_spare(self.path):
                flags |= os.O_CREAT
            file = os.open(self.path, flags, 0o600)
            self._exists = True
        try:
            write_all(file, data, HEAD_BYTES + self.num_bytes)
        finally:
            self._keep_or_close(file)

    def _keep_or_close(self, file: int) -> None:
        if self._file is None and self._spooler.num_open < MAX_OPEN:
            self._file = file
            self._spooler.num_open += 1
        elif self._file is None:
            os.close(file)

    def close(self) -> None:
        """Close the file if it is open. Runs in the thread lane."""
        file, self._file = self._file, None
        if file is not None:
            self._spooler.num_open -= 1
            os.close(file)

    async def end(self) -> None:
        """Wait until what is being appended is written, and take nothing more."""
        async with self._lock:
            self._has_ended = True

    @contextmanager
    def read(self) -> Iterator[memoryview]:
        """Yield what was appended, as a view of the file."""
        file = os.open(self.path, os.O_RDONLY)
        try:
            whole = map_file(file)
        finally:
            os.close(file)
        yield whole[HEAD_BYTES : HEAD_BYTES + self.num_bytes]

    async def discard(self) -> None:
        """Give the space back, if it is still there."""
        await self.end()
        if self._exists:
            await thread(self._discard)

    def _discard(self) -> None:
        self.close()
        make_spare(self.path)
        self._exists = False

    def become_segment(self) -> None:
        """Note that the file is a segment now."""
        self._exists, self.num_bytes = False, 0


def remove_spools(folder: Path, prefix: str) -> None:
    """Remove the spools that a killed worker left behind. `prefix` is what the names of its files begin
    with."""
    for spool in folder.glob(f"*{SPOOL}"):
        if spool.name.startswith(prefix):
            with suppress(OSError):
                spool.unlink(missing_ok=True)
