"""What a process writes into its log of rollouts that failed."""

import logging
from collections import Counter

from ..loop.seldom import is_news
from ..records.ids import RolloutId
from ..records.rollout import Failed

log = logging.getLogger(__name__)

IN_FULL = 10


class FailureLog:
    """The first failures of a boundary in full, then ever fewer: a log stays readable and bounded."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def add(self, id: RolloutId, failed: Failed, whose: str) -> None:
        """`whose` says which attempt of what it was."""
        self._seen[failed.boundary] += 1
        count = self._seen[failed.boundary]
        if count <= IN_FULL or is_news(count - 1, count):
            traceback = f"\n{failed.traceback}" if failed.traceback else ""
            log.warning(
                "%s failed: boundary %s (number %d), %s: %s%s",
                id, failed.boundary, count, whose, failed.error, traceback,
            )  # fmt: skip
