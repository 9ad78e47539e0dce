"""Where a running rollout is, for whoever asks what a step is waiting for."""

import heapq
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...records.ids import RolloutId
from ...wire.messages import Phase, RolloutProgress

MAX_TOLD = 256
"""Rollouts in one Progress: those that are longest in their phase."""


class Track:
    """One rollout's phase and how far it got. Whoever runs it says so as it goes."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.since_s = time.monotonic()
        self.num_turns = 0
        self.num_tokens = 0

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since_s = time.monotonic()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """In a phase for the length of the block, then back in the one before."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before if before != phase else "env")

    def turned(self, num_tokens: int) -> None:
        """The policy has answered with so many tokens."""
        self.num_turns += 1
        self.num_tokens += num_tokens


def progress(tracks: Iterable[tuple[RolloutId, Track]]) -> tuple[RolloutProgress, ...]:
    """What is worth telling, the longest in their phase first."""
    now_s = time.monotonic()
    oldest = heapq.nsmallest(MAX_TOLD, tracks, key=lambda one: one[1].since_s)
    return tuple(
        RolloutProgress(id, track.phase, now_s - track.since_s, track.num_turns, track.num_tokens)
        for id, track in oldest
    )
