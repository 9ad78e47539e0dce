"""Stalls summed by the place that caused them."""

from ..records.lag import Stall

MAX_PLACES = 100
ELSEWHERE = "(other places)"

_Place = tuple[str, str, str, str]


def total(a: Stall, b: Stall) -> Stall:
    """Two sums of the same place as one."""
    return Stall(
        where=a.where,
        function=a.function,
        count=a.count + b.count,
        total_s=a.total_s + b.total_s,
        longest_s=max(a.longest_s, b.longest_s),
        kind=a.kind,
        call=a.call,
    )


class Culprits:
    """One sum for each place; places beyond the hundredth share one, so nothing is lost or grows."""

    def __init__(self) -> None:
        self._by_place: dict[_Place, Stall] = {}

    def add(self, stall: Stall) -> Stall:
        """Count a stall; returns its place's sum."""
        place = _place(stall)
        if place not in self._by_place and len(self._by_place) >= MAX_PLACES:
            stall = Stall(ELSEWHERE, "", stall.count, stall.total_s, stall.longest_s, stall.kind)
            place = _place(stall)
        old = self._by_place.get(place)
        self._by_place[place] = total(old, stall) if old else stall
        return self._by_place[place]

    def seen(self) -> tuple[Stall, ...]:
        """All sums, the longest total first."""
        return tuple(sorted(self._by_place.values(), key=lambda one: (-one.total_s, one.where)))

    def take(self) -> tuple[Stall, ...]:
        """All sums since the last call."""
        seen, self._by_place = self.seen(), {}
        return seen


def _place(stall: Stall) -> _Place:
    return stall.kind, stall.where, stall.function, stall.call
