"""Whose fault a lost worker is."""

import pytest

from rollway.envserver.core.blame import MAX_ATTEMPTS, Loss, verdict
from rollway.envserver.core.events import RunningCode, WorkerDied, WorkerSilent
from rollway.envserver.core.open_runs import OpenRun, OpenRuns
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.rollout import Failed
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Run

W = WorkerName("env.w3.0")
HERE = RunningCode(serial=1, held_s=9.0, where="env.py:12 in rollout")


def entry() -> OpenRun:
    run = Run(RolloutId("g1.0"), 1, Task("7", "?"), Sampling(8), PolicyVersion(0))
    return OpenRuns().add(b"c", (run,), 0.0)[0]


def verdicts(one: OpenRun, losses: list[Loss]) -> list[Failed | None]:
    ends = []
    for loss in losses:
        ends.append(verdict(one, loss))
        one.leave()
    return ends


def test_one_that_held_the_loop_fails_at_once_and_is_told_where() -> None:
    failed = verdict(entry(), WorkerSilent(W, 10.0, mark=HERE))
    assert failed is not None
    assert failed.boundary == "env"
    for said in ("task '7'", "env.w3.0", "for 9 s", "env.py:12 in rollout"):
        assert said in failed.error


@pytest.mark.parametrize(
    "loss",
    [
        WorkerSilent(W, 10.0),
        WorkerSilent(W, 10.0, was_stopped=True, mark=HERE),
        WorkerSilent(W, 10.0, mark=RunningCode(serial=1, held_s=0.01)),
        WorkerSilent(W, 10.0, mark=RunningCode(serial=2, held_s=10.0)),
        WorkerDied(W),
        WorkerDied(W, mark=RunningCode(serial=2, held_s=0.0)),
    ],
)
def test_one_that_did_nothing_is_not_blamed(loss: Loss) -> None:
    one = entry()
    assert verdicts(one, [loss] * (MAX_ATTEMPTS - 1)) == [None] * (MAX_ATTEMPTS - 1)
    last = verdict(one, loss)
    assert last is not None, "there is an end to every patience"
    assert last.boundary == "worker"
    assert str(MAX_ATTEMPTS) in last.error


def test_a_crash_is_believed_the_second_time_a_kill_the_third() -> None:
    crash = WorkerDied(W, "exited with 9", mark=HERE)
    kill = WorkerDied(W, "was killed by SIGKILL", by_sigkill=True, mark=HERE)
    for losses in ([crash, crash], [kill, kill, kill], [kill, crash, kill], [kill, crash, crash]):
        *moved, failed = verdicts(entry(), losses)
        assert moved == [None] * len(moved), losses
        assert failed is not None
        assert failed.boundary == "worker"
        assert f"{len(losses)} times" in failed.error
        assert "env.py:12 in rollout" in failed.error
