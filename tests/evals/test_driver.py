"""An evaluation through a real env server."""

import io
from pathlib import Path

import pytest
from tests.doubles.env_server import ENVS, serving

from rollway.envserver.client import EnvClient
from rollway.evals.driver import EvalDriver, Evaluation
from rollway.evals.folder import EvalFolder, read_results
from rollway.evals.progress import EvalProgress
from rollway.evals.recorder import open_recorder
from rollway.evals.result import RolloutResults
from rollway.evals.spec import EvalRuntime, EvalSpec
from rollway.observe.console import Screen
from rollway.records.turn import Sampling

pytestmark = pytest.mark.anyio

SPEC = EvalSpec(
    env=ENVS, args={}, split="train", num_tasks=3, num_rollouts=2, model="m", engine_url="http://e",
    speaks="tokens", tokenizer="", renderer="auto", template={}, sampling=Sampling(10), seed=0,
)  # fmt: skip


async def evaluate(client: EnvClient, folder: EvalFolder, previous: RolloutResults) -> None:
    screen, runtime = Screen(io.StringIO()), EvalRuntime(4, 1, 60.0, 128, "")
    progress = EvalProgress(SPEC, previous, screen, 1.0)
    evaluation = Evaluation(SPEC, runtime, folder, previous, progress, screen)
    async with open_recorder(folder) as recorder:
        await EvalDriver(client, evaluation, recorder).drive()


async def test_a_task_that_is_too_large_fails_its_rollouts_and_no_others(
    tmp_path: Path, tiny_moe: Path
) -> None:
    folder = EvalFolder(tmp_path / "eval")
    with folder.opened(SPEC, resume=False) as previous:
        async with serving(folder.payload, tiny_moe, "TooLarge") as server:
            await evaluate(server.client, folder, previous)
    results = read_results(folder.results)
    errors = {key: result.error for key, result in results.items() if result.error}
    assert (len(results), sorted(errors)) == (6, [(1, 0), (1, 1)])
    assert {error.boundary for error in errors.values()} == {"env"}
    assert all("its task has 17.8 MB" in error.error for error in errors.values())
