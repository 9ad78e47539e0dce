"""What a run writes for people may fail in any way: the run trains the same steps, and says so."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.doubles.stand_ins import CopyingTrainer, DrawingEngine
from tests.doubles.workspace import DEADLINE_S, Workspace

from rollway.errors import PayloadError

pytestmark = pytest.mark.system

TIDIED = ("weights", "payload")
FAULTS = Path(__file__).parents[1] / "doubles" / "faults"


def trained_once(work: Workspace, last: int) -> None:
    steps = [line["step"] for line in work.metrics()]
    assert steps == list(range(1, last + 1))
    twice = "SELECT count(*) FROM rollouts WHERE num_settled > 1"
    assert work.ledger(twice) == [(0,)]


NAMES = {
    "now.json.partial": "Writing now.json",
    "metrics.jsonl": "Writing metrics.jsonl", "rollouts": "Saving rollouts",
    "weights": "Removing old weights",
    "payload": "(Removing (unused payload|payload that)|Listing the payload)",
}  # fmt: skip
"""What the console calls the work at which a file or folder of the run failed."""


@pytest.mark.parametrize("seed", ["0"])
def test_housekeeping_that_fails_at_random_costs_no_step(
    light: Workspace, monkeypatch: pytest.MonkeyPatch, seed: str
) -> None:
    """Files are missing, read-only, stale or on a full disk, some calls take 5 s, and other programs
    lock the ledger."""
    log = light.folder.parent / "faults.log"
    for name, value in {"RUN": light.run, "LOG": log, "SEED": seed}.items():
        monkeypatch.setenv(f"FAULTS_{name}", str(value))
    monkeypatch.setenv("PYTHONPATH", str(FAULTS))
    options = ("--set", "max_steps=20", "--set", "orchestrator.keep_weights=1")
    with light.started(*options) as process:
        light.wait_for_step(process, 3)
        with closing(sqlite3.connect(light.run / "run.db", timeout=60)) as other:
            other.execute("BEGIN IMMEDIATE")
            light.wait_for_line(process, "^Writing the ledger failed: database is locked")
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    faults = [line.split() for line in log.read_text().splitlines()]
    errors = [(kind, place.split("/")[0]) for kind, _, place in faults if kind != "slow"]
    # what is gone need not be removed
    failed = {name for kind, name in errors if kind != "ENOENT" or name not in TIDIED}
    assert {name for _, name in errors} == set(NAMES)
    assert {kind for kind, *_ in faults} == {
        "slow",
        "ENOENT",
        "ENOSPC",
        "EROFS",
        "EACCES",
        "ESTALE",
    }
    said = "".join(light.printed) + out
    for name in failed:
        assert re.search(f"^{NAMES[name]}.* failed", said, re.MULTILINE), (name, faults)
    trained_once(light, 20)


def test_a_ledger_that_is_removed_is_said(light: Workspace, trainer: CopyingTrainer) -> None:
    trainer.hold_at(3)
    with light.started() as process:
        light.wait_for_step(process, 1)
        for path in light.run.glob("run.db*"):
            path.unlink()
        light.wait_for_line(process, r"^Looking for the ledger failed: .*run.db was removed")
        trainer.release()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err


def test_a_run_whose_directory_is_removed_ends_and_says_why(light: Workspace) -> None:
    with light.started("--set", "max_steps=500") as process:
        light.wait_for_step(process, 1)
        light.run.rename(light.run.with_name("elsewhere"))
        _, err = process.communicate(timeout=DEADLINE_S)
        assert light.trainer is not None
        with suppress(PayloadError):  # its batches went with the directory
            light.trainer.stop()
    assert process.returncode == 1
    assert f"{light.run} was removed or replaced while the run was using it" in err
    assert "Nothing is left to continue. To start over: " in err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on a disk. Return what takes it."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return filler


@pytest.mark.parametrize("what", ["all of it", "payload alone"])
def test_a_full_disk_holds_the_run_until_there_is_room(
    what: str, tmp_path: Path, tiny_moe: Path, engine: DrawingEngine, trainer: CopyingTrainer,
    small_disk: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    work = Workspace(tmp_path, tiny_moe, engines=[engine.url], trainer=trainer)
    options = ["--set", "max_steps=8"]
    if what == "payload alone":
        assert work.train("--set", "max_steps=1").returncode == 0
        shutil.rmtree(work.run / "payload")
        (work.run / "payload").symlink_to(small_disk)
        options.append("--resume")
    else:
        (tmp_path / "outputs").symlink_to(small_disk)
    trainer.hold_at(4)
    with work.started(*options) as process:
        work.wait_for_step(process, 2)
        filler = fill(small_disk)
        work.wait_for_line(
            process, r"^The disk of .* is full: no rollout starts until there is room"
        )
        trainer.release()
        command = [sys.executable, "-m", "rollway", "why", str(work.run)]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
        filler.unlink()
        work.wait_for_line(process, "^There is room on the disk again: rollouts start")
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    trained_once(work, 8)


@pytest.mark.long
def test_a_killed_run_whose_last_weights_are_cut_off_goes_on_from_the_step_before(
    trains: Workspace,
) -> None:
    with trains.training("--set", "max_steps=500") as process:
        trains.wait_for_step(process, 3)
        process.kill()
        process.wait(DEADLINE_S)
    marks = trains.run.glob("weights/step_*/STABLE")
    last = max(int(mark.parent.name.removeprefix("step_")) for mark in marks)
    weights = trains.run / "weights" / f"step_{last}" / "model.safetensors"
    os.truncate(weights, 100)
    done = trains.train("--resume", "--set", f"max_steps={last + 1}")
    assert done.returncode == 0, done.stderr
    assert f"{weights} is not a complete safetensors file" in done.stdout
    assert f"going on from step {last - 1}, whose weights are complete" in done.stdout
    trained_once(trains, last + 1)
