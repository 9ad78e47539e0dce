"""W&B and TensorBoard, with their real packages, fed by the sinks process."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.config.sections import EnvConfig, MetricsConfig, ModelConfig, RunConfig
from rollway.errors import ConfigError
from rollway.launch.sinks import feed_sinks
from rollway.launch.watch import RunWatch
from rollway.observe.console import Screen
from rollway.records.ids import Step
from rollway.rundir.metrics_file import MetricsFile
from rollway.rundir.rundir import RunDir

pytestmark = pytest.mark.anyio

BLOCK = 32 << 10
TENSORBOARD = MetricsConfig(tensorboard=True)
WANDB = MetricsConfig(wandb_project="team/tests")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunDir(tmp_path / "outputs" / "my-run")
    run.create(
        RunConfig(name="my-run", model=ModelConfig(path="m"), env=(EnvConfig(id="e"),))
    )
    return run


def append_lines(run: RunDir, *steps: int) -> None:
    for step in steps:
        line = {"step": step, "time": 1000.0 + step, "loss": step / 8, "reward/all/mean": 0.5,
                "stalls": [{"process": "w0"}]}  # fmt: skip
        MetricsFile(run.metrics).append(json.dumps(line).encode())


async def train(run: RunDir, config: MetricsConfig, *steps: int) -> None:
    """Run the sinks process while these steps are trained."""
    watch = RunWatch(Screen(), 10)
    async with feed_sinks(config, run, watch):
        for step in steps:
            append_lines(run, step)
            watch.on_step()


def events(run: RunDir) -> Iterator[Any]:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    for path in sorted((run.path / "tensorboard").iterdir()):
        yield from loader.LegacyEventFileLoader(str(path)).Load()


def scalars(run: RunDir) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(run) for value in event.summary.value
    ]  # fmt: skip


async def test_tensorboard_reads_back_every_step(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    await train(run, TENSORBOARD, 1, 2)
    assert scalars(run) == [
        (1, "loss", 0.125), (1, "reward/all/mean", 0.5), (2, "loss", 0.25), (2, "reward/all/mean", 0.5)
    ]  # fmt: skip
    assert [event.wall_time for event in events(run) if event.summary.value] == [
        1001.0,
        1002.0,
    ]


async def test_a_resumed_run_sends_new_steps_and_missed_ones(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    append_lines(run, 1)
    await train(run, TENSORBOARD, 2)
    append_lines(run, 3)  # by a run whose sinks were down
    await train(run, TENSORBOARD, 4)
    assert [step for step, tag, _ in scalars(run) if tag == "loss"] == [1, 2, 3, 4]


async def test_a_step_that_is_trained_again_is_sent_again(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    await train(run, TENSORBOARD, 1, 2, 3)
    run.remove_steps_after(Step(1))
    await train(run, TENSORBOARD, 2)
    assert [step for step, tag, _ in scalars(run) if tag == "loss"] == [1, 2, 3, 2]


def logged_pieces(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after W&B's 7 bytes of header. The file has
    blocks of 32 KB, in which a record is complete (1), or begins (2), continues (3) and ends (4)."""
    data, at, piece = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield piece
            piece = b""


def wandb_records(run: RunDir) -> list[Any]:
    """All records of all offline runs, in the order of the runs."""
    from wandb.proto.wandb_internal_pb2 import Record

    paths = sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb"))
    return [Record.FromString(piece) for path in paths for piece in logged_pieces(path)]


async def test_wandb_continues_a_resumed_run_under_the_same_id(run: RunDir) -> None:
    pytest.importorskip("wandb")
    await train(run, WANDB, 1, 2)
    await train(run, WANDB, 3)
    records = wandb_records(run)
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    wandb_id = json.loads(run.sinks.read_bytes())["wandb_id"]
    assert {(run.run_id, run.entity, run.project, run.display_name) for run in runs} == {
        (wandb_id, "team", "tests", "my-run")
    }
    history = [
        record.history for record in records if record.WhichOneof("record_type") == "history"
    ]
    logged = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in line.item
        }
        for line in history
    ]
    assert [(line["_step"], line["loss"], line["reward/all/mean"]) for line in logged] == [
        (1, 0.125, 0.5), (2, 0.25, 0.5), (3, 0.375, 0.5)
    ]  # fmt: skip


async def test_a_project_that_cannot_be_opened_is_an_error_at_the_start(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    with pytest.raises(ConfigError, match=r"W&B cannot be opened: .*mode"):
        await train(run, WANDB, 1)


async def test_without_sinks_no_process_is_started(run: RunDir) -> None:
    await train(run, MetricsConfig(), 1)
    assert not run.sinks.exists()
    assert not (run.logs / "sinks.log").exists()
