"""A run starts where its run directory says that it stopped."""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollway.config.load import check
from rollway.config.sections import RunConfig
from rollway.errors import RunDirError
from rollway.ledger.ledger import open_ledger
from rollway.records.engine import Published
from rollway.records.ids import GroupId, PolicyVersion, Step, make_rollout_id
from rollway.records.task import Task
from rollway.resume.resume import find_start_point
from rollway.rundir.rundir import STABLE, RunDir, write_whole

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    sections: dict[str, Any] = {
        "name": "run",
        "max_steps": 9,
        "env": [{"id": "reverse-text"}],
    }
    return check({**sections, "model": {"path": str(tmp_path / "model")}}, "run.toml")


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create(config)
    return run


def publish(run: RunDir, step: int, weights: Path) -> None:
    published = Published(PolicyVersion(step), str(weights), {})
    write_whole(run.weights_of(PolicyVersion(step)) / STABLE, msgspec.json.encode(published))


def test_a_new_run_starts_from_its_model(tmp_path: Path, config: RunConfig) -> None:
    start = find_start_point(config, RunDir(tmp_path / "new"), resume=False)
    assert (start.first_step, start.weights) == (1, str(tmp_path / "model"))


def test_a_run_that_ended_before_its_first_rollout_may_be_started_again(
    run: RunDir, config: RunConfig, tmp_path: Path
) -> None:
    for resume in (False, True):
        start = find_start_point(config, run, resume=resume)
        assert (start.first_step, start.weights) == (1, str(tmp_path / "model"))


def test_an_existing_run_is_not_overwritten(run: RunDir, config: RunConfig) -> None:
    run.ledger.touch()
    with pytest.raises(RunDirError, match="already holds a run: --resume continues it"):
        find_start_point(config, run, resume=False)


def test_a_resumed_run_starts_after_its_last_published_version(
    run: RunDir, config: RunConfig, tmp_path: Path
) -> None:
    """The user's own trainer wrote the weights elsewhere. A version without its mark is removed."""
    publish(run, 1, tmp_path / "model")
    run.weights_of(PolicyVersion(2)).mkdir()
    for version in (1, 2):
        run.state_of(PolicyVersion(version)).mkdir()
    run.checkpoint(Step(2)).mkdir()
    start = find_start_point(config, run, resume=True)
    assert (start.first_step, start.weights) == (2, str(tmp_path / "model"))
    assert run.last_state(PolicyVersion(2)) == 1
    assert start.generation == 1
    assert not run.weights_of(PolicyVersion(2)).exists()
    assert run.last_checkpoint() is None


def test_a_run_whose_weights_are_gone_cannot_be_resumed(
    run: RunDir, config: RunConfig, tmp_path: Path
) -> None:
    publish(run, 3, tmp_path / "gone")
    with pytest.raises(
        RunDirError, match=r"weights of step 3 are gone from .*; --clean starts over"
    ):
        find_start_point(config, run, resume=True)


async def test_rollouts_of_an_environment_that_is_not_in_the_run_file_are_an_error(
    run: RunDir, config: RunConfig
) -> None:
    group_id, version = GroupId(0), PolicyVersion(0)
    async with open_ledger(run.ledger) as ledger:
        await ledger.record_group(group_id, "sums", Task("0", "?"), version, 1, "train")
        await ledger.record_dispatch(
            make_rollout_id(group_id, 0), group_id, "sums", "0", version
        )
    with pytest.raises(
        RunDirError, match="environment 'sums', which the run file no longer names"
    ):
        find_start_point(config, run, resume=True)


def test_a_run_that_was_stopped_before_its_model_was_built_starts_with_the_warm_up_again(
    run: RunDir, config: RunConfig, tmp_path: Path
) -> None:
    """A run without a version starts from its model, as a new run does. `rollway train` builds it."""
    (tmp_path / "model").rmdir()
    start = find_start_point(config, run, resume=True)
    assert (start.first_step, start.weights) == (1, str(tmp_path / "model"))


def write_weights(run: RunDir, step: int) -> Path:
    folder = run.weights_of(PolicyVersion(step))
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file({"w": np.zeros(1000, np.float32)}, path)
    publish(run, step, folder)
    return path


@pytest.mark.parametrize("size", [0, 50, 2000])
def test_weights_that_a_power_failure_cut_off_cost_one_step(
    run: RunDir, config: RunConfig, size: int
) -> None:
    kept, cut = write_weights(run, 3), write_weights(run, 4)
    os.truncate(cut, size)
    said: list[str] = []
    start = find_start_point(config, run, resume=True, say=said.append)
    assert (start.first_step, start.weights) == (4, str(kept.parent))
    assert not cut.exists()
    (told,) = said
    assert told.startswith(f"{cut} is not a complete safetensors file: ")
    assert told.endswith(": going on from step 3, whose weights are complete")


def test_a_run_without_whole_weights_is_refused_and_loses_nothing(
    run: RunDir, config: RunConfig
) -> None:
    cut = write_weights(run, 4)
    os.truncate(cut, 100)
    with pytest.raises(
        RunDirError, match=r"is not a complete .*and no older version is left"
    ):
        find_start_point(config, run, resume=True)
    assert cut.exists()
