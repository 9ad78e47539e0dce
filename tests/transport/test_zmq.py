"""Batches over a real socket: acknowledged, sent again after a lost connection, taken once."""

import asyncio
import logging
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

from rollway.errors import ConfigError, CurveKeysError, ProtocolError
from rollway.records.engine import Published
from rollway.records.ids import PolicyVersion
from rollway.rundir.rundir import STABLE, RunDir
from rollway.transport import open_batches
from rollway.transport.files import read_manifest, read_published
from rollway.transport.messages import (
    PublishVersion,
    RefusedByOrchestrator,
    ShippedBatch,
    TrainerHello,
    TrainerWelcome,
    VersionNoted,
    WantBatch,
)
from rollway.wire.handshake import NO_KEYS_GIVEN, NOT_ACCEPTED, NOT_ITS_KEY
from rollway.wire.keys import make_keys

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path / "run")


def published(step: int) -> Published:
    return Published(PolicyVersion(step), f"/weights/step_{step}", {"loss": step / 10})


async def test_a_whole_run(run: RunDir) -> None:
    """Every batch comes once and in order. A version is recorded before `publish` returns."""

    async def train(address: str) -> list[int]:
        taken = []
        async with open_batches(address) as batches:
            async for batch in batches:
                check_batch(batch, batch.step)
                await batches.publish(published(batch.step))
                assert read_published(run, batch.version) == published(batch.step)
                taken.append(batch.step)
        return taken

    async with orchestrator(run) as sender:
        training = asyncio.create_task(train(sender.address))
        for step in range(1, LAST + 1):
            manifest = await batch_of(run, step)
            await sender.ship(manifest)
            version = await asyncio.wait_for(
                sender.wait_for_version(PolicyVersion(step)), SOON_S
            )
            assert version == published(step)
            assert read_manifest(run.manifest(manifest.step)) == manifest, "for a resume"
        assert await training == [1, 2, 3, 4]


async def test_a_trainer_that_restarts_gets_its_batch_again(run: RunDir) -> None:
    async with orchestrator(run) as sender:
        await sender.ship(await batch_of(run, 1))
        await sender.ship(await batch_of(run, 2))
        async with open_batches(sender.address) as batches:
            await batches.publish(published((await anext(batches)).step))
            lost = await anext(batches)
        for first in (None, 2):
            async with open_batches(sender.address, first=first) as batches:
                again = await anext(batches)
                assert (again.step, again.encoded) == (lost.step, lost.encoded)
                check_batch(again, 2)
        with pytest.raises(
            ProtocolError, match=r"asks for step 1, but step 2 is next.*version 1"
        ):
            async with open_batches(sender.address, first=1) as batches:
                await anext(batches)


async def test_the_log_names_the_trainer_that_has_connected(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollway")
    async with orchestrator(run) as sender, raw_trainer(sender.address) as trainer:
        await trainer.send(TrainerHello("mine\n"))
        await trainer.receive()
    assert r"trainer 'mine\n' has connected; step 1 is next" in caplog.messages


async def test_a_message_that_comes_twice_counts_once(run: RunDir) -> None:
    async with orchestrator(run) as sender, raw_trainer(sender.address) as trainer:
        await sender.ship(await batch_of(run, 1))
        await trainer.send(TrainerHello(), WantBatch(1, False), WantBatch(1, False))
        assert await trainer.receive() == TrainerWelcome(1, LAST, str(run.payload))
        batch = await trainer.receive()
        assert isinstance(batch, ShippedBatch)
        assert await trainer.gets_nothing(), "asked for twice, sent once"
        publish = PublishVersion(published(1), crc32c(batch.manifest))
        await trainer.send(publish, publish)
        assert [await trainer.receive(), await trainer.receive()] == [
            VersionNoted(1),
            VersionNoted(1),
        ]
        await sender.wait_for_version(PolicyVersion(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.wait_for_version(PolicyVersion(1)), 0.2)


async def test_only_the_batch_that_was_shipped_makes_a_version(run: RunDir) -> None:
    async with orchestrator(run) as sender:
        await sender.ship(await batch_of(run, 1))
        for message, reason in (
            (
                PublishVersion(published(2), 0),
                "publishes version 2, but the last version is 0",
            ),
            (PublishVersion(published(1), 7), "a batch that this run has made again since"),
        ):
            async with raw_trainer(sender.address) as trainer:
                await trainer.send(TrainerHello(), message)
                await trainer.receive()
                refused = await trainer.receive()
                assert isinstance(refused, RefusedByOrchestrator)
                assert reason in refused.reason
        assert not (run.weights_of(PolicyVersion(1)) / STABLE).exists()
        async with open_batches(sender.address) as batches:
            with pytest.raises(ProtocolError, match="the batch of step 1 was not taken"):
                await batches.publish(published(1))


async def test_a_lost_connection_loses_nothing(run: RunDir) -> None:
    """The connection is cut while the trainer waits for a batch, and while it publishes."""
    async with (
        orchestrator(run) as sender,
        cable(sender.address) as (connection, address),
        open_batches(address) as batches,
    ):
        waiting = asyncio.ensure_future(anext(batches))
        connection.cut()
        await sender.ship(await batch_of(run, 1))
        batch = await asyncio.wait_for(waiting, SOON_S)
        check_batch(batch, 1)
        connection.cut()
        await asyncio.wait_for(batches.publish(published(1)), SOON_S)
        assert await sender.wait_for_version(PolicyVersion(1)) == published(1)
        assert connection.num_connections >= 2


async def test_a_trainer_outlives_the_orchestrator(run: RunDir) -> None:
    """A version trained meanwhile is published to the resumed orchestrator at the same address."""
    manifest = await batch_of(run, 1)
    async with orchestrator(run) as sender:
        address = sender.address
        await sender.ship(manifest)
        opened = open_batches(address)
        batches = await opened.__aenter__()
        check_batch(await anext(batches), 1)
    publishing = asyncio.ensure_future(batches.publish(published(1)))
    assert not (await asyncio.wait([publishing], timeout=0.3))[0]
    async with orchestrator(run, bind=address) as sender:
        await sender.ship(manifest)
        await asyncio.wait_for(publishing, SOON_S)
        assert await sender.wait_for_version(PolicyVersion(1)) == published(1)
        await sender.ship(await batch_of(run, 2))
        check_batch(await asyncio.wait_for(anext(batches), SOON_S), 2)
        await opened.__aexit__(None, None, None)


async def test_a_second_trainer_takes_the_place_of_the_first(run: RunDir) -> None:
    async with orchestrator(run) as sender, open_batches(sender.address) as first:
        waiting = asyncio.ensure_future(anext(first))
        async with open_batches(sender.address) as second:
            with pytest.raises(
                ProtocolError, match="another trainer has connected to this run"
            ):
                await asyncio.wait_for(waiting, SOON_S)
            await sender.ship(await batch_of(run, 1))
            check_batch(await asyncio.wait_for(anext(second), SOON_S), 1)


async def test_bad_messages_and_messages_before_hello_are_not_answered(run: RunDir) -> None:
    async with orchestrator(run) as sender, raw_trainer(sender.address) as trainer:
        await sender.ship(await batch_of(run, 1))
        await trainer.send(b"", b"\xff" * 100, b"\x81\xa4type\xa4want")
        await trainer.send(WantBatch(1, False), PublishVersion(published(1), 0))
        assert await trainer.gets_nothing(), "TrainerHello was not sent"
        await trainer.send(TrainerHello(protocol=99))
        refused = await trainer.receive()
        assert "version 1 of the protocol, the trainer 99" in refused.reason
        await trainer.send(TrainerHello())
        assert isinstance(await trainer.receive(), TrainerWelcome)


async def test_an_address_without_an_orchestrator_is_an_error(run: RunDir) -> None:
    async with orchestrator(run) as sender:
        gone = sender.address
        shutil.rmtree(run.payload)
        with pytest.raises(
            ConfigError, match=r"does not exist on this machine: give a 'landing' folder"
        ):
            async with open_batches(gone):
                pass
    with pytest.raises(
        ProtocolError,
        match=rf"no orchestrator at {gone}: nothing listens there \(waited 0.5 s\)",
    ):
        async with open_batches(gone, patience_s=0.5):
            pass


async def test_keys_keep_others_out(run: RunDir, tmp_path: Path) -> None:
    server, client = make_keys(tmp_path / "keys")
    _, unknown = make_keys(tmp_path / "other")
    shutil.copy(client / "server.public", unknown / "server.public")
    _, misled = make_keys(tmp_path / "third")
    async with orchestrator(run, keys=str(server)) as sender:
        await sender.ship(await batch_of(run, 1))
        for keys, why in (
            (unknown, NOT_ACCEPTED),
            (misled, NOT_ITS_KEY),
            (None, NO_KEYS_GIVEN),
        ):
            with pytest.raises(CurveKeysError) as refused:
                async with open_batches(sender.address, keys=keys):
                    pass
            assert (
                str(refused.value) == f"the orchestrator at {sender.address} refused: {why}"
            )
        async with open_batches(
            sender.address, keys=client, landing=tmp_path / "landing"
        ) as batches:
            check_batch(await asyncio.wait_for(anext(batches), SOON_S), 1)
            await batches.publish(published(1))
