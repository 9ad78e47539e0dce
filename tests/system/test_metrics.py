"""Metrics that a killed run could not report."""

import os
import signal
import time
from typing import Any

import pytest
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = [pytest.mark.system]


def published(work: Workspace) -> int:
    stable = (work.run / "weights").glob("step_*/STABLE")
    return max((int(path.parent.name.removeprefix("step_")) for path in stable), default=0)


def reported(work: Workspace) -> int:
    return int(work.metrics()[-1]["step"])


def stop_before_a_report(work: Workspace, trainer: CopyingTrainer) -> int:
    """Stop the orchestrator while the trainer holds a batch whose metrics are in the ledger. Then let
    the trainer publish it, and return the step that is trained and not reported."""
    step = 3
    deadline = time.monotonic() + DEADLINE_S
    while not work.ledger(f"SELECT 1 FROM reports WHERE step = {step}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (orchestrator,) = work.find("rollway.orchestrator.shell.main:main")
    orchestrator.suspend()
    trainer.hold_at(step + 1)
    while published(work) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return step


def test_a_step_that_was_trained_and_not_reported_is_reported_by_the_resumed_run(
    light: Workspace, trainer: CopyingTrainer
) -> None:
    trainer.hold_at(3)
    with light.training("--set", "max_steps=500") as process:
        light.wait_for_step(process, 2)
        step = stop_before_a_report(light, trainer)
        os.kill(process.pid, signal.SIGKILL)
    light.assert_nothing_is_left(was_killed=True)
    assert reported(light) < step == published(light)
    with (light.run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "rew')
    trainer.release()
    resumed = light.train("--resume", "--set", f"max_steps={step + 2}")
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in light.metrics()] == list(range(1, step + 3))
    check_restored(light.metrics()[step - 1])


def check_restored(line: dict[str, Any]) -> None:
    for name in ("reward/all/mean", "env/envs/reward/mean", "batch/rollouts", "loss", "mismatch_kl",
                 "time/step", "throughput/tokens", "time/train", "time"):  # fmt: skip
        assert name in line, name
    assert line["batch/rollouts"] >= 16
    assert "event_loop_lag/p99" not in line, "the killed processes took that with them"
