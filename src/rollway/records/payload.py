"""A handle on a rollout's columns: where they lie, never the bytes."""

from msgspec import Struct


class PayloadRef(Struct, frozen=True):
    """`length` bytes at `offset` of the file `segment` in the payload directory."""

    segment: str
    offset: int
    length: int
