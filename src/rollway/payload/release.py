"""When a segment can go: it is closed, and every ref in it is released. Pure bookkeeping."""

from ..errors import PayloadError
from ..records.payload import PayloadRef


class LiveRefs:
    """The refs in use, and their bytes. `hold` and `release` return segments that may be removed.

    A writer never returns to an older segment, so a ref in a newer one closes those before it.
    """

    def __init__(self) -> None:
        self._live: dict[str, set[int]] = {}
        self.num_bytes = 0

    def hold(self, ref: PayloadRef) -> list[str]:
        """Take a ref in use; segments it shows to be closed and empty are returned."""
        offsets = self._live.setdefault(ref.segment, set())
        if ref.offset in offsets:
            raise PayloadError(f"ref {ref} is held already")
        offsets.add(ref.offset)
        self.num_bytes += ref.length
        writer, number = _split(ref.segment)
        older = [
            segment for segment, live in self._live.items()
            if not live and _split(segment)[0] == writer and _split(segment)[1] < number
        ]  # fmt: skip
        for segment in older:
            del self._live[segment]
        return older

    def release(self, ref: PayloadRef) -> list[str]:
        """Give a ref back; its segment is returned if that was its last and a newer one is in use."""
        offsets = self._live.get(ref.segment, set())
        if ref.offset not in offsets:
            raise PayloadError(f"ref {ref} is released but not held")
        offsets.remove(ref.offset)
        self.num_bytes -= ref.length
        writer, number = _split(ref.segment)
        newer = any(
            _split(segment)[0] == writer and _split(segment)[1] > number for segment in self._live
        )
        if offsets or not newer:
            return []
        del self._live[ref.segment]
        return [ref.segment]


def _split(segment: str) -> tuple[str, tuple[int, int]]:
    """`w0.1-0003.seg` → worker `w0`, and third segment of its first restart as something to order by."""
    writer, _, number = segment.removesuffix(".seg").rpartition("-")
    worker, _, incarnation = writer.rpartition(".")
    return worker, (int(incarnation), int(number))
