"""A batch on its way to the trainer: its manifest, and the blobs that have arrived."""

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
"""Folders whose names start with this may be removed: the trainer's end made them."""


class IncomingBatch:
    """Writes the blobs of a batch to `folder`. Without a folder no blobs are sent."""

    def __init__(self, shipped: ShippedBatch, payload: str, folder: Path | None) -> None:
        self.step = Step(shipped.step)
        self.checksum = crc32c(shipped.manifest)
        self._shipped = shipped
        self._payload = payload if folder is None else str(folder)
        self._writer = None if folder is None else SegmentWriter(folder, "in.0", SEGMENT_BYTES)
        self._landed: dict[int, PayloadRef] = {}

    @property
    def arrived(self) -> tuple[int, ...]:
        """The indices of the blobs that are written."""
        return tuple(self._landed)

    @property
    def is_complete(self) -> bool:
        return len(self._landed) == self._shipped.num_blobs

    async def write_blob(self, index: int, frame: memoryview) -> None:
        """Write a blob unchanged, in the thread lane. A blob that arrived before is dropped."""
        if index not in self._landed and self._writer is not None:
            self._landed[index] = await self._writer.append_whole(frame)

    def finish(self) -> Batch:
        """Return the batch, ready to be trained."""
        landed = None
        if self._writer is not None:
            self._writer.close()
            landed = tuple(ref for _, ref in sorted(self._landed.items()))
        return Batch(self.step, self._shipped.manifest, self._payload, time.time(), landed)


async def open_incoming(
    shipped: ShippedBatch, payload: str, landing: Path | None, current: IncomingBatch | None
) -> IncomingBatch:
    """Return the incoming batch for a manifest: `current` if it is the same batch, so that the transfer
    continues, else a new one with a new folder in `landing`."""
    if current is not None and current.checksum == crc32c(shipped.manifest):
        return current
    if landing is None:
        return IncomingBatch(shipped, payload, None)
    folder = _folder_of(landing, shipped.step)
    await thread(_make_empty, folder)
    return IncomingBatch(shipped, payload, folder)


async def remove_payload(landing: Path | None, step: int) -> None:
    """Remove the payload of a batch that is trained."""
    if landing is not None:
        await thread(shutil.rmtree, _folder_of(landing, step), ignore_errors=True)


def remove_leftovers(landing: Path) -> None:
    """Remove the payload that a killed trainer left. Blocks."""
    for folder in landing.glob(f"{PREFIX}*"):
        shutil.rmtree(folder)


def _folder_of(landing: Path, step: int) -> Path:
    return landing / f"{PREFIX}{step}"


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
