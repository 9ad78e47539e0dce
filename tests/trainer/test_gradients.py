"""Loss and gradients of a step equal those of plain autograd, row by row, with nothing packed."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.test_step import sample, write
from tools.model_table import tiny_model
from torch import Tensor

from rollway.config.sections import TrainerConfig
from rollway.model.load import load_model
from rollway.model.proof import open_rows
from rollway.orchestrator.core.batches.packing import plan_ranks
from rollway.payload.reader import SegmentReader
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import PolicyVersion, Step
from rollway.trainer.collective import Collective, join_ranks
from rollway.trainer.loss import mismatch_kl
from rollway.trainer.step import Learner

pytestmark = pytest.mark.anyio

CONFIG = TrainerConfig(max_grad_norm=1e9)
TOLERANCE = 1e-5
FAMILIES = ("qwen3", "mistral", "mixtral", "glm4_moe")
"""Dense, with a window, with a window and experts, and with sigmoid routers below a dense layer."""

Gradients = dict[str, Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    return folder


@pytest.fixture
async def rows(folder: Path, tmp_path: Path) -> list[BatchRow]:
    """Rows drawn by an engine with slightly other weights, which sometimes chooses other experts."""
    model = load_model(str(folder))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * weight.std() * torch.randn_like(weight)
    return await write(tmp_path, sample(model.eval(), 0.9), lambda n: (n % 3 - 0.7) / 2)


@contextmanager
def choosing(routes: Tensor | None) -> Iterator[None]:
    """Answer every `topk` over experts with the routes of the next layer."""
    if routes is None:
        yield
        return
    layers, own = iter(routes.unbind(1)), torch.topk

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if scores.ndim == 2 and scores.shape[1] == 8:
            chosen = next(layers).long()
            return torch.return_types.topk((scores.gather(1, chosen), chosen))
        return own(scores, k, *args, **kwargs)

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = own


def reference(
    folder: Path, payload: Path, rows: list[BatchRow], *, replays: bool
) -> Gradients:
    """Compute each row alone with the model's own attention, and add up the gradients."""
    model = load_model(str(folder)).train()
    model.set_attn_implementation("eager")
    reader, total = SegmentReader(payload), sum(row.num_trainable for row in rows)
    loss_sum = 0.0
    for row in rows:
        columns = {
            name: torch.from_numpy(np.array(column))
            for name, column in reader.row(row).items()
        }
        routes = columns.get("routes") if replays else None
        with choosing(routes):
            logits = model(
                input_ids=columns["token_ids"][None].long(), use_cache=False
            ).logits[0]
        trained = columns["loss_mask"].bool()
        trained[0] = False
        at = trained.nonzero()[:, 0]
        scaled = logits[at - 1] / columns["temperatures"][at, None]
        logprobs = torch.log_softmax(scaled, -1)[
            range(len(at)), columns["token_ids"][at].long()
        ]
        ratio = torch.exp(logprobs - columns["logprobs"][at])
        bounded = ratio.clamp(1 - CONFIG.clip_low, 1 + CONFIG.clip_high)
        loss = -torch.minimum(ratio * row.advantage, bounded * row.advantage).sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    return {**gradients(model), "loss": torch.tensor(loss_sum)}


def gradients(model: Any) -> Gradients:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def compute(
    folder: Path, payload: Path, rows: list[BatchRow], budget: int, ranks: Collective
) -> dict[bool, Gradients]:
    """Return the gradients that a rank has after a step's backward passes, with and without replay."""
    torch.set_num_threads(1)
    found = {}
    for replays in (True, False):
        config = TrainerConfig(max_grad_norm=1e9, replay_routes=replays)
        learner = Learner(open_rows(load_model(str(folder))), config, ranks)
        planned = plan_ranks([row.num_tokens for row in rows], budget, ranks.count)
        manifest = BatchManifest(Step(1), PolicyVersion(0), tuple(rows), planned)
        _, (loss, *_) = learner.compute_gradients(manifest, SegmentReader(payload))
        assert not learner.left_out
        found[replays] = {**gradients(learner.model), "loss": torch.tensor(loss)}
    return found


def compute_in_rank(rank: int, folder: Path, payload: Path, rows: list[BatchRow]) -> None:
    """Be one of two ranks, and write down what it has."""
    ranks = join_ranks(rank, 2, str(payload / "meeting"))
    torch.save(compute(folder, payload, rows, 60, ranks), payload / f"rank{rank}.pt")


def compute_in_two_ranks(
    folder: Path, payload: Path, rows: list[BatchRow]
) -> dict[bool, Gradients]:
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=compute_in_rank, args=(rank, folder, payload, rows))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    first, second = (torch.load(payload / f"rank{rank}.pt") for rank in range(2))
    for replays, values in first.items():
        for name, value in values.items():
            assert torch.equal(value, second[replays][name]), "ranks differ"
    return dict(first)


async def test_a_step_equals_plain_autograd(
    folder: Path, tmp_path: Path, rows: list[BatchRow]
) -> None:
    packed, one_by_one = 10_000, 1
    found = {
        "packed": compute(folder, tmp_path, rows, packed, Collective()),
        "one by one": compute(folder, tmp_path, rows, one_by_one, Collective()),
        "two ranks": compute_in_two_ranks(folder, tmp_path, rows),
    }
    for replays in (True, False):
        expected = reference(folder, tmp_path, rows, replays=replays)
        for how, results in found.items():
            assert results[replays].keys() == expected.keys(), how
            for name, value in results[replays].items():
                error = float((value - expected[name]).abs().max())
                assert error < TOLERANCE, f"{how}, {replays=}: {name} differs by {error:.2g}"


def test_the_estimate_of_the_kl_is_never_negative() -> None:
    small = torch.randn(100_000) * 10.0 ** torch.randint(-9, 1, (100_000,))
    assert mismatch_kl(small, torch.zeros(100_000)).min() >= 0
    assert float(mismatch_kl(torch.tensor([0.1]), torch.tensor([0.0]))) == pytest.approx(
        0.0051709, rel=1e-3
    )
