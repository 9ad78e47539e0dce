"""Batches and versions through files: each is seen complete, in order, and without polling."""

import asyncio
from pathlib import Path

import pytest
from tests.doubles.disk import record_disk_calls

from rollway.config.load import check
from rollway.errors import ConfigError, PayloadError, RunDirError
from rollway.records.batch import BatchManifest
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, Step
from rollway.rundir.rundir import RunDir
from rollway.transport import open_batches
from rollway.transport.batch import Batch
from rollway.transport.files import FileBatches, FileSender, read_manifest, read_published

pytestmark = pytest.mark.anyio

CONFIG = {
    "name": "run",
    "max_steps": 3,
    "model": {"path": "m"},
    "env": [{"id": "reverse-text"}],
}


def manifest(step: int) -> BatchManifest:
    return BatchManifest(Step(step), PolicyVersion(step - 1), (), ())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create(check(CONFIG, "run.toml"))
    return run


async def test_a_batch_arrives_once_its_manifest_is_complete(run: RunDir) -> None:
    waiting = asyncio.ensure_future(anext(FileBatches(run, Step(3), 3)))
    assert not (await asyncio.wait([waiting], timeout=0.1))[0]
    await FileSender(run).ship(manifest(3))
    batch = await asyncio.wait_for(waiting, 10)
    assert batch.manifest() == manifest(3) == read_manifest(run.manifest(Step(3)))
    assert batch.payload == str(run.payload)
    assert not list(run.batches.rglob("*.partial"))


async def test_a_version_counts_only_when_marked_stable(run: RunDir) -> None:
    """The weights may be anywhere."""
    waiting = asyncio.ensure_future(FileSender(run).wait_for_version(PolicyVersion(1)))
    folder = run.weights_of(PolicyVersion(1))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    assert not (await asyncio.wait([waiting], timeout=0.1))[0]
    published = Published(PolicyVersion(1), "/elsewhere/step_1", {"loss": 0.5})
    await FileBatches(run, Step(1), 3).publish(published)
    assert (
        await asyncio.wait_for(waiting, 10)
        == published
        == read_published(run, PolicyVersion(1))
    )


async def test_a_trainer_continues_at_the_first_step_that_is_not_published(
    run: RunDir,
) -> None:
    sender = FileSender(run)
    for step in (1, 2, 3):
        await sender.ship(manifest(step))
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


async def test_a_wrong_folder_and_a_wrong_argument_are_errors(
    run: RunDir, tmp_path: Path
) -> None:
    with pytest.raises(RunDirError, match="no run at"):
        async with open_batches(tmp_path / "nowhere"):
            pass
    with pytest.raises(ConfigError, match=r"landing and keys are for the address of a run"):
        async with open_batches(run.path, landing=tmp_path):
            pass


async def test_waiting_can_be_cancelled(run: RunDir) -> None:
    waiting = asyncio.ensure_future(anext(FileBatches(run, Step(3), 3)))
    assert not (await asyncio.wait([waiting], timeout=0.1))[0]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_error_of_a_broken_manifest_names_it(run: RunDir) -> None:
    path = run.manifest(Step(1))
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(PayloadError, match=r"cannot read manifest .*step_1/manifest.json"):
        read_manifest(path)
    with pytest.raises(PayloadError, match="cannot read manifest of step 1"):
        Batch(Step(1), b"{", "", 0.0).manifest()


async def test_weights_are_on_the_disk_before_their_record_is_and_batches_before_they_are_seen(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.weights_of(PolicyVersion(1))
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    done = record_disk_calls(monkeypatch)
    await FileBatches(run, Step(1), 3).publish(Published(PolicyVersion(1), str(folder), {}))
    assert sorted(done[:2]) == ["sync config.json", "sync model.safetensors"]
    assert done[2:] == [
        "sync step_1", "sync weights",
        "sync STABLE.partial", "name STABLE", "sync step_1", "sync weights",
    ]  # fmt: skip
    done.clear()
    await FileSender(run).ship(manifest(1))
    assert done == [
        "sync manifest.json.partial", "name manifest.json", "sync step_1", "sync batches",
    ]  # fmt: skip
