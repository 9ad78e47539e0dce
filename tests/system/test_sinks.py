"""Whole runs that tell W&B and TensorBoard: one run after a resume, nothing left of a killed one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.test_train import Workspace

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SINKS = ["--set", "metrics.tensorboard=true", "--set", "metrics.wandb_project=tests"]


@pytest.fixture
def work(tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_MODE", "offline")
    work = Workspace(tmp_path, tiny_moe)
    yield work
    for process in work.processes():
        process.kill()


def steps_of(work: Workspace) -> list[int]:
    """As TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = sorted((work.run / "tensorboard").iterdir())
    events = [event for path in files for event in LegacyEventFileLoader(str(path)).Load()]
    return [
        event.step for event in events for value in event.summary.value if value.tag == "mismatch_kl"
    ]


def test_a_resumed_run_goes_on_in_both(work: Workspace) -> None:
    first = work.train("--set", "max_steps=2", *SINKS)
    assert first.returncode == 0, first.stderr
    work.assert_nothing_is_left()
    id = json.loads((work.run / "sinks.json").read_text())["wandb_id"]
    more = work.train("--resume", "--set", "max_steps=4", *SINKS)
    assert more.returncode == 0, more.stderr
    work.assert_nothing_is_left()
    assert steps_of(work) == [1, 2, 3, 4]
    told = json.loads((work.run / "sinks.json").read_text())
    assert told["wandb_id"] == id
    assert told["last_step"]["tensorboard/metrics"] == told["last_step"]["wandb/metrics"] == 4
    runs = [one.name for one in (work.run / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    assert all(name.endswith(id) for name in runs)


def test_sinks_that_die_do_not_end_the_run(work: Workspace) -> None:
    with work.training("--set", "max_steps=8", *SINKS) as process:
        (sinks,) = work.find("rollway.observe.feed:serve")
        sinks.kill()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert "Warning: W&B and TensorBoard will not get further steps" in out
    assert [line["step"] for line in work.metrics()] == list(range(1, 9))
    work.assert_nothing_is_left()


def test_a_killed_launcher_takes_its_sinks_along(work: Workspace) -> None:
    with work.training("--set", "max_steps=500", *SINKS) as process:
        assert work.find("rollway.observe.feed:serve")
        process.kill()
    work.assert_nothing_is_left()
