"""Metrics are declared, and the console says what a person needs."""

import io
import re

from rollway.observe.console import Screen, stall_line, status_line, step_line
from rollway.observe.lags import Lags
from rollway.observe.metrics import (
    DECLARED,
    lag_metrics,
    stall_metrics,
    stall_records,
    step_metrics,
)
from rollway.observe.report import Progress, StepDone
from rollway.records.batch import BatchManifest
from rollway.records.group import ClosedGroup, Group, Member
from rollway.records.ids import GroupId, PolicyVersion, RolloutId, Step
from rollway.records.lag import LagStats, ProcessStats, Stall
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Failed, RowSummary, Scored, Timing


def scored(reward: float, version: int = 3) -> Scored:
    return Scored(
        reward=reward,
        rewards={"exact": reward},
        metrics={"length": 4.0},
        rows=(RowSummary(20, 8),),
        ref=PayloadRef("s", 0, 1),
        num_turns=2,
        stop="length" if reward else "stop",
        first_version=PolicyVersion(version),
        last_version=PolicyVersion(version),
        timing=Timing(1.0, 0.5, 0.25, 1.75),
    )


def group(fate: str, *rewards: float, failed: int = 0) -> ClosedGroup:
    members = tuple(Member(RolloutId(f"r{n}"), scored(one)) for n, one in enumerate(rewards))
    failures = tuple((RolloutId(f"f{n}"), Failed("env", "x")) for n in range(failed))
    cancelled = ((RolloutId("c"), Cancelled("x")),)
    closed = Group(GroupId(1), "env", "t", members, failures, cancelled)
    return ClosedGroup(closed, tuple(0.0 for _ in rewards), fate)  # type: ignore[arg-type]


LOOP_STALL = Stall("env.py:9", "rollout", 2, 0.5, 0.375)
LANE_STALL = Stall("env.py:12", "exact", 1, 2.0, 2.0, "lane", "reward `exact`")
MANIFEST = BatchManifest(Step(5), PolicyVersion(4), (), ())
CLOSED = [group("trained", 0.0, 1.0, failed=2), group("zero_advantage", 1.0, 1.0)]


def test_rewards_count_every_scored_rollout_not_only_the_trained() -> None:
    metrics = step_metrics(MANIFEST, CLOSED, elapsed_s=2.0)
    assert metrics["reward/all/mean"] == 0.75
    assert metrics["reward/exact/mean"] == 0.75
    assert metrics["metric/length/mean"] == 4.0
    assert metrics["batch/rollouts"] == 2
    assert metrics["off_policy/max"] == 1
    assert metrics["filters/zero_advantage"] == 0.5
    assert metrics["solve_all"] == 0.5
    assert metrics["errors/env"] == 2
    assert metrics["errors/cancelled"] == 2
    assert metrics["truncated"] == 0.75
    assert metrics["throughput/tokens"] == 4 * 8 / 2.0


def test_every_metric_is_declared() -> None:
    patterns = [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(metric.name)) for metric in DECLARED]
    reported = {
        **step_metrics(MANIFEST, CLOSED, 2.0),
        **lag_metrics({"engine": LagStats(), "orchestrator": LagStats()}),
        **stall_metrics({"w0": (LOOP_STALL, LANE_STALL)}),
    }
    for name in reported:
        assert any(re.fullmatch(pattern, name) for pattern in patterns), name


def test_the_orchestrators_lag_has_the_fields_own_name_too() -> None:
    metrics = lag_metrics({"engine": LagStats(p99=1.0), "orchestrator": LagStats(p99=0.25)})
    assert metrics["event_loop_lag/p99"] == metrics["event_loop_lag/orchestrator/p99"] == 0.25
    assert metrics["event_loop_lag/engine/p99"] == 1.0
    assert len(metrics) == 18


def test_stalls_of_a_step_are_counted_by_kind_and_named() -> None:
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
        "count": 6, "total_s": 1.5, "longest_s": 0.375,
    }  # fmt: skip
    assert (slow["kind"], slow["call"], slow["where"]) == ("lane", "reward `exact`", "env.py:12")
    assert lags.take_stalls() == {}


def test_a_step_without_rollouts_has_metrics_too() -> None:
    assert step_metrics(MANIFEST, [], 1.0)["batch/rollouts"] == 0


def test_a_quiet_process_keeps_its_last_lag() -> None:
    lags = Lags()
    lags.add(ProcessStats("engine", LagStats(max=0.5, num_ticks=1, buckets={3: 1}), 0))
    assert lags.take()["engine"].max == 0.5
    assert lags.take()["engine"].max == 0.5


def test_lines_say_what_the_field_expects() -> None:
    lags = {"engine": LagStats(p99=0.0012, max=0.045), "trainer": LagStats()}
    metrics = {"time/step": 1.5, "reward/all/mean": 0.25, "in_flight": 7, "errors/env": 2}
    line = step_line(StepDone(3, metrics, lags), max_steps=9)
    for part in ("Step 3/9", "Time: 1.50s", "Reward: 0.2500", "In Flight: 7", "Failed: 2 env",
                 "engine 1.2/45, trainer 0.0/0.0"):  # fmt: skip
        assert part in line
    assert "1.5 MB payload ·" in status_line(Progress(3, 5, 8, 16, 2, 1_500_000), 9, lags)
    full = Progress(3, 5, 8, 16, 2, 1_500_000, held_back=True)
    assert "1.5 MB payload (at its budget: starting nothing) ·" in status_line(full, 9, lags)
    assert "worst lag now: engine 45 ms" in status_line(Progress(3, 5, 8, 16, 2, 1_500_000), 9, lags)
    stall = Stall("f.py:3", "f", 1, 0.25, 0.25)
    assert stall_line("w0", stall) == "w0: loop held for 250 ms by f.py:3 in f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_stays_last_on_a_terminal_and_out_of_files() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        screen = Screen(stream)
        screen.status("working")
        screen.line("done 1")
        screen.close()
    assert terminal.getvalue() == "\r\x1b[2Kworking\r\x1b[2Kdone 1\nworking\r\x1b[2K"
    assert file.getvalue() == "done 1\n"
