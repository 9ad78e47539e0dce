"""What a trainer gets for one step: the manifest as it was shipped, and where its payload lies."""

from pathlib import Path
from typing import Protocol, Self

import msgspec
from crc32c import crc32c
from msgspec import Struct

from ..errors import UNREADABLE, PayloadError
from ..payload.reader import SegmentReader
from ..records.batch import BatchManifest
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..records.payload import PayloadRef

_decoder: msgspec.json.Decoder[BatchManifest] = msgspec.json.Decoder(BatchManifest)


def decode_manifest(encoded: bytes, where: str) -> BatchManifest:
    try:
        return _decoder.decode(encoded)
    except UNREADABLE as error:
        raise PayloadError(f"cannot read manifest {where}: {error}") from None


class Batch(Struct, frozen=True):
    """One step's rows. The manifest stays encoded on its way: only whoever trains decodes it."""

    step: Step
    encoded: bytes
    payload: str
    """Folder with the segments."""
    came_s: float
    """When it lay ready, as `time.time()`."""
    landed: tuple[PayloadRef, ...] | None = None
    """Where the manifest's blobs came to lie, if they were sent."""

    @property
    def version(self) -> PolicyVersion:
        """Of the weights that this batch is trained into."""
        return PolicyVersion(self.step)

    @property
    def checksum(self) -> int:
        """Two batches of a step with the same one are the same batch."""
        return crc32c(self.encoded)

    def manifest(self) -> BatchManifest:
        """Rows, advantages and packing; refs are those of segments in `payload`."""
        manifest = decode_manifest(self.encoded, f"of step {self.step}")
        if self.landed is None:
            return manifest
        moved = dict(zip(manifest.refs, self.landed, strict=True))
        rows = [msgspec.structs.replace(row, ref=moved[row.ref]) for row in manifest.rows]
        return msgspec.structs.replace(manifest, rows=tuple(rows))

    def reader(self) -> SegmentReader:
        """Opens rows: `reader.row(row)` gives views of its columns."""
        return SegmentReader(Path(self.payload))


class BatchSender(Protocol):
    """The orchestrator's side."""

    address: str
    """Where a trainer connects; empty if it finds batches in the run directory."""

    async def serve(self) -> None:
        """What has to run while batches are shipped; ends at once if that is nothing."""
        ...

    async def ship(self, manifest: BatchManifest) -> None:
        """Hand a batch to the trainer. Once this returns it outlives this process."""
        ...

    async def next_version(self, version: PolicyVersion) -> Published:
        """The record of `version`, once its weights are complete. It outlives this process."""
        ...


class Batches(Protocol):
    """The trainer's side: batches in order, until the run's last step."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Batch: ...

    async def publish(self, published: Published) -> None:
        """Say that the weights of a step lie complete in `published.path`, where the engine can read
        them. Returns once the run has noted it; the batch's payload may be gone then."""
        ...
