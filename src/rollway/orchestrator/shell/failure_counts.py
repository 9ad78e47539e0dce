"""Counts failed rollouts by cause."""

from collections import Counter, defaultdict

from ...records.rollout import Failed

MAX_KINDS = 100
"""Causes that are told apart, for each environment. Further ones share a count."""
OTHER = "other"


class FailureCounts:
    """Knows for each environment how often rollouts failed, by cause, with the first failure of each."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._first: dict[tuple[str, str], Failed] = {}

    def add(self, env: str, failed: Failed) -> None:
        kind = self._kind(env, failed)
        self._counts[env][kind] += 1
        self._first.setdefault((env, kind), failed)

    def next_count(self, env: str, failed: Failed) -> int:
        """Return how many rollouts will have failed in this way once this one is counted."""
        return self._counts[env][self._kind(env, failed)] + 1

    def _kind(self, env: str, failed: Failed) -> str:
        counts, kind = self._counts[env], failed.kind
        return kind if kind in counts or len(counts) < MAX_KINDS else OTHER

    def total(self, env: str) -> int:
        return self._counts[env].total()

    def commonest(self, env: str) -> str:
        """Return the commonest failure of an environment with its count; empty if nothing failed."""
        for kind, count in self._counts[env].most_common(1):
            return f"{count} × {self._first[env, kind].text}"
        return ""
