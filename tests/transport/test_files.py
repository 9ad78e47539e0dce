"""Batches and versions through a directory: seen whole, in order, without polling."""

import asyncio
from pathlib import Path

import pytest

from rollway.config.load import check
from rollway.errors import ConfigError, PayloadError, RunDirError
from rollway.records.batch import BatchManifest
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, Step
from rollway.rundir.rundir import RunDir
from rollway.transport import open_batches
from rollway.transport.batch import Batch
from rollway.transport.files import FileBatches, FileSender, read_manifest, read_stable

pytestmark = pytest.mark.anyio

CONFIG = {"name": "run", "max_steps": 3, "model": {"path": "m"}, "env": [{"id": "reverse-text"}]}


def manifest(step: int) -> BatchManifest:
    return BatchManifest(Step(step), PolicyVersion(step - 1), (), ())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create(check(CONFIG, "run.toml"))
    return run


async def test_a_batch_arrives_once_it_is_whole(run: RunDir) -> None:
    waiting = asyncio.ensure_future(anext(FileBatches(run, Step(3), 3)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await FileSender(run).ship(manifest(3))
    batch = await asyncio.wait_for(waiting, 10)
    assert batch.manifest() == manifest(3) == read_manifest(run.manifest(Step(3)))
    assert batch.payload == str(run.payload)
    assert not list(run.batches.rglob("*.partial"))


async def test_a_version_counts_only_when_marked_stable(run: RunDir) -> None:
    """Wherever its weights lie."""
    waiting = asyncio.ensure_future(FileSender(run).next_version(PolicyVersion(1)))
    folder = run.weights_of(PolicyVersion(1))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    published = Published(PolicyVersion(1), "/elsewhere/step_1", {"loss": 0.5})
    await FileBatches(run, Step(1), 3).publish(published)
    assert await asyncio.wait_for(waiting, 10) == published == read_stable(run, PolicyVersion(1))


async def test_a_trainer_of_ones_own_goes_on_where_the_run_is(run: RunDir) -> None:
    shipping = FileSender(run)
    for step in (1, 2, 3):
        await shipping.ship(manifest(step))
    taken: list[int] = []
    async with open_batches(run.path) as batches:
        async for batch in batches:
            taken.append(batch.step)
            await batches.publish(Published(batch.version, "w", {}))
            if batch.step == 2:
                break
    async with open_batches(run.path) as batches:
        taken += [batch.step async for batch in batches]
    async with open_batches(run.path, first=2) as batches:
        taken += [batch.step async for batch in batches]
    assert taken == [1, 2, 3, 2, 3]


async def test_mistakes_are_named(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="no run at"):
        async with open_batches(tmp_path / "nowhere"):
            pass
    with pytest.raises(ConfigError, match=r"landing and keys are for a tcp:// address"):
        async with open_batches(run.path, landing=tmp_path):
            pass


async def test_waiting_can_be_cancelled(run: RunDir) -> None:
    waiting = asyncio.ensure_future(anext(FileBatches(run, Step(3), 3)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_broken_manifest_is_named(run: RunDir) -> None:
    path = run.manifest(Step(1))
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(PayloadError, match=r"cannot read manifest .*step_1/manifest.json"):
        read_manifest(path)
    with pytest.raises(PayloadError, match="cannot read manifest of step 1"):
        Batch(Step(1), b"{", "", 0.0).manifest()
