"""Writes the ledger, one SQLite file per run. Statements are queued and committed in the thread lane."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec

from ..errors import RunDirError
from ..loop.lanes.lanes import thread, thread_to_the_end
from ..records.group import Fate
from ..records.ids import GroupId, PolicyVersion, RolloutId, Step
from ..records.rollout import Cancelled, Failed, Outcome, Scored, Settled
from ..records.task import Pool, Split, Task

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task BLOB NOT NULL,        -- msgpack: for rollouts that a resumed run starts again
    version INTEGER NOT NULL,
    position INTEGER NOT NULL, -- where the environment's next task is, after this one
    fate TEXT                  -- NULL while it is open or not shipped yet; eval: never trains
);
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id TEXT PRIMARY KEY,
    group_id INTEGER NOT NULL,
    env TEXT NOT NULL,
    task_id TEXT NOT NULL,
    dispatched_version INTEGER NOT NULL,
    dispatched_s REAL NOT NULL,
    outcome TEXT,              -- scored, failed, cancelled; NULL while it runs
    attempt INTEGER,
    worker TEXT,
    settled_s REAL,
    num_settled INTEGER NOT NULL DEFAULT 0,
    reward REAL,
    boundary TEXT,
    error TEXT,
    first_version INTEGER,
    last_version INTEGER,
    segment TEXT, offset INTEGER, length INTEGER,
    record BLOB,               -- msgpack: the complete record of how it settled
    step INTEGER               -- the step it trained in
);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
CREATE TABLE IF NOT EXISTS pools (
    env TEXT NOT NULL,
    task_id TEXT NOT NULL,
    pool TEXT NOT NULL,        -- easy or hard; a task in the normal pool is not in this table
    task BLOB NOT NULL,
    PRIMARY KEY (env, task_id)
);
CREATE TABLE IF NOT EXISTS evals (
    version INTEGER PRIMARY KEY,
    reported_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY,
    shipped_s REAL NOT NULL,
    published_s REAL
);
CREATE TABLE IF NOT EXISTS reports (
    step INTEGER PRIMARY KEY,
    metrics BLOB NOT NULL      -- msgpack: the metrics of its batch, for the report of the step
);
"""
TRAINED = (
    "UPDATE groups SET fate = 'trained' WHERE group_id IN (SELECT group_id FROM rollouts WHERE step = ?)"
)
MAX_QUEUED = 50_000

Statement = tuple[str, tuple[Any, ...]]
LedgerEntry = Statement | asyncio.Future[None] | None
"""A statement to commit, a future to resolve once all before it is committed, or None: the end."""


class Ledger:
    """Records what happens in a run. Each call queues statements, which `commit_queued` commits.

    A call returns before its statement is committed; `flush` waits for that.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._queue: asyncio.Queue[LedgerEntry] = asyncio.Queue(MAX_QUEUED)
        self._failed: sqlite3.Error | None = None

    async def record_group(
        self,
        group_id: GroupId,
        env: str,
        task: Task,
        version: PolicyVersion,
        position: int,
        split: Split,
    ) -> None:
        """Record that a group's rollouts are about to start, for the first time or after a resume."""
        await self.write(
            "INSERT OR REPLACE INTO groups (group_id, env, task, version, position, fate) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            group_id, env, msgspec.msgpack.encode(task), version, position,
            "eval" if split == "eval" else None,
        )  # fmt: skip

    async def record_fate(self, group_id: GroupId, fate: Fate) -> None:
        """Record what became of a closed group."""
        await self.write("UPDATE groups SET fate = ? WHERE group_id = ?", fate, group_id)

    async def record_pool(self, env: str, task: Task, pool: Pool | None) -> None:
        """Record the pool that a task is in from now on; None is the normal pool."""
        if pool is None:
            await self.write("DELETE FROM pools WHERE env = ? AND task_id = ?", env, task.id)
            return
        await self.write(
            "INSERT OR REPLACE INTO pools (env, task_id, pool, task) VALUES (?, ?, ?, ?)",
            env, task.id, pool, msgspec.msgpack.encode(task),
        )  # fmt: skip

    async def record_eval(self, version: PolicyVersion) -> None:
        """Record that the evaluation of a version is over and reported."""
        await self.write("INSERT OR REPLACE INTO evals VALUES (?, ?)", version, time.time())

    async def record_dispatch(
        self, rollout_id: RolloutId, group_id: GroupId, env: str, task_id: str, version: PolicyVersion
    ) -> None:
        """Record the start of a rollout, and replace the record of an earlier start."""
        await self.write(
            "INSERT OR REPLACE INTO rollouts (rollout_id, group_id, env, task_id, dispatched_version, "
            "dispatched_s) VALUES (?, ?, ?, ?, ?, ?)",
            rollout_id, group_id, env, task_id, version, time.time(),
        )  # fmt: skip

    async def record_settled(self, settled: Settled) -> None:
        """Record the end of a rollout."""
        await self.write(
            "UPDATE rollouts SET outcome = ?, attempt = ?, worker = ?, settled_s = ?, "
            "num_settled = num_settled + 1, reward = ?, boundary = ?, error = ?, "
            "first_version = ?, last_version = ?, segment = ?, offset = ?, length = ?, record = ? "
            "WHERE rollout_id = ?",
            type(settled.outcome).__name__.lower(), settled.attempt, settled.worker, time.time(),
            *_outcome_values(settled.outcome), msgspec.msgpack.encode(settled), settled.rollout_id,
        )  # fmt: skip

    async def record_shipped(
        self, step: Step, rollout_ids: Iterable[RolloutId], metrics: Mapping[str, float]
    ) -> None:
        """Record that a batch of these rollouts went to the trainer. Its `metrics` are reported once it
        is trained, by a resumed run if this one ends before."""
        await self.write(
            "INSERT OR REPLACE INTO reports (step, metrics) VALUES (?, ?)",
            step, msgspec.msgpack.encode(metrics),
        )  # fmt: skip
        await self.write(
            "INSERT OR REPLACE INTO steps (step, shipped_s) VALUES (?, ?)", step, time.time()
        )
        for rollout_id in rollout_ids:
            await self.write("UPDATE rollouts SET step = ? WHERE rollout_id = ?", step, rollout_id)

    async def record_published(self, step: Step) -> None:
        """Record that the batch of a step is trained, and its groups with it."""
        await self.write("UPDATE steps SET published_s = ? WHERE step = ?", time.time(), step)
        await self.write(TRAINED, step)

    async def write(self, sql: str, *values: Any) -> None:
        """Queue a statement; wait if the disk is far behind."""
        if self._failed is not None:
            raise self._failed
        await self._queue.put((sql, values))

    async def flush(self) -> None:
        """Wait until everything queued so far is committed."""
        if self._failed is not None:
            raise self._failed
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put(flushed)
        await flushed

    async def commit_queued(self) -> None:
        """Commit what is queued, as one transaction each time, until `close` is called."""
        with closing(self._db) as db:
            is_closed = False
            while not is_closed:
                entries = [await self._queue.get(), *self._take_queued()]
                is_closed = None in entries
                statements = [entry for entry in entries if isinstance(entry, tuple)]
                flushes = [entry for entry in entries if isinstance(entry, asyncio.Future)]
                try:
                    await thread_to_the_end(_commit, db, statements)
                except sqlite3.Error as error:
                    self._fail(flushes, error)
                    raise
                for flushed in flushes:
                    if not flushed.done():
                        flushed.set_result(None)

    def _take_queued(self) -> list[LedgerEntry]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _fail(self, flushes: list[asyncio.Future[None]], error: sqlite3.Error) -> None:
        """Pass an error of the database to every call that waits for `flush`, and to all later calls."""
        self._failed = error
        waiting = [entry for entry in self._take_queued() if isinstance(entry, asyncio.Future)]
        for flushed in [*flushes, *waiting]:
            if not flushed.done():
                flushed.set_exception(error)

    async def close(self) -> None:
        """End `commit_queued` once everything queued so far is committed."""
        await self._queue.put(None)


@asynccontextmanager
async def open_ledger(path: Path) -> AsyncIterator[Ledger]:
    """Open the ledger of a run. Leaving the block commits what is queued."""
    ledger = Ledger(await thread(_open_database, path))
    committing = asyncio.create_task(ledger.commit_queued(), name="ledger")
    try:
        yield ledger
    finally:
        if not committing.done():
            await ledger.close()
        await asyncio.shield(committing)


def _open_database(path: Path) -> sqlite3.Connection:
    """Open the database and create its tables. Raise if the file is not a database."""
    db = None
    try:
        db = sqlite3.connect(path, check_same_thread=False)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(SCHEMA)
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        raise unusable(path, error) from None
    return db


def unusable(path: Path, error: sqlite3.Error) -> RunDirError:
    """Return the error for a ledger that cannot be read or written."""
    return RunDirError(f"the ledger {path} cannot be used: {error}; --clean starts over without it")


def _outcome_values(outcome: Outcome) -> tuple[Any, ...]:
    """Return reward, boundary, error, first and last version, segment, offset and length."""
    match outcome:
        case Scored(reward=reward, first_version=first, last_version=last, ref=ref):
            return reward, None, None, first, last, ref.segment, ref.offset, ref.length
        case Failed(boundary=boundary, error=error):
            return None, boundary, error, None, None, None, None, None
        case Cancelled(reason=reason):
            return None, None, reason, None, None, None, None, None


def _commit(db: sqlite3.Connection, statements: list[Statement]) -> None:
    with db:
        for sql, values in statements:
            db.execute(sql, values)
