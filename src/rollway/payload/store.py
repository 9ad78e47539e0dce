"""What a place for payload offers: to the worker that writes, to whoever reads.

Two exist. *Files* (`SegmentWriter`): worker, orchestrator and trainer share a file system. *Frames*
(`FrameStore`): they do not, and a blob travels beside its Settled to the client, which writes it to a
segment of its own. Either way readers find segments (`SegmentReader`).
"""

from typing import Protocol

from ..records.payload import PayloadRef
from .blob import Blob, Columns


class PayloadStore(Protocol):
    """The worker's side. A ref is returned only once its bytes no longer need the rollout."""

    async def append(self, blob: Blob) -> PayloadRef:
        """Keep a blob; waits while the store is at its bound, PayloadError if it cannot."""
        ...

    def frame_of(self, ref: PayloadRef) -> memoryview | None:
        """The bytes that must travel with a ref, once; None if the ref is enough."""
        ...

    def taken(self, num_bytes: int) -> None:
        """The receiver has these bytes: as many may follow."""
        ...


class PayloadSource(Protocol):
    """The reader's side. A ref can be opened until its segment is removed."""

    def open(self, ref: PayloadRef) -> Columns:
        """The columns, as views."""
        ...

    def verify(self, ref: PayloadRef) -> None:
        """Raise PayloadError unless the bytes are those that were written."""
        ...

    def forget(self) -> None:
        """Let go of what is mapped."""
        ...

    def segments(self) -> list[str]:
        """The names of all segments there are."""
        ...

    def remove(self, segment: str) -> None:
        """Nobody will open a ref of this segment any more."""
        ...
