"""A handle on a rollout's columns: where they lie, never the bytes."""

from typing import Annotated

from msgspec import Meta, Struct

from .ids import FILE_PATTERN, Natural


class PayloadRef(Struct, frozen=True):
    """`length` bytes at `offset` of the file `segment` in the payload directory."""

    segment: Annotated[str, Meta(pattern=FILE_PATTERN)]
    offset: Natural
    length: Natural
