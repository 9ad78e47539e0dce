"""Writes the ledger, one SQLite file per run. Statements are queued and committed in the thread lane."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from msgspec.msgpack import encode

from ..errors import RunDirError
from ..loop.coroutines import FairLoop
from ..loop.lanes.threads import thread, thread_to_the_end
from ..records.group import Fate
from ..records.ids import GroupId, PolicyVersion, RolloutId, Step
from ..records.rollout import Cancelled, Failed, Outcome, Scored, Settled
from ..records.task import Pool, Split, Task
from ..rundir.rundir import sync

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task BLOB NOT NULL,        -- msgpack: for rollouts that a resumed run starts again; empty at the end
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
    "UPDATE groups SET fate = 'trained', task = x'' "
    "WHERE group_id IN (SELECT group_id FROM rollouts WHERE step = ?)"
)
MAX_QUEUED = 50_000
RETRY_S = 1.0
PASSING = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip
"""Codes of errors that somebody else can end: by making room, or by letting go of a lock."""
OnFailed = Callable[[str, Exception], Awaitable[None]]


async def _ignore(what: str, error: Exception) -> None: ...


Statement = tuple[str, tuple[Any, ...]]
LedgerEntry = Statement | asyncio.Future[None] | None
"""A statement to commit, a future to resolve once all before it is committed, or None: the end."""


class Ledger:
    """Records what happens in a run. Calls queue statements, and return before these are committed."""

    def __init__(self, db: sqlite3.Connection, on_failed: OnFailed = _ignore) -> None:
        """`on_failed` hears of each try to write that failed. The run waits until one succeeds."""
        self._db = db
        self._on_failed = on_failed
        (_, _, file), *_ = db.execute("PRAGMA database_list")
        self._log = Path(f"{file}-wal")
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
        await self._insert(
            "groups",
            group_id=group_id,
            env=env,
            task=b"" if split == "eval" else encode(task),
            version=version,
            position=position,
            fate="eval" if split == "eval" else None,
        )

    async def record_fate(self, group_id: GroupId, fate: Fate) -> None:
        """Record what became of a group. Its task is not needed any more, and may be large."""
        await self.write(
            "UPDATE groups SET fate = ?, task = x'' WHERE group_id = ?", fate, group_id
        )

    async def record_pool(self, env: str, task: Task, pool: Pool | None) -> None:
        """Record the pool that a task is in from now on; None is the normal pool."""
        if pool is None:
            await self.write("DELETE FROM pools WHERE env = ? AND task_id = ?", env, task.id)
            return
        await self._insert("pools", env=env, task_id=task.id, pool=pool, task=encode(task))

    async def record_eval(self, version: PolicyVersion) -> None:
        await self._insert("evals", version=version, reported_s=time.time())

    async def record_dispatch(
        self,
        rollout_id: RolloutId,
        group_id: GroupId,
        env: str,
        task_id: str,
        version: PolicyVersion,
    ) -> None:
        """Record the start of a rollout, and replace the record of an earlier start."""
        await self._insert(
            "rollouts",
            rollout_id=rollout_id,
            group_id=group_id,
            env=env,
            task_id=task_id,
            dispatched_version=version,
            dispatched_s=time.time(),
        )

    async def record_settled(self, settled: Settled) -> None:
        outcome = settled.outcome
        await self.write(
            "UPDATE rollouts SET outcome = ?, attempt = ?, worker = ?, settled_s = ?, "
            "reward = ?, boundary = ?, error = ?, first_version = ?, last_version = ?, "
            "segment = ?, offset = ?, length = ?, record = ?, num_settled = num_settled + 1 "
            "WHERE rollout_id = ?",
            type(outcome).__name__.lower(),
            settled.attempt,
            settled.worker,
            time.time(),
            *_outcome_values(outcome),
            encode(settled),
            settled.rollout_id,
        )

    async def record_shipped(
        self, step: Step, rollout_ids: Iterable[RolloutId], metrics: Mapping[str, float]
    ) -> None:
        """Record that a batch of these rollouts went to the trainer. Its `metrics` are reported once it
        is trained, by a resumed run if this one ends before."""
        await self._insert("reports", step=step, metrics=encode(metrics))
        await self._insert("steps", step=step, shipped_s=time.time())
        fair = FairLoop()
        for rollout_id in rollout_ids:
            await self.write(
                "UPDATE rollouts SET step = ? WHERE rollout_id = ?", step, rollout_id
            )
            await fair.breathe()

    async def record_published(self, step: Step) -> None:
        """Record that the batch of a step is trained, and its groups with it."""
        await self.write("UPDATE steps SET published_s = ? WHERE step = ?", time.time(), step)
        await self.write(TRAINED, step)

    async def _insert(self, table: str, **values: Any) -> None:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        sql = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"
        await self.write(sql, *values.values())

    async def write(self, sql: str, *values: Any) -> None:
        """Queue a statement; wait if the disk is far behind."""
        await self._put((sql, values))

    async def flush(self) -> None:
        """Wait until everything queued so far is committed."""
        flushed: asyncio.Future[None] = asyncio.Future()
        await self._put(flushed)
        await flushed

    async def _put(self, entry: LedgerEntry) -> None:
        if self._failed is not None:
            raise self._failed
        await self._queue.put(entry)

    async def commit_queued(self) -> None:
        """Commit what is queued, as one transaction each time, until `close` is called."""
        with closing(self._db) as db:
            is_closed = False
            while not is_closed:
                entries = [await self._queue.get(), *self._take_queued()]
                is_closed = None in entries
                statements = [entry for entry in entries if isinstance(entry, tuple)]
                has_flush = any(isinstance(entry, asyncio.Future) for entry in entries)
                try:
                    await self._commit(db, statements, durable=has_flush)
                except sqlite3.Error as error:
                    self._failed = error
                    _end_flushes(entries + self._take_queued(), error)
                    raise
                _end_flushes(entries)

    async def _commit(
        self, db: sqlite3.Connection, statements: list[Statement], *, durable: bool
    ) -> None:
        """Commit statements, however long the disk is full or another process has locked the file. What
        `flush` waits for is on the disk afterwards, also after a power failure."""
        while True:
            try:
                await thread_to_the_end(_commit, db, statements)
                if durable:
                    await thread_to_the_end(self._sync_log)
                return
            except (sqlite3.Error, OSError) as error:
                if isinstance(error, sqlite3.Error) and not _may_pass(error):
                    raise
                await self._on_failed("Writing the ledger", error)
                await asyncio.sleep(RETRY_S)

    def _sync_log(self) -> None:
        with suppress(FileNotFoundError):  # removed by hand
            sync(self._log)

    def _take_queued(self) -> list[LedgerEntry]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    async def close(self) -> None:
        """End `commit_queued` once everything queued so far is committed."""
        await self._queue.put(None)


@asynccontextmanager
async def open_ledger(path: Path, on_failed: OnFailed = _ignore) -> AsyncIterator[Ledger]:
    """Open the ledger of a run. Leaving the block commits what is queued."""
    ledger = Ledger(await thread(_open_database, path), on_failed)
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
    if _may_pass(error):
        return RunDirError(
            f"the ledger {path} cannot be used now: {error}; end the program that has locked it, or "
            "make room on its disk, and try again"
        )
    return RunDirError(
        f"the ledger {path} cannot be used: {error}; --clean starts over without it"
    )


def _outcome_values(outcome: Outcome) -> tuple[Any, ...]:
    """Return reward, boundary, error, first and last version, segment, offset and length."""
    match outcome:
        case Scored(reward=reward, first_version=first, last_version=last, ref=ref):
            return reward, None, None, first, last, ref.segment, ref.offset, ref.length
        case Failed(boundary=boundary, error=error):
            return None, boundary, error, None, None, None, None, None
        case Cancelled(reason=reason):
            return None, None, reason, None, None, None, None, None


def _may_pass(error: sqlite3.Error) -> bool:
    """Return whether the same statements may succeed later. A bug is none of these."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in PASSING


def _end_flushes(entries: list[LedgerEntry], error: sqlite3.Error | None = None) -> None:
    """Let the calls that wait in `flush` return, or raise the error of the database."""
    for entry in entries:
        if isinstance(entry, asyncio.Future) and not entry.done():
            if error is None:
                entry.set_result(None)
            else:
                entry.set_exception(error)


def _commit(db: sqlite3.Connection, statements: list[Statement]) -> None:
    with db:
        for sql, values in statements:
            db.execute(sql, values)
