"""Ranks are real processes: together they take the step that one would have taken alone."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from tests.trainer.test_trainer import sample, write

from rollway.config.sections import TrainerConfig, TransportConfig
from rollway.config.specs import TrainerSpec, WatchSpec
from rollway.errors import PartDied
from rollway.model.load import load_model
from rollway.orchestrator.core.batches.packing import plan_ranks
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, Step
from rollway.rundir.rundir import RunDir
from rollway.trainer.rank_processes import start_ranks
from rollway.transport.batch import Batch

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

STEPS = 3
BUDGET = 40


def part_of(run: RunDir, model: Path, ranks: int) -> TrainerSpec:
    run.make_folders()
    return TrainerSpec(
        trainer=TrainerConfig(ranks=ranks, lr=1e-3, weight_decay=0.1),
        transport=TransportConfig(),
        weights=str(model),
        optimizer="",
        first_step=Step(1),
        max_steps=STEPS,
        run_dir=str(run.path),
        seed=0,
        watch=WatchSpec(),
    )


def batch_of(step: int, rows: list[BatchRow], payload: Path, ranks: int) -> Batch:
    planned = plan_ranks([row.num_tokens for row in rows], BUDGET, ranks)
    manifest = BatchManifest(Step(step), PolicyVersion(step - 1), tuple(rows), planned)
    return Batch(manifest.step, msgspec.json.encode(manifest), str(payload), time.time())


@pytest.fixture
async def rows(tiny_moe: Path, tmp_path: Path) -> list[BatchRow]:
    payload = tmp_path / "payload"
    payload.mkdir()
    return await write(payload, sample(load_model(str(tiny_moe)).eval(), 1.0))


async def train(part: TrainerSpec, batches: list[Batch]) -> list[Published]:
    async with start_ranks(part) as cores:
        return [await cores.train(batch) for batch in batches]


def weights_of(published: Published) -> dict[str, Any]:
    return load_file(Path(published.path) / "model.safetensors")


async def test_two_ranks_take_the_steps_of_one(
    tiny_moe: Path, tmp_path: Path, rows: list[BatchRow]
) -> None:
    """Over several steps, so that the optimizer's state is the same, too. One batch was packed for
    another number of ranks, one has fewer rows than there are ranks."""
    results, payload = [], tmp_path / "payload"
    for ranks in (1, 2):
        run = RunDir(tmp_path / f"run{ranks}")
        batches = [
            batch_of(1, rows, payload, ranks),
            batch_of(2, rows, payload, 3),
            batch_of(3, rows[:1], payload, ranks),
        ]
        results.append(await train(part_of(run, tiny_moe, ranks), batches))
        assert run.optimizer_of(PolicyVersion(STEPS)).exists()
        assert run.checkpoint(Step(STEPS)).exists()
    alone, together = results
    for one, other in zip(alone, together, strict=True):
        assert other.version == one.version
        for name in ("loss", "grad_norm", "entropy", "ratio/mean", "mismatch_kl"):
            assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-3, abs=1e-6), name
    before = load_file(tiny_moe / "model.safetensors")
    expected, found = weights_of(alone[-1]), weights_of(together[-1])
    for name, weight in expected.items():
        moved = (weight - before[name]).norm()
        assert moved > 0, name
        assert (found[name] - weight).norm() < 0.01 * moved, name


async def test_a_killed_rank_is_named(tiny_moe: Path, tmp_path: Path, rows: list[BatchRow]) -> None:
    part = part_of(RunDir(tmp_path / "run"), tiny_moe, 2)
    batch = batch_of(1, rows, tmp_path / "payload", 2)
    async with start_ranks(part) as cores:
        await cores.train(batch)
        cores.ranks[1].kill()
        with pytest.raises(PartDied, match=r"trainer-core\.1 \(pid \d+\) was killed by SIGKILL"):
            await cores.train(batch)


async def test_a_mistake_of_one_rank_is_told(
    tiny_moe: Path, tmp_path: Path, rows: list[BatchRow]
) -> None:
    wrong = [*rows[:-1], msgspec.structs.replace(rows[-1], num_tokens=rows[-1].num_tokens + 1)]
    part = part_of(RunDir(tmp_path / "run"), tiny_moe, 2)
    with pytest.raises(PartDied, match="is not what its manifest says"):
        await train(part, [batch_of(1, wrong, tmp_path / "payload", 2)])
