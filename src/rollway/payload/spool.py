"""The routes of one rollout while it runs, in a file that becomes its segment when the rollout commits.

Every reply of the policy is appended as it comes, so a worker's memory does not grow with its rollouts.
The file leaves room for the header of a blob at its start, so nothing is copied at the end.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from crc32c import crc32c

from ..errors import PayloadError
from ..loop.lanes.threads import thread, thread_to_the_end
from ..records.turn import Routes, SpooledRoutes
from .lock import map_file
from .reuse import SPOOL, make_spare, take_spare
from .segment import write_all

HEAD_BYTES = 16 << 10
"""The room for the header."""


class Spool:
    """Keeps what is appended to it. The file does not exist before the first append, and is open only
    while it is written, because there is one for each rollout of a worker. It pays off for routes of
    `least_bytes`."""

    def __init__(self, path: Path, least_bytes: int) -> None:
        self.path = path.with_name(path.name + SPOOL)
        self.least_bytes = least_bytes
        self.num_bytes = 0
        self.checksum = 0
        self._lock = asyncio.Lock()
        self._has_ended = False

    async def append(self, chunks: Sequence[Routes]) -> list[SpooledRoutes]:
        """Write routes behind those before, and return where they are. An append that raises OSError
        changes nothing."""
        async with self._lock:
            if self._has_ended:
                raise PayloadError(f"the rollout of {self.path} has ended")
            return await thread_to_the_end(self._write, chunks)

    def _write(self, chunks: Sequence[Routes]) -> list[SpooledRoutes]:
        data = [np.ascontiguousarray(chunk).data.cast("B") for chunk in chunks]
        flags = os.O_RDWR
        if not self.num_bytes and not take_spare(self.path):
            flags |= os.O_CREAT
        file = os.open(self.path, flags, 0o600)
        try:
            write_all(file, data, HEAD_BYTES + self.num_bytes)
        finally:
            os.close(file)
        spooled = []
        for chunk, raw in zip(chunks, data, strict=True):
            spooled.append(SpooledRoutes(self.num_bytes, chunk.shape, chunk.dtype))
            self.checksum = crc32c(raw, self.checksum)
            self.num_bytes += raw.nbytes
        return spooled

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
        if self.num_bytes:
            await thread(make_spare, self.path)


def remove_spools(folder: Path, prefix: str) -> None:
    """Remove the spools that a killed worker left behind. `prefix` is what the names of its files begin
    with."""
    for spool in folder.glob(f"*{SPOOL}"):
        if spool.name.startswith(prefix):
            spool.unlink(missing_ok=True)
