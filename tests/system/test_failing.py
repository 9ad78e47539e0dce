"""What breaks in an environment is said at once, and a run in which everything breaks stops early."""

import re
import signal
import subprocess
import sys

import pytest
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = pytest.mark.system

BROKEN = """
import time

import rollway as rw


class Broken(rw.Environment):
    def __init__(self, how):
        self.how = how

    def tasks(self):
        for number in range(1000):
            if self.how == "tasks" and number == 6:
                raise ValueError("row 6 is broken")
            yield rw.Task(id=str(number), prompt="Say something")

    async def rollout(self, task, chat):
        await chat.say(task.prompt)
        if self.how == "holds" and task.id == "1":
            time.sleep(1000)

    @rw.reward
    def length(self, task, rollout):
        if self.how == "raises":
            return 1 / 0
        if self.how == "blocks":
            time.sleep(1000)
        return len(rollout.last_text) % 7 / 7
"""


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(BROKEN.splitlines(), 1) if text in line)


@pytest.fixture
def broken(light: Workspace) -> Workspace:
    (light.folder / "broken.py").write_text(BROKEN)
    return light


def settings(how: str, *more: str) -> list[str]:
    sets = ["env.0.id=broken.py", f"env.0.args={{how='{how}'}}", *more]
    return [word for setting in sets for word in ("--set", setting)]


def ask(*words: str) -> str:
    command = [sys.executable, "-m", "rollway", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_a_reward_that_always_raises_is_said_at_once_and_stops_the_run_early(
    broken: Workspace,
) -> None:
    done = broken.train(*settings("raises"))
    assert done.returncode == 1
    place = f"{broken.folder}/broken.py:{line_of('1 / 0')} in Broken.length"
    failure = f"scorer: ZeroDivisionError: division by zero, at {place}"
    told = [line for line in done.stdout.splitlines() if "fail" in line]
    assert told[0].startswith("A rollout of 'broken' failed (task '")
    assert told[0].endswith(f"{failure}; log: {broken.run}/logs/broken.w0.log")
    assert [line.partition(" ")[0] for line in told[1:]] == ["10"], "counted, not repeated"
    *_, reason, last = done.stderr.splitlines()
    assert reason == (
        f"rollway: 32 of the first 32 rollouts failed in the same way: {failure}"
    )
    assert last.startswith("0 of 4 steps are trained. To continue: rollway train ")
    assert last.endswith(" --resume")
    assert "ZeroDivisionError" in (broken.run / "logs" / "broken.w0.log").read_text()
    why = " ".join(broken.why().split())
    assert why.startswith("The run has ended. State at ")
    assert re.search(r"0 scored, \d\d failed", why), why
    assert re.search(rf"commonest failure: \d\d × {re.escape(failure)}", why), why
    assert "commonest failure: " in ask("show", str(broken.run))


def test_a_task_that_is_too_large_fails_its_group_also_when_it_is_resumed(
    light: Workspace,
) -> None:
    options = ("--set", 'env.0.args.kind="TooLarge"', "--set", "max_steps")
    for more, step in (((), 1), (("--resume",), 2)):
        done = light.train(*options[:-1], f"{options[-1]}={step}", *more)
        assert done.returncode == 0, done.stderr
    ends = "SELECT DISTINCT outcome, boundary, num_settled FROM rollouts WHERE group_id = 1"
    assert light.ledger(ends) == [("failed", "env", 1)]
    ((fate, size),) = light.ledger("SELECT fate, length(task) FROM groups WHERE group_id = 1")
    assert (fate, size) == ("too_few", 0)


def test_tasks_that_raise_end_the_run_with_their_line(broken: Workspace) -> None:
    done = broken.train(*settings("tasks"))
    assert done.returncode == 1
    place = f"{broken.folder}/broken.py:{line_of('row 6')} in Broken.tasks"
    assert f"cannot give tasks: ValueError: row 6 is broken, at {place}" in done.stderr
    assert "Traceback" in (broken.run / "logs" / "broken.w0.log").read_text()


@pytest.mark.parametrize(
    ("how", "setting", "said"),
    [
        (
            "blocks",
            "env.0.server.scoring_deadline_s=1",
            r"reward `length` was killed at its deadline .*, at \S+broken.py:\d+ in Broken.length",
        ),
        (
            "blocks",
            "env.0.server.scoring_deadline_s=1",
            r"A rollout of 'broken' failed .*: scorer: the reward ran longer than 1 s and was killed, "
            r"at \S+broken.py:\d+",
        ),
        (
            "holds",
            "env.0.server.lease_s=2",
            r"broken.w0.0 was silent for \d s and was killed: task '1' held its event loop at "
            r"\S+broken.py:\d+ in .*: \d+ of its rollouts run again, 1 failed",
        ),
    ],
)
def test_what_was_killed_is_said_with_its_line(
    broken: Workspace, how: str, setting: str, said: str
) -> None:
    with broken.started(*settings(how, setting)) as process:
        broken.wait_for_line(process, said)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130


def test_a_policy_that_changes_beyond_recognition_is_warned_about_at_once(
    light: Workspace, trainer: CopyingTrainer
) -> None:
    trainer.kl = 4.1
    done = light.train("--set", "max_steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("changed beyond recognition in one step (KL above 1)") == 1
