"""Ranks are real processes: together they take the step that one rank would have taken alone."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.torch import load_file
from tests.trainer.test_step import sample, write

from rollway.config.sections import ModelConfig, TrainerConfig, TransportConfig
from rollway.config.specs import TrainerSpec, WatchSpec
from rollway.errors import PartDied
from rollway.model.load import load_model
from rollway.orchestrator.core.batches.packing import at_once, plan_ranks
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, Step
from rollway.rundir.rundir import RunDir
from rollway.trainer.rank_processes import (
    RankOrder,
    RankProcesses,
    RestartPoint,
    start_ranks,
)
from rollway.transport.batch import Batch

pytestmark = [pytest.mark.anyio, pytest.mark.system]

STEPS = 3
BUDGET = 40


def spec_of(
    run: RunDir, model: Path, ranks: int, max_steps: int = STEPS, **settings: Any
) -> TrainerSpec:
    run.make_folders()
    return TrainerSpec(
        trainer=TrainerConfig(ranks=ranks, lr=1e-3, weight_decay=0.1, **settings),
        transport=TransportConfig(),
        model=ModelConfig(str(model)),
        weights=str(model),
        first_step=Step(1),
        max_steps=max_steps,
        run_dir=str(run.path),
        seed=0,
        watch=WatchSpec(),
    )


def batch_of(step: int, rows: list[BatchRow], payload: Path, ranks: int) -> Batch:
    planned = at_once(plan_ranks([row.num_tokens for row in rows], BUDGET, ranks))
    manifest = BatchManifest(Step(step), PolicyVersion(step - 1), tuple(rows), planned)
    return Batch(manifest.step, msgspec.json.encode(manifest), str(payload), time.time())


@pytest.fixture
async def rows(tiny_moe: Path, tmp_path: Path) -> list[BatchRow]:
    payload = tmp_path / "payload"
    payload.mkdir()
    return await write(payload, sample(load_model(str(tiny_moe)).eval(), 1.0))


def weights_of(published: Published) -> dict[str, Any]:
    return load_file(Path(published.path) / "model.safetensors")


async def test_two_ranks_take_the_steps_of_one_until_one_of_them_is_killed(
    tiny_moe: Path, tmp_path: Path, rows: list[BatchRow]
) -> None:
    """Several steps show that the optimizer's state is the same, too. One batch was packed for another
    number of ranks, and one has fewer rows than there are ranks."""
    results, payload = [], tmp_path / "payload"
    for num_ranks in (1, 2):
        run = RunDir(tmp_path / f"run{num_ranks}")
        batches = [
            batch_of(1, rows, payload, num_ranks),
            batch_of(2, rows, payload, 3),
            batch_of(3, rows[:1], payload, num_ranks),
        ]
        spec = spec_of(run, tiny_moe, num_ranks, checkpoint_every=1)
        async with started(spec) as ranks:
            orders = [RankOrder(batch) for batch in batches]
            answers = [await ranks.train(order) for order in orders]
            results.append([answer[0].published for answer in answers])
            check_kept(run)
            check_ports(ranks)
            if num_ranks == 2:
                ranks.processes[1].kill()
                with pytest.raises(
                    PartDied, match=r"trainer-rank\.1 \(pid \d+\) was killed by SIGKILL"
                ):
                    await ranks.train(orders[-1])
    check_same_steps(load_file(tiny_moe / "model.safetensors"), *results)


@asynccontextmanager
async def started(spec: TrainerSpec) -> AsyncIterator[RankProcesses]:
    point = RestartPoint(PolicyVersion(0), spec.weights)
    async with start_ranks(spec, point) as (ranks, loaded):
        assert (loaded.packing, loaded.note) == ("packed", "")
        yield ranks


def check_ports(ranks: RankProcesses) -> None:
    """Ranks listen for each other at this machine alone, and a single rank does not listen."""
    hosts = {
        found.laddr.ip
        for process in ranks.processes
        for found in psutil.Process(process.pid).net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    }
    assert hosts == ({"127.0.0.1"} if len(ranks.processes) > 1 else set())


def check_kept(run: RunDir) -> None:
    """Each checkpoint is a model folder with the trainer's state."""
    assert len([*run.checkpoints.iterdir()]) == STEPS
    checkpoint = {path.name for path in run.checkpoint(Step(STEPS)).iterdir()}
    assert {"model.safetensors", "config.json", "trainer"} <= checkpoint


def check_same_steps(
    before: dict[str, Any], alone: list[Published], together: list[Published]
) -> None:
    for expected, found in zip(alone, together, strict=True):
        assert found.version == expected.version
        for name in ("loss", "grad_norm", "entropy", "ratio/mean", "mismatch_kl"):
            assert found.metrics[name] == pytest.approx(
                expected.metrics[name], rel=1e-3, abs=1e-6
            ), name
    weights_alone, weights_together = weights_of(alone[-1]), weights_of(together[-1])
    for name, weight in weights_alone.items():
        moved = (weight - before[name]).norm()
        assert moved > 0, name
        assert (weights_together[name] - weight).norm() < 0.01 * moved, name
