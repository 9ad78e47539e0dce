"""Packs the rows of a batch into micro-batches for the trainer's ranks, balanced by what they cost to
train."""

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, Sequence
from heapq import heapreplace
from typing import TypeVar

from ....records.batch import BatchManifest, BatchRow
from ....records.group import ClosedGroup
from ....records.ids import PolicyVersion, Step
from ....records.rollout import RowSummary

T = TypeVar("T")
Slices = Generator[None, None, T]
"""Work that yields now and then, so that its caller can do something else in between."""
SLICE = 128
"""Rows that are packed between two such moments: a fraction of a millisecond."""
Lengths = Sequence[int]
Rows = Sequence[int]
MicroBatches = tuple[tuple[int, ...], ...]

ATTENTION_TOKENS = 24_000
"""A row of this length costs as much in attention as in everything else: six times a width of 4,000."""


def at_once(slices: Slices[T]) -> T:
    """Do the work without a break."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: T = done.value
            return result


def cost(num_tokens: int) -> float:
    """Return what a row costs to train: linear in its tokens, plus the quadratic part of attention."""
    return num_tokens * (1 + num_tokens / ATTENTION_TOKENS)


def plan_ranks(lengths: Lengths, budget: int, ranks: int) -> Slices[tuple[MicroBatches, ...]]:
    """Return the micro-batches of each rank, as indices of `lengths`. Every index appears exactly once.

    All ranks get the same number of micro-batches, because they sum gradients together. A rank with
    fewer splits some of its own, and a rank with too few rows gets empty ones at the end. Every rank
    gets a row as long as there are enough rows.
    """
    shares = yield from _shares(lengths, range(len(lengths)), ranks)
    packed = []
    for rows in shares:
        packed.append((yield from _pack(lengths, rows, budget)))
    count = max(len(bins) for bins in packed)
    spread = []
    for bins in packed:
        spread.append((yield from _spread(lengths, bins, count)))
    return tuple(spread)


def _shares(lengths: Lengths, rows: Rows, num_shares: int) -> Slices[list[list[int]]]:
    """Split rows into shares of about the same cost: the costliest first, each to the cheapest share."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    cheapest_first = [(0.0, share) for share in range(num_shares)]
    for number, row in enumerate(_costliest_first(lengths, rows)):
        share_cost, share = cheapest_first[0]
        shares[share].append(row)
        heapreplace(cheapest_first, (share_cost + cost(lengths[row]), share))
        if not number % SLICE:
            yield
    return shares


def _pack(lengths: Lengths, rows: Rows, budget: int) -> Slices[list[list[int]]]:
    """Pack rows into bins of at most `budget` tokens: the longest row first, each into the fullest bin
    with room for it. A row that is longer than the budget gets a bin to itself."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for number, row in enumerate(_costliest_first(lengths, rows)):
        at = bisect_left(room, (lengths[row], 0))
        if at < len(room):
            free, place = room.pop(at)
            bins[place].append(row)
        else:
            free, place = budget, len(bins)
            bins.append([row])
        insort(room, (free - lengths[row], place))
        if not number % SLICE:
            yield
    return bins


def _spread(lengths: Lengths, bins: list[list[int]], count: int) -> Slices[MicroBatches]:
    """Spread the same rows over `count` bins: halve the costliest bins, then pad with empty ones."""

    def total_cost(rows: Rows) -> float:
        return sum(cost(lengths[row]) for row in rows)

    while len(bins) < count:
        yield
        splittable = [rows for rows in bins if len(rows) > 1]
        if splittable:
            costliest = max(splittable, key=total_cost)
            bins.remove(costliest)
            bins += yield from _shares(lengths, costliest, 2)
        else:
            bins.append([])
    return tuple(tuple(sorted(rows)) for rows in bins)


def _costliest_first(lengths: Lengths, rows: Rows) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def is_fresh(row: RowSummary, step: Step) -> bool:
    """Return whether the version that the step trains drew the row: then trainer and engine agree on its
    logprobs, but for rounding."""
    return row.version == step - 1 and not row.is_approximate


def plan_batch(
    step: Step, groups: Iterable[ClosedGroup], micro_batch_tokens: int, ranks: int = 1
) -> Slices[BatchManifest]:
    """Make the manifest of a step: all rows that train, with their advantages, and the packing."""
    rows: list[BatchRow] = []
    for closed in groups:
        yield
        rows += _rows_of(closed, step)
    lengths = [row.num_tokens for row in rows]
    planned = yield from plan_ranks(lengths, micro_batch_tokens, ranks)
    return BatchManifest(step, PolicyVersion(step - 1), tuple(rows), planned)


def _rows_of(closed: ClosedGroup, step: Step) -> Iterator[BatchRow]:
    for member, advantage in zip(closed.group.members, closed.advantages, strict=True):
        if member.rollout_id in closed.left_out:
            continue
        for index, row in enumerate(member.scored.rows):
            yield BatchRow(
                rollout_id=member.rollout_id,
                ref=member.scored.ref,
                row=index,
                num_tokens=row.num_tokens,
                num_trainable=row.num_trainable,
                advantage=advantage,
                engine=row.engine if is_fresh(row, step) else "",
                is_approximate=row.is_approximate,
            )
