"""Which rollout is to blame for a lost worker."""

import pytest

from rollway.envserver.core.blame import (
    MAX_ATTEMPTS,
    Loss,
    describe_loss,
    is_marked,
    verdict,
)
from rollway.envserver.core.events import RunningCode, WorkerDied, WorkerSilent
from rollway.envserver.core.open_runs import OpenRun, OpenRuns
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.rollout import Failed
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Run

W = WorkerName("env.w3.0")
HERE = RunningCode(serial=1, held_s=9.0, where="env.py:12 in rollout")


def open_run() -> OpenRun:
    run = Run(RolloutId("g1.0"), 1, Task("7", "?"), Sampling(8), PolicyVersion(0), 0)
    return OpenRuns().add(b"c", (run,), 0.0)[0]


def verdicts(run: OpenRun, losses: list[Loss]) -> list[Failed | None]:
    ends = []
    for loss in losses:
        ends.append(verdict(run, loss, [run] if is_marked(run, loss) else []))
        run.unassign()
    return ends


def test_a_rollout_that_held_the_loop_fails_at_once_with_its_line() -> None:
    run = open_run()
    failed = verdict(run, WorkerSilent(W, 10.0, mark=HERE), [run])
    assert failed is not None
    assert failed.boundary == "env"
    for text in ("env.w3.0", "for 9 s"):
        assert text in failed.error
    assert failed.where == "env.py:12 in rollout"


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
def test_a_rollout_whose_code_was_not_running_is_not_blamed(loss: Loss) -> None:
    run = open_run()
    assert verdicts(run, [loss] * (MAX_ATTEMPTS - 1)) == [None] * (MAX_ATTEMPTS - 1)
    last = verdict(run, loss, [])
    assert last is not None, "after this many workers it fails all the same"
    assert last.boundary == "worker"
    assert str(MAX_ATTEMPTS) in last.error


def test_a_crash_is_believed_the_second_time_a_kill_the_third() -> None:
    crash = WorkerDied(W, "exited with 9", mark=HERE)
    kill = WorkerDied(W, "was killed by SIGKILL", by_sigkill=True, mark=HERE)
    for losses in (
        [crash, crash],
        [kill, kill, kill],
        [kill, crash, kill],
        [kill, crash, crash],
    ):
        *moved, failed = verdicts(open_run(), losses)
        assert moved == [None] * len(moved), losses
        assert failed is not None
        assert failed.boundary == "worker"
        assert f"{len(losses)} times" in failed.error
        assert failed.where == "env.py:12 in rollout"


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (
            WorkerSilent(W, 10.0, mark=HERE),
            "was silent for 10 s and was killed: task '7' held its event loop at env.py:12 in rollout",
        ),
        (
            WorkerSilent(W, 10.0, was_stopped=True, mark=HERE),
            "was silent for 10 s and was killed: its process had been stopped from outside",
        ),
        (WorkerSilent(W, 10.0), "was silent for 10 s and was killed"),
        (
            WorkerDied(W, "exited with 9", mark=HERE),
            "exited with 9 while task '7' was running at env.py:12 in rollout",
        ),
        (WorkerDied(W, "was killed by SIGKILL"), "was killed by SIGKILL"),
    ],
)
def test_the_loss_of_a_worker_is_told_with_its_reason(loss: Loss, why: str) -> None:
    run = open_run()
    assert describe_loss(loss, [run] if is_marked(run, loss) else []) == why
