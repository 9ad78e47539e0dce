"""Groups whose rollouts are all worth the same teach nothing."""

from collections.abc import Sequence

TINY = 1e-9


def is_flat(advantages_G: Sequence[float]) -> bool:
    """Whether no advantage differs from zero."""
    return all(abs(advantage) < TINY for advantage in advantages_G)
