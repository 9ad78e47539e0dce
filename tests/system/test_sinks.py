"""Whole runs that tell W&B and TensorBoard: one run after a resume, nothing left of a killed one."""

import json

import pytest
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = [pytest.mark.system]

SINKS = ["--set", "metrics.tensorboard=true", "--set", "metrics.wandb_project=tests"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_MODE", "offline")


def steps_of(work: Workspace) -> list[int]:
    """As TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = sorted((work.run / "tensorboard").iterdir())
    events = [event for path in files for event in LegacyEventFileLoader(str(path)).Load()]
    return [
        event.step for event in events for value in event.summary.value if value.tag == "loss"
    ]


@pytest.mark.long
def test_a_resumed_run_goes_on_in_both(light: Workspace) -> None:
    first = light.train("--set", "max_steps=2", *SINKS)
    assert first.returncode == 0, first.stderr
    light.assert_nothing_is_left()
    wandb_id = json.loads((light.run / "sinks.json").read_text())["wandb_id"]
    more = light.train("--resume", "--set", "max_steps=4", *SINKS)
    assert more.returncode == 0, more.stderr
    light.assert_nothing_is_left()
    assert steps_of(light) == [1, 2, 3, 4]
    sinks = json.loads((light.run / "sinks.json").read_text())
    assert sinks["wandb_id"] == wandb_id
    assert (
        sinks["last_step"]["tensorboard/metrics"] == sinks["last_step"]["wandb/metrics"] == 4
    )
    runs = [path.name for path in (light.run / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    assert all(name.endswith(wandb_id) for name in runs)


def test_sinks_that_die_do_not_end_the_run(light: Workspace, trainer: CopyingTrainer) -> None:
    trainer.hold_at(2)
    with light.training("--set", "max_steps=8", *SINKS) as process:
        (sinks,) = light.find("rollway.observe.feed:serve")
        sinks.kill()
        light.wait_for_line(
            process, "Warning: W&B and TensorBoard will not get further steps"
        )
        trainer.release()
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    assert [line["step"] for line in light.metrics()] == list(range(1, 9))
    light.assert_nothing_is_left()


def test_a_killed_launcher_takes_its_sinks_along(
    light: Workspace, trainer: CopyingTrainer
) -> None:
    trainer.hold_at(2)
    with light.training("--set", "max_steps=500", *SINKS) as process:
        assert light.find("rollway.observe.feed:serve")
        process.kill()
    light.assert_nothing_is_left(was_killed=True)
