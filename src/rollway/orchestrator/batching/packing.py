"""Rows into micro-batches: first fit, longest first."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `lengths` in bins of at most `budget` tokens; a longer row gets a bin of its own.

    Every index appears exactly once.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = lengths[index]
        place = next((at for at, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(budget - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return tuple(tuple(sorted(one)) for one in bins)
