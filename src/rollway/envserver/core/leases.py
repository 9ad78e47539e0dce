"""Who was heard of when. Pure: time comes in by `tick`."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_GAP_S = 1.0
"""More between two ticks means that whoever listens was deaf itself: nobody's silence counts then."""


class Leases(Generic[K]):
    """Each is renewed whenever its holder is heard."""

    def __init__(self) -> None:
        self._heard_s: dict[K, float] = {}
        self._now_s = 0.0

    def tick(self, now_s: float) -> None:
        deaf_s = now_s - self._now_s - MAX_GAP_S
        if deaf_s > 0:
            self._heard_s = {one: heard_s + deaf_s for one, heard_s in self._heard_s.items()}
        self._now_s = now_s

    def renew(self, one: K) -> None:
        self._heard_s[one] = self._now_s

    def end(self, one: K) -> None:
        self._heard_s.pop(one, None)

    def silence_s(self, one: K) -> float:
        return self._now_s - self._heard_s[one]

    def silent(self, limit_s: float) -> list[K]:
        """Those not heard of for longer than the limit."""
        return [one for one in self._heard_s if self.silence_s(one) > limit_s]

    def heard_within(self, limit_s: float) -> list[K]:
        return [one for one in self._heard_s if self.silence_s(one) <= limit_s]
