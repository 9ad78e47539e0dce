"""The trainer on real rollouts of a real engine: packing, replay, loss, learning."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollway.config.sections import TrainerConfig
from rollway.inference.embedded.scheduler import GenerationRequest, Scheduler
from rollway.inference.embedded.slots import open_slots
from rollway.model.load import load_model
from rollway.model.packing import RowModel
from rollway.model.proof import open_rows
from rollway.model.routers import capture, find_routers, replay
from rollway.payload.blob import build, row_columns
from rollway.payload.reader import SegmentReader
from rollway.payload.writer import SegmentWriter
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import PolicyVersion, RolloutId, Step
from rollway.records.payload import SegmentName
from rollway.records.turn import Turn
from rollway.trace.trace import Trace
from rollway.trainer.loss import policy_loss, token_sums
from rollway.trainer.micro_batch import PackedMicroBatch, pack_rows
from rollway.trainer.row_rules import RowRules
from rollway.trainer.step import Learner, token_logprobs

NUM = 12


def sample(model: Any, temperature: float, seed: int = 0) -> list[Turn]:
    """Return turns that the embedded engine draws for prompts of different lengths."""
    scheduler = Scheduler(open_slots(model, 8, 64), seed)
    for n in range(NUM):
        prompt = [(7 * n + token) % 200 for token in range(3 + n)]
        scheduler.add(
            GenerationRequest(n, prompt, 6 + n, temperature, 1.0, frozenset(), 0, seed=n)
        )
    turns = []
    while scheduler.has_work:
        for sequence in scheduler.run_pass():
            turns.append(
                Turn(
                    prompt_ids=np.array(sequence.request.prompt, np.int32),
                    completion_ids=np.array(sequence.tokens, np.int32),
                    logprobs=np.array(sequence.logprobs, np.float32),
                    versions=np.zeros(len(sequence.tokens), np.int32),
                    temperature=temperature,
                    finish_reason="length",
                    routes=sequence.routes(),
                )
            )
    return turns


async def write(
    folder: Path, turns: list[Turn], advantage: Any = lambda n: n % 2 - 0.5
) -> list[BatchRow]:
    """Write turns as rows of a segment, the way a worker does."""
    rows = []
    with SegmentWriter(folder, SegmentName("w", 0), 1 << 20) as writer:
        for index, turn in enumerate(turns):
            trace = Trace()
            trace.add(turn)
            (row,) = trace.finish()
            ref = await writer.append(build(row_columns([row.columns()])))
            name = RolloutId(f"g0.{index}")
            rows.append(
                BatchRow(name, ref, 0, row.num_tokens, row.num_trainable, advantage(index))
            )
    return rows


def pack(model: RowModel, folder: Path, rows: Sequence[BatchRow]) -> PackedMicroBatch:
    rules, reader = RowRules(model, replays=True), SegmentReader(folder)
    usable, left_out = rules.load(reader, rows, expects_routes=True)
    assert not left_out
    return pack_rows(usable)


def logprobs_of(
    rows: RowModel, packed: PackedMicroBatch, *, replay_routes: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    with token_logprobs(rows, packed, replay_routes=replay_routes) as found:
        return found


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(str(tiny_moe)).eval()


@pytest.mark.anyio
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_of_packed_rows_equal_those_of_the_engine(
    model: Any, tmp_path: Path, temperature: float
) -> None:
    """Rows packed end to end do not see each other, whatever their temperature."""
    rows = await write(tmp_path, sample(model, temperature))
    row_model = open_rows(model)
    packed = pack(row_model, tmp_path, rows)
    with torch.no_grad():
        logprobs, entropy = logprobs_of(row_model, packed)
    assert len(logprobs) == sum(row.num_trainable for row in rows)
    np.testing.assert_allclose(logprobs, packed.logprobs, atol=2e-4)
    assert (entropy > 0).all()


@pytest.mark.anyio
async def test_router_replay_brings_engine_and_trainer_together(
    model: Any, tiny_moe: Path, tmp_path: Path
) -> None:
    """The engine computes in bfloat16, the trainer in float32, with the same weights. Where the two
    choose different experts their logprobs differ, and replay removes most of the difference."""
    engine = load_model(str(tiny_moe), "bfloat16").eval()
    rows = open_rows(model)
    packed = pack(rows, tmp_path, await write(tmp_path, sample(engine, 1.0)))
    with torch.no_grad(), capture(rows.routers) as chosen:
        own, _ = logprobs_of(rows, packed, replay_routes=False)
        replayed, _ = logprobs_of(rows, packed)
    layers = len(rows.routers)
    assert packed.routes is not None
    differs = torch.stack(chosen[:layers], 1).sort().values != packed.routes.sort().values
    assert 0 < differs.any(-1).float().mean() < 0.5, "some choices differ, most do not"
    error_own = (own - packed.logprobs).abs().mean()
    error_replayed = (replayed - packed.logprobs).abs().mean()
    assert error_replayed * 2 < error_own, (error_replayed, error_own)


@pytest.mark.anyio
async def test_replay_makes_the_routers_choose_and_keeps_gradients(
    model: Any, tmp_path: Path
) -> None:
    turns = sample(model, 1.0)
    rng = np.random.default_rng(0)
    pairs = np.array([(a, b) for a in range(8) for b in range(8) if a != b], np.uint8)
    forced = []
    for turn in turns:
        assert turn.routes is not None
        routes = pairs[rng.integers(len(pairs), size=turn.routes.shape[:2])]
        forced.append(
            Turn(*[*(getattr(turn, f) for f in turn.__struct_fields__[:6]), routes, 0])
        )
    packed = pack(open_rows(model), tmp_path, await write(tmp_path, forced))
    routers = find_routers(model)
    assert packed.routes is not None
    with replay(routers, packed.routes), capture(routers) as chosen:
        output = model(input_ids=packed.token_ids[None])
    np.testing.assert_array_equal(torch.stack(chosen, 1), packed.routes)
    output.logits.sum().backward()
    assert all(router.module.weight.grad.abs().sum() > 0 for router in routers)
    model.zero_grad()


def test_a_clipped_ratio_gets_no_gradient_away_from_one_but_back_to_it() -> None:
    engine = torch.zeros(4)
    logprobs = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    losses, clipped = policy_loss(logprobs, engine, advantages, clip_low=0.2, clip_high=0.28)
    losses.sum().backward()
    assert clipped.tolist() == [True, True, False, False]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])


def test_a_logprob_that_is_far_off_changes_nothing_by_an_infinite_amount() -> None:
    """Engine and trainer each give a probability of e^-900 to one token."""
    engine = torch.tensor([-900.0, -1.0, -1.0])
    logprobs = torch.tensor([-1.0, -900.0, -1.0], requires_grad=True)
    for advantage in (1.0, -1.0):
        advantages = torch.full((3,), advantage)
        losses, clipped = policy_loss(
            logprobs, engine, advantages, clip_low=0.2, clip_high=0.28
        )
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert torch.isfinite(losses).all()
        assert gradient[:2].tolist() == [0.0, 0.0]
        assert gradient[2] == -advantage
    sums = token_sums(logprobs.detach(), engine, clipped, torch.zeros(3))
    assert all(math.isfinite(value) for value in sums)
    assert sums[-1] == 2, "the limited ones are counted"


@pytest.mark.anyio
async def test_a_step_moves_probability_towards_advantage(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Any packing gives the same step, and the rewarded rows become more likely."""
    model = load_model(str(tiny_moe))
    rows = tuple(await write(tmp_path, sample(model.eval(), 1.0)))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    results = []
    for micro_batches in ((tuple(range(NUM)),), tuple((n,) for n in range(NUM))):
        model.load_state_dict(before)
        learner = Learner(open_rows(model), TrainerConfig(lr=1e-3))
        manifest = BatchManifest(Step(1), PolicyVersion(0), rows, (micro_batches,))
        metrics = learner.step(manifest, SegmentReader(tmp_path))
        assert metrics["mismatch_kl"] < 1e-6
        assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert metrics["grad_norm"] > 0
        results.append({name: weight.clone() for name, weight in model.state_dict().items()})
    for name in before:
        torch.testing.assert_close(results[0][name], results[1][name], atol=2e-4, rtol=1e-3)
    row_model = open_rows(model)
    packed = pack(row_model, tmp_path, rows)
    with torch.no_grad():
        after, _ = logprobs_of(row_model, packed)
    gain = after - packed.logprobs
    assert gain[packed.advantages > 0].mean() > 0 > gain[packed.advantages < 0].mean()


@pytest.mark.anyio
async def test_rows_without_logprobs_count_as_drawn_by_the_trained_policy(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Their zeros change nothing: the step is the one that the engine's own logprobs give, which are the
    model's here. The KL is that of the other rows alone."""
    model = load_model(str(tiny_moe))
    turns = sample(model.eval(), 1.0)
    blank = [replace(turn, logprobs=np.zeros_like(turn.logprobs)) for turn in turns]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    results, found = [], []
    for number, drawn in enumerate((turns, [*turns[:3], *blank[3:]], blank)):
        model.load_state_dict(before)
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [
            replace(row, is_approximate=not old.any())
            for row, old in zip(
                await write(folder, drawn), (turn.logprobs for turn in drawn), strict=True
            )
        ]
        manifest = BatchManifest(
            Step(1), PolicyVersion(0), tuple(rows), ((tuple(range(NUM)),),)
        )
        learner = Learner(open_rows(model), TrainerConfig(lr=1e-3))
        found.append(learner.step(manifest, SegmentReader(folder)))
        results.append({name: weight.clone() for name, weight in model.state_dict().items()})
    for name in before:
        torch.testing.assert_close(results[0][name], results[1][name], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(results[0][name], results[2][name], atol=2e-4, rtol=1e-3)
    assert found[0]["mismatch_kl"] < 1e-6
    assert found[1]["mismatch_kl"] < 1e-6
    assert "mismatch_kl" not in found[2]
