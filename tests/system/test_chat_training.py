"""Whole runs that train on a chat endpoint, which takes messages and no weights."""

import asyncio
import random
from pathlib import Path

import pytest
from tests.doubles.chat import chat_double, qwen3
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import Workspace

from rollway.inference.rendering.rendering import SyncRenderer

pytestmark = [pytest.mark.system, pytest.mark.anyio]

FILL = ("--set", "engine.external.fill_ids=true", "--set", "max_steps=3")


def some_letters(text: str, number: int) -> str:
    return "a" * random.Random(f"{text} {number}").randint(1, 5)


@pytest.mark.parametrize("has_ids", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_three_steps(
    tmp_path: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch, has_ids: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    renderer = SyncRenderer(qwen3(tiny_dense)) if has_ids else None
    async with chat_double(some_letters, renderer=renderer) as double:
        work = Workspace(tmp_path, tiny_dense, engines=[double.url])
        done = await asyncio.to_thread(work.train, *FILL)
    assert done.returncode == 0, done.stderr
    assert "The engine takes messages, but no token ids and no weights" in done.stdout
    metrics = work.metrics()
    assert len(metrics) == 3
    for step in metrics:
        num_approximate = 0 if has_ids else step["batch/rows"]
        assert step["batch/approximate_rows"] == num_approximate
        assert ("mismatch_kl" in step) is has_ids
        assert step["rows/left_out"] == step["errors/engine"] == 0
        assert step["grad_norm"] > 0
    saved = (work.run / "rollouts" / "step_1" / "train.jsonl").read_text()
    assert ('"is_approximate":true' in saved) is not has_ids


async def test_without_the_key_a_chat_endpoint_is_refused(
    tmp_path: Path, tiny_dense: Path, trainer: CopyingTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with chat_double(some_letters) as double:
        work = Workspace(tmp_path, tiny_dense, engines=[double.url], trainer=trainer)
        done = await asyncio.to_thread(work.train, "--set", "engine.verify=true")
    assert done.returncode == 1
    assert "engine.external.fill_ids" in done.stderr
