"""Statistics, compared with slow and obvious ways to compute the same."""

from itertools import combinations
from math import comb, isclose, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.evals.result import EvalFailure, RolloutResult
from rollway.evals.statistics import estimate, eval_metrics, pass_at, powers_of_two, summarise
from rollway.records.group import ClosedGroup, Group, Member
from rollway.records.ids import GroupId, PolicyVersion, RolloutId
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Failed, RowSummary, Scored, Timing

REWARDS = st.floats(-10, 10)


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return draw(st.integers(1, n)), n, draw(st.integers(0, n))


@given(counts())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(drawn: tuple[int, int, int]) -> None:
    k, n, passed = drawn
    samples = [index < passed for index in range(n)]
    share = sum(any(subset) for subset in combinations(samples, k)) / comb(n, k)
    assert isclose(pass_at(k, n, passed), share)


@given(counts())
def test_pass_at_k_grows_with_k_and_with_passes(drawn: tuple[int, int, int]) -> None:
    k, n, passed = drawn
    value = pass_at(k, n, passed)
    assert 0 <= value <= 1
    assert isclose(pass_at(1, n, passed), passed / n)
    assert pass_at(n, n, passed) == float(passed > 0)
    if k < n:
        assert pass_at(k + 1, n, passed) >= value
    if passed < n:
        assert pass_at(k, n, passed + 1) >= value


@given(st.lists(st.lists(REWARDS, max_size=5), max_size=8))
def test_an_estimate_is_the_mean_of_means(samples: list[list[float]]) -> None:
    means = [fmean(values) for values in samples if values]
    found = estimate(samples)
    if found is None:
        assert not means
        return
    assert found.num_tasks == len(means)
    assert isclose(found.mean, fmean(means), abs_tol=1e-9)
    if len(means) == 1:
        assert found.error is None
    else:
        assert isclose(found.error or 0.0, stdev(means) / sqrt(len(means)), abs_tol=1e-9)


@given(REWARDS, st.integers(2, 6), st.integers(1, 4))
def test_equal_tasks_have_no_standard_error(value: float, tasks: int, rollouts: int) -> None:
    found = estimate([[value] * rollouts] * tasks)
    assert found is not None
    assert isclose(found.mean, value, abs_tol=1e-9)
    assert isclose(found.error or 0.0, 0.0, abs_tol=1e-9)


def scored(position: int, rollout: int, reward: float, **more: object) -> RolloutResult:
    return RolloutResult(position=position, task=str(position), rollout=rollout, reward=reward,
                  rewards={"exact": reward}, **more)  # type: ignore[arg-type]  # fmt: skip


def failed(position: int, rollout: int, boundary: str) -> RolloutResult:
    return RolloutResult(
        position=position,
        task=str(position),
        rollout=rollout,
        error=EvalFailure(boundary, "no"),
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), REWARDS), unique_by=lambda r: r[:2]),
       st.randoms(use_true_random=False))  # fmt: skip
def test_the_order_of_results_does_not_matter(
    rows: list[tuple[int, int, float]], rng: object
) -> None:
    results = [scored(*row) for row in rows]
    shuffled = list(results)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    a, b = summarise(results, 1.0, 4), summarise(shuffled, 1.0, 4)
    assert (a.num_tasks, a.num_settled) == (b.num_tasks, b.num_settled)
    assert (a.reward is None) == (b.reward is None)
    if a.reward and b.reward:
        assert isclose(a.reward.mean, b.reward.mean, abs_tol=1e-9)
    assert set(a.pass_at) == set(b.pass_at)


def test_a_summary_of_everything() -> None:
    results = [
        scored(0, 0, 1.0, metrics={"len": 3.0}, stop="stop", num_turns=2, num_tokens=10),
        scored(0, 1, 0.0, metrics={"len": 5.0}, stop="length", num_turns=1, num_tokens=30),
        scored(1, 0, 0.0, stop="stop", num_turns=1, num_tokens=20),
        failed(1, 1, "engine"), failed(2, 0, "env"), failed(2, 1, "engine"),
    ]  # fmt: skip
    found = summarise(results, 1.0, 2)
    assert (found.num_tasks, found.num_settled) == (2, 6)
    assert found.errors == {"engine": 2, "env": 1}
    assert found.reward is not None
    assert (found.reward.mean, found.reward.error) == (0.25, 0.25)
    assert found.rewards["exact"] == found.reward
    assert (found.metrics["len"].mean, found.metrics["len"].num_tasks) == (4.0, 1)
    assert (found.pass_at[1].mean, found.pass_at[1].num_tasks) == (0.25, 2)
    assert (found.pass_at[2].mean, found.pass_at[2].num_tasks) == (1.0, 1), (
        "task 1 has one sample only"
    )
    assert (found.truncated, found.turns, found.tokens) == (
        pytest.approx(1 / 3),
        pytest.approx(4 / 3),
        20,
    )


def test_a_summary_of_nothing() -> None:
    found = summarise([], 1.0, 4)
    assert (found.reward, found.pass_at, found.num_settled, found.truncated) == (
        None,
        {},
        0,
        0.0,
    )
    assert summarise([failed(0, 0, "env")], 1.0, 4).errors == {"env": 1}


def test_a_rollout_passes_from_the_reward_that_is_chosen() -> None:
    results = [scored(0, n, reward) for n, reward in enumerate((0.5, 0.4))]
    assert summarise(results, 0.5, 2).pass_at[1].mean == 0.5
    assert summarise(results, 1.0, 2).pass_at[1].mean == 0.0


@given(st.integers(1, 1000))
def test_powers_of_two(limit: int) -> None:
    powers = powers_of_two(limit)
    assert powers[0] == 1
    assert powers[-1] <= limit < 2 * powers[-1]


def closed(
    env: str, *rewards: float, num_failed: int = 0, num_cancelled: int = 0
) -> ClosedGroup:
    """A group of an evaluation between steps; the rollout with reward r sampled 10 + r tokens."""
    members = tuple(
        Member(
            RolloutId(f"r{index}"),
            Scored(
                reward, {}, {}, (RowSummary(40, 10),), PayloadRef("s", 0, 1), 1,
                "length" if reward < 0 else "stop", PolicyVersion(4), PolicyVersion(4 + index),
                Timing(0, 0, 0, 0), num_sampled=int(10 + reward),
            ),
        )
        for index, reward in enumerate(rewards)
    )  # fmt: skip
    failed = tuple((RolloutId(f"f{n}"), Failed("env", "no")) for n in range(num_failed))
    cancelled = tuple((RolloutId(f"c{n}"), Cancelled("no")) for n in range(num_cancelled))
    group = Group(GroupId(1), env, "t", members, failed, cancelled)
    return ClosedGroup(group, (0.0,) * len(members), "eval")


def test_an_evaluation_between_steps() -> None:
    groups = [
        closed("sums", 1.0, 0.0, num_failed=1),
        closed("path/words.py", num_cancelled=2),
        closed("sums", -2.0, 3.0, 1.0),
    ]
    metrics = eval_metrics(
        groups, 1.0, lambda env: env.removeprefix("path/").removesuffix(".py")
    )
    assert metrics == {
        "eval/sums/avg@3": pytest.approx((0.5 + 2 / 3) / 2),
        "eval/sums/pass@1": pytest.approx((0.5 + 2 / 3) / 2),
        "eval/sums/pass@2": 1.0,
        "eval/sums/completion_len/mean": pytest.approx(53 / 5),
        "eval/sums/truncated": pytest.approx(1 / 5),
        "eval/sums/version/min": 4,
        "eval/sums/version/max": 6,
        "eval/sums/failed": pytest.approx(1 / 6),
        "eval/sums/tasks": 2.0,
        "eval/words/failed": 1.0,
        "eval/words/tasks": 0.0,
    }


@given(st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=5), REWARDS)
def test_evaluations_of_both_kinds_agree(tasks: list[list[float]], correct_at: float) -> None:
    """The same rewards give the same figures in `rollway eval` and between the steps of a run."""
    results = [
        scored(position, rollout, reward)
        for position, rewards in enumerate(tasks)
        for rollout, reward in enumerate(rewards)
    ]
    most = max(map(len, tasks))
    summary = summarise(results, correct_at, most)
    metrics = eval_metrics([closed("env", *rewards) for rewards in tasks], correct_at, str)
    assert summary.reward is not None
    assert metrics[f"eval/env/avg@{most}"] == summary.reward.mean
    passes = {name: value for name, value in metrics.items() if "pass@" in name}
    assert passes == {f"eval/env/pass@{k}": rate.mean for k, rate in summary.pass_at.items()}
