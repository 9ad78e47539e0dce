"""The ledger commits everything that is written to it."""

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from rollway.errors import RunDirError
from rollway.ledger.ledger import open_ledger
from rollway.ledger.restore import read_reports, restore
from rollway.records.ids import PolicyVersion

INSERT = (
    "INSERT INTO rollouts (rollout_id, group_id, env, task_id, dispatched_version, dispatched_s, step) "
    "VALUES (?, 0, 'e', 't', 0, 0, ?)"
)


async def fill(path: Path) -> None:
    async with open_ledger(path) as ledger:
        for n in range(100):
            await ledger.write(INSERT, f"r{n}", n // 10 if n < 90 else None)
        for step in range(9):
            await ledger.write("INSERT INTO steps VALUES (?, 0, 0)", step)


@pytest.mark.anyio
async def test_everything_queued_is_committed_on_leaving(tmp_path: Path) -> None:
    await fill(tmp_path / "run.db")
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        assert db.execute("SELECT count(*) FROM rollouts").fetchone() == (100,)


@pytest.mark.anyio
async def test_a_bad_statement_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        async with open_ledger(tmp_path / "run.db") as ledger:
            await ledger.write("INSERT INTO nowhere VALUES (1)")


@pytest.mark.anyio
async def test_everything_queued_is_committed_when_the_run_fails(tmp_path: Path) -> None:
    async def failing_run() -> None:
        async with open_ledger(tmp_path / "run.db") as ledger:
            for n in range(200):
                await ledger.write(INSERT, f"r{n}", 1)
            raise KeyError("the run fails")

    with pytest.raises(KeyError):
        await failing_run()
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        assert db.execute("SELECT count(*) FROM rollouts").fetchone() == (200,)


@pytest.mark.anyio
async def test_a_ledger_that_is_locked_or_full_is_written_once_it_can_be(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    heard = asyncio.Event()

    async def on_failed(what: str, error: Exception) -> None:
        told.append(f"{what}: {error}")
        heard.set()

    path = tmp_path / "run.db"
    async with open_ledger(path, on_failed) as ledger:
        ledger._db.execute("PRAGMA busy_timeout=1")
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await ledger.record_eval(PolicyVersion(3))
            flushing = asyncio.create_task(ledger.flush())
            await heard.wait()
            assert not flushing.done()
        await flushing
    assert told[0] == "Writing the ledger: database is locked"
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT version FROM evals").fetchall() == [(3,)]


@pytest.mark.anyio
async def test_a_file_that_is_not_a_database_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    path.write_bytes(b"not a database " * 100)
    with pytest.raises(
        RunDirError, match=r"the ledger .*run\.db cannot be used: .*not a database"
    ):
        async with open_ledger(path):
            pytest.fail("the file was opened")
    with pytest.raises(RunDirError, match=r"cannot be used: .*--clean"):
        restore(path, [], [], lambda ref: True)
    with pytest.raises(RunDirError, match=r"cannot be used: .*--clean"):
        read_reports(path)


@pytest.mark.anyio
async def test_a_flush_after_a_bad_statement_raises_and_so_does_every_later_call(
    tmp_path: Path,
) -> None:
    async def failing_run() -> None:
        async with open_ledger(tmp_path / "run.db") as ledger:
            await ledger.write("INSERT INTO nowhere VALUES (1)")
            for call in (ledger.flush, ledger.flush, partial(ledger.write, INSERT, "r0", 1)):
                with pytest.raises(sqlite3.OperationalError, match="no such table"):
                    await call()

    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await failing_run()
