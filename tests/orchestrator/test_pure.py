"""Credit, filters and packing."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rollway.orchestrator.batching.packing import pack
from rollway.orchestrator.credit.grpo import advantages
from rollway.orchestrator.filters.zero_advantage import is_flat

rewards = st.lists(st.floats(-1e3, 1e3), max_size=32)


@given(rewards)
def test_advantages_sum_to_zero_and_keep_order(values: list[float]) -> None:
    credit = advantages(values)
    assert len(credit) == len(values)
    assert math.isclose(math.fsum(credit), 0, abs_tol=1e-9 * (1 + sum(map(abs, values))))
    ordered = [credit for _, credit in sorted(zip(values, credit, strict=True))]
    assert ordered == sorted(ordered), "a better reward is never worth less"


@given(st.floats(-10, 10), st.integers(1, 16))
def test_equal_rewards_are_flat(value: float, count: int) -> None:
    assert is_flat(advantages([value] * count))
    assert not is_flat(advantages([value] * count + [value + 1]))


@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 2048))
def test_packing_places_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(index for one in bins for index in one) == list(range(len(lengths)))
    for one in bins:
        assert len(one) == 1 or sum(lengths[index] for index in one) <= budget
    half_full = sum(sum(lengths[i] for i in one) * 2 <= budget for one in bins)
    assert half_full <= 1, "two bins that fit into one were left apart"
