"""Micro-batches of the trainer's ranks: every row once, whole, and about as much for each rank."""

from hypothesis import given
from hypothesis import strategies as st

from rollway.orchestrator.core.batches.packing import (
    ATTENTION_TOKENS,
    at_once,
    cost,
    plan_ranks,
)

LENGTHS = st.lists(st.integers(1, 60_000) | st.integers(1, 300), max_size=60)
BUDGET = st.integers(1, 40_000)
RANKS = st.integers(1, 9)


@given(LENGTHS, BUDGET, RANKS)
def test_every_row_trains_once_and_whole(lengths: list[int], budget: int, ranks: int) -> None:
    planned = at_once(plan_ranks(lengths, budget, ranks))
    assert len(planned) == ranks
    placed = [row for rank in planned for micro_batch in rank for row in micro_batch]
    assert sorted(placed) == list(range(len(lengths)))


@given(LENGTHS, BUDGET, RANKS)
def test_a_micro_batch_keeps_the_budget_unless_one_row_is_larger(
    lengths: list[int], budget: int, ranks: int
) -> None:
    for rank in at_once(plan_ranks(lengths, budget, ranks)):
        for rows in rank:
            assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget


@given(LENGTHS, BUDGET, RANKS)
def test_ranks_line_up_and_none_is_starved(
    lengths: list[int], budget: int, ranks: int
) -> None:
    planned = at_once(plan_ranks(lengths, budget, ranks))
    assert len({len(rank) for rank in planned}) == 1, "as many micro-batches for each"
    counts = [sum(len(rows) for rows in rank) for rank in planned]
    if len(lengths) >= ranks:
        assert all(counts)
    for rank, num_rows in zip(planned, counts, strict=True):
        padding = [rows for rows in rank if not rows]
        assert rank[len(rank) - len(padding) :] == tuple(padding), "padding stands at the end"
        if padding:
            assert num_rows == len(rank) - len(padding), (
                "no padding where a micro-batch could be split"
            )


@given(LENGTHS.filter(bool), BUDGET, RANKS)
def test_no_rank_has_much_more_to_do_than_it_must(
    lengths: list[int], budget: int, ranks: int
) -> None:
    """The costliest rank is within 4/3 of the best there can be, whatever that is."""
    costs = [cost(length) for length in lengths]
    worst = max(
        sum(costs[row] for rows in rank for row in rows)
        for rank in at_once(plan_ranks(lengths, budget, ranks))
    )
    assert worst <= sum(costs) / ranks + max(costs) + 1e-6
    if len(lengths) <= 2 * ranks:  # then the best is known: the longest with the shortest
        ordered = sorted(costs, reverse=True)
        pairs = [
            ordered[at]
            + (ordered[2 * ranks - 1 - at] if 2 * ranks - 1 - at < len(ordered) else 0)
            for at in range(min(ranks, len(ordered)))
        ]
        assert worst <= 4 / 3 * max(pairs) + 1e-6


@given(LENGTHS, BUDGET)
def test_one_rank_packs_tightly(lengths: list[int], budget: int) -> None:
    (bins,) = at_once(plan_ranks(lengths, budget, 1))
    half_full = sum(sum(lengths[row] for row in rows) * 2 <= budget for rows in bins)
    assert half_full <= 1, "two bins that fit into one were left apart"
    assert all(bins), "one rank needs no padding"


def test_attention_counts() -> None:
    """One long row weighs as much as several short ones with more tokens together."""
    assert cost(ATTENTION_TOKENS) == 2 * ATTENTION_TOKENS
    lengths = [ATTENTION_TOKENS, *[ATTENTION_TOKENS // 24] * 46]
    long, short = at_once(plan_ranks(lengths, ATTENTION_TOKENS, 2))
    tokens = [sum(lengths[row] for rows in rank for row in rows) for rank in (long, short)]
    assert tokens[1] > 1.5 * tokens[0]


def test_fewer_rows_than_ranks_are_padded() -> None:
    assert at_once(plan_ranks([5, 3], 10, 4)) == (((0,),), ((1,),), ((),), ((),))
    assert at_once(plan_ranks([], 10, 2)) == ((), ())
    assert at_once(plan_ranks([9_000, 4, 4, 4], 4, 2)) == (((0,), (), ()), ((1,), (2,), (3,)))
