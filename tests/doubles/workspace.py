"""A folder to train in, and the processes that are started from it."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.doubles.stand_ins import CopyingTrainer

ENVS = Path(__file__).parent / "envs.py"
MARK = "ROLLWAY_TEST_MARK"
WAITS_FOR_TRAINER = r"Waiting for your trainer: open_batches\('(.*)'\)"
DEADLINE_S = 600.0
"""A net for tests that hang: on a busy machine, processes that compute have a low priority."""


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
    """A folder with a run file, and the processes started from it.

    The run starts an engine of its own unless `engines` names some, and a trainer of its own unless
    `trainer` stands in for it.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        engines: Sequence[str] = (),
        trainer: CopyingTrainer | None = None,
    ) -> None:
        engine = "embedded = { max_batch = 16 }"
        if engines:
            engine = (
                f"external = {{ url = {json.dumps([*engines])} }}\n            routes = false\n"
                "            verify = false  # these engines have no weights"
            )
        self.trainer = trainer
        self.printed: list[str] = []
        """The lines of all runs that were read while they ran."""
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
            {engine}
            [orchestrator]
            batch_size = 16
            group_size = 4
            max_in_flight = 16
            {"[external_trainer]" if trainer else "[trainer]"}
            {"" if trainer else "checkpoint_every = 2"}
            """
        )

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "rollway", "train", str(self.file), *args]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark}

    def train(self, *args: str) -> subprocess.CompletedProcess[str]:
        with self.started(*args) as process:
            lines = self._read_until(process, WAITS_FOR_TRAINER) if self.trainer else []
            out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(
            args, process.returncode, "".join(lines) + out, err
        )

    @contextmanager
    def training(self, *args: str) -> Iterator["subprocess.Popen[str]"]:
        """Start a run and yield its process once it has trained its first step."""
        with self.started(*args) as process:
            self.wait_for_step(process, 1)
            yield process

    @contextmanager
    def started(self, *args: str) -> Iterator["subprocess.Popen[str]"]:
        with subprocess.Popen(
            self.command(*args), cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()
                if self.trainer:
                    self.trainer.stop()

    def wait_for_step(self, process: "subprocess.Popen[str]", step: int) -> list[str]:
        """Wait for the line of this step, and return what was printed up to it."""
        return self.wait_for_line(process, f"^Step {step}/")

    def wait_for_line(self, process: "subprocess.Popen[str]", pattern: str) -> list[str]:
        """Wait for a line with this pattern, and return what was printed up to it."""
        lines = self._read_until(process, pattern)
        found = lines and re.search(pattern, lines[-1])
        assert found, (
            f"no line {pattern!r}: {lines} {process.stderr and process.stderr.read()}"
        )
        return lines

    def _read_until(self, process: "subprocess.Popen[str]", pattern: str) -> list[str]:
        """Read lines to the first with this pattern. The trainer begins when the run waits for it."""
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            self.printed.append(line)
            if self.trainer and (found := re.search(WAITS_FOR_TRAINER, line)):
                self.trainer.begin(str(self.folder / found[1]))
            if re.search(pattern, line):
                break
        return lines

    def processes(self) -> list[psutil.Process]:
        """Return the processes started from here that still run."""
        return marked_processes(self.mark)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()

    def find(self, entry: str) -> list[psutil.Process]:
        return [
            process
            for process in self.processes()
            if any(entry in word for word in process.cmdline())
        ]

    def assert_nothing_is_left(self, *, was_killed: bool = False) -> None:
        """Wait until all processes have ended, then look for files that should not be there. A process
        that was killed while it wrote a file leaves the part that it has written."""
        deadline = time.monotonic() + DEADLINE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [process.cmdline() for process in left]
        assert was_killed or not list(self.folder.rglob("*.partial"))
        assert sorted(path.name for path in self.folder.iterdir()) == ["outputs", "run.toml"]

    def ledger(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.run / "run.db")) as db:
            return db.execute(sql).fetchall()

    def why(self) -> str:
        command = [sys.executable, "-m", "rollway", "why", str(self.run)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def metrics(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()
        ]
