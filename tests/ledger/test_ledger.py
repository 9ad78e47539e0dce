"""The ledger commits everything that is written to it."""

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.doubles.disk import record_disk_calls

from rollway.cli.stopping import explain
from rollway.errors import RunDirError
from rollway.ledger.ledger import open_ledger
from rollway.ledger.restore import read_reports, restore
from rollway.records.ids import GroupId, PolicyVersion, Step, make_rollout_id
from rollway.records.task import Split, Task

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
async def test_the_file_stops_growing_once_groups_are_trained_or_discarded(
    tmp_path: Path,
) -> None:
    path, sizes = tmp_path / "run.db", []
    async with open_ledger(path) as ledger:
        for number in range(24):
            group_id, version = GroupId(number), PolicyVersion(number)
            task = Task(id=str(number), prompt="x" * 500_000)
            split: Split = "eval" if number % 3 == 0 else "train"
            await ledger.record_group(group_id, "e", task, version, number, split)
            name = make_rollout_id(group_id, 0)
            await ledger.record_dispatch(name, group_id, "e", task.id, version)
            if number % 3 == 1:
                await ledger.record_fate(group_id, "zero_advantage")
            elif number % 3 == 2:
                await ledger.record_shipped(Step(number), [name], {})
                await ledger.record_published(Step(number))
            await ledger.flush()
            sizes.append(*ledger._db.execute("PRAGMA page_count").fetchone())
    assert sizes[-1] < sizes[5] + 10


@pytest.mark.anyio
async def test_what_is_flushed_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite keeps the file whole after a power failure, but brings commits to the disk only now and
    then."""
    done = record_disk_calls(monkeypatch)
    async with open_ledger(tmp_path / "run.db") as ledger:
        modes = [ledger._db.execute(f"PRAGMA {key}").fetchone() for key in SAFE]
        assert dict(zip(SAFE, modes, strict=True)) == SAFE
        await ledger.record_eval(PolicyVersion(3))
        await ledger.flush()
        assert done == ["sync run.db-wal"]


SAFE = {"journal_mode": ("wal",), "synchronous": (1,)}


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


@pytest.mark.anyio
async def test_a_ledger_that_is_locked_at_the_start_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0))
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RunDirError) as opening:
            async with open_ledger(path):
                pytest.fail("the file was opened")
        with pytest.raises(RunDirError) as restoring:
            restore(path, [], [], lambda ref: True)
    for raised in (opening, restoring):
        assert explain(raised.value) == (
            f"the ledger {path} cannot be used now: database is locked; end the program that has locked "
            "it, or make room on its disk, and try again"
        )
