"""Payload over the socket: unchanged, bounded on its way, kept until it is trained."""

import asyncio
import os
import stat
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from crc32c import crc32c
from tests.transport.parties import (
    LAST,
    SOON_S,
    batch_of,
    cable,
    check_batch,
    new_run,
    orchestrator,
    raw_trainer,
)

from rollway.errors import PayloadError
from rollway.payload.reader import SegmentReader
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion, Step
from rollway.rundir.rundir import RunDir
from rollway.transport import open_batches
from rollway.transport.messages import (
    BlobHead,
    BytesTaken,
    ShippedBatch,
    TrainerHello,
    TrainerWelcome,
    VersionNoted,
    WantBatch,
)
from rollway.wire.messages import encode

pytestmark = pytest.mark.anyio

BIG = 60_000
"""The number of tokens of a row that makes a blob of about half a megabyte."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path / "run")


def published(step: int, saved: int | None = None) -> Published:
    kept = None if saved is None else PolicyVersion(saved)
    return Published(PolicyVersion(step), f"/weights/step_{step}", {}, kept)


async def wait_for_batches(landing: Path, steps: list[int]) -> None:
    """Wait until the trainer's folder has the batches of these steps, and no others follow."""
    wanted = [f"rollway-batch-{step}" for step in steps]
    for _ in range(SOON_S * 20):
        if names(landing) == wanted:
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.1)
    assert names(landing) == wanted


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_payload_arrives_unchanged_and_is_removed_once_trained(
    run: RunDir, tmp_path: Path
) -> None:
    """The next batch is received while one is trained, and no more than that."""
    landing = tmp_path / "landing"
    async with orchestrator(run) as sender:
        for step in range(1, LAST + 1):
            await sender.ship(await batch_of(run, step))
        async with open_batches(sender.address, landing=landing) as batches:
            async for batch in batches:
                assert Path(batch.payload).parent == landing
                check_batch(batch, batch.step)
                ahead = min(batch.step + 1, LAST)
                await wait_for_batches(landing, list(range(batch.step, ahead + 1)))
                await batches.publish(published(batch.step))
                assert Path(batch.payload).name not in names(landing)
    assert names(landing) == []


async def test_what_lands_is_for_its_owner_only(run: RunDir, tmp_path: Path) -> None:
    before = os.umask(0o022)  # a trainer of the user's own has this one
    try:
        async with orchestrator(run) as sender:
            await sender.ship(await batch_of(run, 1))
            async with open_batches(sender.address, landing=tmp_path / "landing") as batches:
                folder = Path((await anext(batches)).payload)
                modes = [mode_of(folder / name) for name in (".", *names(folder))]
    finally:
        os.umask(before)
    assert modes == [0o700, 0o600]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_payload_stays_as_long_as_a_restart_of_the_trainer_needs_it(
    run: RunDir, tmp_path: Path
) -> None:
    landing = tmp_path / "landing"
    async with orchestrator(run) as sender:
        for step in (1, 2, 3):
            await sender.ship(await batch_of(run, step))
        async with open_batches(sender.address, landing=landing) as batches:
            for step in (1, 2):
                await anext(batches)
                await batches.publish(published(step, saved=0))
            await wait_for_batches(landing, [1, 2, 3])
        async with open_batches(sender.address, landing=landing, first=Step(3)) as batches:
            batch = await anext(batches)
            check_batch(batch, 3)
            assert names(landing) == [f"rollway-batch-{step}" for step in (1, 2, 3)]
            await batches.publish(published(3, saved=2))
            await wait_for_batches(landing, [3])


async def test_payload_that_a_killed_trainer_left_is_removed(
    run: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "rollway-batch-7").mkdir()
    (tmp_path / "of_the_user").mkdir()
    async with orchestrator(run) as sender:
        await sender.ship(await batch_of(run, 1))
        async with open_batches(sender.address, landing=tmp_path) as batches:
            check_batch(await anext(batches), 1)
    assert names(tmp_path) == ["of_the_user", "rollway-batch-1", "run"]


async def test_a_trainer_that_takes_nothing_gets_no_more_than_the_window_holds(
    run: RunDir,
) -> None:
    async with (
        orchestrator(run, window_bytes=1 << 20) as sender,
        raw_trainer(sender.address) as trainer,
    ):
        manifest = await batch_of(run, 1, blobs=5, size=BIG)
        sizes = [ref.length for ref in manifest.refs]
        assert 2 * sizes[0] < 1 << 20 < 3 * sizes[0]
        await sender.ship(manifest)
        await trainer.send(TrainerHello(), WantBatch(1, True))
        assert isinstance(await trainer.receive(), TrainerWelcome)
        shipped = await trainer.receive()
        assert isinstance(shipped, ShippedBatch)
        assert shipped.num_blobs == 5
        assert [await trainer.receive() for _ in range(2)] == [BlobHead(1, 0), BlobHead(1, 1)]
        assert await trainer.gets_nothing()
        await trainer.send(BytesTaken(sizes[0]))
        assert await trainer.receive() == BlobHead(1, 2)
        assert await trainer.gets_nothing()
        await trainer.send(BytesTaken(10 * sizes[0]))
        assert [await trainer.receive() for _ in range(2)] == [BlobHead(1, 3), BlobHead(1, 4)]


async def test_a_transfer_continues_where_it_was_cut(run: RunDir, tmp_path: Path) -> None:
    blobs = 20
    manifest = await batch_of(run, 1, blobs=blobs, size=BIG)
    total_bytes = sum(ref.length for ref in manifest.refs)
    async with (
        orchestrator(run, window_bytes=1 << 20) as sender,
        cable(sender.address) as (connection, address),
    ):
        await sender.ship(manifest)
        connection.cut_at = total_bytes * 3 // 4
        async with open_batches(address, landing=tmp_path / "landing") as batches:
            batch = await asyncio.wait_for(anext(batches), SOON_S)
            check_batch(batch, 1, blobs)
        assert connection.num_connections == 2
        assert connection.num_bytes < total_bytes * 5 // 4, (
            "blobs that had arrived were not sent again"
        )


async def test_blobs_that_a_trainer_has_are_left_out(run: RunDir) -> None:
    """A blob of another batch, with another checksum, does not count."""
    async with orchestrator(run) as sender:
        manifest = await batch_of(run, 1)
        await sender.ship(manifest)
        async with raw_trainer(sender.address) as trainer:
            await trainer.send(TrainerHello(), WantBatch(1, True))
            await trainer.receive()
            shipped = await trainer.receive()
        right = crc32c(shipped.manifest)
        for checksum, expected in ((right, [1]), (right + 1, [0, 1, 2])):
            async with raw_trainer(sender.address) as trainer:
                await trainer.send(TrainerHello(), WantBatch(1, True, (0, 2), checksum))
                assert isinstance(await trainer.receive(), TrainerWelcome)
                assert await trainer.receive() == shipped
                assert [(await trainer.receive()).index for _ in expected] == expected
                assert await trainer.gets_nothing()


async def test_blobs_and_manifests_that_come_twice_are_dropped(
    run: RunDir, tmp_path: Path
) -> None:
    """The orchestrator sends everything twice and in any order; the trainer gets each batch once."""
    manifest = await batch_of(run, 1)
    reader = SegmentReader(run.payload)
    blobs = [reader.copy(ref) for ref in manifest.refs]
    shipped = ShippedBatch(1, msgspec.json.encode(manifest), len(blobs))
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        port = wire.bind_to_random_port("tcp://127.0.0.1")

        async def repeat() -> None:
            peer, _ = await wire.recv_multipart()
            await wire.send_multipart(
                [peer, encode(TrainerWelcome(1, LAST, str(run.payload)))]
            )
            await wire.recv_multipart()
            for _ in range(2):
                await wire.send_multipart([peer, encode(shipped)])
                for index in (2, 0, 0, 2, 1, 1):
                    await wire.send_multipart(
                        [peer, encode(BlobHead(1, index)), blobs[index]]
                    )
            for _ in range(2):
                await wire.send_multipart([peer, encode(VersionNoted(1))])

        repeating = asyncio.ensure_future(repeat())
        async with open_batches(
            f"tcp://127.0.0.1:{port}", landing=tmp_path / "landing"
        ) as batches:
            batch = await asyncio.wait_for(anext(batches), SOON_S)
            check_batch(batch, 1)
            await repeating
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(batches), 0.3)
            assert num_bytes(Path(batch.payload)) < 4 * len(blobs[0]), (
                "each blob was written once"
            )


async def test_a_damaged_blob_is_an_error(run: RunDir, tmp_path: Path) -> None:
    manifest = await batch_of(run, 1)
    ref = manifest.refs[1]
    with (run.payload / ref.segment).open("r+b") as segment:
        segment.seek(ref.offset + ref.length - 5)
        segment.write(b"\xff")
    async with orchestrator(run) as sender:
        await sender.ship(manifest)
        async with open_batches(sender.address, landing=tmp_path / "landing") as batches:
            with pytest.raises(PayloadError, match="its data has checksum"):
                await asyncio.wait_for(anext(batches), SOON_S)
