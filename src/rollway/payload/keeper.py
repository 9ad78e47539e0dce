"""Keeps segments for as long as anybody holds a ref in them, and not longer."""

from collections.abc import Iterable

from ..loop.lanes import thread
from ..records.payload import PayloadRef
from .release import LiveRefs
from .store import PayloadSource


class SegmentKeeper:
    """The refs of one payload directory that are in use; unused segments go, in the thread lane."""

    def __init__(self, source: PayloadSource) -> None:
        self._source = source
        self._live = LiveRefs()

    async def hold(self, ref: PayloadRef) -> None:
        """Take a ref in use. If its writer has begun a new segment with it, what that closed and nobody
        uses goes."""
        if self._live.hold(ref):
            for segment in self._live.unused(await thread(self._source.segments)):
                await thread(self._source.remove, segment)

    def hold_old(self, ref: PayloadRef) -> None:
        """Take a ref in use whose writer is gone."""
        self._live.hold(ref, closed=True)

    async def release(self, refs: Iterable[PayloadRef]) -> None:
        """Nobody will read these any more."""
        for ref in refs:
            if self._live.release(ref):
                await thread(self._source.remove, ref.segment)
