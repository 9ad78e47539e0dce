"""Steps that were trained but not reported get their line from the ledger and the trainer's records."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollway.ledger.ledger import open_ledger
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, RolloutId, Step
from rollway.records.payload import PayloadRef
from rollway.resume.resume import report_unreported_steps
from rollway.rundir.rundir import STABLE, RunDir, write_whole

pytestmark = pytest.mark.anyio

BATCH = {"reward/all/mean": 0.5, "scored/tokens": 400.0, "scored/rollouts": 8.0}


async def ship(run: RunDir, step: int) -> None:
    async with open_ledger(run.ledger) as ledger:
        await ledger.record_shipped(Step(step), [], BATCH)


def publish(run: RunDir, step: int, at_s: float) -> None:
    folder = run.weights_of(PolicyVersion(step))
    write_whole(
        folder / STABLE,
        msgspec.json.encode(Published(PolicyVersion(step), str(folder), {"loss": step / 10})),
    )
    os.utime(folder / STABLE, (at_s, at_s))


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.make_folders()
    run.metrics.write_text('{"step": 1, "loss": 9}\n')
    return run


async def test_a_missing_line_is_made_from_the_ledger_and_the_trainers_record(
    run: RunDir,
) -> None:
    for step in (1, 2, 3):
        await ship(run, step)
        publish(run, step, at_s=1000.0 + 4 * step)
    report_unreported_steps(run, Step(3))
    first, second, third = lines(run)
    assert first == {"step": 1, "loss": 9}, "a reported step keeps its line"
    assert second == {
        "step": 2, **BATCH, "loss": 0.2, "time/step": 4.0, "throughput/tokens": 100.0,
        "throughput/rollouts": 2.0, "time": 1008.0, "stalls": [],
    }  # fmt: skip
    assert (third["step"], third["loss"], third["time"]) == (3, 0.3, 1012.0)
    report_unreported_steps(run, Step(3))
    assert len(lines(run)) == 3, "a second call adds nothing"


async def test_a_step_whose_weights_are_gone_has_the_metrics_of_its_batch(
    run: RunDir,
) -> None:
    await ship(run, 2)
    await ship(run, 3)
    publish(run, 3, at_s=1000.0)
    report_unreported_steps(run, Step(3))
    assert lines(run)[1:] == [
        {"step": 2, **BATCH, "stalls": []},
        {"step": 3, **BATCH, "loss": 0.3, "time": 1000.0, "stalls": []},
    ]


async def test_a_step_that_is_not_in_the_ledger_has_the_metrics_of_its_manifest(
    run: RunDir,
) -> None:
    rows = tuple(
        BatchRow(RolloutId(name), PayloadRef("s", 0, 1), row, 10, 5, 0.5)
        for name, row in (("g0.0", 0), ("g0.0", 1), ("g0.1", 0))
    )
    manifest = BatchManifest(Step(2), PolicyVersion(1), rows, (((0, 1), (2,)),))
    write_whole(run.manifest(Step(2)), msgspec.json.encode(manifest))
    publish(run, 2, at_s=1000.0)
    report_unreported_steps(run, Step(2))
    assert lines(run)[1:] == [
        {"step": 2, "batch/rollouts": 2, "batch/rows": 3, "batch/tokens": 30, "batch/micro_batches": 2,
         "loss": 0.2, "time": 1000.0, "stalls": []}
    ]  # fmt: skip
