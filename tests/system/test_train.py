"""`rollway train` as a user runs it: whole processes, signals, and what is left behind."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ENVS = Path(__file__).parents[1] / "doubles" / "envs.py"
MARK = "ROLLWAY_TEST_MARK"


class Workspace:
    """A folder with a run file, and the processes started from it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.run = folder / "outputs" / "test"
        self.mark = uuid.uuid4().hex
        self.file = folder / "run.toml"
        self.file.write_text(
            f"""
            name = "test"
            max_steps = 4
            [model]
            path = "{model}"
            renderer = "qwen3"
            template = {{ enable_thinking = false }}
            [[env]]
            id = "{ENVS}"
            args = {{ kind = "Lengths" }}
            concurrency = 8
            [sampling]
            max_tokens = 6
            [engine]
            max_context = 128
            max_batch = 16
            [orchestrator]
            batch_size = 16
            group_size = 4
            max_in_flight = 16
            [trainer]
            checkpoint_every = 2
            """
        )

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "rollway", "train", str(self.file), *args]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark}

    def train(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args), cwd=self.folder, env=self.env, capture_output=True, text=True,
            timeout=150,
        )  # fmt: skip

    @contextmanager
    def training(self, *args: str) -> Iterator["subprocess.Popen[str]"]:
        """A run in progress, past its first step."""
        with subprocess.Popen(
            self.command(*args), cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                self.wait_for_step(process, 1)
                yield process
            finally:
                process.kill()

    def wait_for_step(self, process: "subprocess.Popen[str]", step: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"Step {step}/"):
                return
        raise AssertionError(f"no step {step}: {process.stderr and process.stderr.read()}")

    def processes(self) -> list[psutil.Process]:
        """Everything started from here that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def find(self, entry: str) -> list[psutil.Process]:
        return [one for one in self.processes() if any(entry in word for word in one.cmdline())]

    def nothing_is_left(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [one.cmdline() for one in left]
        assert not list(self.folder.rglob("*.partial"))
        assert sorted(one.name for one in self.folder.iterdir()) == ["outputs", "run.toml"]

    def ledger(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.run / "run.db")) as db:
            return db.execute(sql).fetchall()

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def work(tmp_path: Path, tiny_moe: Path) -> Iterator[Workspace]:
    work = Workspace(tmp_path, tiny_moe)
    yield work
    for process in work.processes():
        process.kill()


def test_a_whole_run_its_refusal_and_its_resumption(work: Workspace) -> None:
    done = work.train()
    assert done.returncode == 0, done.stderr
    work.nothing_is_left()
    check_console(done.stdout)
    check_run_directory(work)
    again = work.train()
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1
    assert "--resume goes on, --clean starts over" in again.stderr
    assert "Nothing to do" in work.train("--resume").stdout
    more = work.train("--resume", "--set", "max_steps=6")
    assert more.returncode == 0, more.stderr
    assert [one["step"] for one in work.metrics()] == [1, 2, 3, 4, 5, 6]
    assert work.ledger("SELECT count(*) FROM steps") == [(6,)]
    trained = work.ledger("SELECT step, count(*) FROM rollouts WHERE step IS NOT NULL GROUP BY step")
    assert [step for step, _ in trained] == [1, 2, 3, 4, 5, 6]
    work.nothing_is_left()


def test_a_run_without_a_shared_file_system(work: Workspace) -> None:
    """Workers send their payload as frames; the orchestrator writes it, through to the disk."""
    done = work.train("--set", "payload.store=frames", "--set", "payload.durability=host")
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in work.metrics()] == [1, 2, 3, 4]
    segments = work.ledger("SELECT DISTINCT segment FROM rollouts WHERE step IS NOT NULL")
    assert segments == [("envs.in.0-0000.seg",)]
    assert not list((work.run / "payload").iterdir())
    work.nothing_is_left()


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
    with work.training("--set", "max_steps=8") as process:
        for victim in work.find("rollway.envserver.worker:main")[:1]:
            victim.kill()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert "died:" in out
    assert "Step 8/8" in out
    assert work.ledger("SELECT DISTINCT num_settled FROM rollouts") == [(1,)]
    work.nothing_is_left()


def test_a_part_stopped_from_outside_ends_the_run(work: Workspace) -> None:
    with work.training("--set", "max_steps=500") as process:
        (victim,) = work.find("rollway.trainer.front:main")
        victim.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "trainer" in err
    assert "was stopped from outside" in err
    work.nothing_is_left()


@pytest.mark.parametrize(
    "entry",
    [
        "rollway.trainer.front:main",
        "rollway.trainer.core:serve_core",
        "rollway.orchestrator.shell.main:main",
    ],
)
def test_a_killed_part_ends_the_run_with_the_reason(work: Workspace, entry: str) -> None:
    with work.training("--set", "max_steps=500") as process:
        (victim,) = work.find(entry)
        victim.kill()
        start = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert time.monotonic() - start < 30
    assert entry.split(".")[1] in err
    assert "SIGKILL" in err or "died" in err
    assert "Traceback" not in err
    work.nothing_is_left()


def test_ctrl_c_ends_everything_and_resume_goes_on(work: Workspace) -> None:
    with work.training("--set", "max_steps=500") as process:
        work.wait_for_step(process, 3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
    assert "--resume" in err
    assert "Traceback" not in err
    work.nothing_is_left()
    resumed = work.train("--resume", "--set", "max_steps=9")
    assert resumed.returncode == 0, resumed.stderr
    steps = [one["step"] for one in work.metrics()]
    assert steps == sorted(set(steps)), "no step is reported twice"
    assert steps[-1] == 9
    trained = work.ledger("SELECT DISTINCT step FROM rollouts WHERE step IS NOT NULL ORDER BY step")
    assert trained == [(step,) for step in range(1, 10)]


def test_sigterm_ends_a_run_and_nobody_trains_in_it_meanwhile(work: Workspace) -> None:
    with work.training("--set", "max_steps=500") as process:
        for flag in ("--resume", "--clean"):
            second = work.train(flag)
            assert second.returncode == 1
            assert second.stderr.startswith("rollway: another process trains in ")
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143
    assert "Traceback" not in err
    work.nothing_is_left()


def test_a_killed_launcher_takes_everything_along(work: Workspace) -> None:
    with work.training("--set", "max_steps=500") as process:
        assert len(work.processes()) > 6
        process.kill()
    work.nothing_is_left()


def test_mistakes_are_one_line(work: Workspace) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        mistakes = {
            "trainer.leaning_rate=1": "unknown key 'trainer.leaning_rate'",
            "env.0.id=revers-text": "did you mean 'reverse-text'?",
            f"engine.port={port}": f"engine.port {port} cannot be bound",
            "model.path=/nowhere": "no model folder '/nowhere'",
            "engine.url=http://127.0.0.1:9": "no engine at http://127.0.0.1:9",
        }
        for mistake, said in mistakes.items():
            failed = work.train("--clean", "--set", mistake)
            assert failed.returncode == 1, (mistake, failed.stdout)
            assert said in failed.stderr
            assert failed.stderr.count("\n") == 1, failed.stderr
            assert failed.stdout == "" or "Traceback" not in failed.stdout
            assert not work.processes()


def test_a_dry_run_prints_the_plan_and_starts_nothing(work: Workspace) -> None:
    shown = work.train("--dry-run", "--set", "trainer.lr=0.5")
    assert shown.returncode == 0
    assert "lr = 0.5" in shown.stdout
    assert "[plan]" in shown.stdout
    assert not work.run.exists()
