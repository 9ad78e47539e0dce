"""Loss and gradients of a step equal those of plain autograd, row by row, with nothing packed."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.trainer.test_step import sample, write
from tools.model_table import tiny_model
from torch import Tensor

from rollway.config.sections import TrainerConfig
from rollway.model.load import load_model
from rollway.model.proof import open_rows
from rollway.orchestrator.core.batches.packing import at_once, plan_ranks
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


class Prepared(NamedTuple):
    """A model, and rows drawn by an engine with slightly other weights, which sometimes chooses other
    experts."""

    folder: Path
    payload: Path
    rows: list[BatchRow]


@pytest.fixture
async def families(tmp_path: Path) -> dict[str, Prepared]:
    torch.set_num_threads(1)
    prepared = {}
    for family in FAMILIES:
        folder, payload = tmp_path / family, tmp_path / f"{family}-payload"
        payload.mkdir()
        tiny_model(family).save_pretrained(folder)
        model = load_model(str(folder))
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * weight.std() * torch.randn_like(weight)
        rows = await write(payload, sample(model.eval(), 0.9), lambda n: (n % 3 - 0.7) / 2)
        prepared[family] = Prepared(folder, payload, rows)
    return prepared


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
        lengths = [row.num_tokens for row in rows]
        planned = at_once(plan_ranks(lengths, budget, ranks.count))
        manifest = BatchManifest(Step(1), PolicyVersion(0), tuple(rows), planned)
        _, (loss, *_) = learner.compute_gradients(manifest, SegmentReader(payload))
        assert not learner.left_out
        found[replays] = {**gradients(learner.model), "loss": torch.tensor(loss)}
    return found


def compute_in_rank(rank: int, families: dict[str, Prepared], meetings: Path) -> None:
    """Be one of two ranks, and write down what it has for each family."""
    for family, prepared in families.items():
        ranks = join_ranks(rank, 2, str(meetings / f"{family}.meeting"))
        torch.save(compute(*prepared, 60, ranks), meetings / f"{family}.{rank}.pt")
        torch.distributed.destroy_process_group()


def compute_in_two_ranks(
    families: dict[str, Prepared], meetings: Path
) -> dict[str, dict[bool, Gradients]]:
    """Return the gradients of each family, which must be the same in both ranks."""
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=compute_in_rank, args=(rank, families, meetings))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = {}
    for family in families:
        first, second = (torch.load(meetings / f"{family}.{rank}.pt") for rank in range(2))
        for replays, values in first.items():
            for name, value in values.items():
                assert torch.equal(value, second[replays][name]), f"{family}: ranks differ"
        found[family] = dict(first)
    return found


async def test_a_step_equals_plain_autograd(
    families: dict[str, Prepared], tmp_path: Path
) -> None:
    """For each family, whether its rows are packed, computed one by one, or shared by two ranks."""
    packed, one_by_one = 10_000, 1
    in_two_ranks = compute_in_two_ranks(families, tmp_path)
    for family, prepared in families.items():
        found = {
            "packed": compute(*prepared, packed, Collective()),
            "one by one": compute(*prepared, one_by_one, Collective()),
            "two ranks": in_two_ranks[family],
        }
        for replays in (True, False):
            expected = reference(*prepared, replays=replays)
            for how, results in found.items():
                case = f"{family}, {how}, {replays=}"
                assert results[replays].keys() == expected.keys(), case
                for name, value in results[replays].items():
                    error = float((value - expected[name]).abs().max())
                    assert error < TOLERANCE, f"{case}: {name} differs by {error:.2g}"


def test_the_estimate_of_the_kl_is_never_negative() -> None:
    small = torch.randn(100_000) * 10.0 ** torch.randint(-9, 1, (100_000,))
    assert mismatch_kl(small, torch.zeros(100_000)).min() >= 0
    assert float(mismatch_kl(torch.tensor([0.1]), torch.tensor([0.0]))) == pytest.approx(
        0.0051709, rel=1e-3
    )
