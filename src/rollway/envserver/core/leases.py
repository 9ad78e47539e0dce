"""Notes when peers were last heard. Pure: time comes in by `tick`."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)

MAX_GAP_S = 1.0
"""If two ticks are further apart than this, the router itself did not run. The time beyond this does
not count as silence of its peers."""


class Leases(Generic[Holder]):
    """A lease is renewed whenever its holder is heard."""

    def __init__(self) -> None:
        self._heard_s: dict[Holder, float] = {}
        self._now_s = 0.0

    def tick(self, now_s: float) -> None:
        deaf_s = now_s - self._now_s - MAX_GAP_S
        if deaf_s > 0:
            for holder in self._heard_s:
                self._heard_s[holder] += deaf_s
        self._now_s = now_s

    def renew(self, holder: Holder) -> None:
        self._heard_s[holder] = self._now_s

    def end(self, holder: Holder) -> None:
        self._heard_s.pop(holder, None)

    def silence_s(self, holder: Holder) -> float:
        return self._now_s - self._heard_s[holder]

    def silent(self, limit_s: float) -> list[Holder]:
        return [holder for holder in self._heard_s if self.silence_s(holder) > limit_s]

    def heard_within(self, limit_s: float) -> list[Holder]:
        return [holder for holder in self._heard_s if self.silence_s(holder) <= limit_s]
