"""A folder to train in, and the processes that are started from it."""

import json
import os
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

ENVS = Path(__file__).parent / "envs.py"
MARK = "ROLLWAY_TEST_MARK"


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return all running processes that have this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


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
            server = {{ workers = 1, concurrency = 16 }}
            [sampling]
            max_tokens = 6
            [engine]
            max_context = 128
            embedded = {{ max_batch = 16 }}
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
        """Start a run and yield its process once it has trained its first step."""
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
        """Return the processes started from here that still run."""
        return marked_processes(self.mark)

    def find(self, entry: str) -> list[psutil.Process]:
        return [
            process for process in self.processes() if any(entry in word for word in process.cmdline())
        ]

    def assert_nothing_is_left(self) -> None:
        """Wait until all processes have ended, then look for files that should not be there."""
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [process.cmdline() for process in left]
        assert not list(self.folder.rglob("*.partial"))
        assert sorted(path.name for path in self.folder.iterdir()) == ["outputs", "run.toml"]

    def ledger(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.run / "run.db")) as db:
            return db.execute(sql).fetchall()

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
