"""The screen shows how a run and an env server do."""

import io

from rollway.launch.watch import MAX_CULPRITS, RunWatch, ServerWatch
from rollway.loop.processes.part import encode
from rollway.observe.console import Screen
from rollway.observe.report import StepDone
from rollway.records.lag import LagStats, ProcessStats, Stall


def test_the_last_lines_of_a_run_sum_it_up() -> None:
    stream = io.StringIO()
    watch = RunWatch(Screen(stream), max_steps=12)
    assert watch.summary() == [], "nothing was trained"
    steps: list[int] = []
    watch.on_step = lambda: steps.append(watch.last_step)
    for step in range(1, 13):
        watch.on_message(encode(StepDone(step, {"reward/all/mean": step / 10}, {})))
    for place in range(MAX_CULPRITS + 3):
        stall = Stall(f"env.py:{place}", "rollout", 1, 1.0 + place, 1.0)
        watch.health.hear(
            ProcessStats("w0", LagStats(p99=0.002, max=0.05), 1, stalls=(stall,))
        )
    reward, lag, *culprits = watch.summary()
    assert reward == "Reward: 0.3000 (first 5 steps) → 1.0000 (last 5)"
    assert lag.startswith("Lag p99/max ms, whole run: w0 ")
    assert len(culprits) == MAX_CULPRITS + 1
    assert f"env.py:{MAX_CULPRITS + 2}" in culprits[0], "the longest comes first"
    assert culprits[-1] == "… and 3 more places, in metrics.jsonl"
    assert steps == list(range(1, 13))
    assert stream.getvalue().startswith("Step 1/12 | ")


def test_the_status_of_a_server_counts_the_workers_that_reported() -> None:
    watch = ServerWatch(Screen(io.StringIO()), "sums.router", num_workers=3)
    watch.health.hear(ProcessStats("sums.router", LagStats(max=0.001), 10_000_000))
    for worker in ("sums.w0.0", "sums.w1.0"):
        watch.health.hear(ProcessStats(worker, LagStats(), 20_000_000, in_flight=4))
    assert watch.status().startswith(
        "2/3 workers · 8 rollouts running · 50 MB · lag p99/max ms: sums."
    )
