"""Steps that were trained and not reported get their line from what is written elsewhere."""

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
from rollway.resume.unreported import report_the_rest
from rollway.rundir.rundir import STABLE, RunDir, write_whole

pytestmark = pytest.mark.anyio

BATCH = {"reward/all/mean": 0.5, "scored/tokens": 400.0, "scored/rollouts": 8.0}


async def shipped(run: RunDir, step: int) -> None:
    async with open_ledger(run.ledger) as ledger:
        await ledger.shipped(Step(step), [], BATCH)


def published(run: RunDir, step: int, at_s: float) -> None:
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


async def test_a_line_is_made_of_the_ledger_and_the_trainers_record(run: RunDir) -> None:
    for step in (1, 2, 3):
        await shipped(run, step)
        published(run, step, at_s=1000.0 + 4 * step)
    report_the_rest(run, Step(3))
    first, second, third = lines(run)
    assert first == {"step": 1, "loss": 9}, "what was reported stays"
    assert second == {
        "step": 2, **BATCH, "loss": 0.2, "time/step": 4.0, "throughput/tokens": 100.0,
        "throughput/rollouts": 2.0, "time": 1008.0, "stalls": [],
    }  # fmt: skip
    assert (third["step"], third["loss"], third["time"]) == (3, 0.3, 1012.0)
    report_the_rest(run, Step(3))
    assert len(lines(run)) == 3, "and only once"


async def test_weights_that_are_gone_leave_what_the_batch_said(run: RunDir) -> None:
    await shipped(run, 2)
    await shipped(run, 3)
    published(run, 3, at_s=1000.0)
    report_the_rest(run, Step(3))
    assert lines(run)[1:] == [
        {"step": 2, **BATCH, "stalls": []},
        {"step": 3, **BATCH, "loss": 0.3, "time": 1000.0, "stalls": []},
    ]


async def test_without_a_ledger_there_is_still_the_manifest(run: RunDir) -> None:
    rows = tuple(
        BatchRow(RolloutId(id), PayloadRef("s", 0, 1), row, 10, 5, 0.5)
        for id, row in (("g0.0", 0), ("g0.0", 1), ("g0.1", 0))
    )
    manifest = BatchManifest(Step(2), PolicyVersion(1), rows, (((0, 1), (2,)),))
    write_whole(run.manifest(Step(2)), msgspec.json.encode(manifest))
    published(run, 2, at_s=1000.0)
    report_the_rest(run, Step(2))
    assert lines(run)[1:] == [
        {"step": 2, "batch/rollouts": 2, "batch/rows": 3, "batch/tokens": 30, "batch/micro_batches": 2,
         "loss": 0.2, "time": 1000.0, "stalls": []}
    ]  # fmt: skip
