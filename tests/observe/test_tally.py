"""A step's metrics, from the groups that closed for it."""

import math

from rollway.observe.declared import declaration_of
from rollway.observe.step_metrics import step_metrics
from rollway.records.batch import BatchManifest
from rollway.records.group import ClosedGroup, Fate, Group, Member
from rollway.records.ids import GroupId, PolicyVersion, RolloutId, Step
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
    members = tuple(Member(RolloutId(f"r{n}"), one) for n, one in enumerate(ends))
    failures = tuple((RolloutId(f"f{n}"), Failed("env", "x")) for n in range(failed))
    stopped = tuple((RolloutId(f"c{n}"), Cancelled("x")) for n in range(cancelled))
    closed = Group(GroupId(1), env, "t", members, failures, stopped)
    return ClosedGroup(closed, (0.0,) * len(ends), fate, tuple(map(RolloutId, left_out)))


CLOSED = [
    group(scored(0.0, stop="length"), scored(1.0, stop="found", tokens=16), failed=2, cancelled=1),
    group(scored(1.0), scored(1.0), fate="zero_advantage", env="path/to/words.py", failed=1),
]


def test_rewards_count_every_scored_rollout_not_only_the_trained() -> None:
    metrics = step_metrics(MANIFEST, CLOSED)
    assert metrics["reward/all/mean"] == metrics["reward/exact/mean"] == 0.75
    assert math.isclose(metrics["reward/all/std"], 0.1875**0.5)
    assert metrics["metric/length/mean"] == 4.0
    assert (metrics["scored/rollouts"], metrics["scored/tokens"]) == (4, 40)
    assert (metrics["batch/rollouts"], metrics["off_policy/max"]) == (2, 1)


def test_right_is_what_the_run_file_says() -> None:
    half = [group(scored(0.0), scored(0.5)), group(scored(0.5), scored(0.75)), group(scored(0.0))]
    strict, lenient = step_metrics(MANIFEST, half), step_metrics(MANIFEST, half, correct_at=0.5)
    told = ("solve_rate", "solve_all", "solve_none")
    assert [strict[name] for name in told] == [0.0, 0.0, 1.0]
    assert [lenient[name] for name in told] == [0.6, 1 / 3, 1 / 3]


def test_an_environment_has_its_own_name_also_if_it_is_a_file() -> None:
    metrics = step_metrics(MANIFEST, CLOSED)
    assert (metrics["env/sums/reward/mean"], metrics["env/words/reward/mean"]) == (0.5, 1.0)
    assert (metrics["env/sums/rollouts"], metrics["env/words/rollouts"]) == (2, 2)
    assert (metrics["env/sums/errors"], metrics["env/words/errors"]) == (2, 1)
    assert (metrics["env/sums/truncated"], metrics["env/words/truncated"]) == (0.5, 0.0)


def test_a_reward_called_like_an_environment_or_like_all_hides_nothing() -> None:
    one = scored(1.0)
    named = Scored(**{**{name: getattr(one, name) for name in one.__struct_fields__},
                      "rewards": {"sums": 0.25, "all": 0.5}})  # fmt: skip
    metrics = step_metrics(MANIFEST, [group(named, named)])
    assert metrics["reward/all/mean"] == metrics["env/sums/reward/mean"] == 1.0
    assert metrics["reward/sums/mean"] == 0.25


def test_ends_and_lengths() -> None:
    metrics = step_metrics(MANIFEST, CLOSED)
    assert {name: value for name, value in metrics.items() if name.startswith("stop/")} == {
        "stop/length": 0.25, "stop/found": 0.25, "stop/stop": 0.5
    }  # fmt: skip
    assert metrics["truncated"] == 0.25
    assert (metrics["completion_len/mean"], metrics["completion_len/max"]) == (10, 16)
    assert (metrics["seq_len/mean"], metrics["seq_len/max"]) == (22, 28)
    assert (metrics["timing/queue/mean"], metrics["timing/queue/max"]) == (0.75, 1.0)
    assert (metrics["timing/engine/mean"], metrics["timing/total/max"]) == (1.0, 1.75)


def test_failures_are_told_by_boundary_also_those_that_did_not_happen() -> None:
    metrics = step_metrics(MANIFEST, CLOSED)
    assert {name: value for name, value in metrics.items() if name.startswith("errors/")} == {
        "errors/env": 3, "errors/engine": 0, "errors/scorer": 0, "errors/deadline": 0,
        "errors/worker": 0, "errors/cancelled": 1,
    }  # fmt: skip


def test_what_was_left_out_is_counted_by_reason() -> None:
    closed = [
        group(scored(0.0), scored(1.0, stop="length"), left_out=("r1",)),
        group(scored(1.0, stop="length"), fate="filtered", left_out=("r0",)),
        group(scored(1.0), fate="too_few"),
        group(scored(1.0), scored(0.0), fate="stale"),
        group(scored(1.0), scored(1.0), fate="zero_advantage"),
        group(fate="too_few", cancelled=2),
    ]
    metrics = step_metrics(MANIFEST, closed)
    assert metrics["filters/left_out"] == 1
    groups = ("filtered", "too_few", "stale")
    assert [metrics[f"filters/{reason}"] for reason in groups] == [1, 2, 1]
    assert metrics["filters/zero_advantage"] == 1 / 5
    assert (metrics["filters/repetition"], metrics["filters/gibberish"]) == (2 / 8, 0.0)
    assert metrics["batch/rollouts"] == 1


def test_every_metric_is_declared_and_a_step_without_rollouts_has_some() -> None:
    for name in step_metrics(MANIFEST, CLOSED):
        assert declaration_of(name), name
    empty = step_metrics(MANIFEST, [])
    assert empty["batch/rollouts"] == empty["scored/rollouts"] == 0
    assert "reward/all/mean" not in empty
