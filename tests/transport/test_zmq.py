"""Batches over a real socket: acknowledged, sent again to whoever comes back, taken once."""

import asyncio
import shutil
from pathlib import Path

import pytest
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

from rollway.errors import ConfigError, KeysError, ProtocolError
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion
from rollway.rundir.rundir import STABLE, RunDir
from rollway.transport import open_batches
from rollway.transport.files import read_manifest, read_stable
from rollway.transport.messages import (
    PublishVersion,
    ShippedBatch,
    TrainerHello,
    TrainerRefused,
    TrainerWelcome,
    VersionNoted,
    WantBatch,
)
from rollway.wire.handshake import NO_KEYS_GIVEN, NOT_ACCEPTED, NOT_ITS_KEY
from rollway.wire.keys import make

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path / "run")


def published(step: int) -> Published:
    return Published(PolicyVersion(step), f"/weights/step_{step}", {"loss": step / 10})


async def test_a_whole_run(run: RunDir) -> None:
    """Every batch once and in order; a version is on record before the trainer goes on."""

    async def train(address: str) -> list[int]:
        taken = []
        async with open_batches(address) as batches:
            async for batch in batches:
                check_batch(batch, batch.step)
                await batches.publish(published(batch.step))
                assert read_stable(run, batch.version) == published(batch.step)
                taken.append(batch.step)
        return taken

    async with orchestrator(run) as shipping:
        training = asyncio.create_task(train(shipping.address))
        for step in range(1, LAST + 1):
            manifest = await batch_of(run, step)
            await shipping.ship(manifest)
            version = await asyncio.wait_for(shipping.next_version(PolicyVersion(step)), SOON_S)
            assert version == published(step)
            assert read_manifest(run.manifest(manifest.step)) == manifest, "for a resume"
        assert await training == [1, 2, 3, 4]


async def test_a_trainer_that_restarts_gets_its_batch_again(run: RunDir) -> None:
    async with orchestrator(run) as shipping:
        await shipping.ship(await batch_of(run, 1))
        await shipping.ship(await batch_of(run, 2))
        async with open_batches(shipping.address) as batches:
            await batches.publish(published((await anext(batches)).step))
            lost = await anext(batches)
        for first in (None, 2):
            async with open_batches(shipping.address, first=first) as batches:
                again = await anext(batches)
                assert (again.step, again.encoded) == (lost.step, lost.encoded)
                check_batch(again, 2)
        with pytest.raises(ProtocolError, match=r"wants step 1; the next to be trained is 2.*version 1"):
            async with open_batches(shipping.address, first=1) as batches:
                await anext(batches)


async def test_what_is_said_twice_counts_once(run: RunDir) -> None:
    async with orchestrator(run) as shipping, raw_trainer(shipping.address) as trainer:
        await shipping.ship(await batch_of(run, 1))
        await trainer.say(TrainerHello(), WantBatch(1, False), WantBatch(1, False))
        assert await trainer.hear() == TrainerWelcome(1, LAST, str(run.payload))
        batch = await trainer.hear()
        assert isinstance(batch, ShippedBatch)
        assert await trainer.is_silent(), "asked for twice, sent once"
        publish = PublishVersion(published(1), crc32c(batch.manifest))
        await trainer.say(publish, publish)
        assert [await trainer.hear(), await trainer.hear()] == [VersionNoted(1), VersionNoted(1)]
        await shipping.next_version(PolicyVersion(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shipping.next_version(PolicyVersion(1)), 0.2)


async def test_only_the_batch_that_was_shipped_makes_a_version(run: RunDir) -> None:
    async with orchestrator(run) as shipping:
        await shipping.ship(await batch_of(run, 1))
        for message, said in (
            (PublishVersion(published(2), 0), "publishes version 2, and the last one was 0"),
            (PublishVersion(published(1), 7), "a batch that this run has made anew since"),
        ):
            async with raw_trainer(shipping.address) as trainer:
                await trainer.say(TrainerHello(), message)
                await trainer.hear()
                refused = await trainer.hear()
                assert isinstance(refused, TrainerRefused)
                assert said in refused.reason
        assert not (run.weights_of(PolicyVersion(1)) / STABLE).exists()
        async with open_batches(shipping.address) as batches:
            with pytest.raises(ProtocolError, match="no batch of that step was taken"):
                await batches.publish(published(1))


async def test_a_lost_connection_loses_nothing(run: RunDir) -> None:
    """Cut while a batch is awaited, and while a publication is."""
    async with (
        orchestrator(run) as shipping,
        cable(shipping.address) as (line, address),
        open_batches(address) as batches,
    ):
        waiting = asyncio.ensure_future(anext(batches))
        line.cut()
        await shipping.ship(await batch_of(run, 1))
        batch = await asyncio.wait_for(waiting, SOON_S)
        check_batch(batch, 1)
        line.cut()
        await asyncio.wait_for(batches.publish(published(1)), SOON_S)
        assert await shipping.next_version(PolicyVersion(1)) == published(1)
        assert line.num_connections >= 2


async def test_a_trainer_outlives_the_orchestrator(run: RunDir) -> None:
    """What it trained meanwhile is published to the one that was resumed, at the same address."""
    manifest = await batch_of(run, 1)
    async with orchestrator(run) as shipping:
        address = shipping.address
        await shipping.ship(manifest)
        opened = open_batches(address)
        batches = await opened.__aenter__()
        check_batch(await anext(batches), 1)
    publishing = asyncio.ensure_future(batches.publish(published(1)))
    await asyncio.sleep(0.3)
    assert not publishing.done()
    async with orchestrator(run, bind=address) as shipping:
        await shipping.ship(manifest)
        await asyncio.wait_for(publishing, SOON_S)
        assert await shipping.next_version(PolicyVersion(1)) == published(1)
        await shipping.ship(await batch_of(run, 2))
        check_batch(await asyncio.wait_for(anext(batches), SOON_S), 2)
        await opened.__aexit__(None, None, None)


async def test_one_trainer_at_a_time_and_the_last_is_it(run: RunDir) -> None:
    async with orchestrator(run) as shipping, open_batches(shipping.address) as first:
        waiting = asyncio.ensure_future(anext(first))
        async with open_batches(shipping.address) as second:
            with pytest.raises(ProtocolError, match="another trainer has connected to this run since"):
                await asyncio.wait_for(waiting, SOON_S)
            await shipping.ship(await batch_of(run, 1))
            check_batch(await asyncio.wait_for(anext(second), SOON_S), 1)


async def test_bad_messages_and_strangers_are_not_answered(run: RunDir) -> None:
    async with orchestrator(run) as shipping, raw_trainer(shipping.address) as trainer:
        await shipping.ship(await batch_of(run, 1))
        await trainer.say(b"", b"\xff" * 100, b"\x81\xa4type\xa4want")
        await trainer.say(WantBatch(1, False), PublishVersion(published(1), 0))
        assert await trainer.is_silent(), "it has not said TrainerHello"
        await trainer.say(TrainerHello(protocol=99))
        refused = await trainer.hear()
        assert "version 1 of the protocol, the trainer 99" in refused.reason
        await trainer.say(TrainerHello())
        assert isinstance(await trainer.hear(), TrainerWelcome)


async def test_nobody_there_is_said(run: RunDir) -> None:
    async with orchestrator(run) as shipping:
        gone = shipping.address
        shutil.rmtree(run.payload)
        with pytest.raises(ConfigError, match=r"cannot be seen from here: give a 'landing' folder"):
            async with open_batches(gone):
                pass
    with pytest.raises(ProtocolError, match=rf"no orchestrator at {gone}: nobody is there \(0.5 s\)"):
        async with open_batches(gone, patience_s=0.5):
            pass


async def test_keys_keep_others_out(run: RunDir, tmp_path: Path) -> None:
    server, client = make(tmp_path / "keys")
    _, unknown = make(tmp_path / "other")
    shutil.copy(client / "server.public", unknown / "server.public")
    _, misled = make(tmp_path / "third")
    async with orchestrator(run, keys=str(server)) as shipping:
        await shipping.ship(await batch_of(run, 1))
        for keys, why in ((unknown, NOT_ACCEPTED), (misled, NOT_ITS_KEY), (None, NO_KEYS_GIVEN)):
            with pytest.raises(KeysError) as refused:
                async with open_batches(shipping.address, keys=keys):
                    pass
            assert str(refused.value) == f"the orchestrator at {shipping.address} refused: {why}"
        async with open_batches(shipping.address, keys=client, landing=tmp_path / "landing") as batches:
            check_batch(await asyncio.wait_for(anext(batches), SOON_S), 1)
            await batches.publish(published(1))
