"""Decides when a segment can be removed: its writer is done with it, and every ref in it is released."""

from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache, partial

from ..errors import PayloadError
from ..records.payload import PayloadRef, SegmentName
from .reader import SegmentReader

_Writer = tuple[int, str]
"""A run's generation and a writer's name."""
_Order = tuple[int, int]
"""The incarnation and number of a segment: they order the segments of one writer."""


class LiveRefs:
    """The refs in use, and their bytes. Pure bookkeeping. A writer never returns to an older segment, so
    a ref in a newer segment closes all older ones. The newest segment of a writer stays, because the
    writer may still append to it, unless the writer is known to be gone."""

    def __init__(self) -> None:
        self._closed: set[str] = set()
        self._live: dict[str, set[int]] = {}
        self._newest: dict[_Writer, _Order] = {}
        self.num_bytes = 0

    def hold(self, ref: PayloadRef, *, closed: bool = False) -> bool:
        """Take a ref in use. Return True if it is the first of a newer segment: older segments may be
        unused now. `closed` says that the writer of its segment is gone."""
        if closed:
            self._closed.add(ref.segment)
        offsets = self._live.setdefault(ref.segment, set())
        if ref.offset in offsets:
            raise PayloadError(f"ref {ref} is already held")
        offsets.add(ref.offset)
        self.num_bytes += ref.length
        writer, order = _split(ref.segment)
        is_newest = order > self._newest.get(writer, (-1, -1))
        if is_newest:
            self._newest[writer] = order
        return is_newest

    def release(self, ref: PayloadRef) -> bool:
        """Give a ref back. Return True if its segment is unused now."""
        offsets = self._live.get(ref.segment, set())
        if ref.offset not in offsets:
            raise PayloadError(f"ref {ref} is released but not held")
        offsets.remove(ref.offset)
        self.num_bytes -= ref.length
        if not offsets:
            del self._live[ref.segment]
        return self.is_unused(ref.segment)

    def is_unused(self, segment: str) -> bool:
        """Return whether no ref of this segment is in use and its writer has moved to a newer one."""
        writer, order = _split(segment)
        is_closed = segment in self._closed or order < self._newest.get(writer, (0, 0))
        return segment not in self._live and is_closed

    def unused(self, files: Iterable[str]) -> list[str]:
        """Return those of `files` that are segments and may be removed. Some never had a ref: a worker
        may die, or its rollout be cancelled, after the write and before the ref is sent."""
        return [file for file in files if _parse(file) and self.is_unused(file)]


@lru_cache(1 << 14)
def _parse(file: str) -> SegmentName | None:
    return SegmentName.parse(file)


def _split(segment: str) -> tuple[_Writer, _Order]:
    name = _parse(segment)
    if name is None:
        raise PayloadError(f"'{segment}' is not the name of a segment")
    return (name.generation, name.writer), (name.incarnation, name.number)


Attempt = Callable[[str, Callable[[], None]], Awaitable[object]]
"""Makes a call that blocks. The text says what the call does."""


class SegmentKeeper:
    """Keeps the segments of a payload directory whose refs are in use, and removes the others. A segment
    that `attempt` did not remove is looked at again when a writer begins its next one."""

    def __init__(self, reader: SegmentReader, attempt: Attempt) -> None:
        self._reader = reader
        self._attempt = attempt
        self._live = LiveRefs()
        self._num_new = 0
        """Segments that began since all were looked at."""
        self._num_found = 0

    async def hold(self, ref: PayloadRef) -> None:
        """Take a ref in use. If it is the first of a new segment, remove older ones that are unused. All
        are looked at once a quarter as many are new, because there may be thousands."""
        if not self._live.hold(ref):
            return
        self._num_new += 1
        if 4 * self._num_new < self._num_found:
            return
        found: list[str] = []
        list_all = self._reader.segments
        await self._attempt("Listing the payload", lambda: found.extend(list_all()))
        self._num_new, self._num_found = 0, len(found)
        for segment in self._live.unused(found):
            await self._remove(segment)

    async def _remove(self, segment: str) -> None:
        remove = partial(self._reader.remove, segment)
        await self._attempt("Removing payload that was trained", remove)

    def hold_old(self, ref: PayloadRef) -> None:
        """Take a ref in use whose writer is gone."""
        self._live.hold(ref, closed=True)

    async def release(self, refs: Iterable[PayloadRef]) -> None:
        for ref in refs:
            if self._live.release(ref):
                await self._remove(ref.segment)
