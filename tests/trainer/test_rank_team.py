"""Ranks die, and batches are bad: training goes on, with the numbers it would have had without."""

import errno
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tests.doubles.cursed_model import BREAKS_GRADIENT, write_cursed_model
from tests.doubles.ranks import ENTRY as MORTAL
from tests.doubles.ranks import KILLS
from tests.trainer.test_rank_processes import batch_of, spec_of
from tests.trainer.test_step import sample, write
from tools.model_table import tiny_model
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from rollway.config.sections import ModelConfig
from rollway.config.specs import TrainerSpec
from rollway.errors import ModelError
from rollway.model.load import load_model
from rollway.records.batch import BatchRow
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, Step
from rollway.records.turn import Turn
from rollway.rundir.rundir import RunDir
from rollway.trainer.rank_processes import ENTRY, RankDone, RankOrder, TrainedBatch
from rollway.trainer.rank_team import RankTeam, find_restart_point
from rollway.transport.batch import Batch

pytestmark = [pytest.mark.anyio, pytest.mark.system]

NUM_BATCHES = 7


class Team:
    """A team of ranks, what it said, and how it is told that a version is recorded."""

    def __init__(self, team: RankTeam, said: list[str]) -> None:
        self._team = team
        self.said = said

    async def train(self, batch: Batch) -> Published:
        published = await self._team.train(batch)
        await self.forget_before(published)
        return published

    async def forget_before(self, published: Published) -> None:
        await self._team.forget_before(published)

    def kill_rank(self) -> None:
        os.kill(self._team._ranks.processes[-1].pid, signal.SIGKILL)


@asynccontextmanager
async def open_team(spec: TrainerSpec, entry: str = ENTRY) -> AsyncIterator[Team]:
    said: list[str] = []

    async def say(text: str) -> None:
        said.append(text)

    async with RankTeam(spec, say, entry) as team:
        yield Team(team, said)


@pytest.fixture
async def recorded(tiny_moe: Path, tmp_path: Path) -> list[Batch]:
    """Seven batches of different rows."""
    payload = tmp_path / "payload"
    payload.mkdir()
    rows = await write(payload, sample(load_model(str(tiny_moe)).eval(), 1.0))
    shares = [rows[step % 4 :: 2] for step in range(NUM_BATCHES)]
    return [batch_of(step + 1, share, payload, 1) for step, share in enumerate(shares)]


def losses(published: list[Published]) -> list[float]:
    return [version.metrics["loss"] for version in published]


async def test_after_a_kill_training_continues_as_if_nothing_had_happened(
    tiny_moe: Path, tmp_path: Path, recorded: list[Batch]
) -> None:
    """States are saved at steps 3 and 6. The rank dies after step 4. After step 5 the trainer itself is
    closed and opened again."""
    settings = {"checkpoint_every": 3, "keep_checkpoints": 1}
    spec = spec_of(RunDir(tmp_path / "quiet"), tiny_moe, 1, NUM_BATCHES, **settings)
    async with open_team(spec) as team:
        expected = [await team.train(batch) for batch in recorded]
        assert team.said == []
    run = RunDir(tmp_path / "killed")
    spec, found = spec_of(run, tiny_moe, 1, NUM_BATCHES, **settings), []
    async with open_team(spec) as team:
        for batch in recorded[:5]:
            found.append(await team.train(batch))
            if batch.step == 4:
                team.kill_rank()
        (told,) = team.said
        assert told.startswith("the trainer's process trainer-rank (pid ")
        assert "was killed by SIGKILL" in told
        assert told.endswith("; the trainer starts again from version 4")
    spec = msgspec.structs.replace(spec, first_step=6, weights=found[-1].path)
    async with open_team(spec) as team:
        found += [await team.train(batch) for batch in recorded[5:]]
        assert team.said == []
    assert losses(found) == pytest.approx(losses(expected), abs=1e-5)
    assert [version.metrics["grad_norm"] for version in found] == pytest.approx(
        [version.metrics["grad_norm"] for version in expected], rel=1e-4
    )
    assert [path.name for path in run.trainer.iterdir()] == ["step_7"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_7"]


@pytest.mark.long
async def test_the_user_is_told_how_rows_are_computed_and_that_batches_are_gone(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    tiny_model("qwen3_next").save_pretrained(model)
    run = RunDir(tmp_path / "run")
    spec = msgspec.structs.replace(spec_of(run, model, 1), first_step=4)
    async with open_team(spec) as team:
        gone, packing = team.said
    assert gone == (
        "The batches that led to version 3 cannot be trained again: training continues from its "
        "weights, and the optimizer has new averages"
    )
    assert packing.startswith(
        "The trainer computes rows beside each other, because rows that are"
    )
    assert "family 'qwen3_next' (log-probabilities differ by " in packing
    assert run.last_state(PolicyVersion(3)) == 3, "a later restart is exact again"


def write_other_model(folder: Path, target: Path) -> None:
    """Write a model of the same shape with slightly other weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    torch.manual_seed(0)
    other = {
        name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in weights.items()
    }
    save_file(other, target / "model.safetensors", metadata={"format": "pt"})


async def train_nothing(team: Team, batches: list[Batch]) -> None:
    """A run of which nothing can be trained ends, with the reason."""
    for batch in batches[:2]:
        published = await team.train(batch)
        assert published.metrics["rows/left_out"] == len(batch.manifest().rows)
    with pytest.raises(ModelError, match=r"no row of the last 3 batches .* step 5: "):
        await team.train(batches[2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("payload is gone", marks=pytest.mark.long),
        pytest.param("another model", marks=pytest.mark.long),
        pytest.param("the state is damaged", marks=pytest.mark.long),
    ],
)
async def test_batches_that_would_give_other_weights_are_not_trained_again(
    tiny_moe: Path, tmp_path: Path, recorded: list[Batch], what: str
) -> None:
    run, model = RunDir(tmp_path / "run"), tiny_moe
    every = 1 if what == "the state is damaged" else 10
    spec = spec_of(run, tiny_moe, 1, NUM_BATCHES, checkpoint_every=every)
    async with open_team(spec) as team:
        for batch in recorded[:2]:
            published = await team.train(batch)
    match what:
        case "payload is gone":
            (tmp_path / "payload").rename(tmp_path / "elsewhere")
        case "another model":
            model = tmp_path / "other"
            write_other_model(tiny_moe, model)
        case _:
            (run.state_of(PolicyVersion(2)) / ".metadata").write_bytes(b"")
    spec = msgspec.structs.replace(
        spec, first_step=3, weights=published.path, model=ModelConfig(str(model))
    )
    async with open_team(spec) as team:
        *before, told = team.said
        assert all("cannot read the trainer's state" in line for line in before)
        assert len(before) == (what == "the state is damaged")
        if what == "payload is gone":
            await train_nothing(team, recorded[2:])
    assert "version 2 cannot be trained again" in told
    state = run.state_of(PolicyVersion(2))
    weights = load_file(Path(published.path) / "model.safetensors")
    names = FileSystemReader(state).read_metadata().state_dict_metadata
    saved = {
        name: torch.empty(names[name].size) for name in names if name.startswith("weight/")
    }
    load(saved, checkpoint_id=state, no_dist=True)
    assert torch.equal(saved["weight/model.norm.weight"], weights["model.norm.weight"])


@pytest.fixture(scope="module")
def cursed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cursed")
    write_cursed_model(folder)
    return folder


async def rows_with(
    cursed: Path, payload: Path, tokens: list[int], at: set[int]
) -> list[BatchRow]:
    """Return rows of which those at `at` contain `tokens`."""
    turns = sample(load_model(str(cursed), trusts_code=True).eval(), 1.0)
    for index in at:
        prompt = np.concatenate([turns[index].prompt_ids, np.array(tokens, np.int32)])
        turns[index] = _replace(turns[index], prompt_ids=prompt)
    return await write(payload, turns)


def _replace(turn: Turn, **changes: Any) -> Turn:
    fields = {name: getattr(turn, name) for name in turn.__struct_fields__}
    return Turn(**{**fields, **changes})


@pytest.mark.parametrize(
    ("tokens", "bad", "how", "entry"),
    [(KILLS, {1, 6, 7}, "the trainer's process was killed by SIGSEGV", MORTAL),
     pytest.param(BREAKS_GRADIENT, {3, 8}, "the gradient is not finite", ENTRY,
                  marks=pytest.mark.long)],
)  # fmt: skip
async def test_rows_that_no_check_can_find_are_searched_and_set_aside(
    cursed: Path, tmp_path: Path, tokens: list[int], bad: set[int], how: str, entry: str
) -> None:
    """Each wrong guess of the search costs a start of the trainer if it dies of it."""
    rows = await rows_with(cursed, tmp_path, tokens, bad)
    spec = spec_of(RunDir(tmp_path / "run"), cursed, 1)
    spec = msgspec.structs.replace(
        spec, model=ModelConfig(str(cursed), trust_remote_code=True)
    )
    good = [row for index, row in enumerate(rows) if index not in bad]
    async with open_team(spec, entry) as team:
        published = await team.train(batch_of(1, rows, tmp_path, 1))
        summary = team.said[-1]
        await team.train(batch_of(2, good, tmp_path, 1))
        assert team.said[-1] == summary, "the next batch is trained without a word"
    names = "; ".join(f"g0.{number}, row 0" for number in sorted(bad))
    assert summary.startswith(f"Step 1: {how} with {names}; set aside in ")
    folder = RunDir(tmp_path / "run").set_aside(published.version)
    assert {path.stem for path in folder.iterdir()} == {f"g0.{number}" for number in bad}
    assert published.metrics["loss"] != 0


async def test_what_training_does_not_need_may_fail(
    tiny_moe: Path, tmp_path: Path, recorded: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder lies where the record of the batch belongs, and the disk is read-only for a while."""
    run = RunDir(tmp_path / "run")
    spec = spec_of(run, tiny_moe, 1, NUM_BATCHES, keep_checkpoints=1)
    run.order_of(Step(1)).mkdir()
    for step in (1, 2):
        run.checkpoint(Step(step)).mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with open_team(spec, MORTAL) as team:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refuse)
            published = await team.train(recorded[0])
        await team.forget_before(replace(published, saved=published.version))
    for what, line in zip(FAILING, team.said, strict=True):
        assert re.fullmatch(rf"{what} failed: .*\. The run goes on", line)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_2"]


FAILING = (
    "Writing how a batch was trained",
    "Removing old checkpoints",
    "Removing old trainer states",
)


async def test_rows_that_cannot_be_copied_are_set_aside(
    tiny_moe: Path, tmp_path: Path, recorded: list[Batch]
) -> None:
    said: list[str] = []

    async def say(text: str) -> None:
        said.append(text)

    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (run.path / "set_aside").write_bytes(b"a file, where a folder belongs")
    team = RankTeam(spec_of(run, tiny_moe, 1), say)
    await team._set_aside(recorded[0], frozenset({0}), "it died")
    assert said[0].startswith("Copying rows that were set aside failed: ")
    assert said[1] == "Step 1: it died with g0.0, row 0; set aside"


async def test_a_run_whose_rows_are_all_set_aside_ends(
    tiny_moe: Path, tmp_path: Path, recorded: list[Batch]
) -> None:
    async def say(text: str) -> None: ...

    team = RankTeam(spec_of(RunDir(tmp_path), tiny_moe, 1), say)
    batch = recorded[0]
    everything = RankOrder(batch, without=frozenset(range(len(batch.manifest().rows))))
    await team._report(everything, [RankDone()])
    await team._report(everything, [RankDone()])
    with pytest.raises(ModelError, match="no row of the last 3 batches could be trained"):
        await team._report(everything, [RankDone()])


@pytest.mark.parametrize(
    ("settings", "is_repeated"),
    [
        ({}, True),
        ({"micro_batch_tokens": 9, "activation_checkpointing": True, "threads": 2}, True),
        ({"lr": 0.5}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_batches_are_trained_again_if_the_settings_give_the_same_weights(
    tiny_moe: Path, tmp_path: Path, settings: dict[str, Any], is_repeated: bool
) -> None:
    run = RunDir(tmp_path / "run")
    spec = spec_of(run, tiny_moe, 1)
    order = RankOrder(batch_of(1, [], tmp_path, 1), purpose="repeat")
    run.order_of(Step(1)).write_bytes(
        msgspec.msgpack.encode(TrainedBatch(order, spec.trainer))
    )
    changed = msgspec.structs.replace(spec.trainer, **settings)
    _, trained = find_restart_point(
        msgspec.structs.replace(spec, trainer=changed), PolicyVersion(1)
    )
    assert [batch.order for batch in trained] == [order] * is_repeated
    path = run.order_of(Step(1))
    path.write_bytes(path.read_bytes()[:-5])
    assert find_restart_point(spec, PolicyVersion(1))[1] == [], "the file is not complete"
