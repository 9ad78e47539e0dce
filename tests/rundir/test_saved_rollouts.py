"""Saved rollouts: every outcome is written with its own keys and read back as it was."""

import json
from pathlib import Path

import msgspec
import pytest

from rollway.records.group import ClosedGroup, Group, Member
from rollway.records.ids import GroupId, PolicyVersion, RolloutId, Step
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Failed, RowSummary, Scored, Timing
from rollway.records.task import Message
from rollway.rundir.rundir import RunDir
from rollway.rundir.saved_rollouts import (
    SavedRollout,
    group_to_save,
    saved_rollouts,
    saved_steps,
)

TRANSCRIPT = '[{"role":"user","content":"2+2?"},{"role":"assistant","content":"4"}]'
HEAD = {"group": 7, "env": "sums", "task": "t3", "fate": "trained"}
LINES = [
    {**HEAD, "rollout": "g7.0", "outcome": "scored", "reward": 0.0, "rewards": {}, "metrics": {},
     "advantage": 0.0, "num_turns": 1, "num_tokens": 10, "stop": "", "first_version": 0,
     "last_version": 1, "messages": json.loads(TRANSCRIPT),
     "timing": {"engine_s": 1.0, "env_s": 2.0, "scoring_s": 3.0, "total_s": 6.0, "queue_s": 0.0}},
    {**HEAD, "rollout": "g7.1", "outcome": "failed", "type": "failed", "boundary": "env",
     "error": "KeyError('x')", "traceback": "", "where": ""},
    {**HEAD, "rollout": "g7.2", "outcome": "cancelled", "reason": "too old"},
]  # fmt: skip


def closed_group() -> ClosedGroup:
    scored = Scored(
        reward=0.0,
        rewards={},
        metrics={},
        rows=(RowSummary(10, 5),),
        ref=PayloadRef("s", 0, 1),
        num_turns=1,
        stop="",
        first_version=PolicyVersion(0),
        last_version=PolicyVersion(1),
        timing=Timing(1.0, 2.0, 3.0, 6.0),
    )
    group = Group(
        GroupId(7), "sums", "t3",
        members=(Member(RolloutId("g7.0"), scored),),
        failed=((RolloutId("g7.1"), Failed("env", "KeyError('x')")),),
        cancelled=((RolloutId("g7.2"), Cancelled("too old")),),
    )  # fmt: skip
    return ClosedGroup(group, (0.0,), "trained")


def saved() -> list[SavedRollout]:
    return list(
        group_to_save(closed_group(), lambda member: msgspec.Raw(TRANSCRIPT.encode()))
    )


def test_a_line_has_the_keys_of_its_outcome_also_where_they_are_empty() -> None:
    assert [json.loads(msgspec.json.encode(rollout)) for rollout in saved()] == LINES


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for step in (1, 2):
        path = run.saved_rollouts(Step(step))
        path.parent.mkdir(parents=True)
        path.write_bytes(
            b"\n".join(map(msgspec.json.encode, saved())) + b'\n{"rollout": "g7.3", "gro'
        )
    return run


def test_rollouts_are_read_back_without_torn_lines(run: RunDir) -> None:
    assert saved_steps(run) == [1, 2]
    scored, failed, cancelled = saved_rollouts(run, 2)
    assert {rollout.step for rollout in (scored, failed, cancelled)} == {2}
    assert scored.read_messages() == (Message("user", "2+2?"), Message("assistant", "4"))
    assert (failed.error, failed.read_messages()) == ("KeyError('x')", ())
    assert (cancelled.reason, cancelled.reward) == ("too old", None)
    assert [rollout.step for rollout in saved_rollouts(run)] == [1, 1, 1, 2, 2, 2]
