"""What a run does beside training: evaluations, a mix by ratio, an environment that never answers."""

import json
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = [pytest.mark.system]

LENGTHS = '''
import rollway as rw

class Lengths(rw.Environment):
    """Longer replies are better, so that rewards of a group differ."""

    def tasks(self):
        yield from (rw.Task(id=str(n), prompt=f"{n}?") for n in range(40))

    def eval_tasks(self):
        yield from (rw.Task(id=f"e{n}", prompt=f"{n}!") for n in range(5))

    async def rollout(self, task, chat):
        await chat.say(task.prompt)

    @rw.reward
    async def length(self, task, rollout):
        return len(rollout.last_text) % 7 / 7
'''
FORGOTTEN = LENGTHS.replace("range(40)", "range(8)").replace(
    "    async def length(self, task, rollout):\n",
    """    async def length(self, task, rollout):
        if task.id == "0" and (seen := getattr(self, "seen", 0)) < 12:
            self.seen = seen + 1
            return 1.0
""",
)
"""Task 0 is solved by its first three groups, and then no longer."""
NEVER = LENGTHS.replace(
    "await chat.say(task.prompt)", "await __import__('asyncio').Event().wait()"
)


@pytest.fixture(scope="module")
def envs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with environments."""
    folder = tmp_path_factory.mktemp("envs")
    (folder / "three.py").write_text(LENGTHS)
    (folder / "one.py").write_text(LENGTHS)
    (folder / "never.py").write_text(NEVER)
    (folder / "forgotten.py").write_text(FORGOTTEN)
    return folder


def use(work: Workspace, folder: Path, ratios: dict[str, float], more: str = "") -> None:
    """Train on files of this folder instead of the one environment of the run file."""
    before, _, after = work.file.read_text().partition("[[env]]")
    envs = "\n".join(
        f'[[env]]\nid = "{folder / name}.py"\nratio = {ratio}\n'
        "server = { workers = 1, concurrency = 16 }"
        for name, ratio in ratios.items()
    )
    rest = after[after.index("[sampling]") :]
    work.file.write_text(f"{before}{envs}\n{rest}\n{more}")


def test_two_environments_train_by_ratio_and_evaluations_run_between(
    light: Workspace, envs: Path
) -> None:
    use(
        light, envs, {"three": 3.0, "one": 1.0},
        "[eval]\nevery = 3\nnum_tasks = 4\nnum_rollouts = 2\n",
    )  # fmt: skip
    done = light.train("--set", "max_steps=8", "--set", "orchestrator.max_off_policy_steps=2")
    assert done.returncode == 0, done.stderr
    trained = Counter(
        Path(str(env)).stem
        for (env,) in light.ledger("SELECT env FROM groups WHERE fate = 'trained'")
    )
    assert trained["three"] + trained["one"] >= 32
    assert 0.6 < trained["three"] / trained.total() < 0.88, trained
    check_evals(light, done.stdout)
    staleness = light.ledger(
        "SELECT step - 1 - first_version FROM rollouts WHERE step IS NOT NULL"
    )
    assert {0} <= {steps for (steps,) in staleness} <= {0, 1, 2}, (
        "nothing older than the bound trains"
    )


def check_evals(work: Workspace, screen: str) -> None:
    lines = [json.loads(line) for line in (work.run / "evals.jsonl").read_text().splitlines()]
    versions = [line["step"] for line in lines]
    assert versions[0] == 0
    assert versions[-1] == 8
    assert len(versions) >= 3
    for line in lines:
        for env in ("three", "one"):
            assert line[f"eval/{env}/tasks"] == 4
            assert line[f"eval/{env}/failed"] == 0
            assert 0 <= line[f"eval/{env}/avg@2"] <= 1
            assert line["step"] <= line[f"eval/{env}/version/max"]
    assert screen.count("Eval of version") == len(lines)
    kept = (work.run / "rollouts" / "step_0" / "eval.jsonl").read_text().splitlines()
    assert {json.loads(line)["task"] for line in kept} == {"e0", "e1", "e2", "e3"}
    sql = "SELECT count(*) FROM rollouts WHERE step IS NOT NULL AND task_id LIKE 'e%'"
    assert work.ledger(sql) == [(0,)], "what is evaluated never trains"


@pytest.mark.long
def test_a_solved_task_comes_up_rarely_until_it_fails_again(
    light: Workspace, envs: Path
) -> None:
    use(light, envs, {"forgotten": 1.0}, "[difficulty]\neasy_at = 1.0\n")
    done = light.train("--set", "max_steps=26")
    assert done.returncode == 0, done.stderr
    sql = "SELECT group_id, max(reward) FROM rollouts WHERE task_id = '0' AND reward IS NOT NULL"
    visits = light.ledger(f"{sql} GROUP BY group_id ORDER BY group_id")
    solved = [int(str(group)) for group, reward in visits if reward == 1.0]
    failed = [int(str(group)) for group, reward in visits if reward != 1.0]
    assert len(solved) == 3
    assert failed[0] >= 32, (
        "every eighth task is this one, but it comes up every twentieth time"
    )
    assert len(failed) >= 3
    assert failed[-1] - failed[0] <= len(failed) * 8, "and now every eighth"
    pooled = [line.get("pool/forgotten/easy", 0) for line in light.metrics()]
    assert 1 in pooled
    assert pooled[-1] == 0
    assert light.ledger("SELECT count(*) FROM pools") == [(0,)]


@pytest.mark.long
def test_training_continues_without_an_environment_that_never_answers(
    light: Workspace, envs: Path
) -> None:
    use(light, envs, {"one": 1.0, "never": 1.0})
    options = ["--set", "orchestrator.env_patience_s=3", "--set", "max_steps=10000"]
    with light.training(*options) as process:
        light.wait_for_step(process, 6)
        deadline = time.monotonic() + DEADLINE_S
        while "no rollout of" not in (reason := light.why()) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.terminate()
        process.wait(60)
    assert "no rollout of" in reason
    assert "'never'" in reason.splitlines()[0]


def test_a_synchronous_run_trains_on_policy_only(light: Workspace) -> None:
    done = light.train("--set", "orchestrator.max_off_policy_steps=0")
    assert done.returncode == 0, done.stderr
    spans = light.ledger(
        "SELECT step, first_version, last_version FROM rollouts WHERE step IS NOT NULL"
    )
    assert spans
    assert all(first == last == int(str(step)) - 1 for step, first, last in spans)


def test_an_interrupted_evaluation_is_run_again(
    light: Workspace, trainer: CopyingTrainer, envs: Path
) -> None:
    trainer.hold_at(4)
    use(
        light,
        envs,
        {"one": 1.0},
        "[eval]\nevery = 2\nnum_tasks = 5\nnum_rollouts = 4\n",
    )
    with light.training("--set", "max_steps=6") as process:
        while not (light.run / "rollouts" / "step_2" / "eval.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        light.kill()
    trainer.release()
    done = light.train("--set", "max_steps=6", "--resume")
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line) for line in (light.run / "evals.jsonl").read_text().splitlines()
    ]
    versions = [line["step"] for line in lines]
    assert versions[-1] == 6
    assert len(versions) == len(set(versions))
    assert light.ledger("SELECT count(*) FROM rollouts WHERE outcome IS NULL") == [(0,)]
    for version in versions:
        kept = light.run / "rollouts" / f"step_{version}" / "eval.jsonl"
        assert len(kept.read_text().splitlines()) == 20, "no line twice"


def test_the_last_evaluation_runs_again_if_it_was_interrupted(
    light: Workspace, trainer: CopyingTrainer, envs: Path
) -> None:
    use(light, envs, {"one": 1.0}, "[eval]\nevery = 9\nnum_tasks = 5\nnum_rollouts = 4\n")
    with light.training("--set", "max_steps=2") as process:
        while not (light.run / "rollouts" / "step_2" / "eval.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        light.kill()
    with closing(sqlite3.connect(light.run / "run.db")) as ledger, ledger:
        ledger.execute(
            "DELETE FROM evals WHERE version = 2"
        )  # it may have ended before the kill
    done = light.train("--set", "max_steps=2", "--resume")
    assert done.returncode == 0, done.stderr
    lines = (light.run / "evals.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2]
    assert "Nothing to do" in light.train("--set", "max_steps=2", "--resume").stdout
