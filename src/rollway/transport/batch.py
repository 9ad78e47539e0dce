"""What a trainer gets for one step: the manifest as it was shipped, and where its payload lies."""

from pathlib import Path

import msgspec
from crc32c import crc32c
from msgspec import Struct

from ..errors import UNREADABLE, PayloadError
from ..payload.reader import SegmentReader
from ..records.batch import BatchManifest
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
