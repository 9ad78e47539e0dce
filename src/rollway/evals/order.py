"""Which rollouts of a task are to run, and which of them together. Pure."""

from collections.abc import Mapping

from .result import Key, Result


def is_done(result: Result | None) -> bool:
    """One that failed runs again."""
    return result is not None and result.error is None


def orders(
    position: int, num_rollouts: int, known: Mapping[Key, Result], *, whole_groups: bool
) -> list[tuple[int, ...]]:
    """The rollouts of the task at `position` that are missing, each sent by itself; or, where an
    environment needs all rollouts of a task together, all of them once more if any is missing."""
    missing = [n for n in range(num_rollouts) if not is_done(known.get((position, n)))]
    if whole_groups:
        return [tuple(range(num_rollouts))] if missing else []
    return [(n,) for n in missing]
