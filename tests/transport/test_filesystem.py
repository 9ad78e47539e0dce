"""Manifests and versions through a directory: seen whole, in order, without polling."""

import asyncio
from pathlib import Path

import pytest

from rollway.errors import PayloadError
from rollway.records.batch import BatchManifest
from rollway.records.ids import PolicyVersion, Step
from rollway.records.policy import Published
from rollway.rundir.rundir import RunDir
from rollway.transport import filesystem

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.batches.mkdir()
    run.weights.mkdir()
    return run


async def test_a_manifest_arrives_once_it_is_whole(run: RunDir) -> None:
    waiting = asyncio.create_task(filesystem.next_manifest(run, Step(3)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    manifest = BatchManifest(Step(3), PolicyVersion(2), (), ())
    await filesystem.ship(run, manifest)
    path = await asyncio.wait_for(waiting, 10)
    assert filesystem.read_manifest(path) == manifest
    assert not list(run.batches.rglob("*.partial"))


async def test_a_version_counts_only_when_marked_stable(run: RunDir) -> None:
    folder = run.weights_of(PolicyVersion(1))
    waiting = asyncio.create_task(filesystem.next_version(run, PolicyVersion(1)))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    published = Published(PolicyVersion(1), str(folder), {"loss": 0.5})
    await filesystem.publish(published)
    assert await asyncio.wait_for(waiting, 10) == published


async def test_what_is_there_already_is_found(run: RunDir) -> None:
    await filesystem.ship(run, BatchManifest(Step(1), PolicyVersion(0), (), ()))
    await asyncio.wait_for(filesystem.next_manifest(run, Step(1)), 10)


async def test_waiting_can_be_cancelled(run: RunDir) -> None:
    waiting = asyncio.create_task(filesystem.next_manifest(run, Step(3)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_broken_manifest_is_named(run: RunDir) -> None:
    path = run.manifest(Step(1))
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(PayloadError, match=r"cannot read manifest .*step_1/manifest.json"):
        filesystem.read_manifest(path)
