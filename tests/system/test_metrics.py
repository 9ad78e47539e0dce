"""Metrics of whole runs: all declared, none lost when a run is killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.declared import declarations_of
from tests.system.test_train import Workspace

from rollway.observe.declared import DECLARED

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

SELDOM = {
    "metric/{metric}/mean", "stalls/{process}/count", "stalls/{process}/seconds",
    "slow_calls/{process}/count", "slow_calls/{process}/seconds", "process_in_flight/{process}",
    "pool/{env}/{pool}",
}  # fmt: skip
"""What a run that goes well, in an environment without metrics, does not write."""
BESIDE = {"stalls"}
"""Keys of a line that are not metrics."""


@pytest.fixture
def work(tmp_path: Path, tiny_moe: Path) -> Iterator[Workspace]:
    work = Workspace(tmp_path, tiny_moe)
    yield work
    for process in work.processes():
        process.kill()


def test_a_run_writes_what_is_declared_and_nothing_else(work: Workspace) -> None:
    done = work.train("--set", "eval.every=4", "--set", "eval.num_tasks=2")
    assert done.returncode == 0, done.stderr
    lines = work.metrics()
    evals = [json.loads(line) for line in (work.run / "evals.jsonl").read_text().splitlines()]
    written = {name for line in [*lines, *evals] for name in line} - BESIDE
    declared = {name: declarations_of(name) for name in written}
    assert not [name for name, metrics in declared.items() if len(metrics) != 1]
    unseen = set(DECLARED) - {metric for metrics in declared.values() for metric in metrics}
    assert {metric.name for metric in unseen} <= SELDOM
    for line in lines:
        stops = [value for name, value in line.items() if name.startswith("stop/")]
        assert sum(stops) == pytest.approx(1.0)
        assert line["env/envs/reward/mean"] == pytest.approx(line["reward/all/mean"])
        assert line["timing/queue/max"] >= line["timing/queue/mean"] >= 0
    check_queue(work)


def check_queue(work: Workspace) -> None:
    """16 are in flight at most, and as many fit into the workers: saved rollouts say how long they
    waited all the same."""
    saved = [
        json.loads(line)
        for path in (work.run / "rollouts").glob("step_*/train.jsonl")
        for line in path.read_text().splitlines()
    ]
    waits = [one["timing"]["queue_s"] for one in saved if one["outcome"] == "scored"]
    assert waits
    assert all(wait >= 0 for wait in waits)


def published(work: Workspace) -> int:
    stable = (work.run / "weights").glob("step_*/STABLE")
    return max((int(one.parent.name.removeprefix("step_")) for one in stable), default=0)


def reported(work: Workspace) -> int:
    return int(work.metrics()[-1]["step"])


def alone(work: Workspace) -> None:
    """Until nothing of the run is left."""
    deadline = time.monotonic() + 20
    while work.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not work.processes()


def stop_before_a_report(work: Workspace) -> int:
    """Stop the orchestrator where the trainer has a batch that nobody will report; which step."""
    (orchestrator,) = work.find("rollway.orchestrator.shell.main:main")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        step = reported(work) + 1
        if not (work.run / "batches" / f"step_{step}" / "manifest.json").exists():
            time.sleep(0.005)
            continue
        orchestrator.suspend()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if published(work) > reported(work):
                return published(work)
            time.sleep(0.01)
        orchestrator.resume()
    raise AssertionError("the orchestrator always was faster")


def test_a_step_that_was_trained_and_not_reported_is_reported_by_the_resumed_run(
    work: Workspace,
) -> None:
    with work.training("--set", "max_steps=500") as process:
        step = stop_before_a_report(work)
        os.kill(process.pid, signal.SIGKILL)
    alone(work)
    assert reported(work) < step == published(work)
    with (work.run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "rew')
    resumed = work.train("--resume", "--set", f"max_steps={step + 2}")
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in work.metrics()] == list(range(1, step + 3))
    check_restored(work.metrics()[step - 1])


def check_restored(line: dict[str, Any]) -> None:
    for name in ("reward/all/mean", "env/envs/reward/mean", "batch/rollouts", "loss", "mismatch_kl",
                 "time/step", "throughput/tokens", "time/train", "time"):  # fmt: skip
        assert name in line, name
    assert line["batch/rollouts"] >= 16
    assert "event_loop_lag/p99" not in line, "that nobody knows any more"
