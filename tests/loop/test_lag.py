"""Lag statistics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.loop.watch.lag import GROWTH, MAX_TICKS, LagWindow, merge, summarise

lags = st.lists(st.floats(0, 10), min_size=1, max_size=200)


@given(lags, lags)
def test_merged_windows_equal_one_window(a: list[float], b: list[float]) -> None:
    merged, together = merge(summarise(a), summarise(b)), summarise(a + b)
    assert merged.buckets == together.buckets
    assert (merged.min, merged.max, merged.p99) == (together.min, together.max, together.p99)
    assert merged.mean == pytest.approx(together.mean)


@given(lags)
def test_quantiles_are_never_too_low_and_at_most_one_bucket_too_high(
    values: list[float],
) -> None:
    stats = summarise(values)
    ordered = sorted(values)
    true_p90 = ordered[-(-9 * len(ordered) // 10) - 1]
    assert true_p90 <= stats.p90 * (1 + 1e-9) + 1e-5
    assert stats.p90 <= max(true_p90, 1e-5) * GROWTH * (1 + 1e-9)


def test_a_window_without_ticks_is_zero() -> None:
    assert summarise([]).max == 0
    assert merge(summarise([]), summarise([1.0])).max == 1.0


def test_a_window_that_is_never_taken_does_not_grow() -> None:
    lags, window = [n / 1e4 for n in range(5 * MAX_TICKS // 2)], LagWindow()
    for lag in lags:
        window.add(lag)
    assert len(window._lags) < MAX_TICKS
    taken, together = window.take(), summarise(lags)
    assert (taken.buckets, taken.min, taken.max, taken.p90) == (
        together.buckets, together.min, together.max, together.p90
    )  # fmt: skip
    assert window.take().num_ticks == 0
