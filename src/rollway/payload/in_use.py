"""When a segment can go: it is closed, and every ref in it is released. Pure bookkeeping."""

import re
from collections.abc import Iterable

from ..errors import PayloadError
from ..loop.lanes.lanes import thread
from ..records.payload import PayloadRef
from .store import PayloadSource

Order = tuple[int, int]
"""Of a writer's segments: incarnation, number."""
_NAME = re.compile(r"(.+)\.(\d+)-(\d+)\.seg")


class LiveRefs:
    """The refs in use, and their bytes.

    A writer never returns to an older segment, so a ref in a newer one closes those before it. The
    newest segment of a writer stays: it may be written to, unless its writer is known to be gone.
    """

    def __init__(self) -> None:
        self._closed: set[str] = set()
        self._live: dict[str, set[int]] = {}
        self._newest: dict[str, Order] = {}
        self.num_bytes = 0

    def hold(self, ref: PayloadRef, *, closed: bool = False) -> bool:
        """Take a ref in use; True if it is the first of a newer segment: others may be unused now.
        `closed` says that nobody writes to its segment any more."""
        if closed:
            self._closed.add(ref.segment)
        offsets = self._live.setdefault(ref.segment, set())
        if ref.offset in offsets:
            raise PayloadError(f"ref {ref} is held already")
        is_first = not offsets
        offsets.add(ref.offset)
        self.num_bytes += ref.length
        return is_first and self._is_news(ref.segment)

    def release(self, ref: PayloadRef) -> bool:
        """Give a ref back; True if its segment is unused now."""
        offsets = self._live.get(ref.segment, set())
        if ref.offset not in offsets:
            raise PayloadError(f"ref {ref} is released but not held")
        offsets.remove(ref.offset)
        self.num_bytes -= ref.length
        if not offsets:
            del self._live[ref.segment]
        return self.is_unused(ref.segment)

    def is_unused(self, segment: str) -> bool:
        """Whether nobody reads this segment, and its writer has gone on to a newer one."""
        writer, order = _split(segment)
        is_closed = segment in self._closed or order < self._newest.get(writer, (0, 0))
        return segment not in self._live and is_closed

    def unused(self, segments: Iterable[str]) -> list[str]:
        """Those of all segments there are that may be removed, also such that never had a ref: a
        worker may die, or its rollout be cancelled, between writing and saying so."""
        return [one for one in segments if _NAME.fullmatch(one) and self.is_unused(one)]

    def _is_news(self, segment: str) -> bool:
        writer, order = _split(segment)
        if writer in self._newest and order <= self._newest[writer]:
            return False
        self._newest[writer] = order
        return True


def _split(segment: str) -> tuple[str, Order]:
    """`w0.1-0003.seg` → worker `w0`, and third segment of its first restart as something to order by."""
    found = _NAME.fullmatch(segment)
    if found is None:
        raise PayloadError(f"'{segment}' is not the name of a segment")
    return found[1], (int(found[2]), int(found[3]))


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
