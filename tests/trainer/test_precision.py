"""Training in bfloat16 with float32 weights, and with activations that are computed twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.test_gradients import Gradients, gradients
from tests.trainer.test_step import sample, write
from tools.model_table import tiny_model

from rollway.config.sections import TrainerConfig
from rollway.errors import ModelError
from rollway.model.load import load_model, save_weights
from rollway.model.proof import open_rows
from rollway.payload.reader import SegmentReader
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import PolicyVersion, Step
from rollway.trainer.step import Learner

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with experts and a window."""
    torch.set_num_threads(1)
    tiny_model("mixtral").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
async def rows(folder: Path, tmp_path: Path) -> list[BatchRow]:
    return await write(tmp_path, sample(load_model(str(folder)).eval(), 1.0))


def learner_of(folder: Path, **settings: Any) -> Learner:
    return Learner(open_rows(load_model(str(folder))), TrainerConfig(**settings))


def manifest_of(rows: list[BatchRow], step: int = 1) -> BatchManifest:
    planned = (tuple(range(len(rows))),)
    return BatchManifest(Step(step), PolicyVersion(step - 1), tuple(rows), (planned,))


async def test_activations_that_are_computed_twice_give_the_same_gradients(
    folder: Path, tmp_path: Path, rows: list[BatchRow]
) -> None:
    found: list[Gradients] = []
    for recomputes in (False, True):
        learner = learner_of(folder, activation_checkpointing=recomputes)
        learner.compute_gradients(manifest_of(rows), SegmentReader(tmp_path))
        found.append(gradients(learner.model))
    kept, recomputed = found
    assert recomputed.keys() == kept.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-7, rtol=1e-5)


def test_a_family_that_cannot_recompute_is_named(folder: Path) -> None:
    rows = open_rows(load_model(str(folder)))
    rows.model.supports_gradient_checkpointing = False
    with pytest.raises(
        ModelError, match=r"'mixtral' cannot recompute .*checkpointing = false"
    ):
        Learner(rows, TrainerConfig(activation_checkpointing=True))


async def test_bfloat16_keeps_what_float32_would_have_learned(
    folder: Path, tmp_path: Path, rows: list[BatchRow]
) -> None:
    """The steps are so small that most of them vanish if weights are rounded after each."""
    before = load_file(folder / "model.safetensors")
    moved = {}
    for dtype in ("float32", "bfloat16"):
        learner = learner_of(folder, dtype=dtype, lr=1e-5)
        for step in range(1, 9):
            metrics = learner.step(manifest_of(rows, step), SegmentReader(tmp_path))
        assert learner.model.dtype == getattr(torch, dtype)
        assert abs(metrics["mismatch_kl"]) < 0.05
        save_weights(learner.model, tmp_path / dtype, "float32", learner.weights)
        after = load_file(tmp_path / dtype / "model.safetensors")
        moved[dtype] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    similarity = torch.cosine_similarity(moved["float32"], moved["bfloat16"], dim=0)
    assert similarity > 0.9
    assert (moved["bfloat16"] != 0).float().mean() > 0.95


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_published_in_the_dtype_that_is_asked_for(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    model = load_model(str(folder))
    save_weights(model, tmp_path / "out", dtype)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["dtype"] == dtype
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    again = load_model(str(tmp_path / "out"))
    for name, weight in again.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], atol=1e-2, rtol=1e-2)
