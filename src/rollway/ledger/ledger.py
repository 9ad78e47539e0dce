"""One SQLite file per run. Writes are queued, batched and done in the thread lane."""

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
from ..records.rollout import Cancelled, Failed, Scored, Settled
from ..records.task import Pool, Split, Task

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task BLOB NOT NULL,        -- msgpack: what a restart gives to rollouts that it runs again
    version INTEGER NOT NULL,
    position INTEGER NOT NULL, -- of the environment's next task, after this one
    fate TEXT                  -- NULL while it is open or waits to be shipped; eval: never trains
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
    record BLOB,               -- msgpack: how it settled, whole
    step INTEGER               -- the step it trained in
);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
CREATE TABLE IF NOT EXISTS pools (
    env TEXT NOT NULL,
    task_id TEXT NOT NULL,
    pool TEXT NOT NULL,        -- easy, hard; a task that is in neither has no line
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
    metrics BLOB NOT NULL      -- msgpack: what its batch says, for whoever reports the step
);
"""
TRAINED = (
    "UPDATE groups SET fate = 'trained' WHERE group_id IN (SELECT group_id FROM rollouts WHERE step = ?)"
)
MAX_QUEUED = 50_000

Statement = tuple[str, tuple[Any, ...]]


class Ledger:
    """Write-behind: `write` queues a statement, one task commits what has gathered."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._queue: asyncio.Queue[Statement | asyncio.Future[None] | None] = asyncio.Queue(MAX_QUEUED)
        self._failed: sqlite3.Error | None = None

    async def opened(
        self,
        group_id: GroupId,
        env: str,
        task: Task,
        version: PolicyVersion,
        position: int,
        split: Split,
    ) -> None:
        """A group's rollouts are about to start, or some of them once more."""
        await self.write(
            "INSERT OR REPLACE INTO groups (group_id, env, task, version, position, fate) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            group_id, env, msgspec.msgpack.encode(task), version, position,
            "eval" if split == "eval" else None,
        )  # fmt: skip

    async def closed(self, group_id: GroupId, fate: Fate) -> None:
        await self.write("UPDATE groups SET fate = ? WHERE group_id = ?", fate, group_id)

    async def pooled(self, env: str, task: Task, pool: Pool | None) -> None:
        """A task is in this pool from now on; None: in none."""
        if pool is None:
            await self.write("DELETE FROM pools WHERE env = ? AND task_id = ?", env, task.id)
            return
        await self.write(
            "INSERT OR REPLACE INTO pools (env, task_id, pool, task) VALUES (?, ?, ?, ?)",
            env, task.id, pool, msgspec.msgpack.encode(task),
        )  # fmt: skip

    async def evaluated(self, version: PolicyVersion) -> None:
        """The evaluation of a version is over and told."""
        await self.write("INSERT OR REPLACE INTO evals VALUES (?, ?)", version, time.time())

    async def dispatched(
        self, id: RolloutId, group_id: GroupId, env: str, task_id: str, version: PolicyVersion
    ) -> None:
        """Also of a rollout that a restart runs again: it is as if it had not run before."""
        await self.write(
            "INSERT OR REPLACE INTO rollouts (rollout_id, group_id, env, task_id, dispatched_version, "
            "dispatched_s) VALUES (?, ?, ?, ?, ?, ?)",
            id, group_id, env, task_id, version, time.time(),
        )  # fmt: skip

    async def settled(self, settled: Settled) -> None:
        outcome = settled.outcome
        scored = outcome if isinstance(outcome, Scored) else None
        ref = scored.ref if scored else None
        boundary = outcome.boundary if isinstance(outcome, Failed) else None
        error = outcome.reason if isinstance(outcome, Cancelled) else getattr(outcome, "error", None)
        await self.write(
            "UPDATE rollouts SET outcome = ?, attempt = ?, worker = ?, settled_s = ?, "
            "num_settled = num_settled + 1, reward = ?, boundary = ?, error = ?, "
            "first_version = ?, last_version = ?, segment = ?, offset = ?, length = ?, record = ? "
            "WHERE rollout_id = ?",
            type(outcome).__name__.lower(), settled.attempt, settled.worker, time.time(),
            scored and scored.reward, boundary, error,
            scored and scored.first_version, scored and scored.last_version,
            ref and ref.segment, ref and ref.offset, ref and ref.length,
            msgspec.msgpack.encode(settled), settled.rollout_id,
        )  # fmt: skip

    async def shipped(
        self, step: Step, trained: Iterable[RolloutId], metrics: Mapping[str, float]
    ) -> None:
        """A batch went to the trainer; `metrics` are told of it once it is trained, if need be by a
        restart."""
        await self.write(
            "INSERT OR REPLACE INTO reports (step, metrics) VALUES (?, ?)",
            step, msgspec.msgpack.encode(metrics),
        )  # fmt: skip
        await self.write(
            "INSERT OR REPLACE INTO steps (step, shipped_s) VALUES (?, ?)", step, time.time()
        )
        for id in trained:
            await self.write("UPDATE rollouts SET step = ? WHERE rollout_id = ?", step, id)

    async def published(self, step: Step) -> None:
        """The batch is trained, and so are its groups."""
        await self.write("UPDATE steps SET published_s = ? WHERE step = ?", time.time(), step)
        await self.write(TRAINED, step)

    async def write(self, sql: str, *values: Any) -> None:
        """Queue a statement; waits when the disk is far behind."""
        if self._failed is not None:
            raise self._failed
        await self._queue.put((sql, values))

    async def flush(self) -> None:
        """Until everything written so far is committed."""
        done = asyncio.get_running_loop().create_future()
        if self._failed is not None:
            raise self._failed
        await self._queue.put(done)
        await done

    async def _commit_all(self) -> None:
        """Commit in batches until told to stop, each batch in the thread lane."""
        with closing(self._db) as db:
            done = False
            while not done:
                batch = [await self._queue.get()]
                while not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                done = None in batch
                try:
                    await thread_to_the_end(_commit, db, [one for one in batch if type(one) is tuple])
                except sqlite3.Error as error:
                    self._fail(batch, error)
                    raise
                for one in batch:
                    if isinstance(one, asyncio.Future) and not one.done():
                        one.set_result(None)

    def _fail(self, batch: list[Any], error: sqlite3.Error) -> None:
        """Whoever waits hears of it, and so does whoever writes from now on."""
        self._failed = error
        while not self._queue.empty():
            batch.append(self._queue.get_nowait())
        for one in batch:
            if isinstance(one, asyncio.Future) and not one.done():
                one.set_exception(error)

    async def _stop(self) -> None:
        await self._queue.put(None)


@asynccontextmanager
async def open_ledger(path: Path) -> AsyncIterator[Ledger]:
    """The ledger of a run; leaving the block commits what is queued."""
    ledger = Ledger(await thread(_opened, path))
    committing = asyncio.create_task(ledger._commit_all(), name="ledger")
    try:
        yield ledger
    finally:
        if not committing.done():
            await ledger._stop()
        await asyncio.shield(committing)


def _opened(path: Path) -> sqlite3.Connection:
    """The database with its tables; one that cannot be used is refused before anything is queued."""
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
    return RunDirError(f"the ledger {path} cannot be used: {error}; --clean starts over without it")


def _commit(db: sqlite3.Connection, batch: list[Statement]) -> None:
    with db:
        for sql, values in batch:
            db.execute(sql, values)
