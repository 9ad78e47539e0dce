"""A batch on its way to the trainer: its manifest, and those of its blobs that have come."""

import shutil
import time
from pathlib import Path

from crc32c import crc32c

from ..loop.lanes.lanes import thread
from ..payload.writer import SegmentWriter
from ..records.ids import Step
from ..records.payload import PayloadRef
from .batch import Batch
from .messages import ShippedBatch

SEGMENT_BYTES = 256 << 20
PREFIX = "rollway-batch-"
"""Folders that are named so are ours to remove."""


class IncomingBatch:
    """Whole once every blob is written. Without a `folder` there are none to write."""

    def __init__(self, shipped: ShippedBatch, payload: str, folder: Path | None) -> None:
        self.step = Step(shipped.step)
        self.checksum = crc32c(shipped.manifest)
        self._shipped = shipped
        self._payload = payload if folder is None else str(folder)
        self._writer = None if folder is None else SegmentWriter(folder, "in.0", SEGMENT_BYTES)
        self._landed: dict[int, PayloadRef] = {}

    @property
    def have(self) -> tuple[int, ...]:
        return tuple(self._landed)

    @property
    def is_whole(self) -> bool:
        return len(self._landed) == self._shipped.num_blobs

    async def land(self, index: int, frame: memoryview) -> None:
        """Write a blob as it is, in the thread lane; one that came before is dropped."""
        if index not in self._landed and self._writer is not None:
            self._landed[index] = await self._writer.append_whole(frame)

    def finish(self) -> Batch:
        """The batch, ready to be trained."""
        landed = None
        if self._writer is not None:
            self._writer.close()
            landed = tuple(ref for _, ref in sorted(self._landed.items()))
        return Batch(self.step, self._shipped.manifest, self._payload, time.time(), landed)


async def arrive(
    shipped: ShippedBatch, payload: str, landing: Path | None, before: IncomingBatch | None
) -> IncomingBatch:
    """Make room for a batch: in a folder of its own below `landing`, if its blobs are sent. One that was
    on its way `before` goes on, if it is still the same."""
    if before is not None and before.checksum == crc32c(shipped.manifest):
        return before
    if landing is None:
        return IncomingBatch(shipped, payload, None)
    folder = folder_of(landing, shipped.step)
    await thread(_make_anew, folder)
    return IncomingBatch(shipped, payload, folder)


async def forget(landing: Path | None, step: int) -> None:
    """The batch is trained: its payload is needed no more."""
    if landing is not None:
        await thread(shutil.rmtree, folder_of(landing, step), ignore_errors=True)


def folder_of(landing: Path, step: int) -> Path:
    return landing / f"{PREFIX}{step}"


def clear(landing: Path) -> None:
    """Remove what a trainer that was killed had taken. Blocks."""
    for folder in landing.glob(f"{PREFIX}*"):
        shutil.rmtree(folder)


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
