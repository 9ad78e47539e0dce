"""Rows that a model cannot take are left out with the reason, and the others are trained."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.trainer.test_step import sample, write
from tools.model_table import tiny_model

from rollway.config.sections import TrainerConfig
from rollway.model.load import load_model
from rollway.model.packing import RowModel
from rollway.model.proof import open_rows
from rollway.payload.blob import Columns
from rollway.payload.reader import SegmentReader
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import PolicyVersion, Step
from rollway.trainer.step import Learner

pytestmark = pytest.mark.anyio


class ChangingReader(SegmentReader):
    """Changes the columns of one row after they are read."""

    def __init__(self, folder: Path, at: BatchRow, change: Callable[[Columns], None]) -> None:
        super().__init__(folder)
        self._at = at
        self._change = change

    def row(self, row: BatchRow) -> Columns:
        columns = {name: np.array(column) for name, column in super().row(row).items()}
        if row is self._at:
            self._change(columns)
        return columns


def set_all(name: str, value: float) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name][1:-1] = value  # type: ignore[call-overload]

    return change


def shorten(name: str) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name] = columns[name][:-1]

    return change


def drop(name: str) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        del columns[name]

    return change


def cut_routes(columns: Columns) -> None:
    columns["routes"] = columns["routes"][:, :2]


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> RowModel:
    torch.set_num_threads(1)
    return open_rows(load_model(str(tiny_moe)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_all("token_ids", 100_000), "token ids go from"),
        (set_all("token_ids", -1), "token ids go from -1"),
        (set_all("logprobs", -9999.0), "a logprob is minus infinity"),
        (set_all("logprobs", float("nan")), "a logprob is minus infinity or not a number"),
        (set_all("temperatures", 0.0), "a temperature is not a number above 0"),
        (shorten("logprobs"), "column 'logprobs' does not have"),
        (shorten("routes"), "its routes are"),
        (cut_routes, "its routes have 2 layers × 2 experts"),
        (set_all("routes", 9), "its routes name expert 9, but the model has 8"),
        (set_all("routes", 3), "tokens to one expert twice"),
        (drop("routes"), "it has no routes, though other rows have"),
    ],
)
async def test_a_row_is_left_out_and_the_others_are_trained(
    model: RowModel, tmp_path: Path, change: Callable[[Columns], None], reason: str
) -> None:
    rows = await write(tmp_path, sample(model.model.eval(), 1.0))
    model.model.train()
    learner = Learner(model, TrainerConfig(lr=1e-9))
    manifest = BatchManifest(
        Step(1), PolicyVersion(0), tuple(rows), ((tuple(range(len(rows))),),)
    )
    metrics = learner.step(manifest, ChangingReader(tmp_path, rows[5], change))
    (left_out,) = learner.left_out
    assert (left_out.rollout_id, left_out.row) == ("g0.5", 0)
    assert reason in left_out.reason
    assert metrics["grad_norm"] > 0


async def test_a_row_that_is_longer_than_the_model_takes_is_left_out(tmp_path: Path) -> None:
    """Learned positions end somewhere, and a position beyond them would be an error of torch."""
    model = tiny_model("gpt2")
    rows = await write(tmp_path, sample(model.eval(), 1.0))
    model.config.n_positions = rows[0].num_tokens
    learner = Learner(open_rows(model), TrainerConfig(lr=1e-9))
    manifest = BatchManifest(
        Step(1), PolicyVersion(0), tuple(rows), ((tuple(range(len(rows))),),)
    )
    learner.step(manifest, SegmentReader(tmp_path))
    longer = [row for row in rows if row.num_tokens > rows[0].num_tokens]
    assert 0 < len(longer) < len(rows)
    assert [row.rollout_id for row in learner.left_out] == [row.rollout_id for row in longer]
    assert f"the model takes up to {rows[0].num_tokens}" in learner.left_out[0].reason


@pytest.mark.parametrize("changes", [{"num_tokens": 999}, {"advantage": float("inf")}])
async def test_a_row_whose_manifest_is_wrong_is_left_out(
    model: RowModel, tmp_path: Path, changes: dict[str, float]
) -> None:
    rows = await write(tmp_path, sample(model.model.eval(), 1.0))
    rows[2] = replace(rows[2], **changes)
    model.model.train()
    learner = Learner(model, TrainerConfig(lr=1e-9))
    manifest = BatchManifest(
        Step(1), PolicyVersion(0), tuple(rows), ((tuple(range(len(rows))),),)
    )
    learner.step(manifest, SegmentReader(tmp_path))
    assert [row.rollout_id for row in learner.left_out] == ["g0.2"]
