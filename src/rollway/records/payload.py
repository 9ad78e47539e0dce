"""A handle on a rollout's columns: where they lie, never the bytes."""

from typing import Annotated

from msgspec import Meta, Struct

from .ids import FILE_PATTERN, Natural


class PayloadRef(Struct, frozen=True):
    """`length` bytes at `offset` of the file `segment` in the payload directory.

    The segment is empty while the bytes travel beside the ref as a raw frame.
    """

    segment: Annotated[str, Meta(pattern=FILE_PATTERN)]
    offset: Natural
    length: Natural

    @property
    def is_frame(self) -> bool:
        """Whether the bytes travel beside this ref as a raw frame, and are not yet in a file."""
        return not self.segment


def frame_ref(length: int) -> PayloadRef:
    """Return a ref for bytes that travel beside it as a raw frame."""
    return PayloadRef("", 0, length)
