"""Handles on a rollout's columns: which segment they lie in, and how segments are named."""

import re
from typing import Annotated

from msgspec import Meta, Struct, structs

from .ids import FILE_PATTERN, Natural

_NAME = re.compile(r"(?:r([1-9]\d*)\.)?(.+)\.(\d+)-(\d+)\.seg")


class PayloadRef(Struct, frozen=True):
    """`length` bytes at `offset` of the file `segment` in the payload directory. The segment is empty
    while the bytes travel beside the ref as a raw frame."""

    segment: Annotated[str, Meta(pattern=FILE_PATTERN)]
    offset: Natural
    length: Natural

    @property
    def is_frame(self) -> bool:
        return not self.segment


def frame_ref(length: int) -> PayloadRef:
    return PayloadRef("", 0, length)


class SegmentName(Struct, frozen=True):
    """The name of a segment file. `r2.env.w0.1-0003.seg` is segment 3 that worker `env.w0` wrote after
    its first restart, in a run that was resumed twice. Other runs have no `r2.` prefix."""

    writer: str
    incarnation: int
    number: int = 0
    generation: int = 0

    def __str__(self) -> str:
        return f"{self.owner}-{self.number:04d}.seg"

    @property
    def owner(self) -> str:
        """How the names of all segments of this writer begin, since it was last started."""
        prefix = f"r{self.generation}." if self.generation else ""
        return f"{prefix}{self.writer}.{self.incarnation}"

    def following(self) -> "SegmentName":
        return structs.replace(self, number=self.number + 1)

    @classmethod
    def parse(cls, text: str) -> "SegmentName | None":
        """Return the parts of a file name, or None if it is not the name of a segment."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        generation, writer, incarnation, number = found.groups()
        return cls(writer, int(incarnation), int(number), int(generation or 0))
