"""Reads back from the ledger what a run had not trained when it ended. Calls block."""

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from ..records.batch import BatchManifest
from ..records.group import ClosedGroup, Group, Member
from ..records.ids import GroupId, RolloutId, Step
from ..records.payload import PayloadRef
from ..records.restored import Restored, RestoredBatch, RestoredGroup, RestoredTask
from ..records.rollout import Failed, Scored, Settled
from ..records.task import Task
from .ledger import SCHEMA, TRAINED, unusable

PUBLISHED = "UPDATE steps SET published_s = coalesce(published_s, ?) WHERE step = ?"
CURSORS = (
    "SELECT env, position, max(group_id) FROM groups WHERE fate IS NOT 'eval' GROUP BY env"
)
CANCEL_UNFINISHED_EVALS = (
    "UPDATE rollouts SET outcome = 'cancelled', error = 'the run was interrupted' WHERE outcome IS NULL "
    "AND group_id IN (SELECT group_id FROM groups WHERE fate = 'eval')"
)
"""An evaluation that was interrupted runs again, with new rollouts."""

decode_task = msgspec.msgpack.Decoder(Task).decode
decode_settled = msgspec.msgpack.Decoder(Settled).decode

IsIntact = Callable[[PayloadRef], bool]
"""Returns whether the columns of a ref can be read and are undamaged."""


def restore(
    path: Path,
    trained: Sequence[BatchManifest],
    shipped: Sequence[BatchManifest],
    is_intact: IsIntact,
) -> Restored:
    """Return the batches and groups that are left to train, and correct the ledger.

    Batches of `shipped` have a manifest but no weights yet, in order. Batches of `trained` have weights,
    though the ledger may not say so. A batch that lost payload is undone: its rollouts wait for a new
    batch, and those without payload run again, like those that were running or cancelled.
    """
    if not path.exists():
        return Restored()
    with _open(path) as db:
        for manifest in trained:
            _record_batch(db, manifest)
            db.execute(TRAINED, (manifest.step,))
            db.execute(PUBLISHED, (time.time(), manifest.step))
        groups, reports = _read_groups(db, is_intact), _read_reports(db)
        batches: list[RestoredBatch] = []
        for manifest in shipped:
            batch = _restore_batch(manifest, groups, reports.get(manifest.step, {}))
            if batch is None:
                break  # later batches were made of later groups, and are undone with this one
            _record_batch(db, manifest)
            batches.append(batch)
            for closed in batch.closed:
                del groups[closed.group.id]
        _undo_batches(db, [manifest.step for manifest in shipped[len(batches) :]])
        db.execute(CANCEL_UNFINISHED_EVALS)
        pools = db.execute("SELECT env, task, pool FROM pools ORDER BY rowid")
        (next_group,) = db.execute(
            "SELECT coalesce(max(group_id) + 1, 0) FROM groups"
        ).fetchone()
        return Restored(
            groups=tuple(groups.values()),
            batches=tuple(batches),
            cursors={env: position for env, position, _ in db.execute(CURSORS)},
            next_group=next_group,
            pooled=tuple(
                RestoredTask(env, decode_task(task), pool) for env, task, pool in pools
            ),
            evaluated=db.execute("SELECT max(version) FROM evals").fetchone()[0],
        )


@contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(path)) as db, db:
            db.executescript(SCHEMA)
            yield db
    except sqlite3.DatabaseError as error:
        raise unusable(path, error) from None


def _record_batch(db: sqlite3.Connection, manifest: BatchManifest) -> None:
    """Record a batch as shipped. Its manifest is written before the ledger, which may lack it."""
    step, time_s = manifest.step, time.time()
    db.execute("INSERT OR IGNORE INTO steps (step, shipped_s) VALUES (?, ?)", (step, time_s))
    for rollout_id in dict.fromkeys(row.rollout_id for row in manifest.rows):
        db.execute("UPDATE rollouts SET step = ? WHERE rollout_id = ?", (step, rollout_id))


def _read_groups(db: sqlite3.Connection, is_intact: IsIntact) -> dict[GroupId, RestoredGroup]:
    """Return the groups that were open, not shipped yet, or in a batch that was not published."""
    rollout_ids: dict[int, list[RolloutId]] = defaultdict(list)
    settled: dict[int, list[Settled]] = defaultdict(list)
    records = db.execute(
        "SELECT group_id, rollout_id, record FROM rollouts WHERE group_id IN "
        "(SELECT group_id FROM groups WHERE fate IS NULL) ORDER BY rollout_id"
    )
    for group_id, rollout_id, record in records:
        rollout_ids[group_id].append(rollout_id)
        if record is not None:
            end = decode_settled(record)
            if _is_usable(end, is_intact):
                settled[group_id].append(end)
    groups = db.execute(
        "SELECT group_id, env, task FROM groups WHERE fate IS NULL ORDER BY group_id"
    )
    return {
        group_id: RestoredGroup(
            id=group_id,
            env=env,
            task=decode_task(task),
            ids=tuple(rollout_ids[group_id]),
            settled=tuple(settled[group_id]),
        )
        for group_id, env, task in groups
        if rollout_ids[group_id]
    }


def _is_usable(end: Settled, is_intact: IsIntact) -> bool:
    """Return whether an outcome counts: a failure needs no payload, a cancelled rollout runs again."""
    if isinstance(end.outcome, Scored):
        return is_intact(end.outcome.ref)
    return isinstance(end.outcome, Failed)


def read_reports(path: Path) -> dict[Step, dict[str, float]]:
    if not path.exists():
        return {}
    with _open(path) as db:
        return _read_reports(db)


def _read_reports(db: sqlite3.Connection) -> dict[Step, dict[str, float]]:
    decode = msgspec.msgpack.Decoder(dict[str, float]).decode
    reports = db.execute("SELECT step, metrics FROM reports")
    return {Step(step): decode(metrics) for step, metrics in reports}


def _restore_batch(
    manifest: BatchManifest, groups: dict[GroupId, RestoredGroup], metrics: dict[str, float]
) -> RestoredBatch | None:
    """Return a batch with its groups as they closed; None if some of its payload is gone."""
    advantages = {row.rollout_id: row.advantage for row in manifest.rows}
    parts = [group for group in groups.values() if advantages.keys() & set(group.ids)]
    closed = tuple(_close_group(group, advantages) for group in parts)
    found = {member.rollout_id for part in closed for member in part.group.members}
    is_complete = found >= advantages.keys()
    return RestoredBatch(manifest, closed, metrics) if is_complete else None


def _close_group(group: RestoredGroup, advantages: Mapping[RolloutId, float]) -> ClosedGroup:
    """Return a group of a batch as it closed. Members without an advantage were left out."""
    ends = [(end.rollout_id, end.outcome) for end in group.settled]
    members = tuple(Member(name, end) for name, end in ends if isinstance(end, Scored))
    failed = tuple((name, end) for name, end in ends if isinstance(end, Failed))
    ids = [member.rollout_id for member in members]
    return ClosedGroup(
        Group(group.id, group.env, group.task.id, members, failed),
        tuple(advantages.get(rollout_id, 0.0) for rollout_id in ids),
        "trained",
        left_out=tuple(name for name in ids if name not in advantages),
    )


def _undo_batches(db: sqlite3.Connection, steps: Sequence[Step]) -> None:
    """Remove batches that lost payload: their rollouts are untrained again."""
    for step in steps:
        db.execute("UPDATE rollouts SET step = NULL WHERE step = ?", (step,))
        db.execute("DELETE FROM steps WHERE step = ?", (step,))
        db.execute("DELETE FROM reports WHERE step = ?", (step,))
