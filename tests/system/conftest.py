"""Folders to train in: `work` runs everything, `light` has stand-ins for the engine and the trainer."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.stand_ins import (
    CopyingTrainer,
    DrawingEngine,
    copying_trainer,
    drawing_engines,
)
from tests.doubles.workspace import Workspace


@pytest.fixture
def work(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    monkeypatch.chdir(tmp_path)
    work = Workspace(tmp_path, tiny_moe)
    yield work
    work.kill()


@pytest.fixture
def engine(tiny_moe: Path) -> Iterator[DrawingEngine]:
    with drawing_engines(tiny_moe) as (engine,):
        yield engine


@pytest.fixture
def trainer(tiny_moe: Path) -> Iterator[CopyingTrainer]:
    with copying_trainer(tiny_moe) as trainer:
        yield trainer


@pytest.fixture
def light(
    tmp_path: Path, tiny_moe: Path, engine: DrawingEngine, trainer: CopyingTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Workspace]:  # fmt: skip
    """Its runs cost a third of the time: neither engine nor trainer loads torch."""
    monkeypatch.chdir(tmp_path)
    work = Workspace(tmp_path, tiny_moe, engines=[engine.url], trainer=trainer)
    yield work
    work.kill()


@pytest.fixture
def trains(
    tmp_path: Path, tiny_moe: Path, engine: DrawingEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    """The trainer is real, only the engine is not."""
    monkeypatch.chdir(tmp_path)
    work = Workspace(tmp_path, tiny_moe, engines=[engine.url])
    yield work
    work.kill()


@pytest.fixture
def engine_url(tiny_moe: Path) -> Iterator[str]:
    """An embedded engine of its own."""
    command = [sys.executable, "-m", "rollway", "engine", str(tiny_moe), "--port", "0",
               "--max-context", "128", "--max-batch", "16", "--open"]  # fmt: skip
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+:\d+", line):
                break
        assert found
        yield found[0]
        process.send_signal(signal.SIGINT)
