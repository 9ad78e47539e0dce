"""The metrics of a step: from the groups that closed for it, and from its processes."""

import math
from collections.abc import Iterable

import msgspec
from tests.doubles.declared import declarations_of

from rollway.observe.health import Lags
from rollway.observe.step_metrics import (
    StepTally,
    lag_metrics,
    speed,
    stall_metrics,
    stall_records,
)
from rollway.records.batch import BatchManifest
from rollway.records.group import ClosedGroup, Fate, Group, Member
from rollway.records.ids import GroupId, PolicyVersion, RolloutId, Step
from rollway.records.lag import LagStats, ProcessStats, Stall
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Failed, RowSummary, Scored, Timing

MANIFEST = BatchManifest(Step(5), PolicyVersion(4), (), ())


def scored(reward: float, *, stop: str = "stop", tokens: int = 8, version: int = 3) -> Scored:
    return Scored(
        reward=reward,
        rewards={"exact": reward},
        metrics={"length": 4.0},
        rows=(RowSummary(12 + tokens, tokens, ("repetition",) if stop == "length" else ()),),
        ref=PayloadRef("s", 0, 1),
        num_turns=2,
        stop=stop,
        first_version=PolicyVersion(version),
        last_version=PolicyVersion(version),
        timing=Timing(1.0, 0.5, 0.25, 1.75, queue_s=reward),
    )


def group(
    *ends: Scored, fate: Fate = "trained", env: str = "sums", failed: int = 0, cancelled: int = 0,
    left_out: tuple[str, ...] = (),
) -> ClosedGroup:  # fmt: skip
    members = tuple(Member(RolloutId(f"r{n}"), end) for n, end in enumerate(ends))
    failures = tuple((RolloutId(f"f{n}"), Failed("env", "x")) for n in range(failed))
    stopped = tuple((RolloutId(f"c{n}"), Cancelled("x")) for n in range(cancelled))
    closed = Group(GroupId(1), env, "t", members, failures, stopped)
    return ClosedGroup(closed, (0.0,) * len(ends), fate, tuple(map(RolloutId, left_out)))


def step_metrics(closed: Iterable[ClosedGroup], correct_at: float = 1.0) -> dict[str, float]:
    tally = StepTally(MANIFEST, correct_at)
    for closed_group in closed:
        tally.add(closed_group)
    return tally.metrics()


CLOSED = [
    group(
        scored(0.0, stop="length"),
        scored(1.0, stop="found", tokens=16),
        failed=2,
        cancelled=1,
    ),
    group(scored(1.0), scored(1.0), fate="zero_advantage", env="path/to/words.py", failed=1),
]


def test_rewards_count_every_scored_rollout_not_only_the_trained() -> None:
    metrics = step_metrics(CLOSED)
    assert metrics["reward/all/mean"] == metrics["reward/exact/mean"] == 0.75
    assert math.isclose(metrics["reward/all/std"], 0.1875**0.5)
    assert metrics["metric/length/mean"] == 4.0
    assert (metrics["scored/rollouts"], metrics["scored/tokens"]) == (4, 40)
    assert (metrics["batch/rollouts"], metrics["off_policy/max"]) == (2, 1)


def test_a_rollout_is_right_from_the_reward_that_the_run_file_names() -> None:
    half = [
        group(scored(0.0), scored(0.5)),
        group(scored(0.5), scored(0.75)),
        group(scored(0.0)),
    ]
    strict, lenient = step_metrics(half), step_metrics(half, correct_at=0.5)
    names = ("solve_rate", "solve_all", "solve_none")
    assert [strict[name] for name in names] == [0.0, 0.0, 1.0]
    assert [lenient[name] for name in names] == [0.6, 1 / 3, 1 / 3]


def test_an_environment_from_a_file_is_reported_by_a_short_name() -> None:
    metrics = step_metrics(CLOSED)
    assert (metrics["env/sums/reward/mean"], metrics["env/words/reward/mean"]) == (0.5, 1.0)
    assert (metrics["env/sums/rollouts"], metrics["env/words/rollouts"]) == (2, 2)
    assert (metrics["env/sums/errors"], metrics["env/words/errors"]) == (2, 1)
    assert (metrics["env/sums/truncated"], metrics["env/words/truncated"]) == (0.5, 0.0)


def test_a_reward_named_like_an_environment_or_all_hides_nothing() -> None:
    named = msgspec.structs.replace(scored(1.0), rewards={"sums": 0.25, "all": 0.5})
    metrics = step_metrics([group(named, named)])
    assert metrics["reward/all/mean"] == metrics["env/sums/reward/mean"] == 1.0
    assert metrics["reward/sums/mean"] == 0.25


def test_ends_lengths_and_times() -> None:
    metrics = step_metrics(CLOSED)
    assert {name: value for name, value in metrics.items() if name.startswith("stop/")} == {
        "stop/length": 0.25, "stop/found": 0.25, "stop/stop": 0.5
    }  # fmt: skip
    assert metrics["truncated"] == 0.25
    assert (metrics["completion_len/mean"], metrics["completion_len/max"]) == (10, 16)
    assert (metrics["seq_len/mean"], metrics["seq_len/max"]) == (22, 28)
    assert (metrics["timing/queue/mean"], metrics["timing/queue/max"]) == (0.75, 1.0)
    assert (metrics["timing/engine/mean"], metrics["timing/total/max"]) == (1.0, 1.75)


def test_failures_are_counted_by_boundary_and_zeros_are_reported() -> None:
    metrics = step_metrics(CLOSED)
    assert {name: value for name, value in metrics.items() if name.startswith("errors/")} == {
        "errors/env": 3, "errors/engine": 0, "errors/scorer": 0, "errors/deadline": 0,
        "errors/worker": 0, "errors/cancelled": 1,
    }  # fmt: skip


def test_groups_that_are_left_out_are_counted_by_reason() -> None:
    closed = [
        group(scored(0.0), scored(1.0, stop="length"), left_out=("r1",)),
        group(scored(1.0, stop="length"), fate="filtered", left_out=("r0",)),
        group(scored(1.0), fate="too_few"),
        group(scored(1.0), scored(0.0), fate="stale"),
        group(scored(1.0), scored(1.0), fate="zero_advantage"),
        group(fate="too_few", cancelled=2),
    ]
    metrics = step_metrics(closed)
    assert metrics["filters/left_out"] == 1
    groups = ("filtered", "too_few", "stale")
    assert [metrics[f"filters/{reason}"] for reason in groups] == [1, 2, 1]
    assert metrics["filters/zero_advantage"] == 1 / 5
    assert (metrics["filters/repetition"], metrics["filters/gibberish"]) == (2 / 8, 0.0)
    assert metrics["batch/rollouts"] == 1


def test_every_metric_is_declared_and_a_step_without_rollouts_still_has_counts() -> None:
    for name in step_metrics(CLOSED):
        assert declarations_of(name), name
    empty = step_metrics([])
    assert empty["batch/rollouts"] == empty["scored/rollouts"] == 0
    assert "reward/all/mean" not in empty


LOOP_STALL = Stall("env.py:9", "rollout", 2, 0.5, 0.375)
LANE_STALL = Stall("env.py:12", "exact", 1, 2.0, 2.0, "lane", "reward `exact`")


def test_the_speed_of_a_step() -> None:
    assert speed({"scored/tokens": 60, "scored/rollouts": 4}, 2.0) == {
        "time/step": 2.0, "throughput/tokens": 30.0, "throughput/rollouts": 2.0
    }  # fmt: skip


def test_the_orchestrators_lag_is_also_reported_under_the_name_other_tools_use() -> None:
    metrics = lag_metrics({"engine": LagStats(p99=1.0), "orchestrator": LagStats(p99=0.25)})
    assert metrics["event_loop_lag/p99"] == metrics["event_loop_lag/orchestrator/p99"] == 0.25
    assert metrics["event_loop_lag/engine/p99"] == 1.0
    assert len(metrics) == 18


def test_stalls_of_a_step_are_counted_by_kind_and_listed() -> None:
    lags = Lags()
    for _ in range(3):
        lags.add(ProcessStats("w0", LagStats(), 0, stalls=(LOOP_STALL, LANE_STALL)))
    lags.add(ProcessStats("w1", LagStats(), 0))
    stalls = lags.take_stalls()
    assert stall_metrics(stalls) == {
        "stalls/w0/count": 6, "stalls/w0/seconds": 1.5,
        "slow_calls/w0/count": 3, "slow_calls/w0/seconds": 6.0,
    }  # fmt: skip
    slow, held = stall_records(stalls)
    assert held == {
        "process": "w0", "kind": "loop", "where": "env.py:9", "function": "rollout", "call": "",
        "count": 6, "total_s": 1.5, "longest_s": 0.375, "was_killed": False,
    }  # fmt: skip
    assert (slow["kind"], slow["call"], slow["where"]) == (
        "lane",
        "reward `exact`",
        "env.py:12",
    )
    assert lags.take_stalls() == {}


def test_a_quiet_process_keeps_its_last_lag() -> None:
    lags = Lags()
    lags.add(ProcessStats("engine", LagStats(max=0.5, num_ticks=1, buckets={3: 1}), 0))
    assert lags.take()["engine"].max == 0.5
    assert lags.take()["engine"].max == 0.5
