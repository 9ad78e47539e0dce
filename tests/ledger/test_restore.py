"""What a restart finds: nothing trains twice, nothing that settled and is intact is lost."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollway.ledger.ledger import open_ledger
from rollway.ledger.restore import reports, restore
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import GroupId, PolicyVersion, RolloutId, Step, WorkerName, rollout_id
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Failed, Outcome, RowSummary, Scored, Settled, Timing
from rollway.records.task import Task

SIZE = 3
SAID = {"reward/all/mean": 0.5}


def scored(number: int) -> Scored:
    ref = PayloadRef("w.0-0000.seg", 64 * number, 64)
    return Scored(
        1.0, {"r": 1.0}, {}, (RowSummary(10, 5),), ref, 1, "stop", PolicyVersion(0), PolicyVersion(0),
        Timing(0, 0, 0, 0),
    )  # fmt: skip


def manifest(step: int, ids: list[str], refs: dict[str, PayloadRef]) -> BatchManifest:
    rows = tuple(BatchRow(RolloutId(id), refs[id], 0, 10, 5, 0.5) for id in ids)
    return BatchManifest(Step(step), PolicyVersion(step - 1), rows, ((tuple(range(len(rows))),),))


class Story:
    """A run's groups, and what was written of them before it ended."""

    def __init__(self, ends: list[list[str]], fates: list[str]) -> None:
        self.ends, self.fates = ends, fates
        self.refs: dict[str, PayloadRef] = {}
        self.outcomes: dict[str, Outcome] = {}
        number = 0
        for group, kinds in enumerate(ends):
            for member, kind in enumerate(kinds):
                id = rollout_id(GroupId(group), member)
                number += 1
                if kind in ("scored", "torn"):
                    self.outcomes[id] = end = scored(number)
                    self.refs[id] = end.ref
                elif kind == "failed":
                    self.outcomes[id] = Failed("env", "x")
                elif kind == "cancelled":
                    self.outcomes[id] = Cancelled("x")
        self.torn = {
            self.refs[rollout_id(GroupId(g), m)]
            for g, kinds in enumerate(ends) for m, kind in enumerate(kinds) if kind == "torn"
        }  # fmt: skip

    def members(self, fate: str) -> list[str]:
        """Scored rollouts of groups with a fate."""
        groups = [g for g, one in enumerate(self.fates) if one == fate]
        ids = [rollout_id(GroupId(g), m) for g in groups for m in range(SIZE)]
        return [id for id in ids if id in self.refs]

    async def write(self, path: Path, *, tells: bool) -> None:
        """`tells`: whether the ledger heard of what was shipped and published."""
        async with open_ledger(path) as ledger:
            for group, kinds in enumerate(self.ends):
                id, task = GroupId(group), Task(id=str(group), prompt="?")
                await ledger.opened(id, "env", task, PolicyVersion(0), group + 1, "train")
                for member in range(len(kinds)):
                    one = rollout_id(id, member)
                    await ledger.dispatched(one, id, "env", str(group), PolicyVersion(0))
                    if one in self.outcomes:
                        await ledger.settled(Settled(one, 1, WorkerName("w"), self.outcomes[one]))
                if self.fates[group] == "discarded":
                    await ledger.closed(id, "zero_advantage")
            if tells:
                await ledger.shipped(Step(1), map(RolloutId, self.members("trained")), {})
                await ledger.published(Step(1))
                await ledger.shipped(Step(2), map(RolloutId, self.members("shipped")), SAID)


kinds = st.sampled_from(["scored", "scored", "torn", "failed", "cancelled", "running"])
groups = st.lists(
    st.tuples(
        st.lists(kinds, min_size=SIZE, max_size=SIZE),
        st.sampled_from(["open", "open", "discarded", "trained", "shipped"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.anyio
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(story=groups, tells=st.booleans())
async def test_everything_is_trained_waits_or_runs_again(
    tmp_path_factory: Any, story: list[tuple[list[str], str]], tells: bool
) -> None:
    path = tmp_path_factory.mktemp("run") / "run.db"
    told = Story([one[0] for one in story], [one[1] for one in story])
    await told.write(path, tells=tells)
    trained = [manifest(1, told.members("trained"), told.refs)]
    shipped = [manifest(2, told.members("shipped"), told.refs)] if told.members("shipped") else []
    if not told.members("trained"):
        trained = []
    found = restore(path, trained, shipped, lambda ref: ref not in told.torn)
    again = restore(path, trained, shipped, lambda ref: ref not in told.torn)
    assert again == found, "restoring twice is the same as once"
    with closing(sqlite3.connect(path)) as db:
        published = [step for (step,) in db.execute("SELECT step FROM steps WHERE published_s NOT NULL")]
    assert published == [1] * bool(trained or tells)

    batch_is_whole = not any(told.refs[id] in told.torn for id in told.members("shipped"))
    assert len(found.batches) == bool(shipped and batch_is_whole)
    in_batches = {m.rollout_id for b in found.batches for c in b.closed for m in c.group.members}
    assert in_batches == (set(told.members("shipped")) if found.batches else set())

    assert [batch.metrics for batch in found.batches] == [SAID if tells else {}] * len(found.batches)
    kept = {1: {}, 2: SAID} if tells else {}
    was_unmade = bool(shipped) and not found.batches
    assert reports(path) == {step: said for step, said in kept.items() if step == 1 or not was_unmade}

    restored = {group.id: group for group in found.groups}
    for number, (ends, fate) in enumerate(story):
        group = restored.get(GroupId(number))
        has_scored = any(kind in ("scored", "torn") for kind in ends)
        if fate == "discarded" or (fate == "trained" and has_scored):
            assert group is None, "what is over is over"
        elif fate == "shipped" and has_scored and found.batches:
            assert group is None, "it is in its batch"
        else:
            assert group is not None
            assert len(group.ids) == SIZE
            usable = {
                rollout_id(GroupId(number), m)
                for m, kind in enumerate(ends) if kind in ("scored", "failed")
            }  # fmt: skip
            assert {one.rollout_id for one in group.settled} == usable
    assert found.next_group == len(story)
    assert found.cursors == {"env": len(story)}


def test_a_run_that_never_began_has_nothing(tmp_path: Path) -> None:
    assert restore(tmp_path / "none.db", [], [], lambda ref: True).groups == ()
