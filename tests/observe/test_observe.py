"""What processes say of themselves, and what a person sees of it."""

import io

import msgspec

from rollway.observe.console import Screen, stall_line, status_line, step_line
from rollway.observe.health import Lags
from rollway.observe.report import StepDone
from rollway.observe.step_metrics import lag_metrics, speed, stall_metrics, stall_records
from rollway.records.lag import LagStats, ProcessStats, Stall
from rollway.records.situation import CoreView

LOOP_STALL = Stall("env.py:9", "rollout", 2, 0.5, 0.375)
LANE_STALL = Stall("env.py:12", "exact", 1, 2.0, 2.0, "lane", "reward `exact`")

VIEW = CoreView(
    step=3,
    version=2,
    waits_for="rollouts",
    in_flight=5,
    max_in_flight=64,
    ready=8,
    batch_size=16,
    live_bytes=1_500_000,
    is_held_back=False,
    num_retries=0,
    pools={},
)


def test_how_fast_a_step_went() -> None:
    assert speed({"scored/tokens": 60, "scored/rollouts": 4}, 2.0) == {
        "time/step": 2.0, "throughput/tokens": 30.0, "throughput/rollouts": 2.0
    }  # fmt: skip


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


def test_a_quiet_process_keeps_its_last_lag() -> None:
    lags = Lags()
    lags.add(ProcessStats("engine", LagStats(max=0.5, num_ticks=1, buckets={3: 1}), 0))
    assert lags.take()["engine"].max == 0.5
    assert lags.take()["engine"].max == 0.5


def test_lines_say_what_the_field_expects() -> None:
    lags = {"engine": LagStats(p99=0.0012, max=0.045), "trainer": LagStats()}
    metrics = {"time/step": 1.5, "reward/all/mean": 0.25, "in_flight": 7, "errors/env": 2,
               "errors/engine": 0, "errors/cancelled": 3}  # fmt: skip
    line = step_line(StepDone(3, metrics, lags), max_steps=9)
    for part in ("Step 3/9", "Time: 1.50s", "Reward: 0.2500", "In Flight: 7", "Failed: 2 env",
                 "engine 1.2/45, trainer 0.0/0.0"):  # fmt: skip
        assert part in line
    assert "engine 0" not in line.lower().partition("lag")[0]
    assert "1.5 MB payload ·" in status_line(VIEW, 9, lags)
    full = msgspec.structs.replace(VIEW, is_held_back=True)
    assert "1.5 MB payload (at its budget: starting nothing) ·" in status_line(full, 9, lags)
    assert "worst lag now: engine 45 ms" in status_line(VIEW, 9, lags)
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
