"""Reads back what a run had when it ended, however it ended. Blocks; not for a loop."""

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from ..records.batch import BatchManifest
from ..records.group import ClosedGroup, Group, Member
from ..records.ids import GroupId, RolloutId, Step
from ..records.payload import PayloadRef
from ..records.restored import Restored, RestoredBatch, RestoredGroup, RestoredTask
from ..records.rollout import Cancelled, Failed, Scored, Settled
from ..records.task import Task
from .ledger import SCHEMA, TRAINED, unusable

PUBLISHED = "UPDATE steps SET published_s = coalesce(published_s, ?) WHERE step = ?"
CURSORS = "SELECT env, position, max(group_id) FROM groups WHERE fate IS NOT 'eval' GROUP BY env"
UNFINISHED_EVALS = (
    "UPDATE rollouts SET outcome = 'cancelled', error = 'the run was interrupted' WHERE outcome IS NULL "
    "AND group_id IN (SELECT group_id FROM groups WHERE fate = 'eval')"
)
"""An evaluation that was interrupted is made anew."""

IsIntact = Callable[[PayloadRef], bool]
"""Whether the columns of a ref can still be read, and are what was written."""


def restore(
    path: Path, trained: Sequence[BatchManifest], shipped: Sequence[BatchManifest], is_intact: IsIntact
) -> Restored:
    """What is left to train: batches of `shipped` have a manifest and no weights yet, in order. Those of
    `trained` have weights, though the ledger may not have heard of it.

    A batch that lost payload is unmade: its rollouts are settled and untrained again, those without
    payload run again. So do those that ran, failed by no fault of theirs, or were cancelled.
    """
    if not path.exists():
        return Restored()
    try:
        return _read(path, trained, shipped, is_intact)
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from None


def _read(
    path: Path, trained: Sequence[BatchManifest], shipped: Sequence[BatchManifest], is_intact: IsIntact
) -> Restored:
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(SCHEMA)
        for manifest in trained:
            _note(db, manifest)
            db.execute(TRAINED, (manifest.step,))
            db.execute(PUBLISHED, (time.time(), manifest.step))
        groups = _groups(db, is_intact)
        batches: list[RestoredBatch] = []
        for manifest in shipped:
            batch = _batch(manifest, groups, _report(db, manifest.step))
            if batch is None:
                break  # later ones were made of what came after
            _note(db, manifest)
            batches.append(batch)
            for one in batch.closed:
                del groups[one.group.id]
        _forget(db, {batch.manifest.step for batch in batches}, [one.step for one in shipped])
        db.execute(UNFINISHED_EVALS)
        newest = db.execute(CURSORS)
        cursors = {env: position for env, position, _ in newest}
        last = db.execute("SELECT max(group_id) FROM groups").fetchone()[0]
        evaluated = db.execute("SELECT max(version) FROM evals").fetchone()[0]
        pooled = tuple(
            RestoredTask(env, msgspec.msgpack.decode(task, type=Task), pool)
            for env, task, pool in db.execute("SELECT env, task, pool FROM pools ORDER BY rowid")
        )
    next_group = GroupId(0 if last is None else last + 1)
    return Restored(tuple(groups.values()), tuple(batches), cursors, next_group, pooled, evaluated)


def _note(db: sqlite3.Connection, manifest: BatchManifest) -> None:
    """A manifest is there before the ledger is told."""
    db.execute(
        "INSERT OR IGNORE INTO steps (step, shipped_s) VALUES (?, ?)", (manifest.step, time.time())
    )
    for id in dict.fromkeys(row.rollout_id for row in manifest.rows):
        db.execute("UPDATE rollouts SET step = ? WHERE rollout_id = ?", (manifest.step, id))


def _groups(db: sqlite3.Connection, is_intact: IsIntact) -> dict[GroupId, RestoredGroup]:
    """Groups that were open, waited to be shipped, or are in a batch that was not published."""
    ids: dict[int, list[RolloutId]] = defaultdict(list)
    settled: dict[int, list[Settled]] = defaultdict(list)
    rows = db.execute(
        "SELECT group_id, rollout_id, record FROM rollouts WHERE group_id IN "
        "(SELECT group_id FROM groups WHERE fate IS NULL) ORDER BY rollout_id"
    )
    for group_id, id, record in rows:
        ids[group_id].append(id)
        if record is not None:
            end = msgspec.msgpack.decode(record, type=Settled)
            if _is_usable(end, is_intact):
                settled[group_id].append(end)
    found = db.execute("SELECT group_id, env, task FROM groups WHERE fate IS NULL ORDER BY group_id")
    return {
        id: RestoredGroup(
            id, env, msgspec.msgpack.decode(task, type=Task), tuple(ids[id]), tuple(settled[id])
        )
        for id, env, task in found
        if ids[id]
    }


def _is_usable(end: Settled, is_intact: IsIntact) -> bool:
    """A failure is known without payload; what was cancelled runs again."""
    if isinstance(end.outcome, Scored):
        return is_intact(end.outcome.ref)
    return isinstance(end.outcome, Failed)


def reports(path: Path) -> dict[Step, dict[str, float]]:
    """What the batches of a run said, by step."""
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path)) as db:
        db.executescript(SCHEMA)
        steps = db.execute("SELECT step FROM reports").fetchall()
        return {Step(step): _report(db, step) for (step,) in steps}


def _report(db: sqlite3.Connection, step: int) -> dict[str, float]:
    """Empty if the run ended before it was written down."""
    found = db.execute("SELECT metrics FROM reports WHERE step = ?", (step,)).fetchone()
    return msgspec.msgpack.decode(found[0], type=dict[str, float]) if found else {}


def _batch(
    manifest: BatchManifest, groups: dict[GroupId, RestoredGroup], metrics: dict[str, float]
) -> RestoredBatch | None:
    """The batch's groups as they closed; None if some of its payload is gone."""
    advantages = {row.rollout_id: row.advantage for row in manifest.rows}
    closed: list[ClosedGroup] = []
    found: set[RolloutId] = set()
    for group in groups.values():
        if not any(id in advantages for id in group.ids):
            continue
        members = [
            Member(one.rollout_id, one.outcome) for one in group.settled
            if isinstance(one.outcome, Scored)
        ]  # fmt: skip
        found |= {member.rollout_id for member in members}
        closed.append(
            ClosedGroup(
                Group(group.id, group.env, group.task.id, tuple(members), *_others(group)),
                tuple(advantages.get(member.rollout_id, 0.0) for member in members),
                "trained",
                tuple(one.rollout_id for one in members if one.rollout_id not in advantages),
            )
        )
    is_whole = found >= advantages.keys()
    return RestoredBatch(manifest, tuple(closed), metrics) if is_whole else None


def _others(
    group: RestoredGroup,
) -> tuple[tuple[tuple[RolloutId, Failed], ...], tuple[tuple[RolloutId, Cancelled], ...]]:
    failed = tuple(
        (one.rollout_id, one.outcome) for one in group.settled if isinstance(one.outcome, Failed)
    )
    return failed, ()


def _forget(db: sqlite3.Connection, kept: set[int], shipped: Sequence[int]) -> None:
    """Unmake the batches that cannot be trained as they are."""
    for step in shipped:
        if step not in kept:
            db.execute("UPDATE rollouts SET step = NULL WHERE step = ?", (step,))
            db.execute("DELETE FROM steps WHERE step = ?", (step,))
            db.execute("DELETE FROM reports WHERE step = ?", (step,))
