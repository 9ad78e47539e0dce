"""`rollway train` as a user runs it: whole processes, signals, and what is left behind."""

import json
import signal
import socket
import time

import pytest
from tests.doubles.command import Rollway
from tests.doubles.workspace import Workspace

from rollway.payload.reuse import SPARE

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ENDLESS = ("--set", "max_steps=500")
"""For runs that are ended from outside."""
TWO_WORKERS = ("--set", "env.0.server.workers=2")


def test_a_whole_run_its_refusal_and_its_resumption(work: Workspace, rollway: Rollway) -> None:
    done = work.train(*TWO_WORKERS)
    assert done.returncode == 0, done.stderr
    work.assert_nothing_is_left()
    check_console(done.stdout)
    check_run_directory(work)
    again = rollway("train", work.file)
    assert again.code == 1
    assert again.err.count("\n") == 1
    assert "--resume continues it, --clean starts over" in again.err
    assert "Nothing to do" in rollway("train", work.file, "--resume").out
    more = work.train("--resume", "--set", "max_steps=6")
    assert more.returncode == 0, more.stderr
    assert [one["step"] for one in work.metrics()] == [1, 2, 3, 4, 5, 6]
    assert work.ledger("SELECT count(*) FROM steps") == [(6,)]
    assert "waits for nothing: its 6 steps were trained at" in rollway("why", work.run).out
    trained = work.ledger("SELECT step, count(*) FROM rollouts WHERE step IS NOT NULL GROUP BY step")
    assert [step for step, _ in trained] == [1, 2, 3, 4, 5, 6]
    work.assert_nothing_is_left()


def test_a_run_without_a_shared_file_system(work: Workspace) -> None:
    """Workers send their payload as frames; the orchestrator writes it, through to the disk."""
    done = work.train("--set", "payload.store=frames", "--set", "payload.durability=host")
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in work.metrics()] == [1, 2, 3, 4]
    segments = work.ledger("SELECT DISTINCT segment FROM rollouts WHERE step IS NOT NULL")
    assert segments == [("envs.in.0-0000.seg",)]
    assert not list((work.run / "payload").iterdir())
    work.assert_nothing_is_left()


def check_console(text: str) -> None:
    for step in range(1, 5):
        (line,) = [one for one in text.splitlines() if one.startswith(f"Step {step}/4 ")]
        for part in ("Time:", "Reward:", "Throughput:", "Off-Policy:", "In Flight:", "Lag p99/max ms:"):
            assert part in line
        assert "orchestrator" in line
    (summary,) = [one for one in text.splitlines() if one.startswith("Lag p99/max ms, whole run")]
    for process in ("orchestrator", "envs.router", "envs.w0", "envs.w1", "engine", "trainer"):
        assert process in summary


def check_run_directory(work: Workspace) -> None:
    run = work.run
    for name in ("config.toml", "run.db", "metrics.jsonl", "logs", "payload", "batches", "rollouts",
                 "weights", "checkpoints", "keys"):  # fmt: skip
        assert (run / name).exists(), name
    assert list((run / "payload").iterdir()) == [], "all payload was released"
    assert sorted(one.name for one in (run / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert (run / "weights" / "step_4" / "STABLE").exists()
    metrics = work.metrics()
    assert [one["step"] for one in metrics] == [1, 2, 3, 4]
    assert metrics[0]["mismatch_kl"] < 1e-5, "fresh rows: engine and trainer agree"
    assert all(one["num_turns/mean"] == 2 for one in metrics)
    assert all(one["off_policy/max"] <= 1 for one in metrics)
    assert work.ledger("SELECT DISTINCT num_settled FROM rollouts") == [(1,)]
    assert work.ledger("SELECT count(*) FROM rollouts WHERE outcome IS NULL") == [(0,)]
    for step in range(1, 5):
        manifest = json.loads((run / "batches" / f"step_{step}" / "manifest.json").read_text())
        assert len({row["rollout_id"] for row in manifest["rows"]}) >= 16
        saved = (run / "rollouts" / f"step_{step}" / "train.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in saved]
        assert {"messages", "reward", "advantage", "timing"} <= set(rollouts[0])
        trained = {one["rollout"] for one in rollouts if one["fate"] == "trained"}
        assert trained == {row["rollout_id"] for row in manifest["rows"]}


def test_a_killed_env_worker_costs_nothing_but_time(work: Workspace) -> None:
    with work.training("--set", "max_steps=8", *TWO_WORKERS) as process:
        for victim in work.find("rollway.envserver.worker.worker:main")[:1]:
            victim.kill()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert "died:" in out
    assert "Step 8/8" in out
    assert work.ledger("SELECT DISTINCT num_settled FROM rollouts") == [(1,)]
    work.assert_nothing_is_left()


def test_a_part_stopped_from_outside_ends_the_run(work: Workspace) -> None:
    with work.training(*ENDLESS) as process:
        (victim,) = work.find("rollway.trainer.front:main")
        victim.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "trainer" in err
    assert "was stopped from outside" in err
    work.assert_nothing_is_left()


@pytest.mark.parametrize(
    "entry",
    [
        "rollway.trainer.front:main",
        "rollway.trainer.rank:serve_rank",
        "rollway.orchestrator.shell.main:main",
    ],
)
def test_a_killed_part_ends_the_run_with_the_reason(work: Workspace, entry: str) -> None:
    with work.training(*ENDLESS) as process:
        (victim,) = work.find(entry)
        victim.kill()
        start = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert time.monotonic() - start < 30
    assert entry.split(".")[1] in err
    assert "SIGKILL" in err or "died" in err
    assert "Traceback" not in err
    work.assert_nothing_is_left()


def test_ctrl_c_ends_everything_and_resume_goes_on(work: Workspace) -> None:
    spare = work.run / "payload" / f"one.0-0000.seg{SPARE}"
    with work.training(*ENDLESS) as process:
        work.wait_for_step(process, 2)
        spare.touch()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
    assert not spare.exists(), "what nothing is written into now takes no space"
    assert "--resume" in err
    assert "Traceback" not in err
    work.assert_nothing_is_left()
    resumed = work.train("--resume", "--set", "max_steps=8")
    assert resumed.returncode == 0, resumed.stderr
    steps = [one["step"] for one in work.metrics()]
    assert steps == sorted(set(steps)), "no step is reported twice"
    assert steps[-1] == 8
    trained = work.ledger("SELECT DISTINCT step FROM rollouts WHERE step IS NOT NULL ORDER BY step")
    assert trained == [(step,) for step in range(1, 9)]


def test_sigterm_ends_a_run_and_nobody_trains_in_it_meanwhile(work: Workspace, rollway: Rollway) -> None:
    with work.training(*ENDLESS) as process:
        for flag in ("--resume", "--clean"):
            second = rollway("train", work.file, flag)
            assert second.code == 1
            assert second.err.startswith("rollway: another process trains in ")
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143
    assert "Traceback" not in err
    work.assert_nothing_is_left()


def test_a_killed_launcher_takes_everything_along(work: Workspace) -> None:
    with work.training(*ENDLESS) as process:
        assert len(work.processes()) > 6
        process.kill()
    work.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("trainer.leaning_rate=1", "unknown key 'trainer.leaning_rate'"),
        ("model.path=/nowhere", "no model folder '/nowhere'"),
        ("env.0.id=revers-text", "no environment 'revers-text'; did you mean 'reverse-text'?"),
        ("env.0.id=my_env.py", "no environment file at "),
    ],
)
def test_mistakes_that_can_be_seen_are_said_before_anything_is_written(
    work: Workspace, rollway: Rollway, mistake: str, said: str
) -> None:
    failed = rollway("train", work.file, "--set", mistake)
    assert failed.code == 1
    assert said in failed.err
    assert failed.err.count("\n") == 1, failed.err
    assert not work.run.exists()


def test_mistakes_that_a_part_finds_are_one_line(work: Workspace) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        mistakes = {
            "env.0.id=revers-text": "did you mean 'reverse-text'?",
            f"engine.embedded.port={port}": f"'engine.embedded.port' = {port} cannot be bound",
            "engine.external.url=http://127.0.0.1:9": "no engine at http://127.0.0.1:9",
        }
        for mistake, said in mistakes.items():
            failed = work.train("--clean", "--set", mistake)
            assert failed.returncode == 1, (mistake, failed.stdout)
            assert said in failed.stderr
            assert failed.stderr.count("\n") == 1, failed.stderr
            assert failed.stdout == "" or "Traceback" not in failed.stdout
            assert not work.processes()


def test_a_dry_run_prints_the_plan_and_starts_nothing(work: Workspace, rollway: Rollway) -> None:
    shown = rollway("train", work.file, "--dry-run", "--set", "trainer.lr=0.5")
    assert shown.code == 0
    assert "lr = 0.5" in shown.out
    assert "[plan]" in shown.out
    assert not work.run.exists()
