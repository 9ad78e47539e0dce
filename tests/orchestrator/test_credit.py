"""Advantages, the length penalty and the zero-advantage filter, as properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.orchestrator.core.batches.closer import is_flat
from rollway.orchestrator.core.batches.credit import BASELINES, grpo, penalise_length

rewards = st.lists(st.floats(-1e3, 1e3), max_size=32)


@pytest.mark.parametrize("name", BASELINES)
@given(values=rewards)
def test_advantages_sum_to_zero_and_keep_order(name: str, values: list[float]) -> None:
    credit = BASELINES[name](values)
    assert len(credit) == len(values)
    assert math.isclose(math.fsum(credit), 0, abs_tol=1e-9 * (1 + sum(map(abs, values))))
    ordered = [credit for _, credit in sorted(zip(values, credit, strict=True))]
    assert ordered == sorted(ordered), "a better reward is never worth less"


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_baselines_are_what_they_say(values: list[float]) -> None:
    for index, advantage in enumerate(BASELINES["rloo"](values)):
        others = values[:index] + values[index + 1 :]
        assert math.isclose(
            advantage, values[index] - sum(others) / len(others), abs_tol=1e-9
        )
    if max(values) - min(values) > 1e-3:
        spread = BASELINES["grpo_std"](values)
        assert math.isclose(
            sum(advantage * advantage for advantage in spread) / len(spread), 1
        )
        assert math.isclose(max(map(abs, BASELINES["grpo_max"](values))), 1)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.integers(1, 500)), max_size=16
    ),
    st.floats(0, 1),
)
def test_only_right_answers_pay_for_their_length(
    group: list[tuple[float, int]], weight: float
) -> None:
    values, lengths = [reward for reward, _ in group], [length for _, length in group]
    worth = penalise_length(values, lengths, weight, correct_at=1.0)
    right = [index for index, value in enumerate(values) if value >= 1.0]
    for index, value in enumerate(values):
        assert value - weight - 1e-12 <= worth[index] <= value
        assert index in right or worth[index] == value
    for a in right:
        for b in right:
            if values[a] == values[b] and lengths[a] <= lengths[b]:
                assert worth[a] >= worth[b]


@given(st.floats(-10, 10), st.integers(1, 16))
def test_equal_rewards_are_flat(value: float, count: int) -> None:
    assert is_flat(grpo([value] * count))
    assert not is_flat(grpo([value] * count + [value + 1]))
