"""Rows into micro-batches of the trainer's ranks: balanced by cost, every rank as many as any other."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heapreplace

from ....records.batch import BatchManifest, BatchRow
from ....records.group import ClosedGroup
from ....records.ids import PolicyVersion, Step

MicroBatch = tuple[int, ...]

ATTENTION_TOKENS = 24_000
"""A row of so many tokens costs as much in attention as in all else: six times a width of 4,000."""


def cost(num_tokens: int) -> float:
    """What a row takes to train: linear in its tokens, and quadratic where it attends to itself."""
    return num_tokens * (1 + num_tokens / ATTENTION_TOKENS)


def plan_ranks(lengths: Sequence[int], budget: int, ranks: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """For each rank its micro-batches, as indices of `lengths`. Every index appears exactly once.

    All ranks have as many micro-batches, so that what they do together lines up: one with fewer splits
    some, and one that has fewer rows than that gets empty ones at its end. No rank is without a row as
    long as there is one for each.
    """
    packed = [_pack(lengths, rows, budget) for rows in _shares(lengths, range(len(lengths)), ranks)]
    count = max(len(bins) for bins in packed)
    return tuple(_spread(lengths, bins, count) for bins in packed)


def _shares(lengths: Sequence[int], rows: Sequence[int], num_shares: int) -> list[list[int]]:
    """Rows in shares of about the same cost: the costliest first, each to the share with least."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    least_first = [(0.0, share) for share in range(num_shares)]
    for row in _costliest_first(lengths, rows):
        so_far, share = least_first[0]
        shares[share].append(row)
        heapreplace(least_first, (so_far + cost(lengths[row]), share))
    return shares


def _pack(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of at most `budget` tokens, longest row first, each to the fullest bin that has room for it;
    a row longer than that gets a bin of its own."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for row in _costliest_first(lengths, rows):
        at = bisect_left(room, (lengths[row], 0))
        if at < len(room):
            free, place = room.pop(at)
            bins[place].append(row)
        else:
            free, place = budget, len(bins)
            bins.append([row])
        insort(room, (free - lengths[row], place))
    return bins


def _spread(lengths: Sequence[int], bins: list[list[int]], count: int) -> tuple[MicroBatch, ...]:
    """The same rows in `count` bins: the costliest that can be are halved, the rest is padding."""
    while len(bins) < count and any(len(one) > 1 for one in bins):
        costliest = max(
            (one for one in bins if len(one) > 1), key=lambda one: sum(cost(lengths[row]) for row in one)
        )
        bins.remove(costliest)
        bins += _shares(lengths, costliest, 2)
    padding: list[list[int]] = [[]] * (count - len(bins))
    return tuple(tuple(sorted(one)) for one in bins + padding)


def _costliest_first(lengths: Sequence[int], rows: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def plan_batch(
    step: Step, groups: Iterable[ClosedGroup], micro_batch_tokens: int, ranks: int = 1
) -> BatchManifest:
    """Rows of `groups`, in order, with each rollout's advantage on all its rows, packed for `ranks`."""
    rows = tuple(
        BatchRow(
            rollout_id=member.rollout_id,
            ref=member.scored.ref,
            row=index,
            num_tokens=row.num_tokens,
            num_trainable=row.num_trainable,
            advantage=advantage,
        )
        for one in groups
        for member, advantage in zip(one.group.members, one.advantages, strict=True)
        if member.rollout_id not in one.left_out
        for index, row in enumerate(member.scored.rows)
    )
    return BatchManifest(
        step=step,
        trains_version=PolicyVersion(step - 1),
        rows=rows,
        ranks=plan_ranks([row.num_tokens for row in rows], micro_batch_tokens, ranks),
    )
