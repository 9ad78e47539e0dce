"""What a resumed run finds: nothing trains twice, and no settled rollout with intact payload is lost."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollway.ledger.ledger import open_ledger
from rollway.ledger.restore import read_reports, restore
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import (
    GroupId,
    PolicyVersion,
    RolloutId,
    Step,
    WorkerName,
    make_rollout_id,
)
from rollway.records.payload import PayloadRef
from rollway.records.rollout import (
    Cancelled,
    Failed,
    Outcome,
    RowSummary,
    Scored,
    Settled,
    Timing,
)
from rollway.records.task import Task

SIZE = 3
METRICS = {"reward/all/mean": 0.5}


def scored(number: int) -> Scored:
    ref = PayloadRef("w.0-0000.seg", 64 * number, 64)
    return Scored(
        1.0, {"r": 1.0}, {}, (RowSummary(10, 5),), ref, 1, "stop", PolicyVersion(0), PolicyVersion(0),
        Timing(0, 0, 0, 0),
    )  # fmt: skip


def manifest(step: int, names: list[str], refs: dict[str, PayloadRef]) -> BatchManifest:
    rows = tuple(BatchRow(RolloutId(name), refs[name], 0, 10, 5, 0.5) for name in names)
    return BatchManifest(
        Step(step), PolicyVersion(step - 1), rows, ((tuple(range(len(rows))),),)
    )


class Story:
    """The groups of a run, and what the ledger recorded of them before the run ended."""

    def __init__(self, ends: list[list[str]], fates: list[str]) -> None:
        self.ends, self.fates = ends, fates
        self.refs: dict[str, PayloadRef] = {}
        self.outcomes: dict[str, Outcome] = {}
        number = 0
        for group, kinds in enumerate(ends):
            for member, kind in enumerate(kinds):
                name = make_rollout_id(GroupId(group), member)
                number += 1
                match kind:
                    case "scored" | "torn":
                        outcome = scored(number)
                        self.outcomes[name] = outcome
                        self.refs[name] = outcome.ref
                    case "failed":
                        self.outcomes[name] = Failed("env", "x")
                    case "cancelled":
                        self.outcomes[name] = Cancelled("x")
        self.torn = {
            self.refs[make_rollout_id(GroupId(g), m)]
            for g, kinds in enumerate(ends) for m, kind in enumerate(kinds) if kind == "torn"
        }  # fmt: skip

    def members(self, fate: str) -> list[str]:
        """Return the scored rollouts of the groups with this fate."""
        groups = [group for group, found in enumerate(self.fates) if found == fate]
        names = [
            make_rollout_id(GroupId(group), member)
            for group in groups
            for member in range(SIZE)
        ]
        return [name for name in names if name in self.refs]

    async def write(self, path: Path, *, records_batches: bool) -> None:
        """Write the ledger, with or without the records of shipped and published batches."""
        async with open_ledger(path) as ledger:
            for group, kinds in enumerate(self.ends):
                group_id, task = GroupId(group), Task(id=str(group), prompt="?")
                await ledger.record_group(
                    group_id, "env", task, PolicyVersion(0), group + 1, "train"
                )
                for member in range(len(kinds)):
                    name = make_rollout_id(group_id, member)
                    await ledger.record_dispatch(
                        name, group_id, "env", str(group), PolicyVersion(0)
                    )
                    if name in self.outcomes:
                        settled = Settled(name, 1, WorkerName("w"), self.outcomes[name])
                        await ledger.record_settled(settled)
                if self.fates[group] == "discarded":
                    await ledger.record_fate(group_id, "zero_advantage")
            if records_batches:
                await ledger.record_shipped(
                    Step(1), map(RolloutId, self.members("trained")), {}
                )
                await ledger.record_published(Step(1))
                await ledger.record_shipped(
                    Step(2), map(RolloutId, self.members("shipped")), METRICS
                )


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
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=groups, records_batches=st.booleans())
async def test_every_rollout_is_trained_or_restored_or_runs_again(
    tmp_path_factory: Any, drawn: list[tuple[list[str], str]], records_batches: bool
) -> None:
    path = tmp_path_factory.mktemp("run") / "run.db"
    story = Story([kinds for kinds, _ in drawn], [fate for _, fate in drawn])
    await story.write(path, records_batches=records_batches)
    trained = [manifest(1, story.members("trained"), story.refs)]
    shipped = (
        [manifest(2, story.members("shipped"), story.refs)]
        if story.members("shipped")
        else []
    )
    if not story.members("trained"):
        trained = []
    found = restore(path, trained, shipped, lambda ref: ref not in story.torn)
    again = restore(path, trained, shipped, lambda ref: ref not in story.torn)
    assert again == found, "restoring twice is the same as once"
    with closing(sqlite3.connect(path)) as db:
        published = [
            step
            for (step,) in db.execute("SELECT step FROM steps WHERE published_s NOT NULL")
        ]
    assert published == ([1] if trained or records_batches else [])

    batch_is_intact = not any(
        story.refs[name] in story.torn for name in story.members("shipped")
    )
    assert len(found.batches) == bool(shipped and batch_is_intact)
    in_batches = {
        m.rollout_id for b in found.batches for c in b.closed for m in c.group.members
    }
    assert in_batches == (set(story.members("shipped")) if found.batches else set())

    for batch in found.batches:
        assert batch.metrics == (METRICS if records_batches else {})
    reports = {1: {}, 2: METRICS} if records_batches else {}
    if shipped and not found.batches:
        reports.pop(2, None)
    assert read_reports(path) == reports

    restored = {group.id: group for group in found.groups}
    for number, (ends, fate) in enumerate(drawn):
        group = restored.get(GroupId(number))
        has_scored = any(kind in ("scored", "torn") for kind in ends)
        if fate == "discarded" or (fate == "trained" and has_scored):
            assert group is None, "its rollouts are trained or discarded"
        elif fate == "shipped" and has_scored and found.batches:
            assert group is None, "the group is in its batch"
        else:
            assert group is not None
            assert len(group.ids) == SIZE
            assert group.task == Task(id=str(number), prompt="?")
            usable = {
                make_rollout_id(GroupId(number), m)
                for m, kind in enumerate(ends) if kind in ("scored", "failed")
            }  # fmt: skip
            assert {settled.rollout_id for settled in group.settled} == usable
    assert found.next_group == len(drawn)
    assert found.cursors == {"env": len(drawn)}


def test_a_run_without_a_ledger_has_nothing_to_restore(tmp_path: Path) -> None:
    assert restore(tmp_path / "none.db", [], [], lambda ref: True).groups == ()
