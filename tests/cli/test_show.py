"""`rollway show`: saved rollouts as a table and one by one, with their tokens while payload exists."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from rollway.cli.main import make_app
from rollway.ledger.ledger import open_ledger
from rollway.model.tiny import write_tokenizer
from rollway.payload.blob import build, row_columns
from rollway.payload.writer import SegmentWriter
from rollway.records.ids import GroupId, PolicyVersion, RolloutId, WorkerName
from rollway.records.payload import PayloadRef, SegmentName
from rollway.records.rollout import RowSummary, Scored, Settled, Timing
from rollway.rundir.rundir import RunDir

MESSAGES = [{"role": "user", "content": "Sort: ba"}, {"role": "assistant", "content": "[ab]"}]
HEAD = {"group": 3, "env": "sort", "task": "[7]", "fate": "trained"}
LINES = [
    {**HEAD, "rollout": "g3.0", "outcome": "scored", "reward": 1.0, "rewards": {"exact": 1.0},
     "advantage": 0.5, "num_turns": 1, "num_tokens": 9, "stop": "stop", "first_version": 1,
     "last_version": 2, "timing": {"engine_s": 0.5}, "messages": MESSAGES},
    {**HEAD, "rollout": "g3.1", "outcome": "failed", "boundary": "env", "error": "KeyError('x')"},
    {**HEAD, "rollout": "g3.2", "outcome": "cancelled", "reason": "too old"},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.make_folders()
    write_tokenizer(tmp_path)
    run.config.write_text(f'[model]\npath = "{tmp_path}"\n')
    for step, lines in ((1, LINES[:1]), (2, LINES)):
        path = run.rollouts / f"step_{step}" / "train.jsonl"
        path.parent.mkdir()
        path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b'\n{"torn')
    asyncio.run(settle(run))
    return run


async def settle(run: RunDir) -> None:
    columns = {
        "token_ids": [np.array([65, 66, 67], np.int32)],
        "loss_mask": [np.array([0, 1, 1], np.uint8)],
        "logprobs": [np.array([0, -0.1, -9], np.float32)],
    }
    with SegmentWriter(run.payload, SegmentName("w", 0), 1 << 20) as writer:
        ref: PayloadRef = await writer.append(build(row_columns([columns] * 11)))
    scored = Scored(1.0, {}, {}, (RowSummary(3, 2),), ref, 1, "stop", PolicyVersion(1), PolicyVersion(2),
                    Timing(0, 0, 0, 0))  # fmt: skip
    rollout_id = RolloutId("g3.0")
    async with open_ledger(run.ledger) as ledger:
        await ledger.record_dispatch(rollout_id, GroupId(3), "sort", "7", PolicyVersion(1))
        await ledger.record_settled(Settled(rollout_id, 1, WorkerName("w"), scored))


def show(*args: str) -> str:
    result = CliRunner().invoke(make_app(), ["show", *args], env={"COLUMNS": "160"})
    return result.output if result.exception is None else str(result.exception)


def test_the_last_step_is_listed(run: RunDir) -> None:
    shown = show(str(run.path))
    assert "step 2: 3 rollouts" in shown
    torn = run.rollouts / "step_2" / "train.jsonl"
    assert f"1 lines of {torn} cannot be read" in shown.replace("\n", "")
    for word in ("g3.0", "[7]", "0.500", "failed: env", "cancelled: too old"):
        assert word in shown
    assert "step 1: 1 rollouts" in show(str(run.path), "--step", "1")
    assert "steps 1 to 2, not of step 9" in show(str(run.path), "--step", "9")


def test_a_rollout_is_shown_with_its_tokens_until_they_are_released(run: RunDir) -> None:
    shown = show(str(run.path), "--rollout", "g3.0")
    for word in (
        "task '[7]'",
        "reward 1 (exact 1)",
        "advantage 0.500",
        "versions 1 to 2",
        "Sort: ba",
        "[ab]",
        "row0",
    ):
        assert word in shown
    assert shown.index("row2") < shown.index("row10")
    for segment in run.payload.glob("*.seg"):
        segment.unlink()
    assert "released" in show(str(run.path), "--rollout", "g3.0")
    assert "KeyError('x')" in show(str(run.path), "--rollout", "g3.1")


def test_a_missing_rollout_or_run_is_named(run: RunDir, tmp_path: Path) -> None:
    assert "no saved rollout 'g3.9'" in show(str(run.path), "--rollout", "g3.9")
    assert "is not a run directory" in show(str(tmp_path / "nowhere"))


HOSTILE, SHOWN = "\x1b[2J\x9b[/b]:smile:", r"\x1b[2J\x9b[/b]:smile:"


def test_nothing_that_is_shown_acts_on_the_terminal(run: RunDir) -> None:
    message = {"role": "user", "content": f"{HOSTILE}\n"}
    lines = [
        {**LINES[0], "rewards": {HOSTILE: 1.0}, "task": HOSTILE, "messages": [message]},
        {**LINES[1], "error": HOSTILE, "env": HOSTILE},
    ]
    path = run.rollouts / "step_3" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    outputs = [show(str(run.path), *more) for more in ((), *ONE)]
    for output, count in zip(outputs, (3, 3, 2), strict=True):
        assert output.count(SHOWN) == count
        assert not {"\x1b", "\x9b"} & {*output}


ONE = (("--rollout", "g3.0"), ("--rollout", "g3.1"))
