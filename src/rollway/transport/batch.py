"""A batch as a trainer gets it, and the two ends of a transport: `BatchSender` and `Batches`."""

from pathlib import Path
from typing import Protocol, Self

import msgspec
from crc32c import crc32c
from msgspec import Struct
from msgspec.structs import replace

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
    """The rows of one optimizer step. `manifest()` lists them, `reader()` opens their columns. A batch
    holds its manifest encoded, so that it can be passed to another process at little cost."""

    step: Step
    """The step that this batch is trained in, from 1."""
    encoded: bytes
    """The manifest as JSON."""
    payload: str
    """The folder with the segments that hold the columns."""
    ready_s: float
    """When the batch was complete, as `time.time()`."""
    landed: tuple[PayloadRef, ...] | None = None
    """New refs for `manifest().refs`, in the same order, if the payload was sent to the trainer."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that training this batch makes."""
        return PolicyVersion(self.step)

    @property
    def checksum(self) -> int:
        """The checksum of the manifest. Batches of a step with the same checksum are the same batch."""
        return crc32c(self.encoded)

    def manifest(self) -> BatchManifest:
        """Decode the manifest: the rows with their advantages, and the micro-batches of each rank. A ref
        in it names a segment in the folder `payload`."""
        manifest = decode_manifest(self.encoded, f"of step {self.step}")
        if self.landed is None:
            return manifest
        landed = dict(zip(manifest.refs, self.landed, strict=True))
        rows = [replace(row, ref=landed[row.ref]) for row in manifest.rows]
        return replace(manifest, rows=tuple(rows))

    def reader(self) -> SegmentReader:
        """Return a reader of the payload. Its `row(row)` returns the columns of a row of the manifest:
        views of mapped files, valid until the version of this batch is published."""
        return SegmentReader(Path(self.payload))


class BatchSender(Protocol):
    """The orchestrator's end of a transport: ships batches, and waits for their versions."""

    address: str
    """The address at which a trainer connects; empty if it finds batches in the run directory."""

    async def serve(self) -> None:
        """Serve the trainer until cancelled. Returns at once if there is nothing to serve."""
        ...

    async def ship(self, manifest: BatchManifest) -> None:
        """Hand a batch to the trainer. Once this returns, the batch survives this process."""
        ...

    async def wait_for_version(self, version: PolicyVersion) -> Published:
        """Wait until the weights of `version` are complete. Their record then survives this process."""
        ...


class Batches(Protocol):
    """The trainer's end of a transport: yields batches in order, until the run's last step."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Batch: ...

    async def publish(self, published: Published) -> None:
        """Report that the weights of a step are complete in `published.path`, where the engine can read
        them. Once the run has recorded the version, the payload of its batch may be removed."""
        ...
